"""Start two or three runs on one output at nearly the same time, in every mixture, and see what they leave.

    python tests/crash/races.py FOLDER [--starts N]

Runs that exit 0 leave the right tree; if none does, what was there is untouched. Nobody dies of a signal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from children import command, fork, hashes, import_everything, wait
from scenarios import QUANTIZE, arguments, make_source

HOW = ((), ("--resume",), ("--overwrite",))
MIXTURES = [mix for count in (2, 3) for mix in itertools.combinations_with_replacement(HOW, count)]
BEFORE = ("nothing", "finished", "unfinished")


def main() -> int:
    """Run what the arguments say, and print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--starts", type=int, default=200)
    options = parser.parse_args()
    import_everything()
    folder, log = options.folder, options.folder / "log"
    source, output, states = folder / "source", folder / "out", {"nothing": None}
    assert wait(fork(lambda: make_source(source, False), log)) == 0
    wanted, other = (*QUANTIZE, "int8"), (*QUANTIZE, "block-fp8")

    def convert(words: tuple[str, ...], place: Path, *more: str) -> int:
        return fork(command(words[0], *arguments(words, source, place, *more)), log)

    began = time.monotonic()
    assert wait(convert(wanted, folder / "final")) == 0, log.read_text()
    seconds = time.monotonic() - began
    final = hashes(folder / "final")
    assert wait(convert(other, folder / "finished")) == 0, log.read_text()
    (folder / "unfinished").mkdir()
    shutil.copytree(folder / "finished", folder / "unfinished" / ".tilewright-partial")
    states |= {name: folder / name for name in BEFORE[1:]}
    found: dict[str, str] = {}
    for start in range(options.starts):
        rng = random.Random(start)
        mixture, before = MIXTURES[start % len(MIXTURES)], BEFORE[start // len(MIXTURES) % len(BEFORE)]
        shutil.rmtree(output, ignore_errors=True)
        if states[before]:
            shutil.copytree(states[before], output)
        untouched = hashes(output)
        log.write_text("")
        children = []
        for how in mixture:
            children.append(convert(wanted, output, *how))
            time.sleep(rng.choice((0, 0.01, 0.1, seconds)) * rng.random())
        codes = [wait(child) for child in children]
        right = final if 0 in codes else untouched
        if not set(codes) <= {0, 1} or hashes(output) != right:
            found[f"start {start}"] = f"{before}, {mixture}: exit codes {codes}, {log.read_text()[-300:]}"
    print(json.dumps({"starts": options.starts, "bad": len(found), "found": found}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
