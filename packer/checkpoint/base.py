"""How a source checkpoint stores one weight, and how its values are read back in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops.convert import all_finite
from tilewright.kernels.tensors import QTensor, Reject, TensorSpec

SUFFIXES = (  # tensors that belong to a weight and share its module path
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "activation_scale",
)


class Reader(Protocol):
    """Reads the values of one matrix from its tensors; picklable, so that it can travel to a worker."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Values of some rows of a matrix.

        Args:
            tensors: The tensors of the matrix in the order of `SourceWeight.tensors`; of a stack, one expert's slices.
            rows: Rows wanted, with explicit start, stop and step.

        Returns:
            fp32 [len(rows), K]; or bf16 or fp16, if the values are stored so.
        """

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Some rows of the weight tensor as they are stored."""

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """The matrix as it is, if it already has the numbers of `fmt`; None if it has to be quantized anew."""


@dataclass(frozen=True)
class StackedAt:
    """Where the matrix of one expert lies in a stack.

    Attributes:
        stack: Module of the stack.
        expert: Number of the matrix [N, K] in the stack.
        rows: Start, stop and step of its rows in there.
    """

    stack: str
    expert: int
    rows: tuple[int, int, int]


@dataclass(frozen=True)
class SourceWeight:
    """One matrix `[N, K]`, or stack of matrices `[E, A, B]`, of the source.

    Attributes:
        module: Path of the module, or of the parameter in the case of a bare stack (`….experts.gate_up_proj`).
        tensors: Names of its tensors in the order that `reader` wants, the weight first.
        companions: Names of further tensors that belong to it (static activation scales, `weight_shape`).
        shape: Logical shape, one element per weight.
        encoding: For people: "bf16", "block FP8", ….
        reader: How values are read.
        keeps: Ids of the weight formats in which `reader.codes` gives the matrix unchanged.
        bare: The weight has no `.weight` at its end.
        transposed: Matrices of a stack are stored [K, N].
        stacked_at: For one expert out of a stack, which of the rows that `reader` gives are its own.
    """

    module: str
    tensors: tuple[str, ...]
    companions: tuple[str, ...]
    shape: tuple[int, ...]
    encoding: str
    reader: Reader
    keeps: tuple[str, ...] = ()
    bare: bool = False
    transposed: bool = False
    stacked_at: StackedAt | None = None

    @property
    def quantized(self) -> bool:
        """Whether the source holds it in fewer than 16 bits."""
        return len(self.tensors) > 1


@dataclass(frozen=True)
class Group:
    """The tensors under one module path, sorted by suffix; input of the detectors.

    Attributes:
        module: Module path.
        weight: Name of the tensor that holds the numbers.
        specs: Suffix -> specification; "weight" for the weight, whatever it is called.
        names: Suffix -> tensor name.
        config: The source's quantization_config, empty if there is none.
    """

    module: str
    weight: str
    specs: Mapping[str, TensorSpec]
    names: Mapping[str, str]
    config: Mapping[str, object]

    def reject(self, reason: str, hint: str | None = None) -> Reject:
        """A refusal of this weight."""
        return Reject(self.weight, reason, hint)


def first_bad(tensors: Sequence[torch.Tensor]) -> tuple[int, list[int], float] | None:
    """The first element that is NaN or infinite: number of the tensor, index, value."""
    for number, tensor in enumerate(tensors):
        if not all_finite(tensor):
            values = tensor.to(torch.float32)
            index = (~torch.isfinite(values)).nonzero()[0].tolist()
            return number, index, float(values[tuple(index)])
    return None
