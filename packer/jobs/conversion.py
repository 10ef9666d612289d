"""What quantizing, packing and unpacking have in common: open, check, carry out, and the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..checkpoint.files import Checkpoint, open_checkpoint
from ..engine.job import Job, RunOptions
from ..engine.pipeline import run_job
from ..engine.preflight import prepare
from ..plan import Plan
from ..progress import Progress, progress_on
from ..quantize.requantized import Loss
from ..summary import Summary, summarize

log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class ConversionOutput:
    """One directory that a conversion writes.

    Attributes:
        path: The directory.
        figures: Works out the summary. Only that of the first of many ranks is shown, unless all are asked for.
    """

    path: Path
    figures: Callable[[], Summary] = field(repr=False)

    @cached_property
    def summary(self) -> Summary:
        """What was done, or would be, in figures."""
        return self.figures()


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion did, or would do.

    Attributes:
        outputs: What was written: one directory, or one for each rank.
        dry_run: Whether nothing was written.
        notes: What is worth telling and was no reason to refuse.
        seconds: How long it took.
        second_quantization: What int4 weights lost by being quantized to int4 once more; None where none were.
    """

    outputs: tuple[ConversionOutput, ...]
    dry_run: bool
    notes: tuple[str, ...]
    seconds: float
    second_quantization: Loss | None = None

    @property
    def summary(self) -> Summary:
        """The figures of the first directory: the only one unless the output was cut for ranks."""
        return self.outputs[0].summary

    def to_json(self) -> Any:
        """JSON values: one object, or a list of one for each rank."""
        documents = [
            output.summary.to_json()
            | {
                "output": str(output.path),
                "dry_run": self.dry_run,
                "notes": list(self.notes),
                "seconds": round(self.seconds, 3),
                "second_quantization": vars(self.second_quantization) if self.second_quantization else None,
            }
            for output in self.outputs
        ]
        return documents[0] if len(documents) == 1 else documents


@dataclass
class Run:
    """One conversion on its way.

    Attributes:
        options: How it runs.
        progress: Hears how far it is.
        notes: What was told so far.
    """

    options: RunOptions
    progress: Progress
    notes: dict[str, None] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(options: RunOptions | None, progress: Progress | None) -> Run:
        """With the defaults filled in: a tqdm bar on a terminal or in a notebook, lines elsewhere."""
        return Run(options or RunOptions(), progress or progress_on())

    def open(self, source: str | Path) -> Checkpoint:
        """Read the headers of the source; with --resume, also of shards that an earlier run has used up."""
        return open_checkpoint(source, consumed=self.options.resume)

    def tell(self, notes: Iterable[str]) -> None:
        """Log each note once, and keep it for the result."""
        for note in notes:
            if note not in self.notes:
                self.notes[note] = None
                log.warning("%s", note)

    def check(self, plans: Mapping[Path, Plan], checkpoint: Checkpoint) -> Job:
        """Check all plans together.

        Raises:
            PlanError: One of them is refused; nothing was written.
        """
        self.tell((*checkpoint.notes, *(note for plan in plans.values() for note in plan.notes)))
        job = prepare(plans, checkpoint, self.options)
        needed, allowed = job.peak_memory, self.options.memory
        if allowed and needed > allowed:
            self.tell([f"about {needed >> 20} MiB of memory are needed at least, --memory allows {allowed >> 20} MiB"])
        return job

    def execute(self, job: Job, before: Callable[[], Sequence[str]] = tuple) -> None:
        """Carry it out; `before` is what has to happen before the first task, and gives notes."""
        self.tell(run_job(job, self.progress, before).notes)

    def result(self, job: Job, *, dry_run: bool, timed: bool = False, loss: Loss | None = None) -> ConversionResult:
        """What there is to say about it; `timed` estimates how long a plan will take, by a short measurement."""
        if dry_run and job.shortage:
            self.tell([str(job.shortage)])
        outputs = tuple(
            ConversionOutput(one.directory, partial(summarize, job, one, timed=timed)) for one in job.destinations
        )
        return ConversionResult(outputs, dry_run, tuple(self.notes), time.monotonic() - self.began, loss)
