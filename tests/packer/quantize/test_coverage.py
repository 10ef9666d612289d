"""What no rule knows is told, counted, and refused by --min-coverage; Conv1D is read as what it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import tilewright
from tilewright.kernels.packed.directory import load_packed
from tilewright.packer.progress import Silent

Write = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Write:
    """source(model_type, tensors): a checkpoint of these tensors."""

    def write(model_type: str | None, tensors: dict[str, torch.Tensor]) -> Path:
        root = tmp_path / "source"
        root.mkdir()
        (root / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
        save_file(tensors, root / "model.safetensors")
        return root

    return write


def weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {
        **{f"model.layers.{layer}.self_attn.q_proj.weight": (64, 96) for layer in range(2)},
        **{f"model.layers.{layer}.odd.mixing.weight": (32, 96) for layer in range(2)},
        "model.stack": (2, 4, 96),
        "model.embed_tokens.weight": (500, 96),
    }
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def test_the_share_of_unknown_names_is_told_and_refused(source: Write, tmp_path: Path) -> None:
    root = source("nobody_knows", weights(torch.Generator().manual_seed(0)))
    result = tilewright.quantize(root, tmp_path / "out", "int8", progress=Silent())
    known, unknown = 2 * 64 * 96, 2 * 32 * 96 + 2 * 4 * 96
    share = f"{100 * unknown / (known + unknown):.1f} % of the weights in matrices ({unknown} of {known + unknown})"
    told = [note for note in result.notes if share in note]
    assert len(told) == 1
    assert "model.layers.{0-1}.odd.mixing.weight, model.stack" in told[0]
    assert any("model_type `nobody_knows` is not known to Tilewright" in note for note in result.notes)
    ledger = json.loads((tmp_path / "out" / "ledger.json").read_text())
    assert set(told) < set(ledger["notes"])
    enough = known / (known + unknown)
    options = tilewright.QuantizeOptions("int8", min_coverage=enough - 1e-6)
    tilewright.quantize(root, tmp_path / "enough", options, progress=Silent())
    options = tilewright.QuantizeOptions("int8", min_coverage=enough + 1e-6)
    with pytest.raises(tilewright.TilewrightError, match=r"--min-coverage .* % of the weights") as caught:
        tilewright.quantize(root, tmp_path / "more", options, progress=Silent())
    assert "odd.mixing" in str(caught.value)
    assert not (tmp_path / "more").exists()


def test_what_was_asked_for_is_not_counted(source: Write, tmp_path: Path) -> None:
    root = source("llama", weights(torch.Generator().manual_seed(1)))
    exclude = ("odd", "model.stack")
    options = tilewright.QuantizeOptions("int8", exclude=("odd",), min_coverage=1.0)
    with pytest.raises(tilewright.TilewrightError, match=r"model\.stack"):
        tilewright.quantize(root, tmp_path / "out", options, progress=Silent())
    included = tilewright.QuantizeOptions("int8", include=("odd",), exclude=exclude[1:], min_coverage=0.9)
    tilewright.quantize(root, tmp_path / "included", included, progress=Silent())


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(tilewright.OptionError, match="a share from 0 to 1"):
        tilewright.QuantizeOptions("int8", min_coverage=share)


def write_gpt2(root: Path, width: int) -> Path:
    torch.manual_seed(width)
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes), dtype=torch.bfloat16)
    model.save_pretrained(root)
    return root


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("gpt2") / "model", 128)


@pytest.mark.parametrize("scheme", ["none", "int8", "block-fp8", "int4"])
def test_conv1d_is_multiplied_as_transformers_does(scheme: str, gpt2: Path, tmp_path: Path) -> None:
    quantized = gpt2
    if scheme != "none":
        options = tilewright.QuantizeOptions(scheme, min_coverage=1.0)
        quantized = tmp_path / "quantized"
        notes = tilewright.quantize(gpt2, quantized, options, progress=Silent()).notes
        assert any("is a Conv1D in transformers" in note for note in notes)
        assert tilewright.verify(gpt2, quantized, progress=Silent()).passed
    tilewright.pack(quantized, tmp_path / "packed", progress=Silent())
    assert tilewright.verify(gpt2, tmp_path / "packed", progress=Silent()).passed
    packed = load_packed(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    assert len(linears) == 8
    for name, module in linears.items():
        x = torch.randn(7, module.nx).to(torch.bfloat16)
        wanted = module(x.float())
        error = (packed[name](x).float() - wanted).norm() / wanted.norm()
        assert error < {"none": 0.01, "int8": 0.03, "block-fp8": 0.06, "int4": 0.2}[scheme], name
    tilewright.unpack(tmp_path / "packed", tmp_path / "back", progress=Silent())
    before, after = (load_file(root / "model.safetensors") for root in (quantized, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name].reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8))
        for name in before
    )


def test_what_is_dequantized_of_a_conv1d_is_stored_transposed_again(tmp_path: Path) -> None:
    source = write_gpt2(tmp_path / "source", 96)
    tilewright.quantize(source, tmp_path / "int8", "int8", progress=Silent())
    name = "transformer.h.0.attn.c_attn.weight"
    before = load_file(tmp_path / "int8" / "model.safetensors")
    assert before[name].shape == (288, 96)
    tilewright.quantize(tmp_path / "int8", tmp_path / "int4", "int4", progress=Silent())  # 96 columns: no whole group
    after = load_file(tmp_path / "int4" / "model.safetensors")[name]
    values = before[name].float() * before[f"{name}_scale"]
    assert torch.equal(after, values.T.to(torch.bfloat16))
    assert tilewright.verify(tmp_path / "int8", tmp_path / "int4", progress=Silent()).passed
