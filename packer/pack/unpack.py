"""Plan the way back: from a packed directory to the checkpoint that it was made from."""

from __future__ import annotations

from dataclasses import replace

from tilewright.kernels.errors import TilewrightError
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.packed.module_spec import INPUT_SCALE, ModuleSpec, RankSharding, described_modules
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import is_packed
from ..garbage import uncollected
from ..plan import Copy, Fate, Piece, Plan, Source, Task
from .steps import UnpackStep

DAMAGED_HINT = "the directory is damaged; fetch it or pack it again"


@uncollected()
def plan_unpack(checkpoint: Checkpoint) -> Plan:
    """Decide how every packed module becomes the tensors of its sources again; all other tensors are copied.

    The tensors equal those of the checkpoint that was packed, but for float16 weights, which packing rounded to bf16,
    and scales that were stored in another dtype than their layout's.
    """
    if not is_packed(checkpoint):
        return Plan({}, (), {}, {}, rejects=(Reject(str(checkpoint.root), "is no packed directory"),))
    if any(
        RankSharding.from_json(h.metadata.get("tilewright.cut", "")) != RankSharding()
        for h in checkpoint.headers.values()
    ):
        reason = "is one rank's share, from which the whole checkpoint cannot be made"
        return Plan({}, (), {}, {}, rejects=(Reject(str(checkpoint.root), reason),))
    tensors: dict[str, TensorSpec] = {}
    tasks: list[Task] = []
    fates: dict[str, Fate] = {}
    rejects: list[Reject] = []
    modules = _modules(checkpoint, rejects)
    for name, spec in modules.items():
        stored = {f"{name}.{suffix}": expected for suffix, expected in spec.tensors().items()}
        names = list(stored)
        if wrong := [full for full in names if full not in checkpoint.files or checkpoint.spec(full) != stored[full]]:
            reason = f"is missing or not what layout `{spec.layout.id}` demands"
            rejects += (Reject(full, reason, DAMAGED_HINT) for full in wrong)
        elif not spec.sources:
            fates.update(
                dict.fromkeys(names, Fate("dropped", "made of another module's weight, which is unpacked from there"))
            )
        elif spec.source_layout not in LAYOUTS:
            rejects.append(Reject(name, "was packed from tensors that no checkpoint layout holds"))
        else:
            made = _unpack_tasks(name, spec, LAYOUTS[spec.source_layout])
            tasks += made
            pieces = {piece.name: piece.spec for task in made for piece in task.pieces}
            if spec.stack:
                pieces = {whole: replace(one, shape=(spec.shape[0], *one.shape)) for whole, one in pieces.items()}
            reason = f"is in `{name}` and in another module"
            rejects += (Reject(piece, reason, DAMAGED_HINT) for piece in pieces if piece in tensors)
            tensors.update(pieces)
            fates.update(dict.fromkeys(names, Fate("packed", f"back to layout {spec.source_layout}", tuple(pieces))))
    for name in checkpoint.files:
        module, _, suffix = name.rpartition(".")
        if suffix == INPUT_SCALE and module in modules:
            fates[name] = Fate("dropped", "the largest of the experts' own, made when they were packed")
        elif name not in fates:
            if name in tensors:
                rejects.append(Reject(name, "is there, and a module says that it holds it", DAMAGED_HINT))
            tensors[name] = checkpoint.spec(name)
            tasks.append(Task((Source(name),), (Piece(name, tensors[name]),), Copy()))
            fates[name] = Fate("copied", "not packed", (name,))
    config = dict(checkpoint.config)
    source = config.pop("quantization_config", {}).get("source")
    if source:
        config["quantization_config"] = source
    return Plan(tensors, tuple(tasks), fates, config, options={"job": "unpack"}, rejects=tuple(rejects))


def _modules(checkpoint: Checkpoint, rejects: list[Reject]) -> dict[str, ModuleSpec]:
    modules: dict[str, ModuleSpec] = {}
    for header in checkpoint.headers.values():
        for name, fields in described_modules(header).items():
            try:
                modules[name] = ModuleSpec.from_json(name, fields)
            except TilewrightError as error:
                rejects.append(Reject(name, error.message, error.hint))
    return modules


def _unpack_tasks(name: str, spec: ModuleSpec, layout: Layout) -> list[Task]:
    """One task for each expert, or one for a Linear."""
    *stack, n, k = spec.shape
    matrix = replace(spec, shape=(n, k))
    tasks = []
    for number in range(stack[0]) if stack else (None,):
        modules = tuple(source.format((number or 0) + spec.first_expert) for source in spec.sources)
        sources = tuple(Source(f"{name}.{suffix}", number) for suffix in spec.tensors())
        if spec.stack:
            made = _tensors(f"{spec.stack.name}_", spec, layout, n)
            pieces = [Piece(piece, one, (number or 0) * one.nbytes) for piece, one in made.items()]
        else:
            parts = zip(modules, spec.source_rows, strict=True)
            pieces = [
                Piece(*made) for module, rows in parts for made in _tensors(f"{module}.", spec, layout, rows).items()
            ]
        tasks.append(Task(sources, tuple(pieces), UnpackStep(matrix, layout, modules)))
    return tasks


def _tensors(prefix: str, spec: ModuleSpec, layout: Layout, rows: int) -> dict[str, TensorSpec]:
    """Name and specification of the tensors of some rows of a matrix of the source, and of its bias."""
    specs = {f"{prefix}{suffix}": t for suffix, t in layout.specs(spec.format, (rows, spec.shape[-1])).items()}
    if spec.bias_dtype is not None:
        specs[f"{prefix}bias"] = TensorSpec(spec.bias_dtype, (rows,))
    return specs
