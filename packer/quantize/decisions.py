"""The fate of each weight and each loose tensor: quantized into what, or left alone and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint import Inventory
from ..checkpoint.encoding import StoredWeight
from ..checkpoint.matrices import Matrix, matrices_of
from ..checkpoint.naming import Naming
from ..families.cache_scales import cache_scales
from ..families.experts import SHORT
from ..families.family import ModelFamily
from ..families.roles import KEPT, Role
from ..quant_config.w4afp8 import UNCALIBRATED_INPUT_SCALE
from ..schemes.scheme import SIXTEEN_BITS, TRANSPOSED, CheckpointFormat, StorageSpec
from .options import QuantizeOptions
from .rules import Pattern, first_match
from .steps import Part

Action = Literal["quantize", "dequantize", "keep", "drop"]
Chosen = tuple[Pattern | None, Pattern | None]  # patterns that exclude and include a module
SHORT_INPUT_SCALES = tuple(f".{name}.input_scale" for name in SHORT.projections)
EXCLUDED, MTP_KEPT = "excluded by --exclude", "MTP layer, --mtp keep"
BY_FORM = "this format leaves all Linears but routed experts in 16 bits"
LOOSE = (  # tensors that are no matrix of a module, and why they keep their bytes
    (re.compile(r"\.bias$|_bias$"), "bias"),
    (re.compile(r"(?i:norm)\w*\.weight$|layernorm|(?:^|\.)ln_\w+\.weight$"), "normalisation"),
    (re.compile(r"conv\w*\.weight$|patch_embed"), "convolution"),
    (
        re.compile(r"\.(?:A_log|D|dt_bias|sinks|inv_freq|k_scale|v_scale|q_scale|layer_scalar|act_fn\.\w+)$"),
        "small parameter",
    ),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one weight, one expert of a stack, or one loose tensor.

    Attributes:
        role: What the name is.
        action: What is done.
        reason: Why, for people.
        names: Source tensors concerned, the weight first.
        weight: The weight, None for a loose tensor.
        matrices: What of it the parts are made of; empty where a stack stays as it is.
        parts: The output matrices.
        bias: A stacked bias that is cut up beside the weight.
        carried: Companions of the weight that the output needs as they are.
        repeats: Whether there are `RepeatedDecision`s like it.
    """

    role: Role
    action: Action
    reason: str
    names: tuple[str, ...]
    weight: StoredWeight | None = None
    matrices: tuple[Matrix, ...] = ()
    parts: tuple[Part, ...] = ()
    bias: str | None = None
    carried: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def first(self) -> Decision:
        """The decision that stands for its kind."""
        return self

    @property
    def index(self) -> int | None:
        """Expert of a stack, None for anything whole."""
        return self.matrices[0].expert if self.matrices else None

    @property
    def quantized(self) -> tuple[Part, ...]:
        """The parts that are stored in fewer than 16 bits."""
        return tuple([part for part in self.parts if part.is_quantized])

    @property
    def is_quantized(self) -> bool:
        """Whether it has parts, and all of them are."""
        return bool(self.parts) and all(part.is_quantized for part in self.parts)


