"""The shipped tiny models, quantized and packed once per run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.sources.checkpoint import open_checkpoint

MODELS = Path(__file__).parent.parent / "examples" / "models"


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """quantized(model, scheme, form=None): directory of a tiny model in that scheme; "none" is the model itself."""

    @cache
    def quantize(model: str, scheme: str, form: str | None = None) -> Path:
        if scheme == "none":
            return MODELS / model
        output = tmp_path_factory.mktemp("quantized") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(MODELS / model)
        execute(plan_quantize(source, QuantizeOptions(scheme, form)), source, output)
        return output

    return quantize


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, quantized: Callable[..., Path]) -> Callable[..., Path]:
    """packed(model, scheme, form=None): the same, packed for CPUs."""

    @cache
    def pack(model: str, scheme: str, form: str | None = None) -> Path:
        output = tmp_path_factory.mktemp("packed") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(quantized(model, scheme, form))
        execute(plan_pack(source, CpuTarget()), source, output)
        return output

    return pack
