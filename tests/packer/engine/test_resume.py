"""Stop a run at any moment, in any way: what was there stays true, and `--resume` ends in the same bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tilewright.kernels.errors import CheckpointError, PlanError, TilewrightError
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.lock import OutputLock
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.plan import Plan
from tilewright.packer.records.journal import PARTIAL

MakeSource = Callable[..., Path]
MakePlan = Callable[..., Plan]
SHARD = 6000  # bytes: about six output shards
MOE_SHARD = 70_000  # of the other model: about five
KILLS = 17  # for each of three schemes
# Every way in which a run changes a disk.
EVENTS = ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "replace", "unlink", "rmdir", "mkdir")

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def hashes(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file() and PARTIAL not in path.parts)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Tripwire:
    """Counts what happens to the disk and calls `trip` at the event number `at`, before or half-way through it."""

    def __init__(self, at: int, trip: Callable[[], None], events: Sequence[str] = EVENTS) -> None:
        self.count = 0
        self._at = at
        self._trip = trip
        self._lock = threading.Lock()
        for name in events:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                tripped = self.count == self._at
            if tripped:
                if name in {"write", "pwrite"} and len(args[1]) > 1:
                    written = real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                    self._trip()
                    return written
                self._trip()
            return real(*args, **kwargs)

        return wrapper


@pytest.fixture
def restored_os() -> Iterator[None]:
    real = {name: getattr(os, name) for name in EVENTS}
    yield
    for name, function in real.items():
        setattr(os, name, function)


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked process: 0 if it returned, 1 if it raised, minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def convert(source: Path, output: Path, make_plan: MakePlan, limit: int = SHARD, **options: Any) -> int:
    """What a command does: open, plan, execute."""
    checkpoint = open_checkpoint(source, consumed=bool(options.get("resume")))
    return execute(make_plan(checkpoint), checkpoint, output, RunOptions(max_shard_size=limit, **options)).written


def check_nothing_half_done(output: Path, final: dict[str, str]) -> None:
    """Whatever has a final name is final; the index and the manifest come after everything that they name."""
    found = hashes(output) if output.exists() else {}
    assert found.items() <= final.items()
    if "model.safetensors.index.json" in found:
        assert {name for name in final if name.endswith(".safetensors")} <= set(found)
    if "manifest.json" in found:
        assert found == final


@pytest.mark.usefixtures("restored_os")
@pytest.mark.parametrize(("scheme", "consume"), [("block-fp8", False), ("int8", True), ("w4afp8", False)])
def test_kill_at_any_moment(
    make_moe: Callable[[str], Path],
    make_scheme_plan: Callable[[str], MakePlan],
    tmp_path: Path,
    scheme: str,
    consume: bool,
) -> None:
    source, make_plan = make_moe("source"), make_scheme_plan(scheme)
    shards = {path.name for path in source.glob("*.safetensors")}
    convert(source, tmp_path / "whole", make_plan, limit=MOE_SHARD)
    final = hashes(tmp_path / "whole")
    wire = Tripwire(0, kill)
    shutil.copytree(source, tmp_path / "count-source")
    convert(tmp_path / "count-source", tmp_path / "count", make_plan, limit=MOE_SHARD, consume=consume)
    total = wire.count
    rng = random.Random(scheme)
    for number in range(KILLS):
        mine, output = tmp_path / f"source{number}", tmp_path / f"out{number}"
        shutil.copytree(source, mine)
        jobs = rng.choice([1, 3])

        def run(at: int) -> None:
            Tripwire(at, kill)
            convert(mine, output, make_plan, limit=MOE_SHARD, jobs=jobs, resume=True, consume=consume)  # noqa: B023

        assert in_child(partial(run, rng.randrange(1, total * 9 // 10))) == -signal.SIGKILL
        check_nothing_half_done(output, final)
        in_child(partial(run, rng.randrange(1, total)))  # the second run may be killed too
        check_nothing_half_done(output, final)
        assert in_child(partial(run, 0)) == 0
        assert hashes(output) == final
        assert not (output / PARTIAL).exists()
        assert {path.name for path in mine.glob("*.safetensors")} == (set() if consume else shards)


def interrupted(source: Path, output: Path, make_plan: MakePlan, **options: Any) -> None:
    """Leave a run that was killed in the middle of writing down its second finished shard."""

    def run() -> None:
        Tripwire(3, kill, events=("write",))  # only the journal is written so
        convert(source, output, make_plan, jobs=1, **options)

    assert in_child(run) == -signal.SIGKILL
    assert (output / PARTIAL / "journal").read_bytes().count(b"\n") == 2
    assert not (output / "manifest.json").exists()


def test_resume_keeps_finished_shards(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    all_bytes = convert(source, tmp_path / "whole", make_plan)
    interrupted(source, output, make_plan)
    assert 0 < convert(source, output, make_plan, resume=True) < all_bytes
    assert hashes(output) == hashes(tmp_path / "whole")


def test_an_unfinished_output_needs_a_decision(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    interrupted(source, output, make_plan)
    with pytest.raises(PlanError, match="--resume goes on, --overwrite starts anew"):
        convert(source, output, make_plan)
    with pytest.raises(PlanError, match="exclude each other"):
        convert(source, output, make_plan, resume=True, overwrite=True)
    assert convert(source, output, make_plan, overwrite=True) > 0
    assert not (output / PARTIAL).exists()


def test_changed_options_refuse_to_resume(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    interrupted(source, output, make_plan)
    checkpoint = open_checkpoint(source)
    with pytest.raises(PlanError, match="begun with other options"):
        execute(
            make_plan(checkpoint, {"scheme": "u"}), checkpoint, output, RunOptions(resume=True, max_shard_size=SHARD)
        )
    with pytest.raises(PlanError, match="another --max-shard-size"):
        execute(make_plan(checkpoint), checkpoint, output, RunOptions(resume=True, max_shard_size=SHARD + 1))


def test_changed_source_refuses_to_resume(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    interrupted(source, output, make_plan)
    shard = source / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(PlanError, match="source changed.*model-00002-of-00002"):
        convert(source, output, make_plan, resume=True)


def test_a_torn_journal_line_is_ignored(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    convert(source, tmp_path / "whole", make_plan)
    interrupted(source, output, make_plan)
    with (output / PARTIAL / "journal").open("ab") as journal:
        journal.write(b'{"file": "model-00003')
    convert(source, output, make_plan, resume=True)
    assert hashes(output) == hashes(tmp_path / "whole")


def test_a_damaged_journal_is_one_message(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    interrupted(source, output, make_plan)
    begin = b'{"schema": 2, "plans": {"": "a"}, "source": {}}\n'
    for content in (b"not json\n", b"[]\n", b'{"plan": 1}\n', begin + b'{"file": 3}\n', b'{"schema": 9}\n'):
        (output / PARTIAL / "journal").write_bytes(content)
        with pytest.raises(PlanError, match=r"journal is damaged[\s\S]*--overwrite"):
            convert(source, output, make_plan, resume=True)


def test_two_runs_do_not_write_into_one_output(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    lock = OutputLock(output)
    try:
        with pytest.raises(PlanError, match="another run"):
            convert(source, output, make_plan, resume=True)
    finally:
        lock.release(finished=True)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, even if these tests were started in the background, where shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("restored_os", "interruptible")
def test_ctrl_c_is_one_line_and_resumable(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"
    convert(source, tmp_path / "whole", make_plan)
    Tripwire(60, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    with pytest.raises(TilewrightError, match=r"^[^\n]*interrupted\nhint: [^\n]*--resume[^\n]*$"):
        convert(source, output, make_plan)
    assert (output / PARTIAL).exists()
    convert(source, output, make_plan, resume=True)
    assert hashes(output) == hashes(tmp_path / "whole")


def raising(number: int) -> Callable[[], None]:
    def trip() -> None:
        raise OSError(number, os.strerror(number))

    return trip


@pytest.mark.usefixtures("restored_os")
@pytest.mark.parametrize(("number", "message"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "Read-only")])
def test_any_refused_write_is_resumable(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path, number: int, message: str
) -> None:
    source, output = make_source(), tmp_path / "out"
    convert(source, tmp_path / "whole", make_plan)
    final, before = hashes(tmp_path / "whole"), hashes(source)
    for at in (2, 3, 5, 30, 61, 75):  # the last ones only give the lock back
        wire = Tripwire(at, raising(number))
        with pytest.raises(TilewrightError, match=message):
            convert(source, output, make_plan)
        assert wire.count >= at
        check_nothing_half_done(output, final)
        convert(source, output, make_plan, resume=True)
        assert hashes(output) == final
        shutil.rmtree(output)
    assert hashes(source) == before


def test_a_full_disk_in_the_middle(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=False, capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        source = make_source(layers=6)
        convert(source, tmp_path / "whole", make_plan)
        ballast = small / "ballast"
        ballast.write_bytes(bytes(220 << 10))
        with pytest.raises(PlanError, match="are needed"):
            convert(source, small / "out", make_plan)
        with monkeypatch.context() as patch:
            patch.setattr("tilewright.packer.engine.preflight.disk_free", lambda output: 1 << 40)
            with pytest.raises(TilewrightError, match=r"disk is full[\s\S]*--resume"):
                convert(source, small / "out", make_plan)
            ballast.unlink()
            convert(source, small / "out", make_plan, resume=True)
        assert hashes(small / "out") == hashes(tmp_path / "whole")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_file_size_limit_is_a_full_disk(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(), tmp_path / "out"

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        with pytest.raises(TilewrightError, match="disk is full"):
            convert(source, output, make_plan)

    assert in_child(run) == 0
    assert convert(source, output, make_plan, resume=True) > 0


def consumed_in_part(source: Path, output: Path, make_plan: MakePlan) -> None:
    """Leave a run that was killed when it was about to delete its second source shard."""

    def run() -> None:
        Tripwire(2, kill, events=("unlink",))
        convert(source, output, make_plan, jobs=1, consume=True)

    assert in_child(run) == -signal.SIGKILL
    assert not (output / "manifest.json").exists()


def test_consume_does_not_mistake_a_lost_shard_for_a_used_one(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path
) -> None:
    source, output = make_source(shards=3), tmp_path / "out"
    consumed_in_part(source, output, make_plan)
    left = sorted(source.glob("*.safetensors"))
    used = {path.stem for path in (source / ".tilewright-consumed").iterdir()} - {path.name for path in left}
    assert len(left) == 2
    with pytest.raises(CheckpointError, match=f"1 of 3 shards were deleted by a run with --consume: `{used.pop()}"):
        convert(source, output, make_plan)
    left[-1].unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards are missing: `{left[-1].name}"):
        convert(source, output, make_plan, resume=True, consume=True)


def test_consumed_weights_are_not_thrown_away(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source, output = make_source(shards=3), tmp_path / "out"
    consumed_in_part(source, output, make_plan)
    other = make_source(name="other", seed=1)
    with pytest.raises(PlanError, match="only --resume"):
        convert(other, output, make_plan, overwrite=True)


def test_consume_refuses_links_into_a_cache(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    source = make_source()
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    with pytest.raises(PlanError, match="links into a cache"):
        convert(linked, tmp_path / "out", make_plan, consume=True)
