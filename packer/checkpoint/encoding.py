"""What an encoding of weights is: how a source stores one weight, and how its values are read back.

Each encoding is one file in `encodings/` and one line in its registry. It claims a group of tensors under one module
path, says what matrix they hold, and gives a decoder for the rows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops.convert import all_finite
from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import QTensor, Reject, TensorSpec

from .declared import DeclaredNumbers, QuantMethod
from .details import NOTHING, Details

# Tensors beside a weight that no encoding needs for its values: scales of activations.
FEW_BITS_OF_GGUF = tuple(f"GGUF-{kind}" for kind in ("Q1", "Q2", "Q3", "Q4", "Q5", "IQ", "TQ", "MXFP4", "NVFP4"))
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point", "activation_scale")


class Decoder:
    """Reads the values of one matrix from its tensors; picklable and stateless."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Values of some rows of a matrix.

        Args:
            tensors: The tensors of the matrix in the order of `StoredWeight.tensors`; of a stack, one expert's slices.
            rows: Rows wanted, with explicit start, stop and step.

        Returns:
            fp32 [len(rows), K]; or bf16 or fp16, if the values are stored so.
        """
        raise NotImplementedError

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Some rows of the weight tensor as they are stored, for encodings that store one row of values as one row."""
        return tensors[0][rows]

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """The matrix as it is, if it already has the numbers of `fmt`; None if it has to be quantized anew."""
        return None

    def transposed(self) -> Decoder | None:
        """A decoder for the same matrix stored [K, N]; None if the encoding cannot be read so."""
        return None


@dataclass(frozen=True)
class TransposedDecoder(Decoder):
    """Reads a matrix that is stored [K, N].

    Attributes:
        inner: Reads it if every tensor of it is transposed.
    """

    inner: Decoder

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        return self.inner.rows([tensor.T for tensor in tensors], rows)

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.raw`."""
        return tensors[0].T[rows]

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`."""
        return self.inner.codes([tensor.T for tensor in tensors], fmt)


@dataclass(frozen=True)
class RotatedDecoder(Decoder):
    """Reads a matrix whose columns were rotated before they were stored.

    Attributes:
        inner: Reads it as it is stored.
        rotation: What its columns were multiplied by.
    """

    inner: Decoder
    rotation: Rotation

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`; without the rotation, whose inverse is itself."""
        return self.rotation.of(self.inner.rows(tensors, rows))

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.raw`."""
        return self.inner.raw(tensors, rows)

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`; as they are stored."""
        return self.inner.codes(tensors, fmt)

    def transposed(self) -> Decoder | None:
        """See `Decoder.transposed`."""
        inner = self.inner.transposed()
        return None if inner is None else RotatedDecoder(inner, self.rotation)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One matrix `[N, K]`, or stack of matrices `[E, A, B]`, as the source stores it.

    Attributes:
        module: Path of the module, or of the parameter in the case of a bare stack (`….experts.gate_up_proj`).
        tensors: Names of its tensors in the order that `decoder` wants, the codes first.
        companions: Names of further tensors that belong to it (static activation scales, `weight_shape`).
        shape: Logical shape, one element per weight.
        encoding: For people: "bf16", "block 128x128 FP8", ….
        decoder: How values are read.
        stored_format: Id of the weight format in which `decoder.codes` gives the matrix unchanged; empty if in none.
        rounds_to: Id of the weight format without scales that its values are rounded to when they are packed, or empty.
        layout: Id of the checkpoint layout that spells it, where names and shapes do not tell.
        requantized: It has zero points or scales that outputs in `stored_format` do not: quantizing to it rounds anew.
        bare: The weight has no `.weight` at its end.
        per_expert: Of a stack, whether each tensor has a slice for each expert; one that has none serves them all.
        rotation: What its columns were multiplied by before they were quantized: `decoder` gives the values that they
            had before, and the codes as they are; None: nothing.
        foreign: No config that this project writes can describe it: what is not quantized of it becomes 16 bits.
        kind: The same for weights of one inventory that differ in nothing but the numbers in their names; None where
            nothing is known to be like it.
    """

    module: str
    tensors: tuple[str, ...]
    companions: tuple[str, ...]
    shape: tuple[int, ...]
    encoding: str
    decoder: Decoder
    stored_format: str = ""
    rounds_to: str = ""
    layout: str = ""
    requantized: bool = False
    bare: bool = False
    per_expert: tuple[bool, ...] = ()
    rotation: Rotation | None = None
    foreign: bool = False

    kind: int | None = None

    def holds(self, fmt: str, rotation: Rotation | None) -> bool:
        """Whether it has the numbers of this format with inputs rotated so, to be taken over as they are."""
        return fmt == self.stored_format and rotation == self.rotation and not self.requantized

    def like(self, module: str, tensors: tuple[str, ...], companions: tuple[str, ...]) -> StoredWeight:
        """The same under other names (`dataclasses.replace`, but quick)."""
        return StoredWeight(
            module,
            tensors,
            companions,
            self.shape,
            self.encoding,
            self.decoder,
            self.stored_format,
            self.rounds_to,
            self.layout,
            self.requantized,
            self.bare,
            self.per_expert,
            self.rotation,
            self.foreign,
            self.kind,
        )

    @property
    def few_bits(self) -> bool:
        """Whether a second quantization to 4 bits would lose about as much again as the first."""
        return self.encoding.startswith((
            "int1",
            "int2",
            "int3",
            "int4",
            "MXFP4",
            "NVFP4",
            "NF4",
            "FP4",
            *FEW_BITS_OF_GGUF,
        ))

    @property
    def quantized(self) -> bool:
        """Whether the source holds it in fewer than 16 bits."""
        return len(self.tensors) > 1 or self.foreign


