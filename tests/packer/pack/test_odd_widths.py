"""Models whose shares begin inside a block of scales: what is listed packs, and ranks together are the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright.kernels.modules import PackedExperts, PackedLinear
from tilewright.kernels.packed.directory import PackedCheckpoint, load_packed
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.packer.progress import Silent

HEADS = {"head_dim": 16, "num_attention_heads": 12, "num_key_value_heads": 12}
MODELS: dict[str, dict[str, Any]] = {
    "issue": {"hidden_size": 320, "intermediate_size": 192} | HEADS,
    "704": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "576": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
MIXTURE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 176, "intermediate_size": 352},
    **{"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
}


def write(root: Path, kind: str, sizes: dict[str, Any]) -> Path:
    torch.manual_seed(len(sizes))
    config = AutoConfig.for_model(kind, **(sizes | {"num_hidden_layers": 1, "vocab_size": 64}))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root)
    return root


def quantized(source: Path, scheme: str, target: Path) -> Path:
    if scheme == "none":
        return source
    group = 64 if scheme == "int4" else None
    tilewright.quantize(source, target, tilewright.QuantizeOptions(scheme, group_size=group), progress=Silent())
    return target


def values(packed: PackedCheckpoint, name: str) -> torch.Tensor:
    """What is stored of a module, dequantized, without the zeros before its share: [.., parts, N / parts, K]."""
    if name in packed.joined:
        _, rows = packed.specs[packed.joined[name]].linears()[name]
        return values(packed, packed.joined[name])[:, rows]
    spec: ModuleSpec = packed.specs[name]
    tensors = {
        suffix: packed.tensor(f"{name}.{suffix}") for suffix in spec.layout.specs(spec.format, spec.stored, spec.parts)
    }
    stored = spec.layout.unpack(tensors, spec.format, spec.stored, spec.parts).dequantize()
    rows, columns = spec.leading
    by_part = stored.unflatten(-2, (spec.parts, -1))
    assert not by_part[..., :rows, :].any()
    assert not by_part[..., :columns].any()
    return by_part[..., rows:, columns:]


def axis_of(whole: torch.Tensor, share: torch.Tensor) -> int | None:
    return next((axis for axis in (-1, -2) if whole.shape[axis] != share.shape[axis]), None)


def check(directory: Path, whole_directory: Path, tp: int) -> Iterator[str]:
    whole = load_packed(whole_directory)
    ranks = [load_packed(directory, rank) for rank in range(tp)]
    first = ranks[0]
    for name in [*first.joined, *(name for name in first if not first.specs[name].joined)]:
        parts, uncut = [values(rank, name) for rank in ranks], values(whole, name)
        axis = axis_of(uncut, parts[0])
        assert torch.equal(parts[0] if axis is None else torch.cat(parts, axis), uncut), name
        modules = [rank[name] for rank in ranks]
        if axis is not None and all(isinstance(module, PackedLinear) for module in modules):
            yield f"{name}:{axis}"
            x = torch.randn(3, uncut.shape[-1]).to(torch.bfloat16)
            if axis == -2:
                assert torch.equal(torch.cat([module(x) for module in modules], -1), whole[name](x)), name
            else:
                total = sum(module(part).float() for module, part in zip(modules, x.chunk(tp, -1), strict=True))
                wanted = whole[name](x).float()
                assert (total - wanted).norm() <= 0.02 * wanted.norm(), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["none", "block-fp8", "int4", "int8"])
@pytest.mark.parametrize("model", ["issue", *(pytest.param(name, marks=pytest.mark.slow) for name in ("704", "576"))])
def test_what_is_listed_packs_and_is_the_whole(model: str, scheme: str, tmp_path: Path) -> None:
    sizes = MODELS[model]
    source = quantized(write(tmp_path / "source", "qwen3", sizes), scheme, tmp_path / "quantized")
    tilewright.pack(source, tmp_path / "whole", progress=Silent())
    summary = tilewright.pack(source, tmp_path / "dry", dry_run=True, progress=Silent()).summary
    listed = [degree.size for degree in summary.tensor_parallel if degree.reason is None]
    assert listed == [size for size in range(2, 65) if sizes["num_key_value_heads"] % size == 0]
    assert summary.expert_parallel == ()
    for tp in (2, 3, 4, 5):
        options = tilewright.PackOptions(tp=tp)
        output = tmp_path / f"tp{tp}"
        if tp in listed:
            tilewright.pack(source, output, options, progress=Silent())
            cut = set(check(output, tmp_path / "whole", tp))
            assert {name.rpartition(":")[2] for name in cut} == {"-1", "-2"}
            with pytest.raises(tilewright.CheckpointError, match=f"rank 0 of {tp}"):
                load_packed(output / f"rank-0-of-{tp}")
            load_packed(output / f"rank-0-of-{tp}", 0)
        else:
            with pytest.raises(tilewright.TilewrightError, match="cannot be cut so"):
                tilewright.pack(source, output, options, progress=Silent())
    with pytest.raises(tilewright.TilewrightError, match="no routed experts to deal"):
        tilewright.pack(source, tmp_path / "ep", tilewright.PackOptions(ep=2), progress=Silent())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheme", "tp", "ep"), [("block-fp8", 2, 1), ("int4", 4, 2), ("int4", 4, 1), ("none", 4, 1)])
def test_experts_of_odd_widths(scheme: str, tp: int, ep: int, tmp_path: Path) -> None:
    sizes = MIXTURE
    source = write(tmp_path / "source", "qwen3_moe", sizes)
    if scheme == "int4":
        options = tilewright.QuantizeOptions("int4", group_size=32, exclude=("mlp",))
        tilewright.quantize(source, tmp_path / "quantized", options, progress=Silent())
        source = tmp_path / "quantized"
    else:
        source = quantized(source, scheme, tmp_path / "quantized")
    whole_result = tilewright.pack(source, tmp_path / "whole", progress=Silent())
    assert not [note for note in whole_result.notes if "experts" in note]
    tilewright.pack(source, tmp_path / "cut", tilewright.PackOptions(tp=tp, ep=ep), progress=Silent())
    stack = "model.layers.0.mlp.experts"
    whole = load_packed(tmp_path / "whole")
    ranks = [load_packed(tmp_path / "cut", rank) for rank in range(tp)]
    x, ids, scores = torch.randn(5, 128).to(torch.bfloat16), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    outputs = [PackedExperts(stack, m[f"{stack}.w13"], m[f"{stack}.w2"])(x, ids, scores) for m in (whole, *ranks)]
    total = sum(y.float() for y in outputs[1:])
    assert (total - outputs[0].float()).norm() <= 0.02 * outputs[0].float().norm()
    if ep == 1:
        for kind in ("w13", "w2"):
            parts = [values(rank, f"{stack}.{kind}") for rank in ranks]
            uncut = values(whole, f"{stack}.{kind}")
            axis = axis_of(uncut, parts[0])
            assert axis is not None
            assert torch.equal(torch.cat(parts, axis), uncut)
