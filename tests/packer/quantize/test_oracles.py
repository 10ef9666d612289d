"""What other software makes of our outputs: transformers' own quantizer, compressed-tensors, whole models in memory."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tilewright.kernels.formats import FP8, MXFP4
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.plan import Source
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.schemes import SCHEMES
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
Make = Callable[..., Any]


def test_block_fp8_agrees_with_transformers() -> None:
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None, modules_to_not_convert=None)
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config, pre_quantized=False))
    weight = torch.randn(512, 384) * torch.logspace(-3, 3, 512)[:, None]
    weight[:128, :128] = 0
    expected = theirs.convert({"m.weight": weight})
    scales = SOLVERS["rtn"].scales(weight, block_amax(weight, FP8), FP8)
    q = QTensor(FP8, encode(weight, scales, FP8), scales)
    distance = (scales.view(torch.int32) - expected["m.weight_scale_inv"].view(torch.int32)).abs()
    assert distance.max() <= 2  # units in the last place: theirs is 1 / (448 / amax), rounded twice
    same = q.codes.view(torch.uint8) == expected["m.weight"].view(torch.uint8)
    assert same.float().mean() > 0.999  # where the scale differs in its last bit, ties may fall the other way


@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "mxfp4", "w4afp8"])
def test_compressed_tensors_reads_the_same_weights(scheme: str, tiny_model: Any, convert: Make) -> None:
    done = convert(tiny_model, scheme, checkpoint_format="compressed-tensors")
    block = done.plan.config["quantization_config"]
    config = QuantizationConfig.model_validate(block)
    group = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    # the library's own list of combinations has no int4 weights with FP8 inputs; engines and its decompressor do
    assert scheme == "w4afp8" or compressor.can_compress(torch.nn.Linear, group)
    form = SCHEMES[scheme].checkpoint_formats["compressed-tensors"]
    checked = 0
    for name, fate in done.plan.fates.items():
        if fate.kind != "quantized":
            continue
        module = name.removesuffix(".weight")
        shape = tiny_model.spec(name).shape
        target = form.target("expert" if ".experts." in name else "linear", 128)
        suffixes = target.checkpoint_layout.specs(target.weight_format, shape)
        tensors = {suffix: done.tensors[f"{module}.{suffix}"] for suffix in suffixes}
        theirs = compressor.decompress(dict(tensors), group)["weight"]
        ours = target.checkpoint_layout.unpack(tensors, target.weight_format, shape).dequantize()
        assert torch.equal(theirs, ours.to(theirs.dtype)), name
        assert module not in block["ignore"]
        checked += 1
    assert checked >= 72


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_numbers_are_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    """Scales and codes, ties and zeros included, of the library's own observer and compressor."""
    weight = torch.randn(64, 384) * torch.logspace(-6, 6, 64)[:, None]
    weight[:, 64:96] = torch.randint(-14, 15, (64, 32)) / 4
    weight = weight.to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=preset_name_to_scheme("MXFP4A16", ["Linear"]).weights)
    groups = weight.reshape(64, -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    theirs = compressor.compress({"weight": weight, "weight_scale": scale.float()}, scheme)
    scales = SOLVERS["rtn"].scales(weight, block_amax(weight, MXFP4), MXFP4)
    ours = LAYOUTS["mxfp4-pack-quantized"].pack(QTensor(MXFP4, encode(weight, scales, MXFP4), scales))
    assert torch.equal(ours["weight_scale"], theirs["weight_scale"])
    assert torch.equal(ours["weight_packed"], theirs["weight_packed"])
    better = SOLVERS["mse"].scales(weight, block_amax(weight, MXFP4), MXFP4)
    assert torch.isin(better / scales, torch.tensor([0.5, 1.0, 2.0])).all()


def windows(count: int) -> torch.Tensor:
    text = (EXAMPLES / "heldout.txt").read_bytes()
    starts = [number * (len(text) - 128) // count for number in range(count)]
    return torch.tensor([list(text[start : start + 128]) for start in starts])


@torch.inference_mode()
def divergence(source: Path, candidate: Path, tokens: torch.Tensor) -> float:
    """KL(source, candidate) in nats per token, both loaded by transformers."""
    logits = []
    for path in (source, candidate):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        logits.append(F.log_softmax(model(tokens).logits.float(), -1))
    p, q = logits
    return float((p.exp() * (p - q)).sum(-1).mean())


def write(source: Path, output: Path, scheme: str, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    execute(plan_quantize(checkpoint, QuantizeOptions(scheme, **options)), checkpoint, output)
    return output


@pytest.mark.filterwarnings("ignore")  # transformers warns that it dequantizes
@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
@pytest.mark.parametrize(("scheme", "most"), [("block-fp8", 0.005), ("int4", 0.02)])
def test_transformers_runs_the_shipped_models(name: str, scheme: str, most: float, tmp_path: Path) -> None:
    if scheme == "block-fp8":
        pytest.importorskip("accelerate", reason="transformers loads FP8 with the help of accelerate")
    output = write(EXAMPLES / name, tmp_path / "out", scheme)
    assert divergence(EXAMPLES / name, output, windows(16)) <= most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_runs_dense_int8(family: str, tmp_path: Path) -> None:
    fields = {"vocab_size": 256, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**fields))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    assert ("model.layers.0.self_attn.q_proj.bias" in source.files) == (family == "qwen2")
    output = write(tmp_path / "source", tmp_path / "out", "int8", checkpoint_format="compressed-tensors")
    assert divergence(tmp_path / "source", output, windows(4)) <= 0.005
    done = open_checkpoint(output)
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert family == "llama" or torch.equal(done.tensor(Source(bias)), source.tensor(Source(bias)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_a_gpu_gives_the_same_bytes(scheme: str, tmp_path: Path) -> None:
    source = open_checkpoint(EXAMPLES / "tiny-qwen3-moe")
    for device in ("cpu", "cuda"):
        execute(plan_quantize(source, QuantizeOptions(scheme), device), source, tmp_path / device)
    assert (tmp_path / "cpu/manifest.json").read_bytes() == (tmp_path / "cuda/manifest.json").read_bytes()
