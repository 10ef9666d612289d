"""Read a directory, plain, quantized or packed, as logical tensors: each matrix with its codes or its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tilewright.kernels.errors import VerifyError
from tilewright.kernels.packed.module_spec import ModuleSpec, RankSharding
from tilewright.kernels.tensors import QTensor

from ..families import family_of
from ..families.cache_scales import cache_scales
from ..families.config import is_tied
from ..plan import Source
from ..records.ledger import read_ledger
from ..records.manifest import solver_of
from .contents import Contents, LogicalTensor
from .encoding import ACTIVATION_SUFFIXES
from .files import Checkpoint
from .matrices import Matrix, matrices_of
from .packed import packed_modules, split_rows, stored_inventory

SMOOTHING = ("smooth", "smooth+gptq")  # those that move scales of channels between Linears
FEEDBACK = ("gptq", "smooth+gptq")  # solvers whose codes are not the nearest ones


def read_contents(checkpoint: Checkpoint) -> Contents:
    """The logical weights of a checkpoint; nothing but headers is read yet.

    Raises:
        VerifyError: Something in it cannot be read as a weight; lists everything.
    """
    packed = packed_modules(checkpoint)
    for header in checkpoint.headers.values():
        sharding = (
            RankSharding.from_json(header.metadata["tilewright.cut"])
            if "tilewright.cut" in header.metadata
            else RankSharding()
        )
        if sharding.ranks > 1:
            raise VerifyError(
                f"{checkpoint.root}: holds the share of rank {sharding.rank} of {sharding.ranks}, not a model",
                hint="verify the uncut packed directory: a cut moves weights and changes none",
            )
    solver = solver_of(checkpoint.root)
    weights = (*_packed_weights(checkpoint, packed), *_stored_tensors(checkpoint))
    return Contents(
        title=str(checkpoint.root),
        weights={weight.name: weight for weight in weights},
        dropped=_dropped(checkpoint.root),
        aliases=_tied(checkpoint, [weight.name for weight in weights]),
        feedback=solver in FEEDBACK,
        smoothed=solver in SMOOTHING,
        forget=partial(_forget, checkpoint),
    )


def _tied(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """The head of a model with tied embeddings -> the embedding that serves for it."""
    family = family_of(checkpoint.config)
    if is_tied(checkpoint.config) is False or not family.head:
        return {}
    tables = [name for name in names if family.role(name.removesuffix(".weight")) == "embedding"]
    return {f"{family.head}.weight": tables[0]} if tables else {}


def _forget(checkpoint: Checkpoint, weight: LogicalTensor) -> None:
    for name in weight.sources:
        checkpoint.forget(Source(name))


def _dropped(root: Path) -> dict[str, str]:
    ledger = read_ledger(root)
    return {name: entry.reason for name, entry in ledger.tensors.items() if entry.fate == "dropped"} if ledger else {}


def _plain(checkpoint: Checkpoint, name: str) -> LogicalTensor:
    source = Source(name)
    return LogicalTensor(name, checkpoint.spec(name).shape, None, partial(checkpoint.tensor, source), sources=(name,))


def _stored_tensors(checkpoint: Checkpoint) -> Iterator[LogicalTensor]:
    """What is stored as checkpoints store it."""
    inventory = stored_inventory(checkpoint)
    matrices = matrices_of(inventory.weights, checkpoint.files, checkpoint.config, family_of(checkpoint.config))
    if matrices.rejects:
        raise VerifyError("\n".join(map(str, matrices.rejects)))
    for matrix in matrices.found:
        yield _matrix(checkpoint, matrix)
        if matrix.bias and not matrix.alone:
            read = partial(_bias, checkpoint, matrix)
            yield LogicalTensor(f"{matrix.module}.bias", matrix.shape[:1], None, read, sources=(matrix.bias,))
    biases = {matrix.bias for matrix in matrices.found if not matrix.alone}
    activations = tuple(f".{suffix}" for suffix in ACTIVATION_SUFFIXES)
    for name in inventory.loose:
        if name not in biases and not name.endswith(activations):
            for called in cache_scales(name) or (name,):
                yield replace(_plain(checkpoint, name), name=called)


def _bias(checkpoint: Checkpoint, matrix: Matrix) -> torch.Tensor:
    assert matrix.bias_source
    return checkpoint.tensor(matrix.bias_source)[slice(*matrix.rows)]


def _matrix(checkpoint: Checkpoint, matrix: Matrix) -> LogicalTensor:
    quantized = matrix.stored.quantized
    fmt = matrix.stored_format if quantized else None
    encoding = matrix.stored.encoding if quantized and fmt is None else ""
    names = tuple(source.name for source in matrix.sources)
    return LogicalTensor(
        f"{matrix.module}.weight",
        matrix.shape,
        fmt,
        partial(_read_matrix, checkpoint, matrix),
        encoding,
        names,
        matrix.stored.rotation if fmt else None,  # other encodings are read as values, without it
        matrix.stored.requantized,
    )


def _read_matrix(checkpoint: Checkpoint, matrix: Matrix) -> QTensor | torch.Tensor:
    tensors = [checkpoint.tensor(source) for source in matrix.sources]
    if not matrix.stored.quantized:
        return matrix.decoder.raw(tensors, slice(*matrix.rows))
    codes = matrix.codes(tensors)
    return matrix.values(tensors) if codes is None else codes


def _packed_weights(checkpoint: Checkpoint, modules: dict[str, ModuleSpec]) -> Iterator[LogicalTensor]:
    """Packed modules, taken apart into the matrices that they were made of."""
    for module, spec in modules.items():
        names = {suffix: f"{module}.{suffix}" for suffix in spec.tensors()}
        if missing := [name for name in names.values() if name not in checkpoint.files]:
            raise VerifyError(f"{checkpoint.root}: packed module `{module}` lacks `{missing[0]}`")
        stored = partial(_tensors, checkpoint, names)
        for name, (linear, rows) in spec.linears().items():
            yield from _packed_module(_Packed(name, linear, partial(_rows, spec, stored, rows), tuple(names.values())))
        if not spec.joined:
            yield from _packed_module(_Packed(module, spec, stored, tuple(names.values())))


def _tensors(checkpoint: Checkpoint, names: dict[str, str]) -> dict[str, torch.Tensor]:
    return {suffix: checkpoint.tensor(Source(name)) for suffix, name in names.items()}


def _rows(spec: ModuleSpec, stored: Callable[[], dict[str, torch.Tensor]], rows: slice) -> dict[str, torch.Tensor]:
    return spec.take(stored(), rows)


@dataclass(frozen=True)
class _Packed:
    """A packed module that was not joined, or one of the Linears of one that was.

    Attributes:
        name: Its name.
        spec: What it is.
        tensors: Views of its tensors by suffix.
        names: Stored tensors that they lie in.
    """

    name: str
    spec: ModuleSpec
    tensors: Callable[[], dict[str, torch.Tensor]]
    names: tuple[str, ...]

    def part(self, expert: int | None, part: int) -> QTensor:
        """One of the parts of the rows, with its own grid of scales."""
        spec = self.spec
        tensors, shape = self.tensors(), spec.shape
        tensors.pop("bias", None)
        if expert is not None:
            tensors = {suffix: tensor[expert : expert + 1] for suffix, tensor in tensors.items()}
            shape = (1, *shape[1:])
        whole = spec.layout.unpack(tensors, spec.format, shape, spec.parts)
        return split_rows(whole if expert is None else _only(whole), spec.source_rows)[part]

    def bias(self, expert: int | None, part: int) -> torch.Tensor:
        """The bias of one of the parts, in its dtype in the source."""
        assert self.spec.bias_dtype is not None
        whole = self.tensors()["bias"]
        mine = whole if expert is None else whole[expert]
        found: torch.Tensor = mine.split(self.spec.source_rows)[part]
        return found.to(self.spec.bias_dtype)


def _packed_module(packed: _Packed) -> Iterator[LogicalTensor]:
    spec = packed.spec
    if not spec.sources and not spec.source_layout:
        return  # made of another module's weight (`w_kc`, `w_vc`), which is compared there
    for expert in range(spec.shape[0]) if len(spec.shape) == 3 else (None,):
        for part, (template, rows) in enumerate(zip(spec.sources or (packed.name,), spec.source_rows, strict=True)):
            name = template.format(None if expert is None else expert + spec.first_expert)
            read = partial(packed.part, expert, part)
            shape = (rows, spec.shape[-1])
            yield LogicalTensor(f"{name}.weight", shape, spec.format, read, "", packed.names, spec.rotation, True)
            if spec.bias_dtype is not None:
                yield LogicalTensor(
                    f"{name}.bias", (rows,), None, partial(packed.bias, expert, part), sources=packed.names
                )


def _only(q: QTensor) -> QTensor:
    """The one expert of a stack of one."""
    scales = None if q.scales is None else q.scales[0]
    return QTensor(q.format, q.codes[0], scales, None if q.zeros is None else q.zeros[0], q.parts)
