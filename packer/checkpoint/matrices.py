"""The logical matrices of a checkpoint: one for each Linear and each projection of each expert, however it is stored.

Every job reads a source through these: quantizing, packing, verifying.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.kernels.formats import FORMATS, WeightFormat
from tilewright.kernels.layouts.checkpoint_scaled import CONV1D_BF16
from tilewright.kernels.tensors import QTensor, Reject

from ..families.experts import ExpertsOrder
from ..families.family import ModelFamily
from ..plan import Source
from .encoding import Decoder, StoredWeight
from .stacks import StackLayout, decide, output_rows, stacks_of

Rows = tuple[int, int, int]
Shared = dict[tuple[int, int], tuple[tuple[int, int], Rows]]  # one object for equal shapes, and rows


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix [N, K]: the weight of a Linear, or one projection of one expert.

    Attributes:
        module: Path of the Linear, or of the expert's matrix: `….experts.7.gate_proj`, also if it lies in a stack.
        stored: What it is stored as, alone or in a stack.
        decoder: Reads the matrix that it has some of the rows of.
        shape: (N, K).
        rows: Start, stop and step of its rows in what `decoder` reads.
        height: Rows of what `decoder` reads.
        expert: Which slice of the stored tensors it lies in; None if it is all of them.
        bias: Name of the stored tensor with its bias, empty if it has none; of a stack, a slice for each expert.
    """

    module: str
    stored: StoredWeight
    decoder: Decoder
    shape: tuple[int, int]
    rows: Rows
    height: int
    expert: int | None = None
    bias: str = ""

    @property
    def sources(self) -> tuple[Source, ...]:
        """What has to be read for it, in the order that `decoder` wants."""
        return sources_of(self.stored, self.expert)

    @property
    def bias_source(self) -> Source | None:
        """Where its bias lies, of whose elements it has `rows`."""
        return Source(self.bias, self.expert) if self.bias else None

    @property
    def alone(self) -> bool:
        """Whether it is all that its tensors hold."""
        return self.expert is None

    @property
    def stored_format(self) -> WeightFormat | None:
        """The weight format whose codes `codes` gives; None if there are only values."""
        fmt = FORMATS[self.stored.stored_format] if self.stored.stored_format else None
        if fmt is None or fmt.block_n <= 1 or _whole_blocks(self.rows, fmt.block_n, self.height):
            return fmt
        return None

    def values(self, tensors: Sequence[torch.Tensor], start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` of it: fp32, bf16 or fp16."""
        first, _, step = self.rows
        stop = self.shape[0] if stop is None else stop
        return self.decoder.rows(tensors, slice(first + start * step, first + stop * step, step))

    def codes(self, tensors: Sequence[torch.Tensor]) -> QTensor | None:
        """Its codes and scales as they are stored; None if they are not in a format of ours."""
        fmt = self.stored_format
        q = self.decoder.codes(tensors, fmt) if fmt else None
        return None if q is None else take_rows(q, self.rows)


def sources_of(weight: StoredWeight, expert: int | None) -> tuple[Source, ...]:
    """What has to be read for a weight, or for one expert of a stack."""
    apart = weight.per_expert or (True,) * len(weight.tensors)
    return tuple(Source(name, expert if sliced else None) for name, sliced in zip(weight.tensors, apart, strict=True))


def take_rows(q: QTensor, rows: Rows) -> QTensor | None:
    """Some rows of codes with their scales; None where a block of scales would be cut."""
    start, stop, step = rows
    n, unit = q.shape[0], q.format.block_n
    if (start, stop, step) == (0, n, 1):
        return q
    codes = q.codes[start:stop:step]
    if q.scales is None:
        return QTensor(q.format, codes)
    if unit > 1 and not _whole_blocks(rows, unit, n):
        return None
    grid = slice(start, stop, step) if unit == 1 else slice(start // unit, -(-stop // unit))
    return QTensor(q.format, codes, q.scales[grid], None if q.zeros is None else q.zeros[grid])


def _whole_blocks(rows: Rows, unit: int, n: int) -> bool:
    start, stop, step = rows
    return step == 1 and start % unit == 0 and (stop % unit == 0 or stop == n)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a checkpoint.

    Attributes:
        found: Each of them, in the order of the stored weights; an expert's next to one another.
        rejects: Why the experts of a layer cannot be told apart.
    """

    found: list[Matrix] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)


def matrices_of(
    weights: Sequence[StoredWeight],
    names: Mapping[str, object],
    config: Mapping[str, Any],
    family: ModelFamily,
    order: ExpertsOrder | None = None,
    transposed: bool = False,
) -> Matrices:
    """Every matrix of some stored weights.

    Args:
        weights: What is stored.
        names: Names of all tensors of the source, to find biases.
        config: config.json of the source.
        family: The family of the model.
        order: Declared order of gate and up in merged stacks.
        transposed: Declares that stacks are stored [in, out].
    """
    matrices = Matrices()
    layouts: dict[str, StackLayout] = {}
    shared: Shared = {}
    for container, members in stacks_of(weights, family.experts).items():
        layout = decide(members, config, family, order, transposed)
        if isinstance(layout, Reject):
            matrices.rejects.append(layout)
        else:
            layouts[container] = layout
    for weight in weights:
        path = family.experts.find_stack(weight.module) if len(weight.shape) == 3 else None
        if path is None and len(weight.shape) == 2:
            matrices.found.append(_whole(weight, names, family, shared))
        elif path is not None and path.container in layouts:
            layout = layouts[path.container]
            decoder = weight.decoder.transposed() if layout.transposed else weight.decoder
            if decoder is None:
                reason = f"{weight.encoding} stored [in, out] is not read"
                matrices.rejects.append(Reject(weight.tensors[0], reason))
            else:
                bias = f"{weight.module}_bias"
                matrices.found.extend(_experts(weight, decoder, layout, family, bias if bias in names else ""))
    return matrices


def _whole(weight: StoredWeight, names: Mapping[str, object], family: ModelFamily, shared: Shared) -> Matrix:
    """The matrix that is all of a stored weight."""
    module, bias = family.experts.canonical(weight.module), f"{weight.module}.bias"
    (n, k), decoder = weight.shape, weight.decoder
    if not weight.quantized and family.stores_transposed(module) and (read := decoder.transposed()):
        (n, k), decoder, weight = (k, n), read, replace(weight, layout=CONV1D_BF16.id)
    shape, rows = shared.setdefault((n, k), ((n, k), (0, n, 1)))
    return Matrix(module, weight, decoder, shape, rows, n, bias=bias if bias in names else "")


def _experts(
    weight: StoredWeight, decoder: Decoder, layout: StackLayout, family: ModelFamily, bias: str
) -> Iterator[Matrix]:
    """The matrices of every expert in one stack."""
    path = family.experts.find_stack(weight.module)
    assert path
    experts, *matrix = weight.shape
    n, k = reversed(matrix) if layout.transposed else matrix
    for expert in range(experts):
        for projection, rows in output_rows(family.experts, path.name, n, layout.order).items():
            module = f"{path.container}.{expert}.{projection}"
            yield Matrix(module, weight, decoder, (len(range(*rows)), k), rows, n, expert, bias)
