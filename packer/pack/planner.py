"""Plan the packing of a checkpoint: quantized codes keep their values and change their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tilewright import __version__
from tilewright.kernels.formats import BF16, FORMATS, WeightFormat
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.model_names import KV_B
from tilewright.kernels.packed.module_spec import PACKED_VERSION, QUANT_METHOD, ModuleSpec, RankSharding
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint import quantization_config
from ..checkpoint.files import Checkpoint
from ..checkpoint.matrices import Matrix
from ..checkpoint.packed import is_packed
from ..families.config import gating_of, is_tied
from ..families.roles import KEPT, Role
from ..garbage import uncollected
from ..plan import AnyTask, Copy, Fate, Piece, Plan, RepeatedTask, Source, Task
from ..records.manifest import solver_of
from .activation_scales import reduced_scale
from .degrees import Cuttable, Degrees
from .dequantized import dequantizing
from .groups import Linear, ModuleGroup, join_linears, shares_of
from .latent_attention import AbsorbStep, heads_of
from .sharding import rank_slice_of
from .source import QUANTIZE_HINT, ExpertLayer, PackSource
from .steps import PackedPart, PackStep
from .target import PackTarget, scheme_of, source_layout, stored_specs, why_not_rotated

ROUTER = "router: its scores are computed from the plain weight, in the precision that the model asks for"
WHOLE = RankSharding()


@uncollected()
def plan_pack(checkpoint: Checkpoint, target: PackTarget, sharding: RankSharding = WHOLE) -> Plan:
    """Decide from headers alone what becomes of every tensor of a 16-bit or quantized checkpoint.

    Args:
        checkpoint: The source.
        target: What to pack for.
        sharding: Which share of the model to pack.

    Returns:
        The plan; its `rejects` say why the source cannot be packed, if it cannot.
    """
    if is_packed(checkpoint):
        hint = "`--unpack` turns it back into the checkpoint that it was made from"
        return Plan({}, (), {}, {}, rejects=(Reject(str(checkpoint.root), "is packed already", hint),))
    return plan_share(PackSource(checkpoint, target), sharding)


def plan_share(source: PackSource, sharding: RankSharding) -> Plan:
    """The same of a source that was looked at: the share of one rank."""
    planner = _Planner(source, sharding)
    planner.decide()
    return planner.plan()


@dataclass
class _Planner:
    source: PackSource
    sharding: RankSharding
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    tasks: list[AnyTask] = field(default_factory=list)
    fates: dict[str, Fate] = field(default_factory=dict)
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    formats: dict[Role, set[str]] = field(default_factory=dict)  # quantized formats found for each role

    def __post_init__(self) -> None:
        self.checkpoint, self.target, self.family = self.source.checkpoint, self.source.target, self.source.family
        self.degrees = Degrees(self.family, self.checkpoint.config)

    def decide(self) -> None:
        """Walk through the weights in source order, then through all that is left."""
        source = self.source
        self.notes += source.notes
        self.rejects += source.rejects
        self.degrees.uncut += source.uncut
        joined = self._join() if self.target.joins else {}
        for member in source.members:
            if isinstance(member, ExpertLayer):
                self._pack_experts(member)
                continue
            matrix, role = member
            if role in self.target.roles or (matrix.stored.quantized and role in {"linear", "other"}):
                group = joined.get(matrix.module) or ModuleGroup(matrix.module, ((matrix,),))
                if matrix is group.experts[0][0]:
                    self._pack([group], role)
                if self.target.absorbs and matrix.module.endswith(f".{KV_B}"):
                    self._absorb(matrix)
            elif matrix.stored.quantized and "linear" in self.target.roles:
                self._dequantize(matrix, KEPT.get(role, role))
            else:
                self._copy(matrix.stored.tensors, ROUTER if role == "router" else KEPT.get(role, role))
        self._pack_tied_head([matrix for matrix, role in source.linears if role == "embedding"])
        self.rejects += self.degrees.rejects(self.sharding.tp[1], self.sharding.ep[1])
        self._copy([name for name in self.checkpoint.files if name not in self.fates], "no weight of a Linear")
        if not self.modules and not self.rejects:
            reason = f"holds no weight that is packed for {self.target.id}"
            self.rejects.append(Reject(str(self.checkpoint.root), reason, QUANTIZE_HINT))

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
                "tilewright.cut": self.sharding.to_json(),
            },
            {
                "job": "pack",
                "target": self.target.record(),
                "cut": self.sharding.to_json(),
                "solver": solver_of(source.root),
            },
            rejects=tuple(self.rejects),
            notes=tuple(self.notes),
            tensor_parallel=self.degrees.tensor_parallel(),
            expert_parallel=self.degrees.expert_parallel(),
        )

    def _join(self) -> dict[str, ModuleGroup]:
        """Module of each Linear that is packed together with others -> their group."""
        linears: dict[str, Linear] = {}
        for matrix, role in self.source.linears:
            if matrix.alone and role in self.target.roles:
                fmt = self._format(matrix)
                if not isinstance(fmt, Reject):
                    bias = self.checkpoint.spec(matrix.bias).dtype if matrix.bias else None
                    linears[matrix.module] = Linear(matrix, fmt, bias)
        groups: dict[str, ModuleGroup] = {}
        apart: dict[str, list[str]] = {}
        for found in join_linears(linears, self.sharding, self.family):
            if isinstance(found, Reject):
                apart.setdefault(found.reason, []).append(found.name)
            else:
                groups.update(dict.fromkeys(found.templates, found))
        for reason, names in apart.items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            self.notes.append(f"{names[0]}{more} is not joined: {reason}")
        return groups

    def _pack_experts(self, layer: ExpertLayer) -> None:
        self._copy((name for matrix in layer.idle for name in matrix.stored.tensors), "an expert that computes nothing")
        if layer.apart:
            self._pack_apart(layer)
        elif isinstance(layer.groups, Reject):
            self.rejects.append(layer.groups)
        else:
            self._pack(layer.groups, "expert")
            if self.target.reduces_scales:
                self._reduce_scales(layer.groups)

    def _pack_apart(self, layer: ExpertLayer) -> None:
        """Pack the matrices of experts without a gate as Linears."""
        undealt = "experts without a gate are packed one by one, and not dealt to ranks"
        self.degrees.cuttable[Cuttable("", (1, 1), len(layer.apart) // 2, undealt=undealt)] = layer.path
        if not all(matrix.alone for matrix in layer.apart):
            reason = "experts without a gate are not packed from stacks"
            self.rejects.append(Reject(layer.path, reason, QUANTIZE_HINT))
            return
        for matrix in layer.apart:
            self._pack([ModuleGroup(matrix.module, ((matrix,),))], "expert")
        told = "experts without a gate are packed one by one; load_packed gives each as a Linear"
        self.notes.append(f"{layer.path}: {told}")

    def _reduce_scales(self, groups: list[ModuleGroup]) -> None:
        """One static activation scale for each stack, beside those of its experts, which stay as they are."""
        for group in groups:
            task = reduced_scale(group, self.sharding, self.modules.get(group.name))
            if isinstance(task, Reject):
                self.rejects.append(task)
            elif task:
                self.tasks.append(task)
                self.tensors.update({piece.name: piece.spec for piece in task.pieces})

    def _absorb(self, weight: Matrix) -> None:
        """Add `w_kc` and `w_vc` beside a packed `kv_b_proj`."""
        fmt = self._format(weight)
        heads = heads_of(weight, self.checkpoint.config, self.sharding.tp[1])
        if isinstance(heads, Reject):
            self.rejects.append(heads)
        if weight.module not in self.modules or isinstance(heads, Reject) or not isinstance(fmt, WeightFormat):
            return
        prefix = weight.module.removesuffix(f".{KV_B}")
        made = heads.format(BF16 if weight.stored.rotation else fmt)
        layout = self.target.layout("linear", made, heads.shapes()["w_kc"], 1)
        if layout is None or isinstance(layout, Reject):
            self.rejects.append(layout or Reject(prefix, f"no layout of {self.target.id} holds w_kc and w_vc"))
            return
        outputs: dict[str, TensorSpec] = {}
        for name, shape in heads.shapes().items():
            spec = self.modules[f"{prefix}.{name}"] = ModuleSpec(layout, made, shape)
            outputs |= {f"{prefix}.{name}.{suffix}": tensor for suffix, tensor in spec.tensors().items()}
        self.tensors |= outputs
        rank_slice = rank_slice_of(KV_B, self.sharding, self.family.axes, is_expert=False)
        step = AbsorbStep(prefix, weight, fmt, rank_slice, heads, layout)
        self.tasks.append(Task(weight.sources, tuple(Piece(*output) for output in outputs.items()), step))
        for name in weight.stored.tensors:
            fate = self.fates[name]
            self.fates[name] = replace(fate, outputs=(*fate.outputs, *outputs))

    def _pack_tied_head(self, embeddings: list[Matrix]) -> None:
        """Where the head shares the embedding's matrix: pack it once for the head, keep it for the embedding."""
        config = self.checkpoint.config
        if "head" not in self.target.roles:
            return
        family = self.family
        if self.source.has_head or not family.head or "ForCausalLM" not in str(config.get("architectures")):
            return
        if is_tied(config) is False:
            hint = "set tie_word_embeddings in config.json if the head is the embedding"
            self.rejects.append(Reject(family.head, "is absent, and config.json says that it is not tied", hint))
        elif len(embeddings) == 1:
            name = embeddings[0].stored.tensors[0]
            self._pack([ModuleGroup(family.head, ((embeddings[0],),))], "head")
            outputs = (name, *(output for output in self.tensors if output.startswith(f"{family.head}.")))
            self.fates[name] = Fate("copied", "embedding; packed a second time as the tied head", outputs)
            twice = f"{self.checkpoint.spec(name).nbytes / 1e6:.1f} MB are stored twice"
            self.notes.append(f"{family.head}: tied, but rows are looked up in the plain matrix, so {twice}")

    def _format(self, matrix: Matrix) -> WeightFormat | Reject | None:
        """The format in which a matrix's codes are packed; None if it stays as it is."""
        if fmt := matrix.stored_format:
            return fmt
        if matrix.stored.quantized:
            return Reject(matrix.stored.module, f"no packed layout holds {matrix.stored.encoding}", QUANTIZE_HINT)
        return FORMATS[matrix.stored.rounds_to] if matrix.stored.rounds_to else None

    def _pack(self, groups: list[ModuleGroup], role: Role) -> None:
        """Give groups of equally many experts of one encoding their modules, tensors and tasks, or say why not."""
        weights = [weight for group in groups for expert in group.experts for weight in expert]
        fmt = self._format(weights[0]) if role in self.target.roles else None
        if isinstance(fmt, Reject):
            self.rejects.append(fmt)
            return
        if fmt:
            self.rejects += why_not_rotated(self.target, [group.experts[0][0] for group in groups], fmt)
            self.degrees.add(groups)
            groups = shares_of(groups, fmt, self.sharding, self.family.axes)
        layouts, target = list[Layout](), self.target.fitting(weights[0].stored, self.notes)
        for group in groups:
            layout = target.layout(role, fmt, group.shape, group.parts) if fmt else None
            if isinstance(layout, Reject):
                self.rejects.append(replace(layout, name=group.name))
            elif layout:
                layouts.append(layout)
        if not fmt or not layouts:
            reason = f"{weights[0].stored.encoding} stays as it is"
            self.degrees.add(groups, packed=False)
            self._copy(dict.fromkeys(name for weight in weights for name in weight.stored.tensors), reason)
        if not fmt or len(layouts) != len(groups):
            return
        for group, layout in zip(groups, layouts, strict=True):
            self._add_module(group, layout, fmt)
        self._add_tasks(groups, layouts, fmt)
        if fmt.has_scales:
            self.formats.setdefault(role, set()).add(fmt.id)
        elif rounds_to := weights[0].stored.rounds_to:
            self.notes.append(f"{weights[0].module}: float16 is rounded to {rounds_to}, which the kernels read")

    def _add_module(self, group: ModuleGroup, layout: Layout, fmt: WeightFormat) -> None:
        """Describe a packed module and its tensors, and what becomes of the tensors that it is made of."""
        weights = [weight for expert in group.experts for weight in expert]
        first = weights[0]
        stored = source_layout(first, fmt, stored_specs(first, self.checkpoint))
        biases = [weight.bias for weight in weights]
        if any(biases) and not all(biases):
            self.rejects.append(Reject(group.name, "some of its parts have a bias and others have none"))
        gating = gating_of(self.checkpoint.config, self.family.gate)
        spec = ModuleSpec(
            layout,
            fmt,
            group.shape,
            group.parts,
            () if group.is_tied_head else group.templates,
            stored.id if stored else "",
            self.checkpoint.spec(biases[0]).dtype if biases[0] else None,
            group.numbers.start,
            group.whole if group.whole != group.shape else (),
            group.joined,
            rotation=first.stored.rotation,
            gating=gating if group.stacked and group.parts > 1 else None,
            leading=group.leading,
            stack=group.source_stack if stored else None,
        )
        self.modules[group.name] = spec
        outputs = {f"{group.name}.{suffix}": tensor for suffix, tensor in spec.tensors().items()}
        self.tensors.update(outputs)
        held = stored.specs(fmt, first.shape) if stored else {}
        where = f"layout {layout.id}" + (f", joined to {group.name.rpartition('.')[2]}" if group.joined else "")
        fate = Fate("packed", f"{fmt.id} codes in {where}", tuple(outputs))
        elsewhere = Fate("dropped", "an expert of another rank")
        mine = group.numbers
        for number, weight in ((number, weight) for number, expert in enumerate(group.experts) for weight in expert):
            names, bias = weight.stored.tensors, weight.bias
            if weight.alone and weight.stored.companions:
                names += tuple(name for name in weight.stored.companions if name.rpartition(".")[2] in held)
            if number in mine:
                self.fates.update(dict.fromkeys(names, fate))
                if bias:
                    self.fates[bias] = Fate("packed", "bias in fp32", (f"{group.name}.bias",))
            else:
                for name in (*names, *([bias] if bias else [])):
                    self.fates.setdefault(name, elsewhere)  # a stack also holds experts of this rank

    def _add_tasks(self, groups: list[ModuleGroup], layouts: list[Layout], fmt: WeightFormat) -> None:
        """The task of a Linear, or those of this rank's experts, most of which are like the first."""
        inputs, (start, *others) = self.source.inputs(groups), groups[0].numbers
        first = self._task(groups, layouts, fmt, start)
        outputs = first.outputs
        self.tasks.append(first)
        for number in others:
            if inputs[number].are_like(inputs[start]):
                self.tasks.append(RepeatedTask(first, inputs[number].names, outputs, number - start))
            else:
                self.tasks.append(self._task(groups, layouts, fmt, number))

    def _task(self, groups: list[ModuleGroup], layouts: list[Layout], fmt: WeightFormat, number: int) -> Task:
        """The task of one expert, or of a Linear."""
        sources: list[Source] = []
        pieces: list[Piece] = []
        parts = []
        for group, layout in zip(groups, layouts, strict=True):
            matrices = group.experts[number]
            for matrix in matrices:
                sources += [*matrix.sources, *([matrix.bias_source] if matrix.bias_source else [])]
            has_bias = self.modules[group.name].bias_dtype is not None
            parts.append(
                PackedPart(group.name, layout, fmt, matrices, has_bias, group.rank_slice, group.parts, group.leading)
            )
            one = replace(self.modules[group.name], shape=group.matrix)
            for suffix, piece in one.tensors().items():
                offset = (number - group.numbers.start) * piece.nbytes
                pieces.append(Piece(f"{group.name}.{suffix}", piece, offset))
        return Task(tuple(sources), tuple(pieces), PackStep(tuple(parts)))

    def _dequantize(self, matrix: Matrix, reason: str) -> None:
        task, fates = dequantizing(matrix, reason)
        self.tasks.append(task)
        self.tensors |= {piece.name: piece.spec for piece in task.pieces}
        self.fates |= fates

    def _copy(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            spec = self.checkpoint.spec(name)
            self.tensors[name] = spec
            self.tasks.append(Task((Source(name),), (Piece(name, spec),), Copy()))
            self.fates[name] = Fate("copied", reason, (name,))
