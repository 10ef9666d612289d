"""Which kernel this machine can run, and one clear line where it is not the fast one.

The Gluon kernel leans on an experimental interface, so it runs on the releases of Triton it was tested with; every
other release gets the plain Triton kernel, which computes the same. Tuned sizes are data.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from dataclasses import dataclass

import torch

from ..errors import KernelUnavailableError

TESTED_TRITON = ("3.6.0",)
HOPPER = (9, 0)
FP8_SINCE = (8, 9)


@dataclass(frozen=True)
class Launch:
    """Sizes of the Gluon kernel.

    Attributes:
        blocks: Blocks of 64 weight rows for each of the two consumers: 1 or 2.
        tile_m: Most activation rows of a tile.
        stages: Depth of the ring that the producer fills.
        registers: Registers of a consumer thread.
        products: Products between two points where none is in flight, at most; loops that are longer than the
            instruction cache are slow.
        piece: Most activation rows of one product: 64 or 128.
        programs: Programs that share a multiprocessor.
        max_registers: Registers of a thread at the start; None leaves them to the compiler.
    """

    blocks: int
    tile_m: int
    stages: int
    registers: int
    products: int = 4
    piece: int = 64
    programs: int = 1
    max_registers: int | None = None


@dataclass(frozen=True)
class TritonLaunch:
    """Sizes of the plain Triton kernel, for tiles of `block_n` weight rows by `block_m` activation rows."""

    block_n: int
    block_m: int
    stages: int
    warps: int


# Most rows per expert, on average, that a line is for. Few rows hit few experts: tiles of half as many weight rows then
# occupy more multiprocessors. Many rows: the taller a tile, the less decoding for each row.
TUNED: tuple[tuple[float, Launch], ...] = (
    (8, Launch(blocks=1, tile_m=16, stages=8, registers=104, programs=2, max_registers=80)),
    (80, Launch(blocks=2, tile_m=96, stages=6, registers=240)),
    (float("inf"), Launch(blocks=1, tile_m=256, stages=4, registers=240, products=2, piece=128)),
)
# Most rows per expert, on average, that a line is for.
TUNED_TRITON: tuple[tuple[float, TritonLaunch], ...] = (
    (24, TritonLaunch(64, 16, 4, 4)),
    (96, TritonLaunch(128, 64, 4, 8)),
    (float("inf"), TritonLaunch(128, 128, 4, 8)),
)


def launch_for(rows: int, experts: int) -> Launch:
    """Sizes for `rows` activation rows over `experts` experts."""
    return next(launch for average, launch in TUNED if rows <= average * experts)


def triton_launch_for(rows: int, experts: int) -> TritonLaunch:
    """Sizes for `rows` activation rows over `experts` experts."""
    return next(launch for limit, launch in TUNED_TRITON if rows / experts <= limit)


@functools.cache
def triton_version() -> str | None:
    """The installed release of Triton, or None."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def use_gluon(capability: tuple[int, int], version: str | None) -> bool:
    """Whether the Gluon kernel runs on such a machine; otherwise plain Triton does, and one line says why.

    Raises:
        KernelUnavailableError: Neither kernel can run.
    """
    if version is None:
        raise KernelUnavailableError(
            "w4a8_grouped_mm: Triton is not installed", hint="install a CUDA build of torch, which brings it"
        )
    if capability < FP8_SINCE:
        raise KernelUnavailableError(
            f"w4a8_grouped_mm: this GPU has compute capability {capability[0]}.{capability[1]}, FP8 products need 8.9",
            hint="pack with `pack-for-cpu`, or use a GPU of the Ada or Hopper generation or later",
        )
    if capability == HOPPER and version in TESTED_TRITON:
        return True
    reason = (
        f"Triton {version} was not tested with the Hopper kernel ({', '.join(TESTED_TRITON)} was)"
        if capability == HOPPER
        else f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    )
    warnings.warn(f"w4a8_grouped_mm runs its plain Triton kernel, which is slower: {reason}", stacklevel=2)
    return False


@functools.cache
def gluon_on(device: int) -> bool:
    """Whether the Gluon kernel runs on the device of this index; see `use_gluon`."""
    return use_gluon(torch.cuda.get_device_capability(device), triton_version())
