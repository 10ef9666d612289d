"""Whole models run from packed directories: as good as the source, equal to a float simulation, complete or refused."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

import tilewright
from tilewright.engines.transformers.experts import find_gating
from tilewright.engines.transformers.linears import keep_precision, why_no_linear
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.modules import PackedExperts, PackedLinear, PackedWeight, report_kernels
from tilewright.kernels.modules.mlp import PackedMlp
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.packed.module_spec import Gating
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget

ROOT = Path(__file__).parents[3]
TINY = ("tiny-qwen3-moe", "tiny-deepseek-v3")
MAX_KL = {"none": 5e-4, "int8": 5e-3, "block-fp8": 5e-3, "w4afp8": 5e-3, "int4": 2e-2}
Call = Callable[..., Path]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@cache
def windows(count: int = 8, length: int = 128) -> torch.Tensor:
    """Evenly spaced windows of the unseen text; a byte is a token."""
    text = (ROOT / "examples/models/heldout.txt").read_bytes()
    starts = [number * (len(text) - length) // (count - 1) for number in range(count)]
    return torch.tensor([list(text[start : start + length]) for start in starts])


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits.float().log_softmax(-1)


@cache
def source_probabilities(model: str) -> torch.Tensor:
    source = AutoModelForCausalLM.from_pretrained(ROOT / "examples/models" / model, dtype=torch.bfloat16)
    return log_probabilities(source.eval(), windows())


def divergence(p: torch.Tensor, q: torch.Tensor) -> tuple[float, float]:
    """KL(p, q) and how often the likeliest token is the same."""
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).float().mean())


@pytest.mark.parametrize("scheme", MAX_KL)
@pytest.mark.parametrize("model", TINY)
def test_close_to_the_source(model: str, scheme: str, packed: Call) -> None:
    directory = packed(model, scheme)
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in directory.iterdir()}
    kl, top1 = divergence(source_probabilities(model), log_probabilities(tilewright.load_model(directory), windows()))
    assert kl <= MAX_KL[scheme]
    assert top1 >= (0.98 if scheme != "int4" else 0.95)
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in directory.iterdir()} == before


@pytest.mark.parametrize("model", TINY)
def test_swapped_gate_and_up_are_noticed(model: str, packed: Call) -> None:
    runs = tilewright.load_model(packed(model, "int8"))
    for module in runs.modules():
        if isinstance(module, PackedExperts):
            w13 = module.w13
            for suffix, tensor in zip(w13.kernel.suffixes, w13.tensors(), strict=True):
                half = tensor.shape[1] // 2
                swapped = torch.cat([tensor[:, half:].view(torch.uint8), tensor[:, :half].view(torch.uint8)], 1)
                w13.register_buffer(suffix, swapped.view(tensor.dtype))
    kl, top1 = divergence(source_probabilities(model), log_probabilities(runs, windows()))
    assert kl > MAX_KL["int8"]
    assert top1 < 0.98


@pytest.mark.parametrize(("model", "scheme"), [(TINY[0], "int8"), (TINY[1], "block-fp8")])
def test_joined_linears_change_no_bit(model: str, scheme: str, quantized: Call, packed: Call, tmp_path: Path) -> None:
    source = open_checkpoint(quantized(model, scheme))
    execute(plan_pack(source, CpuTarget(joins=False)), source, tmp_path / "apart")
    joined, apart = (tilewright.load_model(path, fused=False) for path in (packed(model, scheme), tmp_path / "apart"))
    assert any(spec.joined for spec in joined.packed.specs.values())
    assert joined.state_dict().keys() == apart.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(joined(windows()[:2]).logits, apart(windows()[:2]).logits)


def test_whole_mlps_norms_and_attention_unless_asked_not_to(packed: Call) -> None:
    directory = packed("tiny-deepseek-v3", "block-fp8")
    fused, apart = tilewright.load_model(directory), tilewright.load_model(directory, fused=False)
    kinds = {name: type(module).__name__ for name, module in fused.named_modules()}
    assert {name for name, kind in kinds.items() if kind == "PackedMlp"} == {
        "model.layers.0.mlp",
        *(f"model.layers.{layer}.mlp.shared_experts" for layer in range(1, 4)),
    }
    assert fused.model.layers[0].self_attn._attends_by_tilewright
    assert set(fused.state_dict()) == {name for name in fused.state_dict() if ".gate_proj." not in name}
    assert not {"PackedMlp", "RmsNorm"} & {type(module).__name__ for module in apart.modules()}
    assert apart.config._attn_implementation == "sdpa"
    kl, top1 = divergence(log_probabilities(apart, windows()[:2]), log_probabilities(fused, windows()[:2]))
    assert kl <= 5e-4
    assert top1 >= 0.985


def test_experts_that_are_gated_in_another_way_stay_as_they_are(packed: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound lies where small activations do not reach it; what packed experts compute would differ beyond."""

    def clamped(self: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7)

    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", clamped)
    model = tilewright.load_model(packed(TINY[0], "int8"))
    kept = {use.module: use for use in report_kernels(model) if not use.layout}
    assert set(kept) == {f"model.layers.{layer}.mlp.experts" for layer in range(model.config.num_hidden_layers)}
    assert kept["model.layers.0.mlp.experts"].kernel == "Qwen3MoeExperts"
    assert "computes something else between its products than silu" in kept["model.layers.0.mlp.experts"].faster[0]
    stack = model.packed.weight("model.layers.0.mlp.experts.w13")
    assert isinstance(stack, PackedWeight)
    wanted = Simulated(stack).values.to(torch.bfloat16)
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, wanted)


