"""What huge pages would gain: int8 linears whose weights lie in pages of 4 KiB or 2 MiB, mapped from a file or not.

    python benchmarks/bench_pages.py --out benchmarks/results/pages-NAME

All variants hold the same bytes. A round multiplies one token by every matrix of every variant, one after the other, as
a decode step does; the variants take turns. What the kernel really maps in huge pages is read from smaps.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench_linear import machine

from tilewright.kernels import ops

N = K = 4096
MATRIX = N * (K + 4)
SCALE = torch.ones(N)


@dataclass
class Variant:
    """One way to hold the weights: `memory` maps them, `rounds` are seconds for all matrices."""

    name: str
    memory: mmap.mmap
    rounds: list[float] = field(default_factory=list)

    def matrices(self) -> list[torch.Tensor]:
        """The weights, without a copy."""
        return list(torch.frombuffer(self.memory, dtype=torch.int8).view(-1, N, K + 4))

    def huge_bytes(self) -> int:
        """Bytes of it that are mapped in pages of 2 MiB."""
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        text = Path("/proc/self/smaps").read_text()
        for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)[1:]:
            start, end = (int(part, 16) for part in entry.split(" ", 1)[0].split("-"))
            if start <= address < end:
                return sum(int(n) << 10 for n in re.findall(r"(?:AnonHugePages|FilePmdMapped): +(\d+)", entry))
        return 0


def anonymous(content: bytes, huge: bool) -> mmap.mmap:
    """The bytes in memory of this process."""
    memory = mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory[:] = content
    return memory


def mapped(path: Path, content: bytes, huge: bool) -> mmap.mmap:
    """The bytes of a file that has just been written and dropped from the cache."""
    path.write_bytes(content)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = mmap.mmap(file.fileno(), len(content), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def measure(variants: list[Variant], seconds: float) -> None:
    """Rounds until `seconds` are over, after one that reads everything in."""
    x = torch.randn(1, K).bfloat16()
    weights = [variant.matrices() for variant in variants]
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        for variant, matrices in zip(variants, weights, strict=True):
            start = time.perf_counter()
            for matrix in matrices:
                ops.linear_int8(x, matrix, SCALE, N)
            if deadline is not None:
                variant.rounds.append(time.perf_counter() - start)
        deadline = deadline or time.monotonic() + seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=640, help="MiB of weights of each variant")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--work", type=Path, help="where the files are written")
    parser.add_argument("--out", type=Path, help="path of the results without suffix")
    options = parser.parse_args()
    content = os.urandom(MATRIX) * max(1, (options.size << 20) // MATRIX)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        variants = [
            Variant("file", mapped(Path(folder) / "plain", content, huge=False)),
            Variant("file, MADV_HUGEPAGE", mapped(Path(folder) / "huge", content, huge=True)),
            Variant("anonymous", anonymous(content, huge=False)),
            Variant("anonymous, MADV_HUGEPAGE", anonymous(content, huge=True)),
        ]
        measure(variants, options.seconds)
        base = statistics.median(variants[0].rounds)
        lines = ["# Pages", "", "Machine: " + ", ".join(f"{k} {v}" for k, v in machine().items()) + ".", ""]
        lines += [
            f"Command: `python {' '.join(sys.argv)}`.",
            "",
            f"{len(content) >> 20} MiB of int8 matrices, M = 1.",
            "",
        ]
        lines += ["| weights in | huge pages | GB/s | x |", "|---|---:|---:|---:|"]
        for variant in variants:
            median, huge = statistics.median(variant.rounds), variant.huge_bytes() / len(content)
            lines.append(f"| {variant.name} | {huge:.0%} | {len(content) / median / 1e9:.1f} | {base / median:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
