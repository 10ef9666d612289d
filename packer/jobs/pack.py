"""Pack a checkpoint into the byte order of kernels, and the way back."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright.kernels.errors import OptionError, check_choice, check_least
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.packed.module_spec import rank_directory

from ..checkpoint.side_files import find_side_files
from ..engine.job import RunOptions
from ..pack.planner import plan_pack
from ..pack.ranks import plan_ranks
from ..pack.target import CpuTarget, GpuTarget, PackTarget
from ..pack.unpack import plan_unpack
from ..progress import Progress
from .conversion import ConversionResult, Run

TARGETS = ("cpu", "gpu")


@dataclass(frozen=True)
class PackOptions:
    """What a checkpoint is packed for.

    Attributes:
        target: "cpu" packs every matrix, "gpu" the int4 experts for Hopper GPUs.
        layout: Layout to prefer for the weights that it can hold; None takes the target's first.
        tp: Ranks that every matrix is cut for (CPU only).
        ep: Groups of ranks that the experts are dealt to.
        absorbed: Whether kv_b_proj of latent attention is also split into w_kc and w_vc (CPU only).
        join: Whether q, k, v and gate, up are packed as one Linear where they can be (CPU only).
    """

    target: Literal["cpu", "gpu"] = "cpu"
    layout: str | None = None
    tp: int = 1
    ep: int = 1
    absorbed: bool = False
    join: bool = True

    def __post_init__(self) -> None:
        check_choice("target", self.target, TARGETS)
        check_choice("--layout", self.layout, (name for name in LAYOUTS if name.startswith(f"{self.target}-")))
        check_least("--tp", self.tp, 1)
        check_least("--ep", self.ep, 1)
        if self.target == "gpu" and (self.tp > 1 or self.absorbed or not self.join):
            raise OptionError("--tp, --absorbed and --no-join belong to packing for CPUs")

    def resolved(self) -> PackTarget:
        """The target of the planner."""
        if self.target == "cpu":
            return CpuTarget(self.layout, absorbs=self.absorbed, joins=self.join)
        return GpuTarget(self.layout) if self.layout else GpuTarget()


def pack(
    source: str | Path,
    output: str | Path,
    options: PackOptions | None = None,
    *,
    run: RunOptions | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Put the weights of a checkpoint, 16-bit or quantized, into the byte order of kernels. Codes are kept.

    Args:
        source: A directory, one .safetensors file, or a hub id `org/name[@revision]`.
        output: The directory to write; it holds a directory for each rank if `tp` or `ep` is more than 1.
        options: What for; CPUs by default.
        run: How the job runs.
        dry_run: Decide and check everything, and write nothing.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        OptionError: The options are not allowed.
        TilewrightError: The job is refused, with nothing left behind, or it failed or was interrupted.
    """
    output, options = Path(output), options or PackOptions()
    ongoing = Run.of(run, progress)
    checkpoint = ongoing.open(source)
    target, ranks = options.resolved(), max(options.tp, options.ep)
    if ranks == 1:
        plans = {output: plan_pack(checkpoint, target)}
    else:
        ranked = plan_ranks(checkpoint, target, options.tp, options.ep)
        plans = {output / rank_directory(rank, ranks): plan for rank, plan in enumerate(ranked)}
    job = ongoing.check(plans, checkpoint)
    if not dry_run:
        ongoing.execute(job)
        if ranks > 1:
            _describe(output, output / rank_directory(0, ranks))
    return ongoing.result(job, dry_run=dry_run)


def _describe(output: Path, rank: Path) -> None:
    """Put config, tokenizer and their like beside the directories of the ranks: engines are given the model as a whole.

    config.json comes last, so that what has one has the others.
    """
    for name in (*find_side_files(rank, set(), [])[0], Path("config.json")):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        draft = output / name.with_name(f".{name.name}.part")
        shutil.copyfile(rank / name, draft)
        draft.replace(output / name)


def unpack(
    source: str | Path,
    output: str | Path,
    *,
    run: RunOptions | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Turn a packed directory back into the checkpoint that it was made from.

    Args:
        source: The packed directory.
        output: The directory to write.
        run: How the job runs.
        dry_run: Decide and check everything, and write nothing.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        TilewrightError: The job is refused, with nothing left behind, or it failed or was interrupted.
    """
    output = Path(output)
    ongoing = Run.of(run, progress)
    checkpoint = ongoing.open(source)
    job = ongoing.check({output: plan_unpack(checkpoint)}, checkpoint)
    if not dry_run:
        ongoing.execute(job)
    return ongoing.result(job, dry_run=dry_run)