class Simulated(nn.Module):
    """The same codes as values in fp32, with the same rounding of activations."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        spec = packed.spec
        self.values = spec.layout.unpack(dict(packed.named_buffers()), spec.format, spec.shape, spec.parts).dequantize()
        self.is_int8 = spec.format.id == "int8" or spec.format.bits == 4
        self.spec = spec

    def forward(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        values = self.values if expert is None else self.values[expert]
        rows = x.reshape(-1, x.shape[-1])
        if self.is_int8:
            codes, scale = quantize_rows(rows)
            rows = codes.float() * scale
        return (rows.float() @ values.T).to(x.dtype).reshape(*x.shape[:-1], values.shape[0])


class SimulatedExperts(nn.Module):
    """Routed experts, one at a time."""

    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        self.w13, self.w2 = Simulated(packed.w13), Simulated(packed.w2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for expert in range(self.w13.values.shape[0]):
            token, slot = torch.where(ids == expert)
            gate, up = self.w13(x[token], expert).float().chunk(2, -1)
            y = self.w2((nn.functional.silu(gate) * up).to(torch.bfloat16), expert)
            total.index_add_(0, token, y.float() * weights[token, slot, None].float())
        return total.to(x.dtype)


class SimulatedMlp(nn.Module):
    """A gated MLP, in fp32 between its products but for one rounding."""

    def __init__(self, packed: PackedMlp) -> None:
        super().__init__()
        self.gate_up, self.down = Simulated(packed.gate_up_proj), Simulated(packed.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x.float()).chunk(2, -1)
        y: torch.Tensor = self.down((nn.functional.silu(gate) * up).to(torch.bfloat16).float())
        return y.to(x.dtype)


@pytest.mark.parametrize("scheme", ["none", "int8", "w4afp8"])
@pytest.mark.parametrize("model", TINY)
def test_equal_to_a_float_simulation(model: str, scheme: str, packed: Call) -> None:
    runs = tilewright.load_model(packed(model, scheme))
    ours = log_probabilities(runs, windows()[:2])
    for name, module in list(runs.named_modules()):
        if isinstance(module, PackedLinear):
            runs.set_submodule(name, Simulated(module))
        elif isinstance(module, PackedExperts):
            runs.set_submodule(name, SimulatedExperts(module))
        elif isinstance(module, PackedMlp):
            runs.set_submodule(name, SimulatedMlp(module))
    kl, top1 = divergence(log_probabilities(runs, windows()[:2]), ours)
    assert kl <= 2e-4
    assert top1 >= 0.985


@pytest.mark.parametrize("model", TINY)
def test_generation_with_and_without_a_cache(model: str, packed: Call) -> None:
    runs = tilewright.load_model(packed(model, "none"))
    prompt = windows()[:1, :32]
    texts = [runs.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=cached) for cached in (True, False)]
    source = AutoModelForCausalLM.from_pretrained(ROOT / "examples/models" / model, dtype=torch.bfloat16).eval()
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], source.generate(prompt, max_new_tokens=16, do_sample=False))


@pytest.mark.parametrize("model", TINY)
def test_copies_and_pickles_give_the_same_bits(model: str, packed: Call) -> None:
    original = tilewright.load_model(packed(model, "int8"))
    with torch.no_grad():
        wanted = original(windows()[:1]).logits
        for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            assert torch.equal(other(windows()[:1]).logits, wanted)


def test_nothing_is_left_to_train_or_on_meta(packed: Call) -> None:
    runs = tilewright.load_model(packed("tiny-deepseek-v3", "w4afp8"))
    assert not any(parameter.requires_grad for parameter in runs.parameters())
    assert all(tensor.device.type == "cpu" for tensor in [*runs.parameters(), *runs.buffers()])
    assert "model.layers.1.mlp.experts.w13.weight" in runs.state_dict()


def test_what_does_not_fit_is_listed(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "none"), tmp_path / "packed"))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.extra.weight"] = tensors.pop("model.norm.weight")
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    save_file(tensors, file, read_header(file).metadata)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["size"] = file.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as error:
        tilewright.load_model(directory)
    assert "`model.norm.weight` is not in the files" in str(error.value)
    assert "`model.layers.2.self_attn.q_norm.weight` is not in the files" in str(error.value)
    assert "`model.layers.1.extra.weight` has no place in Qwen3MoeForCausalLM" in str(error.value)


def test_a_model_that_transformers_does_not_know(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "unheard-of"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="transformers builds no model of its config: .*unheard-of"):
        tilewright.load_model(directory)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"hidden_act": [64]}, "transformers builds no model of its config: .*hidden_act"),
        ("config.json", {"hidden_act": "sigh"}, "transformers builds no model of its config: .*sigh"),
        ("generation_config.json", {"pad_token_id": [1]}, "transformers cannot use generation_config.json"),
    ],
)
def test_configs_that_transformers_cannot_use(
    packed: Call, tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    path = directory / file
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=message):
        tilewright.load_model(directory)


def test_experts_without_their_other_stack(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    file = directory / "model.safetensors"
    metadata = read_header(file).metadata
    modules = json.loads(metadata["tilewright.modules"])
    del modules["model.layers.1.mlp.experts.w2"]
    save_file(load_file(file), file, metadata | {"tilewright.modules": json.dumps(modules)})
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["size"] = file.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="w13 and w2 are not both stacks"):
        tilewright.load_model(directory)


class Router(nn.Linear):
    """A Linear by name only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


