"""Kill conversions at every change that they make to a disk, and see how each ends.

    LD_PRELOAD=shim.so python tests/crash/crash.py FOLDER [--every N] [--random N] [--scenario NAME] [--jobs N]

`tests/test_crash.py` compiles the shim and runs a slice; `make crash-test` runs all. Each run is a child forked from
this process, which has imported everything and computed nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from children import command, fork, hashes, import_everything, wait
from scenarios import SCENARIOS, Scenario, arguments, make_source, wrong

SHIM = ctypes.CDLL(None)


class Bench:
    """A scenario with its template: source, and output as it is before the run."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.log = folder / "log"
        self.run_name = "run"
        self.template = folder / "template"
        self.template.mkdir(parents=True)
        assert wait(fork(lambda: make_source(self.template / "source", scenario.calibrated), self.log)) == 0
        self.shards = {path.name for path in (self.template / "source").glob("*.safetensors")}
        if scenario.earlier:
            code = self.convert(self.template, scenario.earlier, kill=scenario.earlier_kill)
            assert code == (-signal.SIGKILL if scenario.earlier_kill else 0), self.log.read_text()
        whole = self.fresh("whole")
        plain = tuple(word for word in scenario.command if word not in {"--overwrite"})
        shutil.rmtree(whole / "output", ignore_errors=True)
        assert self.convert(whole, plain) == 0, self.log.read_text()
        self.final = hashes(whole / "output")
        counted = self.fresh("counted")
        self.points = self.count(counted)

    def fresh(self, name: str) -> Path:
        """A copy of the template; times are kept, since they are part of what a source is."""
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.template, place)
        return place

    def _run(self, place: Path, words: tuple[str, ...], more: tuple[str, ...], kill: int, tell: int = -1) -> None:
        SHIM.crash_arm(str(place).encode(), ctypes.c_long(kill))
        try:
            command(words[0], *arguments(words, place / "source", place / "output", *more))()
        finally:
            if tell >= 0:
                SHIM.crash_count.restype = ctypes.c_long
                os.write(tell, str(SHIM.crash_count()).encode())

    def start(self, place: Path, words: tuple[str, ...], *more: str, kill: int = 0) -> int:
        """Start the command in a child."""
        return fork(lambda: self._run(place, words, more, kill), self.log)

    def convert(self, place: Path, words: tuple[str, ...], *more: str, kill: int = 0) -> int:
        """Run the command in a child; its exit code, or minus its signal."""
        return wait(self.start(place, words, *more, kill=kill))

    @property
    def more(self) -> tuple[str, ...]:
        """What is added to the command of the run that is killed."""
        return ("--resume",) if self.scenario.resumes else ()

    def count(self, place: Path) -> int:
        """How many changes of the disk the run makes."""
        reading, writing = os.pipe()
        child = fork(lambda: self._run(place, self.scenario.command, self.more, 0, writing), self.log)
        assert wait(child) == 0, self.log.read_text()
        total = int(os.read(reading, 20))
        os.close(reading)
        os.close(writing)
        assert not wrong(self.scenario, place / "source", place / "output", self.final, self.shards, hashes)
        return total

    def end(self, place: Path) -> str:
        """Go on as a user would, and say what is wrong with the result."""
        words = tuple(word for word in self.scenario.command if word != "--overwrite")
        codes = [self.convert(place, words, "--resume")]
        if codes[-1] == 1 and "--overwrite" in self.scenario.command:
            codes.append(self.convert(place, self.scenario.command))
        if codes[-1] != 0:
            return f"exit codes {codes}: {self.log.read_text()[-300:]}"
        again = self.convert(place, words, "--resume")  # so that a loop until success ends
        if again != 0:
            return f"--resume on the finished output exits {again}: {self.log.read_text()[-300:]}"
        return wrong(self.scenario, place / "source", place / "output", self.final, self.shards, hashes)

    def at_point(self, point: int) -> str:
        """Kill the run at one change of the disk."""
        self.log.write_text("")
        place = self.fresh(self.run_name)
        code = self.convert(place, self.scenario.command, *self.more, kill=point)
        if code not in {-signal.SIGKILL, 0}:
            return f"exit code {code}: {self.log.read_text()[-300:]}"
        return self.end(place)

    def at_random(self, rng: random.Random, seconds: float) -> str:
        """Kill the run, and what goes on with it, whenever."""
        self.log.write_text("")
        place = self.fresh(self.run_name)
        first, later = (self.scenario.command, *self.more), (*self.scenario.command, "--resume")
        for words in (first, tuple(word for word in later if word != "--overwrite")):
            child = self.start(place, words)
            time.sleep(rng.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            wait(child)
        return self.end(place)

    def in_parallel(self, kills: Sequence[tuple[str, int]], seconds: float, jobs: int) -> dict[str, str]:
        """Try all of them in so many processes, each with a folder of its own; what is wrong with which."""

        def work(number: int) -> None:
            self.log, self.run_name = self.folder / f"log-{number}", f"run-{number}"
            found = {}
            for kind, at in kills[number::jobs]:
                rng = random.Random(f"{self.scenario.name} {at}")
                if problem := self.at_point(at) if kind == "point" else self.at_random(rng, seconds):
                    found[f"{kind} {at}"] = problem
            (self.folder / f"found-{number}.json").write_text(json.dumps(found))

        workers = [fork(partial(work, number), self.log, limit=0) for number in range(jobs)]
        assert [wait(worker) for worker in workers] == [0] * jobs, self.log.read_text()
        files = [self.folder / f"found-{number}.json" for number in range(jobs)]
        return {name: problem for file in files for name, problem in json.loads(file.read_text()).items()}


def main() -> int:
    """Run what the arguments say, and print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="Processes that kill side by side.")
    parser.add_argument("--every", type=int, default=1, help="Only every Nth point of each scenario.")
    parser.add_argument("--random", type=int, default=0, help="Kills at random moments, over all scenarios.")
    parser.add_argument("--scenario", action="append", help="Only these.")
    options = parser.parse_args()
    import_everything()
    report: dict[str, dict[str, object]] = {}
    bad = 0
    chosen = [one for one in SCENARIOS if not options.scenario or one.name in options.scenario]
    for number, scenario in enumerate(chosen):
        began = time.monotonic()
        bench = Bench(scenario, options.folder / scenario.name)
        whole = time.monotonic()
        bench.convert(bench.fresh("run"), scenario.command, *bench.more)
        seconds = time.monotonic() - whole
        points = range(1 + number % options.every, bench.points + 1, options.every)
        kills = options.random // len(chosen) + (number < options.random % len(chosen))
        tried = [("point", point) for point in points] + [("random kill", kill) for kill in range(kills)]
        found = bench.in_parallel(tried, seconds, options.jobs)
        bad += len(found)
        report[scenario.name] = {"changes": bench.points, "points": len(points), "random": kills, "bad": found}
        report[scenario.name]["seconds"] = round(time.monotonic() - began)
        print(scenario.name, json.dumps(report[scenario.name]), file=sys.stderr, flush=True)
        shutil.rmtree(bench.folder)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    totals = {key: sum(int(str(one[key])) for one in report.values()) for key in ("points", "random")}
    print(json.dumps({**totals, "bad": bad, "cpu_seconds": round(used.ru_utime + used.ru_stime), "scenarios": report}))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
