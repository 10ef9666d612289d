"""Read a directory, plain, quantized or packed, as logical weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.errors import VerifyError
from tilewright.kernels.formats import FORMATS
from tilewright.kernels.packed.module_spec import Cut, ModuleSpec
from tilewright.kernels.tensors import QTensor

from ..checkpoint.base import Reader, SourceWeight
from ..checkpoint.files import Checkpoint
from ..checkpoint.naming import canonical
from ..checkpoint.stacks import StackLayout, TransposedReader, container_of, decide, output_rows
from ..families import architecture_of, text_config
from ..pack.modules import packed_modules, stored_inventory
from ..pack.steps import split_rows
from ..plan import Source
from ..records.manifest import solver_of
from .contents import Contents, Weight

ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale", ".input_zero_point")  # of activations, not weights
FEEDBACK = ("gptq",)  # solvers whose codes are not the nearest ones
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_contents(checkpoint: Checkpoint) -> Contents:
    """The logical weights of a checkpoint; nothing but headers is read yet.

    Raises:
        VerifyError: Something in it cannot be read as a weight; lists everything.
    """
    packed = packed_modules(checkpoint)
    for header in checkpoint.headers.values():
        cut = Cut.from_json(header.metadata["tilewright.cut"]) if "tilewright.cut" in header.metadata else Cut()
        if cut.ranks > 1:
            raise VerifyError(
                f"{checkpoint.root}: holds the share of rank {cut.rank} of {cut.ranks}, not a model",
                hint="verify the uncut packed directory: a cut moves weights and changes none",
            )
    weights = (*_packed_weights(checkpoint, packed), *_stored_weights(checkpoint))
    tied = text_config(checkpoint.config).get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))
    return Contents(
        title=str(checkpoint.root),
        weights={weight.name: weight for weight in weights},
        dropped=_dropped(checkpoint.root),
        aliases={HEAD: EMBEDDING} if tied else {},
        feedback=solver_of(checkpoint.root) in FEEDBACK,
        forget=partial(_forget, checkpoint),
    )


def _forget(checkpoint: Checkpoint, weight: Weight) -> None:
    for name in weight.sources:
        checkpoint.forget(Source(name))


def _dropped(root: Path) -> dict[str, str]:
    try:
        ledger: dict[str, Any] = json.loads((root / "ledger.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {name: fate["reason"] for name, fate in ledger["tensors"].items() if fate["fate"] == "dropped"}


def _plain(checkpoint: Checkpoint, name: str) -> Weight:
    source = Source(name)
    return Weight(name, checkpoint.spec(name).shape, None, partial(checkpoint.tensor, source), sources=(name,))


def _stored_weights(checkpoint: Checkpoint) -> Iterator[Weight]:
    """Weights that are stored as checkpoints store them."""
    inventory = stored_inventory(checkpoint)
    stacks: dict[str, list[SourceWeight]] = {}
    for weight in inventory.weights:
        container = container_of(weight.module) if len(weight.shape) == 3 else None
        if container is None:
            yield _matrix(checkpoint, weight)
        else:
            stacks.setdefault(container, []).append(weight)
    for container, members in stacks.items():
        yield from _stack(checkpoint, container, members)
    biases = {f"{weight.module}_bias" for members in stacks.values() for weight in members}
    for name in inventory.loose:
        if name not in biases and not name.endswith(ACTIVATION_SUFFIXES):
            yield _plain(checkpoint, name)


def _matrix(checkpoint: Checkpoint, weight: SourceWeight) -> Weight:
    if not weight.quantized:
        plain = _plain(checkpoint, weight.tensors[0])
        return Weight(f"{canonical(weight.module)}.weight", plain.shape, None, plain.read, sources=plain.sources)
    tensors = [Source(name) for name in weight.tensors]
    return _encoded(checkpoint, weight, f"{canonical(weight.module)}.weight", tensors, weight.reader, slice(None))


def _stack(checkpoint: Checkpoint, container: str, members: list[SourceWeight]) -> Iterator[Weight]:
    layout = decide(members, checkpoint.config, architecture_of(checkpoint.config), None, False)
    if not isinstance(layout, StackLayout):
        raise VerifyError(str(layout))
    for weight in members:
        e, *matrix = weight.shape
        n = matrix[1] if layout.transposed else matrix[0]
        reader: Reader = TransposedReader(weight.reader) if layout.transposed else weight.reader
        for projection, (start, stop, step) in output_rows(weight.module, n, layout.order).items():
            for expert in range(e):
                tensors = [Source(name, expert) for name in weight.tensors]
                name, rows = f"{container}.{expert}.{projection}", slice(start, stop, step)
                yield _encoded(checkpoint, weight, f"{name}.weight", tensors, reader, rows)
                if (bias := f"{weight.module}_bias") in checkpoint.files:
                    read = partial(_bias, checkpoint, Source(bias, expert), rows)
                    yield Weight(f"{name}.bias", (len(range(start, stop, step)),), None, read, sources=(bias,))


def _bias(checkpoint: Checkpoint, source: Source, rows: slice) -> torch.Tensor:
    return checkpoint.tensor(source)[rows]


def _encoded(
    checkpoint: Checkpoint, weight: SourceWeight, name: str, sources: list[Source], reader: Reader, rows: slice
) -> Weight:
    """A weight that `reader` decodes; `rows` are those of a stack that belong to it."""
    n, k = weight.shape[-2:]
    whole = rows == slice(None)
    fmt = FORMATS[weight.keeps[0]] if whole and weight.keeps else None
    if isinstance(reader, TransposedReader):
        n, k = k, n
    rows = slice(*rows.indices(n))

    def read() -> QTensor | torch.Tensor:
        tensors = [checkpoint.tensor(source) for source in sources]
        codes = reader.codes(tensors, fmt) if fmt else None
        if codes is not None:
            return codes
        if weight.quantized:
            return reader.rows(tensors, rows)
        return tensors[0].T[rows] if isinstance(reader, TransposedReader) else tensors[0][rows]

    encoding = "" if fmt or not weight.quantized else weight.encoding
    names = tuple(source.name for source in sources)
    return Weight(name, (len(range(*rows.indices(n))), k), fmt, read, encoding, names)


def _packed_weights(checkpoint: Checkpoint, modules: dict[str, ModuleSpec]) -> Iterator[Weight]:
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


def _packed_module(packed: _Packed) -> Iterator[Weight]:
    spec = packed.spec
    if not spec.sources and not spec.source_layout:
        return  # made of another module's weight (`w_kc`, `w_vc`), which is compared there
    for expert in range(spec.shape[0]) if len(spec.shape) == 3 else (None,):
        for part, (template, rows) in enumerate(zip(spec.sources or (packed.name,), spec.source_rows, strict=True)):
            name = template.format(None if expert is None else expert + spec.first_expert)
            read = partial(packed.part, expert, part)
            yield Weight(f"{name}.weight", (rows, spec.shape[-1]), spec.format, read, sources=packed.names)
            if spec.bias_dtype is not None:
                yield Weight(f"{name}.bias", (rows,), None, partial(packed.bias, expert, part), sources=packed.names)


def _only(q: QTensor) -> QTensor:
    """The one expert of a stack of one."""
    scales = None if q.scales is None else q.scales[0]
    return QTensor(q.format, q.codes[0], scales, None if q.zeros is None else q.zeros[0], q.parts)
