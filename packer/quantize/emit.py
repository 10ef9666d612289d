"""Decisions become tasks, output tensors and fates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint.naming import Naming
from ..families.cache_scales import cache_scales
from ..plan import Copy, Fate, FateKind, Piece, Source, Step, Task
from .decisions import Decision
from .steps import QuantizeStep, SplitStep

KINDS: dict[str, FateKind] = {"quantize": "quantized", "dequantize": "dequantized", "keep": "copied"}
COMPANIONS = {  # companions of a weight that is quantized anew
    "weight_shape": "the output has its own",
    "input_scale": "static activation scale: activations are quantized at run time",
    "activation_scale": "static activation scale: activations are quantized at run time",
}


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
    tasks: list[Task] = field(default_factory=list)
    fates: dict[str, Fate] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)

    def emit(self, decisions: Sequence[Decision]) -> None:
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

    def _convert(self, decision: Decision) -> None:
        weight = decision.weight
        assert weight
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
        for name in decision.carried:
            self._copy(name, "static activation scale of the source")
        for name in (name for name in weight.companions if name not in decision.carried):
            suffix = name.rpartition(".")[2]
            self.fates[name] = Fate("dropped", COMPANIONS.get(suffix, "belongs to the source's format"))
        if decision.bias:
            self._bias(decision, decision.bias)

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
        for output, spec in outputs.items():
            if output in self.tensors:
                self.rejects.append(
                    Reject(names[0], f"would be written as `{output}`, which another tensor already is")
                )
            self.tensors[output] = spec
        pieces = tuple(Piece(output, spec) for output, spec in outputs.items())
        self.tasks.append(Task(sources, pieces, step))
        for name in names:
            before = self.fates.get(name)
            fed = (*before.outputs, *outputs) if before else tuple(outputs)
            kind = before.kind if before and before.kind == "quantized" else kind
            self.fates[name] = Fate(kind, before.reason if before and before.kind == kind else reason, fed)