@dataclass(frozen=True, slots=True)
class RepeatedDecision:
    """What was decided of another matrix, of one that differs from it in the numbers of its name alone.

    Attributes:
        first: The decision on the other one: about a matrix that is alone in its tensors, which have no companions.
        matrix: This one.
        naming: Names of the output.
    """

    first: Decision
    matrix: Matrix
    naming: Naming
    bias: str | None = None
    index: int | None = None

    @property
    def role(self) -> Role:
        """See `Decision`."""
        return self.first.role

    @property
    def action(self) -> Action:
        """See `Decision`."""
        return self.first.action

    @property
    def reason(self) -> str:
        """See `Decision`."""
        return self.first.reason

    @property
    def names(self) -> tuple[str, ...]:
        """See `Decision`."""
        return self.matrix.stored.tensors

    @property
    def weight(self) -> StoredWeight:
        """See `Decision`."""
        return self.matrix.stored

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `Decision`."""
        return (self.matrix,)

    @property
    def parts(self) -> tuple[Part, ...]:
        """See `Decision`."""
        (part,) = self.first.parts
        module = self.naming.of_canonical(self.matrix.module)
        scale = part.input_scale and (self.naming.input_scale(module), part.input_scale[1])
        return (Part(module, part.rows, part.target, scale),)

    @property
    def quantized(self) -> tuple[Part, ...]:
        """See `Decision`."""
        return self.parts if self.is_quantized else ()

    @property
    def is_quantized(self) -> bool:
        """See `Decision`."""
        return self.first.is_quantized


AnyDecision = Decision | RepeatedDecision


def firsts(decisions: Iterable[AnyDecision]) -> list[Decision]:
    """The first decision of each kind, in their order."""
    return list({id(decision.first): decision.first for decision in decisions}.values())


@dataclass
class Decider:
    """Applies rules and patterns to an inventory.

    Attributes:
        config: config.json of the source.
        family: The family of the model.
        checkpoint_format: How the scheme is stored on disk.
        options: The request.
        group: int4 group size.
        mtp: Names of the tensors of MTP layers.
        naming: Names of the output.
        notes: What is worth telling.
        rejects: Why the plan cannot be carried out.
    """

    config: Mapping[str, Any]
    family: ModelFamily
    checkpoint_format: CheckpointFormat
    options: QuantizeOptions
    group: int
    mtp: set[str] = field(default_factory=set)
    naming: Naming = Naming()
    notes: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._exclude = [Pattern(text) for text in self.options.exclude]
        self._include = [Pattern(text) for text in self.options.include]
        self._kinds: dict[tuple[Any, ...], Decision] = {}
        self._roles: dict[int | None, Role] = {}

    def decide(self, inventory: Inventory, specs: Mapping[str, TensorSpec]) -> list[AnyDecision]:
        """One decision per matrix, expert of a stack, and loose tensor, in source order."""
        options = self.options
        matrices = matrices_of(
            inventory.weights, specs, self.config, self.family, options.experts_order, options.experts_transposed
        )
        self.rejects += matrices.rejects
        stacked = [matrix for matrix in matrices.found if not matrix.alone]
        if stacked and options.experts_order is None and self.family.experts_order is None:
            kind = self.config.get("model_type")
            self.notes.append(
                f"model_type `{kind}` is not known: gate rows are taken to come before up rows; --experts-order says so"
            )
        decided: list[AnyDecision] = [self._matrix(matrix) for matrix in matrices.found if matrix.alone]
        stacks: dict[str, list[list[Decision]]] = {}  # container -> for each of its stacks, one decision per expert
        for _, group in itertools.groupby(stacked, lambda matrix: matrix.stored.module):
            members = list(group)
            container = self.family.experts.container(members[0].module) or ""
            stacks.setdefault(container, []).append(self._stack(members))
        for layer in stacks.values():
            untouched = all(decision.action == "keep" for experts in layer for decision in experts)
            for experts in layer:
                decided += _whole(experts) if untouched else [_cut(decision) for decision in experts]
        biases = {decision.bias for decision in decided}
        decided += [self._loose(name, specs[name]) for name in inventory.loose if name not in biases]
        self._unmatched()
        order = {name: position for position, name in enumerate(specs)}
        return sorted(decided, key=lambda decision: (order[decision.names[0]], decision.index or 0))

    def _unmatched(self) -> None:
        for flag, patterns in (("--exclude", self._exclude), ("--include", self._include)):
            for pattern in (pattern for pattern in patterns if not pattern.matched):
                reason = "matches no module of the source"
                if self.options.strict:
                    hint = "patterns are dotted paths, tails, globs or re:regex; see --dry-run for the names"
                    self.rejects.append(Reject(f"{flag} {pattern.text}", reason, hint))
                else:
                    self.notes.append(f"{flag} {pattern.text}: {reason}")

    def _loose(self, name: str, spec: TensorSpec) -> Decision:
        role = self.family.role(name.removesuffix(".weight"))
        if dropped := self._dropped(name, role):
            return Decision(role, "drop", dropped, (name,))
        reason = next((reason for pattern, reason in LOOSE if pattern.search(name)), None)
        reason = "scale of cached keys or values" if cache_scales(name) else reason
        if reason is None and role == "other":
            reason = KEPT["other"]
            if self.options.strict:
                hint = "without --strict it is copied as it is"
                self.rejects.append(Reject(name, f"{spec.dtype} {list(spec.shape)}: {reason}", hint))
        return Decision(role, "keep", reason or KEPT.get(role, "no matrix"), (name,))

    def _matrix(self, matrix: Matrix) -> AnyDecision:
        weight = matrix.stored
        role = self._role(matrix)
        if dropped := self._dropped(weight.tensors[0], role):
            return Decision(role, "drop", dropped, (*weight.tensors, *weight.companions))
        chosen = self._patterns(matrix)
        key = (weight.kind, *(pattern and pattern.text for pattern in chosen), weight.tensors[0] in self.mtp)
        if first := self._kinds.get(key):
            return RepeatedDecision(first, matrix, self.naming)
        refused = len(self.rejects)
        decision = self._decide(matrix, role, chosen)
        if weight.kind is None or weight.companions or len(self.rejects) > refused:
            return decision
        return self._kinds.setdefault(key, replace(decision, repeats=True))

    def _decide(self, matrix: Matrix, role: Role, chosen: Chosen) -> Decision:
        weight = matrix.stored
        part, reason = self._part(matrix, role, chosen)
        carried = tuple(
            name
            for name in weight.companions
            if name.endswith(SHORT_INPUT_SCALES) and self.checkpoint_format.input_scale
        )
        names = (*weight.tensors, *weight.companions)
        return Decision(role, _action((part,)), reason, names, weight, (matrix,), (part,), carried=carried)

    def _role(self, matrix: Matrix) -> Role:
        """The role of a matrix, which numbers in its name do not change."""
        kind = matrix.stored.kind
        if kind is None or kind not in self._roles:
            self._roles[kind] = self.family.role(matrix.module)
        return self._roles[kind]

    def _patterns(self, matrix: Matrix) -> Chosen:
        """The patterns that exclude and include a matrix."""
        if 0 in matrix.shape or not (self._exclude or self._include):
            return None, None
        module, alias = matrix.module, matrix.stored.module
        return first_match(self._exclude, module, alias), first_match(self._include, module, alias)

    def _dropped(self, name: str, role: Role) -> str | None:
        """Why a tensor is left out; None if it is not."""
        if self.options.mtp == "drop" and name in self.mtp:
            return "MTP layer, --mtp drop"
        if self.options.mtp == "draft" and name not in self.mtp:
            return "not part of the draft model"
        if self.options.mtp == "draft" and role in {"embedding", "head"}:
            return "the draft model shares it with its target"
        return None

    def _part(self, matrix: Matrix, role: Role, chosen: Chosen) -> tuple[Part, str]:
        """The output matrix and the reason for what it becomes."""
        weight = matrix.stored
        target, reason = self._target(matrix, role, chosen)
        if target is None and weight.foreign and 0 not in matrix.shape:
            target, reason = SIXTEEN_BITS, f"{weight.encoding} -> bf16: {reason}"
        module = self.naming(matrix.module)
        scale = None
        if role == "expert" and target is not None and self.checkpoint_format.input_scale:
            name = self.naming.input_scale(module)
            carried = {self.naming(companion) for companion in weight.companions}
            scale = None if name in carried else (name, UNCALIBRATED_INPUT_SCALE)
        return Part(module, matrix.rows, target, scale), reason

    def _target(self, matrix: Matrix, role: Role, chosen: Chosen) -> tuple[StorageSpec | None, str]:
        weight, shape = matrix.stored, matrix.shape
        if 0 in shape:
            return None, f"{list(shape)} holds no weights"
        excluded, included = chosen
        if excluded:
            return None, f"{EXCLUDED} {excluded.text}"
        if weight.tensors[0] in self.mtp and self.options.mtp == "keep":
            return None, MTP_KEPT
        if role in KEPT and not included:
            if role == "other" and self.options.strict:
                hint = "add --exclude or --include for it, or leave --strict out to copy it as it is"
                self.rejects.append(Reject(weight.tensors[0], f"{list(weight.shape)}: {KEPT[role]}", hint))
            if role != "other" and weight.quantized:  # engines take what is not listed as quantized for 16 bits
                return SIXTEEN_BITS, f"{weight.encoding} -> bf16: {KEPT[role]}"
            return None, KEPT[role]
        target = self.checkpoint_format.target(role, self.group)
        reason = BY_FORM
        if target is not None:
            refused = target.checkpoint_layout.accepts(target.weight_format, shape)
            if refused is None:
                target = replace(target, rotation=Rotation.named(self.options.rotate_inputs, shape[1]))
                return target, self._describe(weight, target)
            reason = refused.reason
        if weight.quantized:
            plain = TRANSPOSED if self.family.stores_transposed(matrix.module) else SIXTEEN_BITS
            return plain, f"{weight.encoding} -> bf16: {reason}"
        return None, reason

    def _describe(self, weight: StoredWeight, target: StorageSpec) -> str:
        rotated = f", input rotated by {target.rotation}" if target.rotation else ""
        if weight.holds(target.format, target.rotation):
            return f"{weight.encoding} -> {target.format}, codes as they are"
        if weight.few_bits and target.weight_format.is_coarse:
            kind = weight.encoding.split()[0]
            note = (
                f"{weight.encoding} -> {target.format}: {kind} weights are quantized a second time, expect the error "
                "of both; verify-accuracy measures it"
            )
            if note not in self.notes:
                self.notes.append(note)
        return f"{weight.encoding} -> {target.format}{rotated}"

    def _stack(self, matrices: Sequence[Matrix]) -> list[Decision]:
        """One decision per expert of a stack."""
        weight = matrices[0].stored
        names = (*weight.tensors, *weight.companions)
        if dropped := self._dropped(names[0], "expert"):
            return [Decision("expert", "drop", dropped, names)]
        decided = []
        for _, group in itertools.groupby(matrices, lambda matrix: matrix.expert):
            members = tuple(group)
            found = [self._part(matrix, "expert", self._patterns(matrix)) for matrix in members]
            parts = tuple(part for part, _ in found)
            bias = members[0].bias or None
            decided.append(Decision("expert", _action(parts), found[0][1], names, weight, members, parts, bias))
        return decided


def _action(parts: Sequence[Part]) -> Action:
    targets = [part.target for part in parts if part.target]
    if not targets:
        return "keep"
    return "quantize" if any(target.is_quantized for target in targets) else "dequantize"


def _whole(experts: list[Decision]) -> list[Decision]:
    """A stack of which nothing is quantized stays one tensor."""
    return [replace(first, matrices=_stack_of(first), parts=_as_it_is(first), bias=None) for first in experts[:1]]


def _stack_of(decision: Decision) -> tuple[Matrix, ...]:
    return tuple(replace(matrix, expert=None) for matrix in decision.matrices)


def _as_it_is(decision: Decision) -> tuple[Part, ...]:
    assert decision.weight
    return (Part(decision.weight.module, (0, decision.weight.shape[-2], 1), None),)


def _cut(decision: Decision) -> Decision:
    """An expert of a layer of which only some are quantized: the others get 16-bit tensors of their own."""
    if not decision.weight or not decision.weight.quantized:
        return decision
    parts = tuple(replace(part, target=part.target or SIXTEEN_BITS) for part in decision.parts)
    return replace(decision, action=_action(parts), parts=parts)
