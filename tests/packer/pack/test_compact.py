"""`--layout cpu-int4-compact`: the same numbers in fewer bytes, back without a loss, and only where it holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright import load_packed
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.pack.unpack import plan_unpack
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.verify.weights import compare_weights

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3-moe"
COMPACT = CpuTarget("cpu-int4-compact")


@pytest.mark.parametrize("group", [32, 128])
def test_the_same_model_in_fewer_bytes(group: int, tmp_path: Path) -> None:
    source = open_checkpoint(MODEL)
    execute(plan_quantize(source, QuantizeOptions("int4", group_size=group)), source, tmp_path / "int4")
    quantized = open_checkpoint(tmp_path / "int4")
    for name, target in (("wide", CpuTarget()), ("compact", COMPACT)):
        plan = plan_pack(quantized, target)
        assert not plan.rejects
        execute(plan, quantized, tmp_path / name)
    compact = open_checkpoint(tmp_path / "compact")
    results = [result for result, _ in compare_weights(read_contents(quantized), read_contents(compact))]
    assert not any(result.failed for result in results)
    ours, wide = load_packed(tmp_path / "compact"), load_packed(tmp_path / "wide")
    sizes = {"wide": 0, "compact": 0}
    for name, spec in ours.specs.items():
        if spec.format.id == f"int4-g{group}":
            assert spec.layout.id == "cpu-int4-compact"
            for key, packed in (("compact", ours), ("wide", wide)):
                sizes[key] += sum(packed.tensor(f"{name}.{suffix}").nbytes for suffix in packed.specs[name].tensors())
            if len(spec.shape) == 2:
                x = torch.randn(3, spec.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
                assert torch.equal(ours[name](x), wide[name](x))
    assert sizes["compact"] < sizes["wide"] * (0.73 if group == 32 else 0.93)
    execute(plan_unpack(compact), compact, tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "int4", tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
