"""Everything that a verification found, whether it passes, and its JSON form."""

from __future__ import annotations

import contextlib
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewright import __version__
from tilewright.kernels.formats import FORMATS

from ..families.experts import LONG
from ..records.manifest import FileCheck
from .histograms import Histogram
from .options import Level, Thresholds, VerifyOptions
from .report import write_report
from .results import LayerResult, ModelResult
from .weights import TensorResult

NAME = re.compile(r"^(?P<head>.*?)(?:layers|blocks|h)\.(?P<layer>\d+)\.(?P<module>.*?)(?:\.weight)?$")


@dataclass(frozen=True)
class Verification:
    """The outcome of one run of `verify-accuracy`.

    Attributes:
        reference: What it was compared with.
        candidate: What was verified.
        level: How far it went.
        thresholds: What passes.
        tensors: Every tensor, worst first.
        histograms: Codes and scales by format id.
        layers: Every packed layer, worst first; None below level `layers`.
        model: Whole-model numbers; None below level `model`.
        notes: Things worth telling.
        files: Files compared with their manifests; None without any, or if that was not asked for.
        wrong_pair: What says that the two do not belong together.
        options: What was asked for; names the text and the command.
        manifest: SHA-256 of the candidate's manifest.json, which says what exactly was verified; None without one.
    """

    reference: str
    candidate: str
    level: Level
    thresholds: Thresholds
    tensors: Sequence[TensorResult]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    layers: Sequence[LayerResult] | None = None
    model: ModelResult | None = None
    notes: Sequence[str] = ()
    files: FileCheck | None = None
    wrong_pair: Sequence[str] = ()
    options: VerifyOptions | None = None
    manifest: str | None = None

    def failures(self) -> list[str]:
        """One line for each thing below its threshold, empty if all passes.

        A wrong pair comes first, then damaged files, then the worst of each level.
        """
        lines = list(self.files.damaged) if self.files else []
        lines += [f"{result.name}: {result.status}: {result.note}" for result in self.tensors if result.failed]
        limit = self.thresholds.layer_error
        bad = [layer for layer in self.layers or () if not layer.relative <= limit]
        lines += [f"{layer.name}: kernel output is off by {layer.relative:.3g}, allowed {limit:.3g}" for layer in bad]
        if self.model and not self.model.overall.kl <= self.thresholds.kl:
            lines.append(f"model: KL divergence {self.model.overall.kl:.3g}, allowed {self.thresholds.kl:.3g}")
        return [*self.wrong_pair, *lines] if lines else []

    @property
    def passed(self) -> bool:
        """Whether nothing is below its threshold."""
        return not self.failures()

    def write_report(self, path: str | Path) -> None:
        """Write a self-contained HTML page."""
        write_report(self.to_json(), Path(path))

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; what is not finite is null."""
        failures = self.failures()
        document = {
            "tool": f"tilewright {__version__}",
            "versions": _versions(),
            "command": self.options.command(self.reference, self.candidate) if self.options else None,
            "text": str(self.options.text) if self.options and self.options.text else None,
            "verdict": "fail" if failures else "pass",
            "failures": failures,
            "notes": list(self.notes),
            "reference": self.reference,
            "candidate": self.candidate,
            "manifest": self.manifest,
            "level": self.level,
            "thresholds": asdict(self.thresholds),
            "files": asdict(self.files) if self.files else None,
            "weights": {
                "tensors": [_tensor(result) for result in self.tensors],
                "formats": summarize(self.tensors),
                "histograms": {name: found.to_json(FORMATS[name]) for name, found in self.histograms.items()},
            },
            "layers": None if self.layers is None else [asdict(layer) for layer in self.layers],
            "model": asdict(self.model) | {"advice": self.model.advice, "outliers": self.model.outliers}
            if self.model
            else None,
        }
        finite: dict[str, Any] = _finite(document)
        return finite


def _versions() -> dict[str, str]:
    """Of what has computed the figures."""
    found = {"tilewright": __version__, "Python": platform.python_version()}
    for package in ("torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def summarize(tensors: Sequence[TensorResult]) -> dict[str, dict[str, Any]]:
    """For each format: how many tensors, the root mean square of their relative errors, the worst of each figure."""
    summary: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(result.format for result in tensors if result.format):
        found = [result for result in tensors if result.format == name and result.error]
        errors = [result.error for result in found if result.error]
        summary[str(name)] = {
            "tensors": len(found),
            "weights": sum(math.prod(result.shape) for result in found),
            "relative_error": math.sqrt(sum(error.relative**2 for error in errors) / max(len(errors), 1)),
            "worst_relative_error": max((error.relative for error in errors), default=0.0),
            "worst_ratio": max((error.ratio for error in errors), default=0.0),
        }
    return summary


def _tensor(result: TensorResult) -> dict[str, Any]:
    place = NAME.match(result.name)
    module = place["head"] + place["module"] if place else result.name.removesuffix(".weight")
    error = result.error
    return {
        "name": result.name,
        "layer": int(place["layer"]) if place else None,
        "module": re.sub(rf"\b({LONG.container})\.\d+\.", r"\1.*.", module).removeprefix("model."),
        "shape": list(result.shape),
        "format": result.format,
        "status": result.status,
        "relative_error": error.relative if error else None,
        "bound": error.bound if error else None,
        "ratio": error.ratio if error else None,
        "outliers": len(error.outliers) if error else 0,
        "max_error": error.largest if error else None,
        "sqnr_db": error.sqnr_db if error else None,
        "note": result.note,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
