"""Decisions become tasks, output tensors and fates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint.naming import Naming
from ..families.cache_scales import cache_scales
from ..plan import AnyTask, Copy, Fate, FateKind, Piece, RepeatedTask, Source, Step, Task
from .decisions import AnyDecision, Decision, RepeatedDecision
from .steps import Part, QuantizeStep, SplitStep

KINDS: dict[str, FateKind] = {"quantize": "quantized", "dequantize": "dequantized", "keep": "copied"}
COMPANIONS = {  # companions of a weight that is quantized anew
    "weight_shape": "the output has its own",
    "input_scale": "static activation scale: activations are quantized at run time",
    "activation_scale": "static activation scale: activations are quantized at run time",
}


@dataclass(frozen=True)
class _First:
    """The first task of a kind, and the part that it makes."""

    task: Task
    part: Part

    def outputs(self, part: Part, sources: Sequence[str]) -> tuple[str, ...]:
        """Names of the output tensors of another part; where one is called like a source, that very object."""
        length = len(self.part.module)
        names = []
        for name in self.task.outputs:
            is_scale = self.part.input_scale and part.input_scale and name == self.part.input_scale[0]
            output = part.input_scale[0] if is_scale and part.input_scale else part.module + name[length:]
            names.append(next((source for source in sources if source == output), output))
        return tuple(names)


@dataclass
class Emitter:
    """Collects the tasks of a plan.

    Attributes:
        specs: Specification of every source tensor.
        solver: Id of the solver.
        naming: Names of the output.
        device: Where the arithmetic is done.
        tensors: Output tensors so far.
        tasks: Tasks so far.
        fates: Fates so far.
        rejects: Output names that two sources claim.
    """

    specs: Mapping[str, TensorSpec]
    solver: str
    naming: Naming
    device: str = "cpu"
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    tasks: list[AnyTask] = field(default_factory=list)
    fates: dict[str, Fate] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    _firsts: dict[str, _First] = field(default_factory=dict)

    def emit(self, decisions: Sequence[AnyDecision]) -> None:
        """Turn every decision into its tasks, in order."""
        for decision in decisions:
            if decision.action == "drop":
                self.fates |= {name: Fate("dropped", decision.reason) for name in decision.names}
            elif decision.action == "keep" and decision.index is None:
                for name in decision.names:
                    self._copy(name, decision.reason)
            else:
                self._convert(decision)

    def _copy(self, name: str, reason: str) -> None:
        for output in map(self.naming, cache_scales(name) or (name,)):
            self._task([name], (Source(name),), {output: self.specs[name]}, Copy(), "copied", reason)

    def _convert(self, decision: AnyDecision) -> None:
        weight = decision.weight
        assert weight
        if isinstance(decision, RepeatedDecision):
            self._repeat(decision, self._firsts[decision.first.names[0]])
            return
        step = QuantizeStep(
            decoder=decision.matrices[0].decoder,
            parts=decision.parts,
            solver=self.solver,
            k=decision.matrices[0].shape[1],
            kept=tuple(
                part.module
                for part in decision.parts
                if part.target and weight.holds(part.target.format, part.target.rotation)
            ),
            device=self.device,
        )
        outputs: dict[str, TensorSpec] = {}
        for part in decision.parts:
            outputs |= part.specs(step.k, self.specs[weight.tensors[0]].dtype)
        sources = decision.matrices[0].sources
        self._task(weight.tensors, sources, outputs, step, KINDS[decision.action], decision.reason)
        if decision.repeats:
            self._firsts[decision.names[0]] = _First(self.tasks[-1].first, decision.parts[0])
        for name in decision.carried:
            self._copy(name, "static activation scale of the source")
        for name in (name for name in weight.companions if name not in decision.carried):
            suffix = name.rpartition(".")[2]
            self.fates[name] = Fate("dropped", COMPANIONS.get(suffix, "belongs to the source's format"))
        if decision.bias:
            self._bias(decision, decision.bias)

    def _repeat(self, decision: RepeatedDecision, first: _First) -> None:
        """The task of a matrix like that of another one."""
        names = decision.weight.tensors
        outputs = first.outputs(decision.parts[0], names)
        self._claim(names[0], zip(outputs, (piece.spec for piece in first.task.pieces), strict=True))
        self.tasks.append(RepeatedTask(first.task, names, outputs))
        self.fates.update(dict.fromkeys(names, Fate(KINDS[decision.action], decision.reason, outputs)))

    def _claim(self, name: str, outputs: Iterable[tuple[str, TensorSpec]]) -> None:
        for output, spec in outputs:
            if output in self.tensors:
                self.rejects.append(Reject(name, f"would be written as `{output}`, which another tensor already is"))
            self.tensors[output] = spec

    def _bias(self, decision: Decision, name: str) -> None:
        """The biases of one expert, cut like the rows of its weights."""
        cuts = tuple((f"{part.module}.bias", part.rows) for part in decision.parts)
        dtype = self.specs[name].dtype
        outputs = {output: TensorSpec(dtype, (len(range(*rows)),)) for output, rows in cuts}
        self._task([name], (Source(name, decision.index),), outputs, SplitStep(cuts), "copied", "bias, cut by expert")

    def _task(
        self,
        names: Sequence[str],
        sources: tuple[Source, ...],
        outputs: dict[str, TensorSpec],
        step: Step | Copy,
        kind: FateKind,
        reason: str,
    ) -> None:
        self._claim(names[0], outputs.items())
        pieces = tuple(Piece(output, spec) for output, spec in outputs.items())
        self.tasks.append(Task(sources, pieces, step))
        for name in names:
            before = self.fates.get(name)
            fed = (*before.outputs, *outputs) if before else tuple(outputs)
            kind = before.kind if before and before.kind == "quantized" else kind
            self.fates[name] = Fate(kind, before.reason if before and before.kind == kind else reason, fed)
