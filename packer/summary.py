"""What a plan comes to: sizes, bits per weight, and the decisions, grouped for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES

from .checkpoint import detect_weights
from .checkpoint.encoding import StoredWeight
from .checkpoint.files import Checkpoint
from .checkpoint.packed import config_before_packing
from .engine.job import Destination, Job
from .estimate import compute_seconds
from .folding import pattern, with_ranges
from .garbage import uncollected
from .pack.parallel import described, expert_parallel, tensor_parallel
from .plan import Degree, Fate, Plan, kinds


@dataclass(frozen=True)
class FateGroup:
    """Source tensors that differ only in the numbers of their names and share one fate.

    Attributes:
        name: The name, each number that varies replaced by its range: `model.layers.{0-3}.mlp.gate.weight`.
        count: How many there are.
        fate: Kind of fate.
        reason: Reason of the fate.
        before: dtype and shape of each.
        after: dtypes written for it.
        bytes_before: Bytes of all of them.
        bytes_after: Bytes of what they feed.
    """

    name: str
    count: int
    fate: str
    reason: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Summary:
    """A plan in figures.

    Attributes:
        groups: The decisions, in the order of the source.
        weights: Number of weights in the output, one per element of a matrix whatever it is stored in.
        bytes_before: Bytes of the source's tensors.
        bytes_after: Bytes of the output's.
        files: Number of its files with weights.
        job: What running it takes, with all that is made at the same time.
        seconds: Estimated time of computing; None if it was not asked for.
        tensor_parallel: Degrees that the output allows.
        expert_parallel: The same for whole experts; empty for dense models.
    """

    groups: tuple[FateGroup, ...]
    weights: int
    bytes_before: int
    bytes_after: int
    files: int
    job: Job
    tensor_parallel: tuple[Degree, ...] = ()
    expert_parallel: tuple[Degree, ...] = ()
    seconds: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """Output bits per weight, scales and what stays in 16 bits included."""
        return 8 * self.bytes_after / max(self.weights, 1)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        fates: Counter[str] = Counter()
        for group in self.groups:
            fates[group.fate] += group.count
        return {
            "weights": self.weights,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "fates": dict(fates),
            "workers": self.job.workers,
            "peak_memory": self.job.peak_memory,
            "disk_needed": self.job.disk_needed,
            "disk_free": self.job.disk_free,
            "shards": self.files,
            "estimated_seconds": self.seconds,
            "tensor_parallel": {degree.size: degree.reason for degree in self.tensor_parallel},
            "expert_parallel": {degree.size: degree.reason for degree in self.expert_parallel},
            "groups": [vars(group) for group in self.groups],
        }

    def line(self) -> str:
        """The figures that matter when all is done."""
        changed = [group for group in self.groups if group.fate in {"quantized", "packed"}]
        made = sum(group.count for group in changed)
        return (
            f"{made} tensors {changed[0].fate if changed else 'changed'}, "
            f"{_size(self.bytes_before)} -> {_size(self.bytes_after)}, {self.bits_per_weight:.2f} bits per weight"
        )

    def table(self) -> str:
        """For --dry-run."""
        rows = [
            (f"{group.count}", group.name, f"{group.before} -> {group.after}", group.reason) for group in self.groups
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else [0, 0, 0]
        lines = [
            f"{count:>{widths[0]}}  {name:<{widths[1]}}  {change:<{widths[2]}}  {reason}"
            for count, name, change, reason in rows
        ]
        job = self.job
        return "\n".join([
            *lines,
            "",
            self.line(),
            f"{self.files} file(s); {job.workers} worker(s), up to {_size(job.peak_memory)} of memory; "
            f"{_size(job.disk_needed)} of disk needed, {_size(job.disk_free)} free",
            *([] if self.seconds is None else [f"about {self.seconds:.1f} s of computing, beside reading and writing"]),
            *described("tensor parallel", self.tensor_parallel),
            *(described("expert parallel", self.expert_parallel) if self.expert_parallel else []),
        ])


@uncollected()
def summarize(job: Job, one: Destination, *, timed: bool = False) -> Summary:
    """Put a plan into figures, from headers alone; `timed` estimates how long it will take, by a short measurement."""
    plan, checkpoint = one.plan, job.checkpoint
    lasts = {id(task.first): task for task in plan.tasks}.values()
    counts = Counter({name: count for task, count in kinds(plan.tasks) for name in task.outputs})
    ends = counts.keys() | {name for task in lasts for name in task.outputs}  # first and last stand for their kind
    plain = {n: plan.tensors[n] for n in plan.tensors if n in ends and n.rpartition(".")[0] not in plan.modules}
    inventory = detect_weights(plain, config_before_packing(plan.config))
    weights = sum(math.prod(fields["shape"]) for fields in plan.modules.values())
    weights += sum(math.prod(weight.shape) * counts[weight.tensors[0]] for weight in inventory.weights)
    weights += sum(math.prod(plan.tensors[name].shape) * counts[name] for name in inventory.loose)
    return Summary(
        tuple(_groups(plan, checkpoint)),
        weights,
        sum(checkpoint.spec(name).nbytes for name in plan.fates),
        sum(spec.nbytes for spec in plan.tensors.values()),
        len(one.shards),
        job,
        *_degrees(plan, inventory.weights),
        compute_seconds(plan, job.workers) if timed else None,
    )


def _degrees(plan: Plan, weights: Sequence[StoredWeight]) -> tuple[tuple[Degree, ...], tuple[Degree, ...]]:
    """Tensor- and expert-parallel degrees: those that pack, or those that engines have for a checkpoint."""
    if plan.tensor_parallel is not None:
        return plan.tensor_parallel, plan.expert_parallel
    return tuple(tensor_parallel(weights, plan.config)), tuple(expert_parallel(plan.config))


def _groups(plan: Plan, checkpoint: Checkpoint) -> Iterable[FateGroup]:
    spelled: dict[int, str] = {}  # by the object: there are few specifications, and many tensors
    told: tuple[Fate | None, str] = (None, "")  # neighbours often share their fate
    members: dict[tuple[str, ...], list[str]] = {}
    for name, fate in plan.fates.items():
        spec = checkpoint.spec(name)
        if id(spec) not in spelled:
            spelled[id(spec)] = f"{DTYPE_NAMES[spec.dtype]}{list(spec.shape)}"
        if fate is not told[0]:
            told = fate, _after(fate, plan)
        key = (pattern(name), fate.kind, fate.reason, spelled[id(spec)], told[1])
        members.setdefault(key, []).append(name)
    counted: set[str] = set()
    for (_, kind, reason, before, after), names in members.items():
        size, read = 0, sum(checkpoint.spec(name).nbytes for name in names)
        for fate in (plan.fates[name] for name in names):
            if fate is not told[0]:
                told = fate, ""
                fed = [output for output in fate.outputs if output not in counted]
                counted.update(fed)
                size += sum(plan.tensors[output].nbytes for output in fed)
        yield FateGroup(with_ranges(names), len(names), kind, reason, before, after, read, size)


def _after(fate: Fate, plan: Plan) -> str:
    if fate.kind == "dropped":
        return "nothing"
    return "+".join(dict.fromkeys(DTYPE_NAMES[plan.tensors[output].dtype] for output in fate.outputs))


def _size(size: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1000
    raise AssertionError
