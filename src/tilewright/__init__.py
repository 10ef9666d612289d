"""Tilewright: quantize and pack Hugging Face checkpoints offline, and run the packed layers as they lie on disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines.transformers.model import load_model
    from .kernels.errors import (
        CheckpointError,
        InterruptError,
        KernelUnavailableError,
        LayoutError,
        OptionError,
        PlanError,
        PublishError,
        SchemeError,
        TilewrightError,
        VerifyError,
    )
    from .kernels.packed.directory import load_packed
    from .packer.engine.job import RunOptions
    from .packer.inspect import Inspection
    from .packer.jobs.calibration import CalibrationOptions
    from .packer.jobs.conversion import ConversionResult
    from .packer.jobs.inspect import inspect
    from .packer.jobs.pack import PackOptions, pack, unpack
    from .packer.jobs.publish import PublishOptions, PublishResult, publish
    from .packer.jobs.quantize import quantize
    from .packer.jobs.repair import Repair, RepairOptions, repair
    from .packer.progress import Progress, Silent
    from .packer.quantize.options import QuantizeOptions
    from .packer.verify.options import Thresholds, VerifyOptions
    from .packer.verify.verdict import Verification
    from .verification import verify, verify_served

__version__ = "0.2.0"

# Imported when they are first asked for: nothing of what converts is needed to serve, load_model needs transformers.
_LAZY = {
    "load_packed": "kernels.packed.directory",
    "load_model": "engines.transformers.model",
    "quantize": "packer.jobs.quantize",
    "pack": "packer.jobs.pack",
    "unpack": "packer.jobs.pack",
    "verify": "verification",
    "verify_served": "verification",
    "inspect": "packer.jobs.inspect",
    "publish": "packer.jobs.publish",
    "repair": "packer.jobs.repair",
    "QuantizeOptions": "packer.quantize.options",
    "CalibrationOptions": "packer.jobs.calibration",
    "PackOptions": "packer.jobs.pack",
    "RunOptions": "packer.engine.job",
    "PublishOptions": "packer.jobs.publish",
    "PublishResult": "packer.jobs.publish",
    "Repair": "packer.jobs.repair",
    "RepairOptions": "packer.jobs.repair",
    "VerifyOptions": "packer.verify.options",
    "Thresholds": "packer.verify.options",
    "ConversionResult": "packer.jobs.conversion",
    "Verification": "packer.verify.verdict",
    "Inspection": "packer.inspect",
    "Progress": "packer.progress",
    "Silent": "packer.progress",
} | dict.fromkeys(
    (
        "TilewrightError",
        "CheckpointError",
        "InterruptError",
        "KernelUnavailableError",
        "LayoutError",
        "OptionError",
        "PlanError",
        "PublishError",
        "SchemeError",
        "VerifyError",
    ),
    "kernels.errors",
)
__all__ = [
    "CalibrationOptions",
    "CheckpointError",
    "ConversionResult",
    "Inspection",
    "InterruptError",
    "KernelUnavailableError",
    "LayoutError",
    "OptionError",
    "PackOptions",
    "PlanError",
    "Progress",
    "PublishError",
    "PublishOptions",
    "PublishResult",
    "QuantizeOptions",
    "Repair",
    "RepairOptions",
    "RunOptions",
    "SchemeError",
    "Silent",
    "Thresholds",
    "TilewrightError",
    "Verification",
    "VerifyError",
    "VerifyOptions",
    "__version__",
    "inspect",
    "load_model",
    "load_packed",
    "pack",
    "publish",
    "quantize",
    "repair",
    "unpack",
    "verify",
    "verify_served",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{name} needs transformers; install it with: pip install 'tilewright[hf]'") from error


def __dir__() -> list[str]:
    return __all__
