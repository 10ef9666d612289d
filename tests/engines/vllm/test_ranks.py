"""Directories that were cut for two ranks, served by two processes of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare import BOUND, divergence

import tilewright

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def cut(source: Callable[[str], Path], tmp_path: Path) -> Callable[[str, str, int], Path]:
    """cut(family, scheme, ep): a model packed for two ranks."""

    def pack(family: str, scheme: str, ep: int) -> Path:
        checkpoint = source(family)
        if scheme != "none":
            tilewright.quantize(checkpoint, tmp_path / "quantized", scheme, progress=tilewright.Silent())
            checkpoint = tmp_path / "quantized"
        options = tilewright.PackOptions(tp=2, ep=ep)
        tilewright.pack(checkpoint, tmp_path / "cut", options, progress=tilewright.Silent())
        return tmp_path / "cut"

    return pack


@pytest.mark.parametrize(
    ("family", "ep"),
    [
        ("tiny-qwen3-moe", 1),
        pytest.param("tiny-qwen3-moe", 2, marks=pytest.mark.matrix),
        pytest.param("gemma3", 1, marks=pytest.mark.matrix),  # a tied head
        pytest.param("deepseek", 1, marks=pytest.mark.matrix),
    ],
)
def test_two_ranks_serve_the_model(family: str, ep: int, engine: Any, cut: Any, reference: Any) -> None:
    arguments = TWO | ({"enable_expert_parallel": True} if ep > 1 else {})
    assert divergence(reference(family), engine.distributions(cut(family, "none", ep), **arguments)) <= BOUND


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "scheme"), [("tiny-qwen3-moe", "w4afp8"), ("qwen3", "block-fp8"), ("gemma3", "int4")]
)
def test_two_ranks_are_as_good_as_one(
    family: str, scheme: str, engine: Any, cut: Any, served: Any, reference: Any
) -> None:
    wanted = reference(family)
    whole = divergence(wanted, engine.distributions(served(family, scheme)))
    assert divergence(wanted, engine.distributions(cut(family, scheme, 1), **TWO)) <= 1.1 * whole + BOUND
