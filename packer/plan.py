"""What a job will do, decided from headers alone: the planner fills these types, the pipeline executes them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.tensors import Reject, TensorSpec

CHUNK = 1 << 20  # bytes at a time: fits a core's own cache, so that what was just written is hashed from there
STRIP_MEMORY = 32 << 20  # bytes: weights are converted a strip at a time


@dataclass(frozen=True, slots=True)
class Source:
    """A source tensor, or one slice of its first dimension (one expert of a stack).

    Attributes:
        name: Name in the source checkpoint.
        index: Position along the first dimension, or None for the whole tensor.
    """

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one output tensor; the pieces of a tensor cover it exactly.

    Attributes:
        name: Output tensor.
        spec: dtype and shape of this piece.
        offset: Where it begins inside the output tensor, in bytes.
    """

    name: str
    spec: TensorSpec
    offset: int = 0


class NotFiniteError(Exception):
    """A step met a NaN or an infinity; its task knows what the tensor is called.

    Attributes:
        number: Of the source in the task.
        index: Of the element in that source.
        value: The element.
        hint: The way out.
    """

    def __init__(self, number: int, index: list[int], value: float, hint: str) -> None:
        super().__init__(f"element {index} of source {number} is {value}")
        self.number, self.index, self.value, self.hint = number, index, value, hint


@dataclass(frozen=True)
class Work:
    """Computing of a step that is worth an estimate of its time.

    Attributes:
        kind: Equal for work that takes equally long for each weight.
        weights: How many weights are computed.
        trial: Does the same for a bf16 matrix [N, K], so that it can be timed.
    """

    kind: tuple[str, ...]
    weights: int
    trial: Callable[[torch.Tensor], object]


