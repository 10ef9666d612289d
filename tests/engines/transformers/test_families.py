"""Every family of models that `load_model` promises, small and with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import tilewright
from tilewright.kernels.modules.mlp import PackedMlp
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "head_dim": 16},  # whole blocks of q, k and v, which are joined
    "mistral": {"intermediate_size": 80},  # no whole blocks: gate and up stay Linears of their own
    "phi3": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": MOE,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA | {"q_lora_rank": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # transformers starts them at zero
    model.save_pretrained(tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")
    packed = tilewright.load_model(tmp_path / "packed")
    norms = [name for name, module in packed.named_modules() if type(module).__name__.endswith("RMSNorm")]
    assert bool(norms) is (family == "gpt_oss")  # whose norms are rounded elsewhere
    mlps = [path for path, module in model.named_modules() if type(module).__name__.endswith("MLP")]
    fused = [path for path, module in packed.named_modules() if isinstance(module, PackedMlp)]
    assert fused == ([] if family in {"mistral", "gpt_oss"} else mlps)  # what GPT-OSS calls so are its experts
    tokens = torch.randint(0, 96, (2, 20))
    with torch.no_grad():
        ours, theirs = packed(tokens).logits.float(), model(tokens).logits.float()
    assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_matrices_of_another_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **(SMALL | MOE)), dtype=torch.bfloat16)
    model.eval().save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    kept = ("layers.0.self_attn.q_proj.weight", "layers.1.mlp.gate.weight", "norm.weight", "lm_head.weight")
    tensors = {name: t.to(dtype) if name.endswith(kept) else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "source")
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")
    packed = tilewright.load_model(tmp_path / "packed")
    tokens = torch.randint(0, 96, (2, 20))
    with torch.no_grad():
        ours, theirs = packed(tokens).logits.float(), model(tokens).logits.float()
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()
