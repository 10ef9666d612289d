"""Plan the packing of a checkpoint: quantized codes keep their values and change their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from tilewright import __version__
from tilewright.kernels.formats import BF16, FORMATS, FP8, WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.packed.module_spec import PACKED_VERSION, QUANT_METHOD, Cut, ModuleSpec
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint import quantization_config, take_inventory
from ..checkpoint.base import SourceWeight
from ..checkpoint.files import Checkpoint
from ..families import architecture_of, text_config
from ..families.base import KEPT, Architecture, Role
from ..plan import Copy, Fate, Piece, Plan, Source, Task
from ..quantize.planner import source_specs
from ..records.manifest import solver_of
from .activation_scales import reduced_scale
from .cuts import Share, cut_of, cut_rejects, share_of
from .groups import EXPERT, Group, Linear, group_experts, join_linears
from .latent_attention import PROJECTION, AbsorbStep, heads_of
from .stacked import unstack
from .steps import PackedPart, PackStep
from .target import PACKED_PREFIXES, Target

ROUTER = "router: its scores are computed from the plain weight, in the precision that the model asks for"
HEAD = "lm_head"
WHOLE = Cut()
DEGREES = (1, 2, 4, 8, 16, 32, 64)
QUANTIZE_HINT = "convert it with `quantize-model` first, which reads it"


def plan_pack(checkpoint: Checkpoint, target: Target, cut: Cut = WHOLE) -> Plan:
    """Decide from headers alone what becomes of every tensor of a 16-bit or quantized checkpoint.

    Args:
        checkpoint: The source.
        target: What to pack for.
        cut: Which share of the model to pack.

    Returns:
        The plan; its `rejects` say why the source cannot be packed, if it cannot.
    """
    if is_packed(checkpoint):
        hint = "`--unpack` turns it back into the checkpoint that it was made from"
        return Plan({}, (), {}, {}, rejects=(Reject(str(checkpoint.root), "is packed already", hint),))
    planner = _Planner(checkpoint, target, cut)
    planner.decide()
    return planner.plan()


def plan_ranks(checkpoint: Checkpoint, target: Target, tp: int, ep: int) -> list[Plan]:
    """The plan of every rank of a tensor- and expert-parallel run; if it is refused, with the degrees that are not."""
    plans = [plan_pack(checkpoint, target, cut_of(rank, tp, ep)) for rank in range(max(tp, ep))]
    if plans[0].rejects and not plan_pack(checkpoint, target).rejects:
        legal = [size for size in DEGREES if not plan_pack(checkpoint, target, cut_of(0, size, 1)).rejects]
        dealt = [size for size in DEGREES if not plan_pack(checkpoint, target, cut_of(0, 1, size)).rejects]
        reason = f"possible are --tp {', '.join(map(str, legal))}; alone, --ep {', '.join(map(str, dealt))}"
        plans[0] = replace(plans[0], rejects=(*plans[0].rejects, Reject("degrees", reason)))
    return plans


def is_packed(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a packed directory."""
    return any("tilewright.packed" in header.metadata for header in checkpoint.headers.values())


def source_layout(weight: SourceWeight, fmt: WeightFormat, specs: Mapping[str, TensorSpec]) -> Layout | None:
    """The checkpoint layout that has tensors of the same names and shapes as `specs`.

    Dtypes may differ (float16 weights, scales in bf16): unpacking then gives the layout's own.
    """
    shapes = {suffix: spec.shape for suffix, spec in specs.items()}
    for layout in LAYOUTS.values():
        if layout.id.startswith(PACKED_PREFIXES) or layout.accepts(fmt, weight.shape):
            continue
        wanted = {suffix: spec.shape for suffix, spec in layout.specs(fmt, weight.shape).items()}
        if wanted == {suffix: shape for suffix, shape in shapes.items() if suffix in wanted}:
            return layout
    return None


def scheme_of(formats: Mapping[Role, set[str]]) -> str:
    """Id of the scheme that gives these quantized formats to the roles; several joined by `+` if it is none of ours."""
    experts = formats.get("expert", set())
    found = set().union(*formats.values())
    if not found:
        return "none"
    if experts == {"int4-g128"} and found - experts <= {"fp8"} and formats.get("linear", set()) <= {"fp8"}:
        return "w4afp8"
    names = {"fp8": "block-fp8", "int8": "int8"}
    return "+".join(sorted({names.get(fmt, "int4") for fmt in found}))


