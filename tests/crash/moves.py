"""Change the source while it is quantized, packed and verified, and see how that ends.

    python tests/crash/moves.py FOLDER [--moments N]

Exit 0 only with the bytes of one source, as it was before or as it is after; never a signal; no manifest otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from children import command, fork, hashes, import_everything, wait
from scenarios import PACK, QUANTIZE, arguments, make_source

SHARD = "model-00002-of-00003.safetensors"


def truncate(path: Path) -> None:
    """Cut it."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Cut all of it."""
    os.truncate(path, 0)


def extend(path: Path) -> None:
    """Write something behind it."""
    with path.open("ab") as file:
        file.write(bytes(5000))


def rewrite(path: Path) -> None:
    """Change numbers in place."""
    with path.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(3000))


def replace(path: Path) -> None:
    """Put another file in its place."""
    other = path.with_suffix(".new")
    shutil.copyfile(path, other)
    rewrite(other)
    other.replace(path)


def remove(path: Path) -> None:
    """Delete it."""
    path.unlink()


CHANGES: tuple[Callable[[Path], None], ...] = (truncate, empty, extend, rewrite, replace, remove)
JOBS = {"quantize": (*QUANTIZE, "int8"), "pack": PACK, "verify": ("verify-accuracy",)}


def main() -> int:
    """Run what the arguments say, and print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=20, help="For each job and each kind of change.")
    options = parser.parse_args()
    import_everything()
    folder, log = options.folder, options.folder / "log"
    source, output, kept = folder / "source", folder / "out", folder / "kept"
    assert wait(fork(lambda: make_source(kept, False), log)) == 0
    assert wait(fork(command("quantize-model", *arguments(JOBS["quantize"], kept, folder / "int8")), log)) == 0
    found: dict[str, str] = {}
    runs = 0

    def start(job: str) -> int:
        words, last = JOBS[job], folder / "int8" if job == "verify" else output
        more = [] if job == "verify" else ["--jobs", "2"]
        return fork(command(words[0], *words[1:], *more, source, last), log)

    def fresh() -> None:
        for place in (source, output):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(kept, source)

    for job in JOBS:
        right: list[dict[str, str]] = []
        seconds = 0.0
        for change in (None, *CHANGES):
            fresh()
            if change:
                change(source / SHARD)
            began = time.monotonic()
            code = wait(start(job))
            seconds = seconds or time.monotonic() - began
            right.append(hashes(output) if code == 0 else {})
        for number, change in enumerate(CHANGES):
            for moment in range(options.moments):
                fresh()
                log.write_text("")
                child = start(job)
                time.sleep(seconds * (moment + random.Random(moment).random()) / options.moments)
                change(source / SHARD)
                code = wait(child)
                runs += 1
                tree = hashes(output) if output.exists() else {}
                good = tree in (right[0], right[number + 1]) if code == 0 else "manifest.json" not in tree
                if code not in {0, 1, 3} or not (good or job == "verify"):
                    found[f"{job}, {change.__name__}, moment {moment}"] = f"exit {code}: {log.read_text()[-300:]}"
                if code == 1 and "error: " not in log.read_text() or "Traceback" in log.read_text():
                    found[f"{job}, {change.__name__}, moment {moment}"] = log.read_text()[-300:]
    print(json.dumps({"runs": runs, "bad": len(found), "found": found}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