class Step(ABC):
    """The computation of one task: pure, picklable, the same bytes whenever and wherever it runs."""

    @abstractmethod
    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Turn the task's sources (views of mapped files, in order) into its pieces, by output name.

        Raises:
            NotFiniteError: A source holds a value that no step may pass on.
            SchemeError: Something else is wrong with the numbers.
        """

    def memory(self, sources: Sequence[TensorSpec], results: int) -> int:
        """Bytes that `run` allocates at most, by estimate: four for each weight, a strip in work, and what it gives.

        Args:
            sources: dtype and shape of each source. A byte of an 8-bit or integer tensor may hold two 4-bit weights.
            results: Bytes of all pieces.
        """
        weights = 0
        for spec in sources:
            packed = not spec.dtype.is_floating_point or spec.dtype.itemsize == 1
            weights += math.prod(spec.shape) * (2 * spec.dtype.itemsize if packed else 1)
        return 4 * weights + STRIP_MEMORY + results

    def work(self) -> Iterable[Work]:
        """What `run` computes beyond moving bytes; nothing by default."""
        return ()

    def renamed(self, names: Mapping[str, str]) -> Step:
        """The same step, for a `RepeatedTask` whose output tensors have other names; `names` maps the old ones."""
        raise NotImplementedError(f"{type(self).__name__} is not repeated under other names")


@dataclass(frozen=True)
class Copy:
    """In place of a step: each source keeps its bytes, which are streamed from file to file."""

    def memory(self, sources: Sequence[TensorSpec], results: int) -> int:
        """See `Step.memory`: a chunk that is read, and one that is hashed."""
        return 2 * CHUNK

    def work(self) -> Iterable[Work]:
        """See `Step.work`."""
        return ()


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work, memory and restart: some sources become some pieces.

    Attributes:
        sources: What is read.
        pieces: What is written; exactly what `step` gives.
        step: How.
    """

    sources: tuple[Source, ...]
    pieces: tuple[Piece, ...]
    step: Step | Copy

    @property
    def first(self) -> Task:
        """The task that stands for its kind."""
        return self

    @property
    def place(self) -> int:
        """See `RepeatedTask`."""
        return 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the source tensors."""
        return tuple([source.name for source in self.sources])

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the output tensors."""
        return tuple([piece.name for piece in self.pieces])

    def run(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What `step` makes of the sources' tensors, by output name.

        Raises:
            SchemeError: The numbers of a source cannot be converted; a NaN or an infinity is named by tensor and index.
        """
        if isinstance(self.step, Copy):
            return {piece.name: tensor for piece, tensor in zip(self.pieces, tensors, strict=True)}
        try:
            return self.step.run(tensors)
        except NotFiniteError as error:
            source = self.sources[error.number]
            index = error.index if source.index is None else [source.index, *error.index]
            reason = f"{source.name}{index} is {error.value}; only finite weights can be converted"
            raise SchemeError(reason, hint=error.hint) from None


@dataclass(frozen=True)
class Degree:
    """Whether a model may be cut into `size` parts.

    Attributes:
        size: Number of parts.
        reason: Why not; None if it may.
    """

    size: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class RepeatedTask:
    """A task like another one, for tensors of other names, or for the next slices of the same output tensors.

    A model of 140,000 tensors has as many tasks, of a few dozen kinds: what is the same for all of a kind is held, and
    asked of, their first.

    Attributes:
        first: The task that it is like.
        inputs: Names of its source tensors, in the order of those of `first`.
        outputs: Names of its output tensors, likewise.
        place: How many pieces of the same size lie between each of its pieces and that of `first`.
    """

    first: Task
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    place: int = 0

    @property
    def sources(self) -> tuple[Source, ...]:
        """See `Task`."""
        pairs = zip(self.inputs, self.first.sources, strict=True)
        return tuple([Source(name, source.index) for name, source in pairs])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """See `Task`."""
        pairs = zip(self.outputs, self.first.pieces, strict=True)
        return tuple([Piece(name, p.spec, p.offset + self.place * p.spec.nbytes) for name, p in pairs])

    @property
    def step(self) -> Step | Copy:
        """See `Task`."""
        step, outputs = self.first.step, self.first.outputs
        if isinstance(step, Copy) or outputs == self.outputs:
            return step
        return step.renamed(dict(zip(outputs, self.outputs, strict=True)))

    def run(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Task.run`."""
        return Task(self.sources, self.pieces, self.step).run(tensors)


AnyTask = Task | RepeatedTask


def kinds(tasks: Iterable[AnyTask]) -> Iterable[tuple[Task, int]]:
    """The first task of each kind, and how many there are."""
    counts = Counter(id(task.first) for task in tasks)
    firsts = {id(task.first): task.first for task in tasks}
    return [(firsts[kind], count) for kind, count in counts.items()]


FateKind = Literal["quantized", "dequantized", "packed", "copied", "dropped"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one source tensor: exactly one of these for every name in the source.

    Attributes:
        kind: What is done.
        reason: Why, for people ("router", "K = 576 is not a multiple of group 128", "excluded by --exclude lm_head").
        outputs: Names of the output tensors that it feeds.
    """

    kind: FateKind
    reason: str
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that a run will do; complete before any weight byte is read.

    Attributes:
        tensors: Every output tensor, in the order in which shards are filled.
        tasks: In that order too.
        fates: One for each source tensor.
        config: The output's config.json.
        modules: What to write about packed modules in shard headers: module -> fields of `tilewright.modules`.
        metadata: Further header metadata of every shard.
        options: Every option that can change an output byte; hashed, so that a resumed run is the same run.
        extra_files: Further small files to write, name -> content.
        stale_files: Side files of the source that would be wrong beside the output, and are not copied.
        rejects: Reasons to refuse; a plan with any is never executed.
        notes: Things worth telling that are no reason to refuse.
        tensor_parallel: For a packed output: into how many shares it can be cut; None where nobody asked.
        expert_parallel: The same for experts that are dealt to ranks; empty for a dense model.
        memory: Bytes that what comes before the tasks needs, by estimate: a calibration.
    """

    tensors: dict[str, TensorSpec]
    tasks: tuple[AnyTask, ...]
    fates: dict[str, Fate]
    config: dict[str, Any]
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    extra_files: dict[str, bytes] = field(default_factory=dict)
    stale_files: tuple[str, ...] = ()
    rejects: tuple[Reject, ...] = ()
    notes: tuple[str, ...] = ()
    tensor_parallel: tuple[Degree, ...] | None = None
    expert_parallel: tuple[Degree, ...] = ()
    memory: int = 0
