"""Which kernel runs each packed module of a model, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .. import ops
from .weight import PackedWeight


@dataclass(frozen=True)
class KernelUse:
    """Which kernel runs one module.

    Attributes:
        module: Its name.
        layout: Id of its layout; empty for a module that stayed as it was, its packed weight unpacked.
        kernel: Operator and instruction set; the class of a module that stayed.
        faster: Each faster instruction set and why it is not taken; why a module stayed.
        activations: How they are rounded, `int8 by group of 128` for instance.
    """

    module: str
    layout: str
    kernel: str
    faster: tuple[str, ...]
    activations: str


_REASON = "_kept_because"


def keep_because(module: nn.Module, reason: str) -> None:
    """Note why a module of a model stays, although its weight was packed; `report_kernels` tells."""
    setattr(module, _REASON, reason)


def report_kernels(model: nn.Module) -> list[KernelUse]:
    """For each packed module below `model`: which kernel runs it, and why not a faster one, or none."""
    statuses = ops.kernel_report()
    chosen = next(number for number, status in enumerate(statuses) if status.chosen)
    faster = tuple(f"{status.name}: {status.reason}" for status in statuses[:chosen])
    uses = []
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            on_cpu = module.kernel.device == "cpu"
            kernel = f"{module.operator} on {statuses[chosen].name if on_cpu else module.kernel.device}"
            uses.append(KernelUse(name, module.spec.layout.id, kernel, faster if on_cpu else (), module.activations))
        elif reason := getattr(module, _REASON, ""):
            uses.append(KernelUse(name, "", type(module).__name__, (reason,), "as the module takes them"))
    return uses
