"""What a checkpoint holds that can be packed: found once, for all ranks that share the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright.kernels.tensors import Reject

from ..checkpoint import detect_weights
from ..checkpoint.completeness import incomplete
from ..checkpoint.encoding import StoredWeight
from ..checkpoint.files import Checkpoint
from ..checkpoint.matrices import Matrix, matrices_of
from ..families import family_of, unknown_model
from ..families.roles import Role
from ..folding import pattern
from ..quantize.planner import source_specs
from .degrees import forbids_cuts
from .groups import ModuleGroup, group_experts, split_zero_experts, without_gate
from .target import PackTarget, misshapen

SIXTEEN_BITS = ("bf16", "fp16")  # encodings of stacks of experts that are packed
ORDER_HINT = "`quantize-model --experts-order` declares it and writes experts one by one"
QUANTIZE_HINT = "convert it with `quantize-model` first, which reads it"


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        path: Their path, without their numbers.
        idle: Matrices of experts that compute nothing.
        apart: Matrices of experts without a gate, which are packed one by one; empty for others.
        groups: The modules that they become; why they become none.
    """

    path: str
    idle: list[Matrix]
    apart: list[Matrix]
    groups: list[ModuleGroup] | Reject


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the task of an expert, or of a Linear, reads.

    Attributes:
        names: Of the source tensors.
        kinds: Kind of each stored matrix, None for one like no other, and whether it has a bias.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[int | None, bool], ...]

    @staticmethod
    def of(matrices: Sequence[Matrix]) -> Inputs:
        """Those of a task that packs these matrices."""
        names = [(*m.stored.tensors, m.bias) if m.bias else m.stored.tensors for m in matrices]
        kinds = [(matrix.stored.kind if matrix.alone else None, bool(matrix.bias)) for matrix in matrices]
        return Inputs(tuple([name for stored in names for name in stored]), tuple(kinds))

    def are_like(self, others: Inputs) -> bool:
        """Whether they differ from others in nothing but names."""
        return self.kinds == others.kinds and all(kind is not None for kind, _ in self.kinds)


class PackSource:
    """A checkpoint that is packed for a target.

    Attributes:
        checkpoint: The checkpoint.
        target: The target.
        family: Its family.
        rejects: Why it cannot be packed, into however many shares.
        notes: What is worth telling of it.
        uncut: Why it cannot be cut.
        members: In source order: each Linear with its role, and each layer of experts.
    """

    def __init__(self, checkpoint: Checkpoint, target: PackTarget) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.family = family_of(checkpoint.config)
        specs = source_specs(checkpoint)
        inventory = detect_weights(specs, checkpoint.config, checkpoint.details)
        self.notes = list(unknown_model(checkpoint.config))
        self.rejects = [*inventory.rejects, *incomplete(checkpoint, self.family)]
        self._roles: dict[int, Role] = {}  # by the kind of the weight: numbers in names do not change what it is
        self._inputs: dict[str, list[Inputs]] = {}
        matrices = self._matrices(inventory.weights)
        self.rejects += misshapen(matrices, specs)
        roles = [self._role(matrix) for matrix in matrices]
        packed = [matrix for matrix, role in zip(matrices, roles, strict=True) if role in target.roles]
        self.uncut = list(forbids_cuts(checkpoint.config, specs, packed, self.family))
        found: dict[str, tuple[Matrix, Role] | list[Matrix]] = {}
        for matrix, role in zip(matrices, roles, strict=True):
            if path := self.family.experts.find(matrix.module):
                layer = found.setdefault(path.container, [])
                assert isinstance(layer, list)
                layer.append(matrix)
            else:
                found[f"{matrix.module}."] = matrix, role
        self.members = [self._layer(path, of) if isinstance(of, list) else of for path, of in found.items()]

    @cached_property
    def has_head(self) -> bool:
        """Whether a tensor is called like one of an output head."""
        kinds = {pattern(name): name for name in self.checkpoint.files}
        return any(self.family.role(name.removesuffix(".weight")) == "head" for name in kinds.values())

    @property
    def linears(self) -> list[tuple[Matrix, Role]]:
        """Every matrix that is no expert's, with its role."""
        return [member for member in self.members if not isinstance(member, ExpertLayer)]

    def inputs(self, groups: Sequence[ModuleGroup]) -> list[Inputs]:
        """What the task of each expert of these modules reads, or of the one Linear."""
        name = groups[0].name
        if name not in self._inputs:
            numbers = range(len(groups[0].experts))
            self._inputs[name] = [Inputs.of([m for group in groups for m in group.experts[n]]) for n in numbers]
        return self._inputs[name]

    def _role(self, matrix: Matrix) -> Role:
        kind = matrix.stored.kind
        if kind is None or not matrix.alone:
            return self.family.role(matrix.module)
        if kind not in self._roles:
            self._roles[kind] = self.family.role(matrix.module)
        return self._roles[kind]

    def _layer(self, path: str, matrices: list[Matrix]) -> ExpertLayer:
        experts = self.family.experts
        matrices, idle = split_zero_experts(matrices, experts, self.checkpoint.config)
        if without_gate(matrices, experts):
            return ExpertLayer(path, idle, matrices, [])
        return ExpertLayer(path, idle, [], group_experts(path, matrices, experts))

    def _matrices(self, weights: list[StoredWeight]) -> list[Matrix]:
        """All matrices, but for stacks that no layout gives back and those whose order of rows nothing tells."""
        family = self.family
        stacks = [weight for weight in weights if len(weight.shape) == 3]
        if family.experts_order is None:
            kind = self.checkpoint.config.get("model_type")
            reason = f"model_type `{kind}` is not known, so it may hold gate over up or up over gate"
            layers = {str(family.experts.container(weight.module)): weight for weight in reversed(stacks)}
            self.rejects += [Reject(weight.tensors[0], reason, ORDER_HINT) for weight in layers.values()]
            weights = [weight for weight in weights if len(weight.shape) == 2]
        refused = [weight for weight in stacks if weight.encoding not in SIXTEEN_BITS and not weight.layout]
        for weight in refused:
            reason = f"experts stacked in one tensor {list(weight.shape)} are not packed"
            self.rejects.append(Reject(weight.module, reason, QUANTIZE_HINT))
        weights = [weight for weight in weights if weight not in refused]
        matrices = matrices_of(weights, self.checkpoint.files, self.checkpoint.config, family)
        self.rejects += [replace(reject, hint=reject.hint and ORDER_HINT) for reject in matrices.rejects]
        return matrices.found
