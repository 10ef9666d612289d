"""GPT-OSS as it is published: experts in MXFP4 blocks and scales, with biases, gate and up in turn, and sinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import tilewright
from tilewright.kernels.modules import PackedExperts
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.pack.unpack import plan_unpack
from tilewright.packer.verify.weights import compare_weights

EXPERTS, HIDDEN, INNER = 4, 64, 96
CONFIG: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"sliding_window": 8, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1},
}
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the tensors of the published ones."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("gpt-oss") / "source"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **CONFIG), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
    model.save_pretrained(root)
    tensors = load_file(root / "model.safetensors")
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        for name, (n, k) in {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
            del tensors[f"{path}.{name}"]
            tensors[f"{path}.{name}_blocks"] = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8)
            tensors[f"{path}.{name}_scales"] = torch.randint(119, 124, (EXPERTS, n, k // 32), dtype=torch.uint8)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def packed(published: Path) -> Path:
    output = published.parent / "packed"
    checkpoint = open_checkpoint(published)
    plan = plan_pack(checkpoint, CpuTarget())
    assert not plan.rejects
    execute(plan, checkpoint, output)
    return output


@pytest.mark.filterwarnings("ignore")  # transformers tells that it dequantizes
def test_logits_and_text_are_those_of_transformers(published: Path, packed: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16).eval()
    ours = tilewright.load_model(packed)
    kinds = {module.w13.spec.format.id for module in ours.modules() if isinstance(module, PackedExperts)}
    assert kinds == {"mxfp4"}
    tokens = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y, wanted = ours(tokens).logits.float(), theirs(tokens).logits.float()
        exact = theirs.float()(tokens).logits
    assert (y - wanted).norm() <= 0.02 * wanted.norm()
    # and no further from the model in fp32 than transformers in bf16 is, give or take
    assert (y - exact).norm() <= 1.5 * (wanted - exact).norm()
    text = ours.generate(tokens[:1, :4], max_new_tokens=12, do_sample=False)
    assert text.shape[1] > 4
    again = ours.generate(tokens[:1, :4], max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(text, again)


def test_it_comes_back_to_the_byte(published: Path, packed: Path, tmp_path: Path) -> None:
    source, made = open_checkpoint(published), open_checkpoint(packed)
    results = [result for result, _ in compare_weights(read_contents(source), read_contents(made))]
    assert {result.status for result in results} <= {"equal", "same"}, {result.status for result in results}
    execute(plan_unpack(made), made, tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    documents = [json.loads((path / "config.json").read_text()) for path in (published, tmp_path / "back")]
    assert documents[0] == documents[1]


def test_a_scale_that_is_no_number_is_named(published: Path, tmp_path: Path) -> None:
    root = tmp_path / "source"
    root.mkdir()
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_bytes((published / "config.json").read_bytes())
    checkpoint = open_checkpoint(root)
    with pytest.raises(
        tilewright.TilewrightError, match=r"model\.layers\.1\.mlp\.experts\.2\.down_proj.*scale \[5, 1\]"
    ):
        execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")