@dataclass(frozen=True)
class TensorGroup:
    """The tensors under one module path, sorted by suffix; what encodings are asked about.

    Attributes:
        module: Module path.
        specs: Suffix -> specification; "weight" for a parameter without a suffix, too.
        names: Suffix -> tensor name.
        declared: What the source's config says about the weight; None if it says that it is not quantized, or nothing.
        method: The source's `quant_method`; empty if it has no quantization config.
        stack: Whether the path is that of a stack of experts.
        details: What headers do not tell.
    """

    module: str
    specs: Mapping[str, TensorSpec]
    names: Mapping[str, str]
    declared: DeclaredNumbers | None = None
    method: str = ""
    stack: bool = False
    details: Details = NOTHING

    def is_matrix(self, suffix: str = "weight") -> bool:
        """Whether it has a tensor of this suffix that is a matrix [N, K], or a stack of experts [E, A, B]."""
        rank = len(self.specs[suffix].shape) if suffix in self.specs else 0
        return (rank == 2 and self.names[suffix] != self.module) or (rank == 3 and self.stack)

    def others(self, *suffixes: str) -> tuple[str, ...]:
        """Names of all tensors but those of these suffixes."""
        return tuple(name for suffix, name in self.names.items() if suffix not in suffixes)

    def small(self, suffix: str) -> torch.Tensor:
        """The tensor of this suffix, which has a few bytes and tells how to read the others."""
        return self.details.tensor(self.names[suffix])

    def missing(self, *suffixes: str) -> Reject | None:
        """A refusal if one of these tensors is not there."""
        lacking = [suffix for suffix in suffixes if suffix not in self.specs]
        if not lacking:
            return None
        present = next(iter(self.names.values()))
        hint = "it may be in a shard that is missing; fetch the checkpoint again"
        return Reject(present, f"has no `{self.module}.{lacking[0]}`, which belongs to it", hint)

    def undeclared(self, what: str, suffix: str) -> Reject:
        """A refusal of codes that the config says nothing about, so that nothing tells how to read them."""
        said = f"of `{self.method}` says that this module is not quantized" if self.method else "is missing"
        reason = f"looks like {what}, but the quantization config {said}"
        return self.reject(reason, "restore config.json as it was published", suffix)

    def mismatch(self, expected: Mapping[str, tuple[Any, Any]], declared: str) -> Reject | None:
        """A refusal if a tensor is not what the config demands.

        Args:
            expected: Suffix -> type or types, and shape or set of shapes.
            declared: What the config says, for people.
        """
        for suffix, (types, shapes) in expected.items():
            spec = self.specs[suffix]
            known_types = types if isinstance(types, tuple) else (types,)
            known_shapes = shapes if isinstance(shapes, set) else {tuple(shapes)}
            if spec.dtype not in known_types or tuple(spec.shape) not in known_shapes:
                names = " or ".join(str(kind).removeprefix("torch.") for kind in known_types)
                wanted = f"{names} {' or '.join(str(list(shape)) for shape in sorted(known_shapes))}"
                found = f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
                reason = f"is {found}; with {declared}, as config.json says, it has to be {wanted}"
                return self.reject(reason, suffix=suffix)
        return None

    def reject(self, reason: str, hint: str | None = None, suffix: str = "weight") -> Reject:
        """A refusal that names the tensor of this suffix."""
        return Reject(self.names.get(suffix, self.module), reason, hint)


class Encoding(Protocol):
    """One way of storing weights."""

    @property
    def id(self) -> str:
        """Name in the registry."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Last parts of the names of its tensors, that of the codes first: `weight`, `qweight`, `weight.absmax`."""

    @property
    def methods(self) -> tuple[QuantMethod, ...]:
        """Readers of the quantization configs that announce it."""

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """The weight that a group holds in this encoding; why it cannot be read; None if it is another encoding."""


def first_bad(tensors: Sequence[torch.Tensor]) -> tuple[int, list[int], float] | None:
    """The first element that is NaN or infinite: number of the tensor, index, value."""
    for number, tensor in enumerate(tensors):
        if not all_finite(tensor):
            values = tensor.to(torch.float32)
            index = (~torch.isfinite(values)).nonzero()[0].tolist()
            return number, index, float(values[tuple(index)])
    return None
