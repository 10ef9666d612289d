"""Fill the shards on the machines of a Ray cluster: each task is one output file, and all are committed here.

Ray places the tasks, finds out that a machine is gone and shows what runs; the journal, the lock and the commits are
those of a run on one machine, and so are the bytes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tilewright
from tilewright.kernels.errors import OptionError, TilewrightError
from tilewright.kernels.packed.page_guard import page_guard
from tilewright.kernels.packed.safetensors_file import FileStamp

from ..checkpoint.files import Checkpoint
from ..progress import Progress
from ..records.journal import Journal
from .commits import Commits
from .failures import one_clear_message
from .fill import run_task
from .job import Job
from .permissions import Permissions
from .resources import BASE_MEMORY, task_memory
from .run import begin_progress, unfinished
from .shards import ShardPlan
from .writer import FileWriter

ATTEMPT = ".attempt-"  # in names of files that a worker may still be writing
ATTEMPTS = 5  # workers or machines that may be lost over one file
STOPPING = 10  # seconds that workers have to end after a failure
LOOKING = 60  # seconds in which every machine has to answer whether it sees the files


@dataclass(frozen=True)
class Shipment:
    """What workers are told of a job, once.

    Attributes:
        checkpoint: The source, with absolute paths.
        permissions: Modes of what is written.
    """

    checkpoint: Checkpoint
    permissions: Permissions

    @staticmethod
    def of(checkpoint: Checkpoint, permissions: Permissions) -> Shipment:
        """The same for other machines: no file is open, and no path depends on where a process was started."""
        headers = {name: replace(header, path=header.path.absolute()) for name, header in checkpoint.headers.items()}
        return Shipment(replace(checkpoint, root=checkpoint.root.absolute(), headers=headers, _maps={}), permissions)


def fill(shipment: Shipment, shard: ShardPlan, path: Path) -> str | TilewrightError:
    """Write one output file; runs in a worker of the cluster.

    Returns:
        sha256 of the file, which is safe on disk; or why it cannot be written, which another try would not mend.
    """
    torch.set_num_threads(1)
    try:
        with one_clear_message(path), page_guard() as lost_pages:
            writer = FileWriter(path, shard.size, mode=shipment.permissions.file)
            try:
                writer.write(0, shard.header)
                for task in shard.tasks:
                    run_task(shipment.checkpoint, writer, shard, task, lost_pages)
                return writer.finish()
            finally:
                writer.close()
    except TilewrightError as error:
        return error


def look(stamps: Mapping[Path, FileStamp], folder: Path, version: str) -> str | None:
    """What keeps this machine from taking part, None if nothing does; runs on each machine of the cluster."""
    if tilewright.__version__ != version:
        return f"has Tilewright {tilewright.__version__}, not {version}"
    for path, stamp in stamps.items():
        if different := stamp.difference(path):
            return f"does not see the source: {path} {different}"
    if not os.access(folder, os.W_OK):
        return f"does not see the output, or may not write there: {folder}"
    return None


class ClusterRun:
    """One run over the shards of a job on a Ray cluster."""

    def __init__(self, job: Job, journal: Journal, progress: Progress, permissions: Permissions) -> None:
        self._checkpoint = job.checkpoint
        self._journal = journal
        self._address = job.options.ray
        self._in_step = job.options.consume
        self._progress = progress
        self._permissions = permissions
        self._folder = journal.folder.absolute()
        self._todo = unfinished(job, journal)
        self._commits = Commits(job, journal, self._todo)
        self._running: dict[Any, tuple[int, Path]] = {}  # future -> number in `_todo`, and the file it writes

    def run(self) -> int:
        """Write the shards that the journal does not name; returns how many bytes that were.

        Raises:
            TilewrightError: A machine does not see the files, a weight cannot be converted, or one file cost too many
                workers.
        """
        ray = import_ray()
        size = begin_progress(self._progress, self._todo, self._journal)
        joined = not ray.is_initialized()
        if joined:
            ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        try:
            self._remove_attempts()
            self._look(ray)
            self._work(ray)
        finally:
            for future in self._running:
                ray.cancel(future, force=True)
            if self._running:  # a worker may only just have begun its file
                ray.wait(list(self._running), num_returns=len(self._running), timeout=STOPPING)
            if joined:
                ray.shutdown()
            self._remove_attempts()
            self._progress.finish()
        self._commits.close()
        return size

    def _look(self, ray: Any) -> None:
        """Ask every machine before anything is computed."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        stamps = {
            header.path.absolute(): header.stamp
            for name, header in self._checkpoint.headers.items()
            if name not in self._checkpoint.gone
        }
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
                asked[task.remote(stamps, self._folder, tilewright.__version__)] = node["NodeManagerAddress"]
        for future, address in asked.items():
            try:
                problem = ray.get(future, timeout=LOOKING)
            except ray.exceptions.GetTimeoutError:
                problem = f"does not answer within {LOOKING} seconds"
            except ray.exceptions.RayError as error:
                problem = f"cannot run Tilewright: {_first_line(error)}"
            if problem:
                hint = "source and output must lie on storage that every machine mounts at the same path"
                raise TilewrightError(f"--ray: machine {address} {problem}", hint=hint)

    def _work(self, ray: Any) -> None:
        shipment = ray.put(Shipment.of(self._checkpoint, self._permissions))
        waiting = list(range(len(self._todo)))[::-1]
        lost: dict[int, int] = {}
        while waiting or self._running:
            while waiting and self._may_start(ray, waiting[-1]):
                self._start(ray, shipment, waiting.pop())
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=1.0)
            for future in done:
                number, path = self._running.pop(future)
                try:
                    outcome = ray.get(future)
                except ray.exceptions.RayError as error:
                    lost[number] = lost.get(number, 0) + 1
                    if lost[number] == ATTEMPTS or isinstance(error, ray.exceptions.RayTaskError):
                        raise self._given_up(number, lost[number], error) from error
                    waiting.append(number)
                    continue
                if isinstance(outcome, TilewrightError):
                    raise outcome
                self._commit(number, path, outcome)

    def _may_start(self, ray: Any, number: int) -> bool:
        """No more files at once than CPUs, so that no disk is flooded; two if the source makes room for them."""
        if self._in_step and number - self._commits.count > 1:
            return False
        return len(self._running) < max(1, int(ray.cluster_resources().get("CPU", 1)))

    def _start(self, ray: Any, shipment: Any, number: int) -> None:
        one, shard = self._todo[number]
        path = self._folder / f"{one.path(shard.file)}{ATTEMPT}{uuid.uuid4().hex}"
        path.parent.mkdir(self._permissions.folder, exist_ok=True)
        memory = BASE_MEMORY + max((task_memory(task, self._checkpoint) for task in shard.tasks), default=0)
        name = f"{one.path(shard.file)}: {len(shard.offsets)} tensors from {next(iter(shard.offsets), 'none')}"
        task = ray.remote(fill).options(num_cpus=1, memory=memory, name=name, max_retries=0)
        self._running[task.remote(shipment, shard, path)] = number, path

    def _commit(self, number: int, path: Path, digest: str) -> None:
        one, shard = self._todo[number]

        def finish() -> str:
            path.replace(self._folder / one.path(shard.file))
            return digest

        self._commits.add(one, shard, finish)
        self._progress.advance(shard.size)

    def _given_up(self, number: int, times: int, error: Exception) -> TilewrightError:
        one, shard = self._todo[number]
        reason = f"{one.path(shard.file)}: its worker was lost {times} times, at last by: {_first_line(error)}"
        return TilewrightError(reason, hint="Ray's dashboard tells why; the same command with --resume goes on")

    def _remove_attempts(self) -> None:
        """Files that a lost worker left, or one that is cancelled; nobody else writes below a locked output."""
        for path in self._folder.rglob(f"*{ATTEMPT}*"):
            path.unlink(missing_ok=True)


def import_ray() -> Any:
    """Ray, which is an extra.

    Raises:
        OptionError: It is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise OptionError("--ray needs Ray", hint="pip install 'tilewright[ray]'") from None
    return ray


def _first_line(error: Exception) -> str:
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
