"""Repair a checkpoint that somebody published, or only say what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import OptionError, check_choice

from ..checkpoint.files import open_checkpoint
from ..checkpoint.packed import is_packed
from ..engine.job import RunOptions
from ..progress import Progress
from ..repair.draft import EVERY_ENGINE, Finding
from ..repair.planner import examine, open_damaged, plan_repair
from .conversion import ConversionResult, Run


@dataclass(frozen=True)
class RepairOptions:
    """What a repaired checkpoint is for.

    Attributes:
        engines: The engines that will load it: "SGLang", "vLLM", "transformers", "TensorRT-LLM".
        original: The model that was quantized, a directory, file or hub id; scales that were rounded to 16 bits are
            worked out anew from it where the codes bear that out.
    """

    engines: tuple[str, ...] = EVERY_ENGINE
    original: str | Path | None = None

    def __post_init__(self) -> None:
        for engine in self.engines:
            check_choice("--engine", engine, EVERY_ENGINE)
        if not self.engines:
            raise OptionError(f"--engine: name one of {', '.join(EVERY_ENGINE)}")


@dataclass(frozen=True)
class Repair:
    """What was found, and what was done about it.

    Attributes:
        findings: Everything that is wrong, in the order in which it was looked at.
        conversion: What was written; None where nothing was, since only a check was asked for or nothing is wrong.
        notes: What is worth telling and no damage.
    """

    findings: tuple[Finding, ...]
    conversion: ConversionResult | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "conversion": self.conversion.to_json() if self.conversion else None,
            "notes": list(self.notes),
        }


def repair(
    source: str | Path,
    output: str | Path | None,
    options: RepairOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Bring a quantized checkpoint to what serving engines read; tensors that are right keep their bytes.

    Looked at: the index, the place and the keys of the quantization config, names, types and shapes of scales, the
    list of unquantized modules as each engine reads it, a tied head that the list leaves out, the type of the model.

    Args:
        source: A directory, one .safetensors file, or a hub id `org/name[@revision]`.
        output: The directory to write; None only checks.
        options: For which engines, and the model that was quantized.
        run: How the job runs.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        OptionError: The options are not allowed.
        TilewrightError: Something is wrong that cannot be mended here, or the job failed or was interrupted.
    """
    options = options or RepairOptions()
    ongoing = Run.of(run, progress)
    if ongoing.options.consume:
        raise OptionError("--consume: a repair keeps its source")
    checkpoint, problem = open_damaged(source)
    original = open_checkpoint(options.original) if options.original else None
    if is_packed(checkpoint):
        raise OptionError(f"{source} is packed; repair the checkpoint that it was made from")
    draft = examine(checkpoint, problem, options.engines, original)
    if output is None or not draft.findings:
        ongoing.tell(checkpoint.notes)
        return Repair(tuple(draft.findings), None, tuple(ongoing.notes))
    job = ongoing.check({Path(output): plan_repair(draft)}, checkpoint)
    ongoing.execute(job)
    return Repair(tuple(draft.findings), ongoing.result(job, dry_run=False), tuple(ongoing.notes))
