"""Packed layers against float products: they agree, the check needs the right activation rounding, damage shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilewright.kernels.modules import PackedWeight, linear_kernels
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.verify.layers import check_layers, layer_names

QWEN, DEEPSEEK = "tiny-qwen3-moe", "tiny-deepseek-v3"
SCHEMES = ("block-fp8", "int8", "int4", "w4afp8")
Packed = Callable[[str, str], Path]


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_packed_layer_runs_and_agrees(model: str, scheme: str, packed: Packed) -> None:
    checkpoint = open_checkpoint(packed(model, scheme))
    results = list(check_layers(checkpoint))
    assert [result.name for result in results] == layer_names(checkpoint)
    config = json.loads((packed(model, scheme) / "config.json").read_text())
    sparse = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    assert sum(result.name.endswith(".experts") for result in results) == sparse
    assert all(0 < result.relative < 1e-2 for result in results), results


def test_the_reference_rounds_activations_as_the_kernel_does(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rounding of activations the int8 kernel would look as bad as that rounding is."""
    checkpoint = open_checkpoint(packed(QWEN, "int8"))
    right = {result.name: result.relative for result in check_layers(checkpoint)}
    monkeypatch.setattr(PackedWeight, "sees", lambda _, x: x)
    wrong = {result.name: result.relative for result in check_layers(checkpoint)}
    linear = "model.layers.0.self_attn.qkv_proj"
    assert wrong[linear] > 2 * right[linear]


def test_a_wrong_kernel_fails(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose last 16 output columns are off by a fifth: every Linear is above the threshold."""
    checkpoint = open_checkpoint(packed(QWEN, "block-fp8"))
    right = linear_kernels.LinearKernel.run

    def run(self: linear_kernels.LinearKernel, *arguments: object) -> torch.Tensor:
        y = right(self, *arguments)  # type: ignore[arg-type]
        return torch.cat((y[..., :-16], y[..., -16:] * 1.2), -1)

    monkeypatch.setattr(linear_kernels.LinearKernel, "run", run)
    linears = [result for result in check_layers(checkpoint) if not result.name.endswith(".experts")]
    assert len(linears) == 9
    assert all(result.relative > 1e-2 for result in linears)


def test_plain_and_quantized_directories_have_no_packed_layers(quantized: Callable[..., Path]) -> None:
    assert list(check_layers(open_checkpoint(quantized(QWEN, "int8")))) == []
