"""Whatever a source holds, a plan accounts for every tensor, and its steps give what it says; or it says why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.engine.preflight import prepare
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.schemes import SCHEMES

Tensors = dict[str, torch.Tensor]
STEMS = ("", "model.", "model.", "model.language_model.", "language_model.model.", "model.visual.")
MODULES = (
    *(f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 2) for name in "qo"),
    *("layers.0.mlp.experts.0.up_proj", "layers.0.mlp.experts.down_proj.1", "layers.0.mlp.gate", "layers.2.eh_proj"),
    *("layers.1.mlp.down_proj", "embed_tokens", "lm_head", "mystery", "mtp.fc"),
)
BARE = ("norm.weight", "layers.0.self_attn.q_proj.bias", "layers.0.linear_attn.A_log", "odd", "layers.1.conv1d.weight")
SIDES = st.sampled_from((1, 2, 32, 64, 96, 128, 129, 256))


def codes(draw: Callable[..., Any], dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(-100, 100, shape, generator=generator).to(torch.float32).to(dtype)


def scales(draw: Callable[..., Any], *shape: int) -> torch.Tensor:
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)))
    return torch.exp2(codes(draw, torch.float32, *shape).div(25).round()).to(dtype)


def matrix(draw: Callable[..., Any], module: str, experts: tuple[int, ...] = ()) -> Tensors:
    """One matrix, or stack of matrices, in some encoding."""
    n, k = draw(SIDES), draw(SIDES)
    kind = draw(st.sampled_from(("plain", "plain", "block", "channel", "tensor", "int8", "int4")))
    weight, scale = (module, f"{module}_scale_inv") if experts else (f"{module}.weight", f"{module}.weight_scale_inv")
    if kind == "plain" or (experts and kind != "block"):
        dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)))
        return {weight: codes(draw, dtype, *experts, n, k)}
    if kind == "int4":
        group = draw(st.sampled_from((32, 64, 128)))
        packed = codes(draw, torch.int32, n, k * group // 8)
        return {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales(draw, n, k)}
    grids = {"block": (-(-n // 128), -(-k // 128)), "channel": (n, 1), "int8": (n, 1), "tensor": (1,)}
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    found = {weight: codes(draw, dtype, *experts, n, k), scale: scales(draw, *experts, *grids[kind])}
    if draw(st.integers(0, 19)) == 0:
        found.popitem()
    return found


@st.composite
def sources(draw: Callable[..., Any]) -> Tensors:
    """A model of a few modules, a stack now and then, and things that no rule knows."""
    stem = draw(st.sampled_from(STEMS))
    tensors: Tensors = {"model.layers.1.self_attn.v_proj.weight": codes(draw, torch.bfloat16, 128, 256)}
    for module in draw(st.lists(st.sampled_from(MODULES), unique=True, max_size=5)):
        tensors |= matrix(draw, stem + module)
    if draw(st.booleans()):
        for name in ("gate_up_proj", "down_proj"):
            tensors |= matrix(draw, f"{stem}layers.1.mlp.experts.{name}", (2,))
    for name in draw(st.lists(st.sampled_from(BARE), unique=True, max_size=3)):
        dtype = draw(st.sampled_from((torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8)))
        tensors[stem + name] = codes(draw, dtype, *draw(st.lists(st.integers(0, 3), max_size=3)))
    return tensors


OPTIONS = st.fixed_dictionaries({
    "scheme": st.sampled_from(list(SCHEMES)),
    "checkpoint_format": st.sampled_from((None, "compressed-tensors")),
    "exclude": st.sampled_from(((), (), ("o_proj",), ("experts.1",), ("*.mlp*",))),
    "include": st.sampled_from(((), (), ("mystery",), ("gate",))),
    "mtp": st.sampled_from(("convert", "convert", "keep", "drop", "draft")),
    "experts_order": st.sampled_from(("gate-up", "interleaved")),
})


@settings(max_examples=120)
@given(tensors=sources(), options=OPTIONS, hidden=st.sampled_from((128, 128, 256, None)))
def test_any_source(
    tensors: Tensors, options: dict[str, Any], hidden: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root: Path = tmp_path_factory.mktemp("any")
    config = {"model_type": "deepseek_v3", "hidden_size": hidden, "num_hidden_layers": 2}
    (root / "source").mkdir()
    (root / "source/config.json").write_text(json.dumps(config))
    save_file(tensors, root / "source/model.safetensors")
    source = open_checkpoint(root / "source")
    plan = plan_quantize(source, QuantizeOptions(**options))
    event("refused" if plan.rejects else "converted")
    if plan.rejects:
        assert all(reject.name and reject.reason for reject in plan.rejects)
        return
    prepare({root / "out": plan}, source, RunOptions())  # raises if the plan is inconsistent
    execute(plan, source, root / "out")
    output = open_checkpoint(root / "out")
    assert set(output.files) == set(plan.tensors)
    assert set(plan.fates) == set(source.files)