def test_subclasses_of_linear_keep_what_they_compute(packed: Call) -> None:
    holder = nn.Sequential(Router(8, 4).float(), nn.Linear(4, 4).float())
    x = torch.randn(3, 8)
    wanted = holder(x)
    keep_precision(holder)
    assert isinstance(holder[0], Router)
    assert torch.equal(holder(x), wanted)
    assert torch.equal(holder[0](x.bfloat16()), Router.forward(holder[0], x.bfloat16().float()))
    assert why_no_linear(Router(8, 4), 4, 8) == "Router computes something else than a Linear"
    assert why_no_linear(nn.Linear(8, 4), 4, 8) == ""
    assert why_no_linear(FalconLinear(8, 8), 8, 8) == why_no_linear(Conv1D(4, 8), 4, 8) == ""  # [K, N] in the second
    assert "weight [4, 8], the packed one is [8, 4]" in why_no_linear(nn.Linear(8, 4), 8, 4)
    assert find_gating(Router(8, 4)) == "Router holds bias, weight, packed experts are gate, up and down"


def test_experts_with_more_than_their_stacks_are_not_taken_for_packed_ones() -> None:
    """LongCat Flash sends some tokens to experts that hand them on as they are; packed experts would drop them."""
    options = {"hidden_size": 64, "expert_ffn_hidden_size": 32, "n_routed_experts": 4}
    experts = LongcatFlashExperts(LongcatFlashConfig(**options, zero_expert_num=2))
    assert "no stacks of as many matrices" in str(find_gating(experts))
    assert find_gating(LongcatFlashExperts(LongcatFlashConfig(**options, zero_expert_num=0))) == (Gating("silu"), False)

    class Handing(Qwen3MoeExperts):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            beyond = (weights * (ids == self.num_experts)).sum(1, keepdim=True) * x
            return super().forward(x, ids.clamp(max=self.num_experts), weights) + beyond

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4)
    assert find_gating(Qwen3MoeExperts(config)) == (Gating("silu"), False)
    assert "has a result for experts beyond" in str(find_gating(Handing(config)))
