"""The plan of a repair: what is wrong with a checkpoint, and an output in which it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.tensors import Reject

from ..checkpoint import detect_weights
from ..checkpoint.files import Checkpoint, open_checkpoint
from ..plan import Copy, Fate, Piece, Plan, Source, Task
from .draft import Draft, Finding, OutputTensor
from .rules import (
    check_absent,
    check_config,
    check_dtype,
    check_exclusions,
    check_index,
    check_tied_head,
    identify,
)
from .scales import mend_scales

ANY_TYPE = ("compressed-tensors",)  # formats whose scales engines read in whatever type they have


def open_damaged(source: str | Path) -> tuple[Checkpoint, str | None]:
    """Open a checkpoint, without its index if that is what is wrong.

    Returns:
        The checkpoint, and what is wrong with its index.

    Raises:
        CheckpointError: Something else is wrong that nothing here can mend.
    """
    try:
        return open_checkpoint(source), None
    except CheckpointError as error:
        return open_checkpoint(source, indexed=False), " ".join(error.message.split())


def examine(checkpoint: Checkpoint, problem: str | None, engines: Sequence[str], original: Checkpoint | None) -> Draft:
    """Look at everything that is known to go wrong, from headers alone.

    Args:
        checkpoint: The source, as `open_damaged` gives it.
        problem: What is wrong with its index.
        engines: Names of the engines that it is for.
        original: The model that was quantized, if it is at hand.
    """
    draft = Draft(checkpoint, tuple(engines))
    check_index(draft, problem)
    check_absent(draft)
    check_dtype(draft)
    candidate = identify(draft)
    if candidate:
        mend_scales(draft, candidate.storages, original, keep_type=candidate.method in ANY_TYPE)
        check_config(draft, candidate)
        check_tied_head(draft, candidate.method)
        check_exclusions(draft, candidate.method)
    return draft


def plan_repair(draft: Draft) -> Plan:
    """The output that a draft describes; tensors that are right keep their bytes."""
    tasks, fates = [], {}
    sources = sorted(draft.tensors, key=lambda name: (draft.checkpoint.files[name], draft.checkpoint.entry(name).start))
    for name in sources:
        tensor = draft.tensors[name]
        reads = tuple(Source(one) for one in (name, *tensor.beside))
        tasks.append(Task(reads, (Piece(tensor.name, tensor.spec),), tensor.step))
        fates[name] = Fate("copied", _reason(name, tensor), (tensor.name,))
    hopeless = [finding for finding in draft.findings if not finding.repair]
    rejects = [Reject(finding.file, finding.problem, _way_out(finding)) for finding in hopeless]
    rejects += detect_weights(draft.specs, draft.config).rejects
    return Plan(
        tensors={draft.tensors[name].name: draft.tensors[name].spec for name in sources},
        tasks=tuple(tasks),
        fates=fates,
        config=draft.config,
        metadata={"format": "pt"},
        options={"job": "repair", "findings": [str(replace(finding, file="")) for finding in draft.findings]},
        rejects=tuple(dict.fromkeys(rejects)),
    )


def _reason(name: str, tensor: OutputTensor) -> str:
    if not isinstance(tensor.step, Copy):
        return "scales in another type or shape"
    return "right as it is" if tensor.name == name else "under another name"


def _way_out(finding: Finding) -> str:
    if finding.rule == "absent-tensors":
        return "fetch the shards that hold them, or ask whoever published them"
    return f"{', '.join(finding.engines)}: no spelling of the list is read rightly; --engine leaves engines out"
