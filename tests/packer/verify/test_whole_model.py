"""Whole models out of directories: packed ones by the bundled kernels, the others in fp32, against the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tilewright  # noqa: E402
from tilewright.engines.transformers.model import load_model  # noqa: E402
from tilewright.kernels.ops.reference import quantize_rows  # noqa: E402
from tilewright.packer.checkpoint.files import open_checkpoint  # noqa: E402
from tilewright.packer.checkpoint.reading import read_contents  # noqa: E402
from tilewright.packer.verify.distributions import Agreement  # noqa: E402
from tilewright.packer.verify.options import VerifyOptions  # noqa: E402
from tilewright.packer.verify.results import LinearLoss, ModelResult  # noqa: E402
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens  # noqa: E402

MODELS = Path(__file__).parents[3] / "examples" / "models"
TEXT = MODELS / "heldout.txt"
QWEN, DEEPSEEK = "tiny-qwen3-moe", "tiny-deepseek-v3"
LARGEST_KL = {"block-fp8": 0.005, "int8": 0.005, "w4afp8": 0.005, "int4": 0.02}
Tensors = dict[str, torch.Tensor]
Packed = Callable[[str, str], Path]
Edit = Callable[[Path, Callable[[Tensors], None]], Path]


def run(reference: Path, candidate: Path, windows: int = 16) -> ModelResult:
    options = VerifyOptions("model", text=TEXT, windows=windows)
    result = tilewright.verify(reference, candidate, options).model
    assert result is not None
    return result


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("scheme", LARGEST_KL)
def test_packed_models_meet_their_bar(model: str, scheme: str, packed: Packed) -> None:
    result = run(MODELS / model, packed(model, scheme), windows=32)
    for part in (result.overall, result.decode):
        assert part is not None
        assert part.kl <= LARGEST_KL[scheme]
    assert result.overall.top1 >= (0.98 if scheme != "int4" else 0.97)
    ratio = result.overall.candidate_perplexity / result.overall.reference_perplexity
    assert 0.99 < ratio < 1.01
    assert all(layer.relative < 0.1 and layer.cosine > 0.99 for layer in result.drift)


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("scheme", ["int8", "w4afp8"])
def test_swapped_gate_and_up_miss_the_bar(model: str, scheme: str, packed: Packed, edit: Edit) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts.w13." in name]:
            tensors[name] = torch.cat(tensors[name].chunk(2, 1)[::-1], 1)

    assert run(MODELS / model, edit(packed(model, scheme), change)).overall.kl > LARGEST_KL[scheme]


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
def test_streamed_packed_model_is_the_whole_one(model: str, packed: Packed) -> None:
    """Logits of `load_model` in one forward, compared with the source by hand, give the streamed numbers."""
    path = packed(model, "int8")
    tokens = evenly_spaced_windows(read_tokens(MODELS / model, TEXT), 8, 64)
    source = transformers.AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32).eval()
    with torch.inference_mode():
        p, q = (m(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1) for m in (source, load_model(path)))
    options = VerifyOptions("model", text=TEXT, windows=8, window=64, decode_steps=0)
    result = tilewright.verify(MODELS / model, path, options).model
    assert result is not None
    assert result.decode is None
    assert result.overall.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-7)
    assert result.overall.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.005)


@pytest.mark.parametrize(("scheme", "form"), [("int4", "compressed-tensors")])
def test_quantized_model_is_what_transformers_makes_of_it(
    scheme: str, form: str, quantized: Callable[..., Path]
) -> None:
    """transformers' own loading of a quantized checkpoint gives the perplexity of the dequantized weights."""
    path = quantized(QWEN, scheme, form)
    result = run(MODELS / QWEN, path)
    tokens = evenly_spaced_windows(read_tokens(path, TEXT), 16, 128)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logs = model(input_ids=tokens).logits.float().log_softmax(-1)
    loss = -logs[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    assert result.overall.candidate_perplexity == pytest.approx(float(loss.exp()), rel=2e-3)
    assert result.overall.kl <= LARGEST_KL[scheme]


def test_the_loss_is_split_into_weights_and_activations(packed: Packed, quantized: Callable[..., Path]) -> None:
    """The part of the weights is what the quantized checkpoint loses in fp32; bf16 activations add nearly nothing."""
    options = VerifyOptions("model", text=TEXT, windows=8, window=64, decode_steps=2, split_loss=True)
    shares = {}
    for scheme in ("int8", "block-fp8"):
        found = tilewright.verify(MODELS / QWEN, packed(QWEN, scheme), options, progress=tilewright.Silent()).model
        assert found is not None
        assert found.weights_only is not None
        alone = tilewright.verify(MODELS / QWEN, quantized(QWEN, scheme), options, progress=tilewright.Silent()).model
        assert alone is not None
        assert alone.weights_only is None  # nothing is packed
        assert alone.advice == ""
        assert found.weights_only.kl == pytest.approx(alone.overall.kl, rel=0.02, abs=1e-7)
        shares[scheme] = found.weights_only.kl / found.overall.kl
        dominant = "weights" if shares[scheme] >= 0.5 else "activations"
        assert dominant in found.advice.partition(":")[0]
    assert shares["int8"] < shares["block-fp8"]
    with pytest.raises(tilewright.OptionError, match="belongs to --level model"):
        VerifyOptions(split_loss=True)


def test_the_worst_linears_are_named_with_what_they_add(packed: Packed) -> None:
    """The model of the source in memory, with one Linear as its kernel sees it, gives the same divergence."""
    path = packed(QWEN, "int8")
    options = VerifyOptions("model", text=TEXT, windows=4, window=64, decode_steps=0, split_loss=True)
    found = tilewright.verify(MODELS / QWEN, path, options, progress=tilewright.Silent()).model
    assert found is not None
    assert len(found.worst) == 10
    assert [loss.kl for loss in found.worst] == sorted((loss.kl for loss in found.worst), reverse=True)
    tokens = evenly_spaced_windows(read_tokens(MODELS / QWEN, TEXT), 4, 64)
    source = transformers.AutoModelForCausalLM.from_pretrained(MODELS / QWEN, dtype=torch.float32).eval()
    weights = read_contents(open_checkpoint(path)).weights

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        codes, scales = quantize_rows(inputs[0].flatten(0, -2))
        return ((codes * scales).reshape(inputs[0].shape),)

    with torch.inference_mode():
        wanted = source(input_ids=tokens).logits.log_softmax(-1)
        for loss in (found.worst[0], found.worst[-1]):
            linear = source.get_submodule(loss.name)
            kept, linear.weight.data = linear.weight.data, weights[f"{loss.name}.weight"].values()
            alone = source(input_ids=tokens).logits.log_softmax(-1)
            handle = linear.register_forward_pre_hook(rounded)
            both = source(input_ids=tokens).logits.log_softmax(-1)
            handle.remove()
            linear.weight.data = kept
            for logs, stated in ((alone, loss.weight_kl), (both, loss.kl)):
                assert stated == pytest.approx(
                    float((wanted.exp() * (wanted - logs)).sum(-1).mean()), rel=0.02, abs=1e-7
                )


def test_advice_leaves_few_linears_in_16_bits() -> None:
    agreement = Agreement(1, 1.0, 1.0, 0.1, 0.1, 1.0)
    losses = [LinearLoss("a", 0.06, 0.0), LinearLoss("b", 0.01, 0.0), LinearLoss("c", 0.002, 0.0)]
    result = ModelResult(1, 1, 0, agreement, None, (), replace(agreement, kl=0.01), tuple(losses))
    assert "activations" in result.advice
    assert result.outliers.startswith("--exclude a leaves")
    assert replace(result, worst=tuple(replace(loss, kl=0.01) for loss in losses)).outliers == ""
    assert replace(result, worst=()).outliers == ""
