"""Streamed runs give what the whole model in memory gives, by transformers' own loading and forward."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tilewright.packer.checkpoint.contents import Contents, LogicalTensor  # noqa: E402
from tilewright.packer.verify.dequantized import stream_dequantized  # noqa: E402
from tilewright.packer.verify.model import compare_models  # noqa: E402
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens  # noqa: E402

MODELS = Path(__file__).parents[3] / "examples" / "models"
TINY = ("tiny-qwen3-moe", "tiny-deepseek-v3")
DECODE = 3


def contents(path: Path, noise: float = 0.0) -> Contents:
    torch.manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    if noise:
        tensors = {
            k: v + noise * v.float().std() * torch.randn_like(v) if v.dim() == 2 else v for k, v in tensors.items()
        }
    weights = {k: LogicalTensor(k, tuple(v.shape), None, lambda v=v: v) for k, v in tensors.items()}
    return Contents(str(path), weights, {}, {})


@pytest.fixture(scope="module", params=TINY)
def path(request: pytest.FixtureRequest) -> Path:
    return MODELS / request.param


@pytest.fixture(scope="module")
def windows(path: Path) -> torch.Tensor:
    return evenly_spaced_windows(read_tokens(path, MODELS / "heldout.txt"), 9, 40)


def whole(path: Path, windows: torch.Tensor, tensors: Contents) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states after each layer, and logits, of the model in memory; one forward without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    perturbed = {name: weight.values() for name, weight in tensors.weights.items()}
    for name, parameter in model.named_parameters():
        if "experts.gate_up_proj" in name or name.endswith("experts.down_proj"):
            base, kind = name.rsplit(".", 1)
            for e in range(parameter.shape[0]):
                parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                parameter.data[e] = torch.cat([perturbed[f"{base}.{e}.{part}.weight"] for part in parts])
        else:
            parameter.data = perturbed[name]
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        logits = model(input_ids=windows, use_cache=False).logits
    return seen, logits


def test_streamed_numbers_are_those_of_the_whole_model(path: Path, windows: torch.Tensor) -> None:
    sides = contents(path), contents(path, noise=0.05)
    config = transformers.AutoConfig.from_pretrained(path)
    streams = [stream_dequantized(config, side) for side in sides]
    result = compare_models(streams[0], streams[1], windows, DECODE)
    (ours, p), (theirs, q) = (whole(path, windows, side) for side in sides)

    assert len(result.drift) == len(ours) == config.num_hidden_layers
    for drift, a, b in zip(result.drift, ours, theirs, strict=True):
        assert drift.relative == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-4)
        assert drift.cosine == pytest.approx(float(F.cosine_similarity(a, b, dim=-1).mean()), abs=1e-5)
    for agreement, part in ((result.overall, slice(None)), (result.decode, slice(-DECODE, None))):
        assert agreement is not None
        logs = [F.log_softmax(logits[:, part].double(), -1) for logits in (p, q)]
        kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        assert agreement.positions == kl.numel()
        assert agreement.kl == pytest.approx(float(kl.mean()), rel=1e-3)
        assert agreement.kl_largest == pytest.approx(float(kl.max()), rel=1e-3)
        assert agreement.top1 == pytest.approx(float((logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean()))
        shifted = windows[:, 1:] if part == slice(None) else windows[:, -DECODE + 1 :]
        for logits, perplexity in zip(
            logs, (agreement.reference_perplexity, agreement.candidate_perplexity), strict=True
        ):
            loss = F.nll_loss(logits[:, :-1].flatten(0, 1), shifted.flatten())
            assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_equal_models_agree_and_decode_as_they_prefill(path: Path, windows: torch.Tensor) -> None:
    config = transformers.AutoConfig.from_pretrained(path)
    side = contents(path)
    result = compare_models(stream_dequantized(config, side), stream_dequantized(config, side), windows, DECODE)
    assert result.overall.kl == 0
    assert result.overall.top1 == 1
    assert all(drift.relative == 0 for drift in result.drift)
    assert 2 < result.overall.reference_perplexity < 12


def test_one_layer_is_in_memory_at_a_time(path: Path, windows: torch.Tensor) -> None:
    config = transformers.AutoConfig.from_pretrained(path)
    stream = stream_dequantized(config, contents(path))
    layers = [layer for _, layer in stream._layers]

    def filled() -> list[int]:
        return [i for i, layer in enumerate(layers) if any(not p.is_meta for p in layer.parameters())]

    assert filled() == []
    for index in range(stream.depth):
        with stream.layer(index):
            assert filled() == [index]
    assert filled() == []
