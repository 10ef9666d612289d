"""The native library: loads it, and says which instruction set it runs on."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from .errors import KernelUnavailableError


@dataclass(frozen=True)
class IsaStatus:
    """One instruction set that the kernels were compiled for.

    Attributes:
        name: As in kernels/csrc/cpu/instruction_sets.def; `amx_emu` is AMX on tiles in software.
        available: Whether this machine can run it.
        chosen: Whether the kernels run on it.
        reason: Why it was not taken; None if it was.
    """

    name: str
    available: bool
    chosen: bool
    reason: str | None


def isa() -> str:
    """Name of the instruction set that the kernels run on."""
    return str(torch.ops.tilewright.isa())


def kernel_report() -> tuple[IsaStatus, ...]:
    """Every instruction set, best first, with the reason why it was not taken."""
    chosen = isa()
    result = []
    passed = False
    for line in str(torch.ops.tilewright.isa_report()).splitlines():
        name, missing, note = line.split("\t")
        passed = passed or name == chosen
        reason = missing or note or (f"`{chosen}` is better" if passed else f"`{chosen}` was asked for")
        result.append(IsaStatus(name, not missing, name == chosen, None if name == chosen else reason))
    return tuple(result)


def select_isa(name: str) -> None:
    """Run the kernels on the instruction set `name` from now on; "" is the best that this machine has.

    For tests and measurements; users set TILEWRIGHT_ISA.

    Raises:
        KernelUnavailableError: There is none of this name, or the machine cannot run it.
    """
    problem = str(torch.ops.tilewright.select_isa(name))
    if problem:
        lines = "".join(f"\n  {status.name}: {status.reason or 'chosen'}" for status in kernel_report())
        raise KernelUnavailableError(
            f"instruction set: {problem}{lines}",
            hint="TILEWRIGHT_ISA can only lower the choice; unset it to take the best",
        )


def release_scratch() -> None:
    """Frees the memory that this thread and its helpers keep between calls; docs/runtime.md says how much that is.

    Results do not change, and the next call allocates again what it needs. Threads of other callers keep theirs.
    """
    torch.ops.tilewright.release_scratch()


def _load() -> None:
    spec = importlib.util.find_spec(f"{__package__}._C")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError(
            "the native library of tilewright is not built",
            hint="install it with `pip install --no-build-isolation .`, with torch and a C++ compiler present",
        )
    torch.ops.load_library(spec.origin)
    select_isa(os.environ.get("TILEWRIGHT_ISA", ""))


_load()
