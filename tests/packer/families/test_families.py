"""Tiny models of every family as transformers writes them: no name is unknown, no matrix is left out by accident."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.families.roles import KEPT
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

BASE = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
HEADS = {"head_dim": 16}
MOE = HEADS | {
    **{"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "n_group": 1, "topk_group": 1},
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK = MOE | LATENT | {"first_k_dense_replace": 1, "num_key_value_heads": 4}
HYBRID = MOE | {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2", "qwen3", "olmo2", "smollm3"), HEADS),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), MOE),
    **{"falcon": {}, "llama4_text": MOE | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1}},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), HYBRID),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_has_a_role(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **(BASE | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    source = open_checkpoint(tmp_path / "model")
    plan = plan_quantize(source, QuantizeOptions("int8", strict=True))
    assert not plan.rejects
    kept = {
        re.sub(r"\d+", "#", name): fate.reason
        for name, fate in plan.fates.items()
        if fate.kind == "copied" and len(source.spec(name).shape) > 1
    }
    allowed = {KEPT[role] for role in ("router", "shared-gate", "embedding", "head", "conv", "small")}
    assert set(kept.values()) <= allowed | {"convolution", "bias, cut by expert"}, kept
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = [name for name in linears if not re.search(r"lm_head|gate$|router|in_proj_b|in_proj_a|conv1d", name)]
    assert inside
    for name in inside:
        assert plan.fates[f"{name}.weight"].kind == "quantized", name