@dataclass
class _Planner:
    checkpoint: Checkpoint
    target: Target
    cut: Cut
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    fates: dict[str, Fate] = field(default_factory=dict)
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    formats: dict[Role, set[str]] = field(default_factory=dict)  # quantized formats found for each role

    def decide(self) -> None:
        """Walk through the weights in source order, then through all that is left."""
        source = self.checkpoint
        architecture = architecture_of(source.config)
        specs = source_specs(source)
        inventory = take_inventory(specs, source.config)
        self.rejects += inventory.rejects
        self.rejects += cut_rejects(source.config, specs, self.cut.tp[1], self.cut.ep[1])
        weights, rejects = unstack(inventory.weights, source.config, architecture)
        self.rejects += rejects
        stacks: dict[str, list[SourceWeight]] = {}
        for weight in weights:
            if match := EXPERT.match(weight.module):
                stacks.setdefault(match["stack"], []).append(weight)
        joined = self._join(weights, architecture) if self.target.joins else {}
        for weight in weights:
            role = architecture.role(weight.module)
            if match := EXPERT.match(weight.module):
                if members := stacks.pop(match["stack"], []):
                    self._pack_experts(match["stack"], members)
            elif len(weight.shape) > 2 and role in self.target.roles:
                reason = f"experts stacked in one tensor {list(weight.shape)} are not packed"
                self.rejects.append(Reject(weight.module, reason, QUANTIZE_HINT))
            elif weight.quantized or role in self.target.roles:
                group = joined.get(weight.module) or Group(weight.module, ((weight,),))
                if weight is group.experts[0][0]:
                    self._pack([group], role)
                if self.target.absorbs and weight.module.endswith(f".{PROJECTION}"):
                    self._absorb(weight)
            else:
                self._copy(weight.tensors, ROUTER if role == "router" else KEPT.get(role, role))
        embeddings = [weight for weight in inventory.weights if architecture.role(weight.module) == "embedding"]
        self._pack_tied_head(embeddings)
        self._copy((name for name in source.files if name not in self.fates), "no weight of a Linear")
        if not self.modules and not self.rejects:
            reason = f"holds no weight that is packed for {self.target.id}"
            self.rejects.append(Reject(str(source.root), reason, QUANTIZE_HINT))

    def plan(self) -> Plan:
        """The plan of what was decided."""
        config = dict(self.checkpoint.config)
        block = quantization_config(config)
        scheme = scheme_of(self.formats)
        config["quantization_config"] = {
            "quant_method": QUANT_METHOD,
            "packed": PACKED_VERSION,
            "target": self.target.id,
            "scheme": scheme,
            "source": dict(block) or None,
        }
        source = self.checkpoint
        return Plan(
            self.tensors,
            tuple(self.tasks),
            self.fates,
            config,
            {name: spec.to_json() for name, spec in self.modules.items()},
            {
                "tilewright.packed": PACKED_VERSION,
                "tilewright.tool": __version__,
                "tilewright.scheme": scheme,
                "tilewright.cut": self.cut.to_json(),
            },
            {"job": "pack", "target": repr(self.target), "cut": self.cut.to_json(), "solver": solver_of(source.root)},
            rejects=tuple(self.rejects),
            notes=tuple(self.notes),
        )

    def _join(self, weights: Iterable[SourceWeight], architecture: Architecture) -> dict[str, Group]:
        """Module of each Linear that is packed together with others -> their group."""
        linears: dict[str, Linear] = {}
        for weight in weights:
            if len(weight.shape) == 2 and architecture.role(weight.module) in self.target.roles:
                fmt, bias = self._format(weight), self._bias(weight)
                if not isinstance(fmt, Reject):
                    linears[weight.module] = Linear(weight, fmt, self.checkpoint.spec(bias).dtype if bias else None)
        groups: dict[str, Group] = {}
        apart: dict[str, list[str]] = {}
        for found in join_linears(linears, self.cut):
            if isinstance(found, Reject):
                apart.setdefault(found.reason, []).append(found.name)
            else:
                groups.update(dict.fromkeys(found.templates, found))
        for reason, names in apart.items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            self.notes.append(f"{names[0]}{more} is not joined: {reason}")
        return groups

    def _pack_experts(self, stack: str, weights: list[SourceWeight]) -> None:
        groups = group_experts(stack, weights)
        if isinstance(groups, Reject):
            self.rejects.append(groups)
        else:
            self._pack(groups, "expert")
            if self.target.reduces_scales:
                self._reduce_scales(groups)

    def _reduce_scales(self, groups: list[Group]) -> None:
        """One static activation scale for each stack, beside those of its experts, which stay as they are."""
        for group in groups:
            task = reduced_scale(group, self.cut, self.modules.get(group.name))
            if isinstance(task, Reject):
                self.rejects.append(task)
            elif task:
                self.tasks.append(task)
                self.tensors.update({piece.name: piece.spec for piece in task.pieces})

    def _absorb(self, weight: SourceWeight) -> None:
        """Add `w_kc` and `w_vc` beside a packed `kv_b_proj`."""
        fmt = self._format(weight)
        heads = heads_of(weight, self.checkpoint.config, self.cut.tp[1])
        if isinstance(heads, Reject):
            self.rejects.append(heads)
        if weight.module not in self.modules or isinstance(heads, Reject) or not isinstance(fmt, WeightFormat):
            return
        prefix = weight.module.removesuffix(f".{PROJECTION}")
        made = heads.format(fmt)
        layout = LAYOUTS["cpu-vnni-fp8" if made is FP8 else "cpu-vnni-bf16"]
        outputs: dict[str, TensorSpec] = {}
        for name, shape in heads.shapes().items():
            spec = self.modules[f"{prefix}.{name}"] = ModuleSpec(layout, made, shape)
            outputs |= {f"{prefix}.{name}.{suffix}": tensor for suffix, tensor in spec.tensors().items()}
        self.tensors |= outputs
        share = share_of(PROJECTION, self.cut, is_expert=False)
        step = AbsorbStep(prefix, weight.reader, fmt, share, heads, layout)
        self.tasks.append(Task(tuple(map(Source, weight.tensors)), tuple(Piece(*o) for o in outputs.items()), step))
        for name in weight.tensors:
            fate = self.fates[name]
            self.fates[name] = replace(fate, outputs=(*fate.outputs, *outputs))

    def _pack_tied_head(self, embeddings: list[SourceWeight]) -> None:
        """Where the head shares the embedding's matrix: pack it once for the head, keep it for the embedding."""
        config = self.checkpoint.config
        if "head" not in self.target.roles:
            return
        if f"{HEAD}.weight" in self.checkpoint.files or "ForCausalLM" not in str(config.get("architectures")):
            return
        if text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings")) is False:
            hint = "set tie_word_embeddings in config.json if the head is the embedding"
            self.rejects.append(Reject(HEAD, "is absent, and config.json says that it is not tied", hint))
        elif len(embeddings) == 1:
            name = embeddings[0].tensors[0]
            self._pack([Group(HEAD, ((embeddings[0],),))], "head")
            outputs = (name, *(output for output in self.tensors if output.startswith(f"{HEAD}.")))
            self.fates[name] = Fate("copied", "embedding; packed a second time as the tied head", outputs)
            twice = f"{self.checkpoint.spec(name).nbytes / 1e6:.1f} MB are stored twice"
            self.notes.append(f"{HEAD}: tied, but rows are looked up in the plain matrix, so {twice}")

    def _format(self, weight: SourceWeight) -> WeightFormat | Reject | None:
        """The format in which a weight's codes are packed; None if it stays as it is."""
        if weight.keeps:
            return FORMATS[weight.keeps[0]]
        if weight.quantized:
            return Reject(weight.module, f"no packed layout holds {weight.encoding}", QUANTIZE_HINT)
        return BF16 if self.checkpoint.spec(weight.tensors[0]).dtype == torch.float16 else None

    def _pack(self, groups: list[Group], role: Role) -> None:
        """Give groups of equally many experts of one encoding their modules, tensors and tasks, or say why not."""
        weights = [weight for group in groups for expert in group.experts for weight in expert]
        fmt = self._format(weights[0]) if role in self.target.roles else None
        if isinstance(fmt, Reject):
            self.rejects.append(fmt)
            return
        if fmt:
            groups = [self._cut(group, fmt) for group in groups]
        layouts: list[Layout] = []
        for group in groups:
            layout = self.target.layout(role, fmt, group.shape, group.parts) if fmt else None
            if isinstance(layout, Reject):
                self.rejects.append(replace(layout, name=group.name))
            elif layout:
                layouts.append(layout)
        if not fmt or not layouts:
            reason = f"{weights[0].encoding} stays as it is"
            if share_of(weights[0].module.rpartition(".")[2], self.cut, groups[0].stacked) != Share():
                self.rejects.append(Reject(groups[0].name, f"{reason}, and only packed matrices are cut"))
            self._copy((name for weight in weights for name in weight.tensors), reason)
        if not fmt or len(layouts) != len(groups):
            return
        for group, layout in zip(groups, layouts, strict=True):
            self._add_module(group, layout, fmt)
        for number in groups[0].numbers:
            self._add_task(groups, layouts, fmt, number)
        if fmt.has_scales:
            self.formats.setdefault(role, set()).add(fmt.id)
        elif self.checkpoint.spec(weights[0].tensors[0]).dtype == torch.float16:
            self.notes.append(f"{weights[0].module}: float16 is rounded to bf16, which the kernels read")

    def _cut(self, group: Group, fmt: WeightFormat) -> Group:
        """The group with this rank's share of it."""
        first = group.experts[0][0]
        share = share_of(first.module.rpartition(".")[2], self.cut, group.stacked)
        n, k = first.shape
        if reason := share.against(fmt, n, k):
            self.rejects.append(Reject(first.module, reason))
            return group
        if len(group.experts) % share.experts[1]:
            self.rejects.append(
                Reject(group.name, f"{len(group.experts)} experts are not {share.experts[1]} equal shares")
            )
            return group
        return replace(group, share=share)

    def _tensors(self, weight: SourceWeight) -> dict[str, TensorSpec]:
        """Suffix -> specification of all tensors under the weight's module path but its bias."""
        if weight.stacked_at:
            return {"weight": TensorSpec(self.checkpoint.spec(weight.tensors[0]).dtype, weight.shape)}
        names = (*weight.tensors, *weight.companions)
        return {name.removeprefix(f"{weight.module}."): self.checkpoint.spec(name) for name in names}

    def _bias(self, weight: SourceWeight) -> str | None:
        name = f"{weight.stacked_at.stack}_bias" if weight.stacked_at else f"{weight.module}.bias"
        return name if name in self.checkpoint.files else None

    def _add_module(self, group: Group, layout: Layout, fmt: WeightFormat) -> None:
        """Describe a packed module and its tensors, and what becomes of the tensors that it is made of."""
        weights = [weight for expert in group.experts for weight in expert]
        first = weights[0]
        stored = source_layout(first, fmt, self._tensors(first))
        biases = [self._bias(weight) for weight in weights]
        if any(biases) and not all(biases):
            self.rejects.append(Reject(group.name, "some of its parts have a bias and others have none"))
        spec = ModuleSpec(
            layout,
            fmt,
            group.shape,
            group.parts,
            () if group.name == HEAD != first.module else group.templates,
            stored.id if stored else "",
            self.checkpoint.spec(biases[0]).dtype if biases[0] else None,
            group.numbers.start,
            group.whole if group.whole != group.shape else (),
            group.joined,
        )
        self.modules[group.name] = spec
        outputs = {f"{group.name}.{suffix}": tensor for suffix, tensor in spec.tensors().items()}
        self.tensors.update(outputs)
        held = stored.specs(fmt, first.shape) if stored else {}
        where = f"layout {layout.id}" + (f", joined to {group.name.rpartition('.')[2]}" if group.joined else "")
        fate = Fate("packed", f"{fmt.id} codes in {where}", tuple(outputs))
        for number, weight in ((number, weight) for number, expert in enumerate(group.experts) for weight in expert):
            names = [*weight.tensors, *(name for name in weight.companions if name.rpartition(".")[2] in held)]
            bias = self._bias(weight)
            if number not in group.numbers:
                elsewhere = Fate("dropped", "an expert of another rank")
                for name in (*names, *([bias] if bias else [])):
                    self.fates.setdefault(name, elsewhere)  # a stack also holds experts of this rank
                continue
            self.fates.update(dict.fromkeys(names, fate))
            if bias:
                self.fates[bias] = Fate("packed", "bias in fp32", (f"{group.name}.bias",))

    def _add_task(self, groups: list[Group], layouts: list[Layout], fmt: WeightFormat, number: int) -> None:
        """The task of one expert, or of a Linear."""
        sources: list[Source] = []
        pieces: list[Piece] = []
        parts = []
        for group, layout in zip(groups, layouts, strict=True):
            weights = group.experts[number]
            for weight in weights:
                bias, index = self._bias(weight), weight.stacked_at.expert if weight.stacked_at else None
                sources += [Source(name, index) for name in (*weight.tensors, *([bias] if bias else []))]
            counts = tuple(len(weight.tensors) for weight in weights)
            has_bias = self.modules[group.name].bias_dtype is not None
            readers = tuple(weight.reader for weight in weights)
            rows = tuple(slice(*weight.stacked_at.rows) if weight.stacked_at else slice(None) for weight in weights)
            part = PackedPart(group.name, layout, fmt, readers, counts, rows, has_bias, group.share, group.parts)
            parts.append(part)
            one = replace(self.modules[group.name], shape=group.matrix)
            for suffix, piece in one.tensors().items():
                offset = (number - group.numbers.start) * piece.nbytes
                pieces.append(Piece(f"{group.name}.{suffix}", piece, offset))
        self.tasks.append(Task(tuple(sources), tuple(pieces), PackStep(tuple(parts))))

    def _copy(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            spec = self.checkpoint.spec(name)
            self.tensors[name] = spec
            self.tasks.append(Task((Source(name),), (Piece(name, spec),), Copy()))
            self.fates[name] = Fate("copied", reason, (name,))
