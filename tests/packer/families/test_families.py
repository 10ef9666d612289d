"""Tiny models of every family as transformers writes them: no name is unknown, no matrix is left out by accident."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

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
SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
NEMOTRON_H = {
    **{"hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 96},
}
LFM2 = {"layer_types": ["conv", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2", "qwen3", "olmo2", "smollm3"), HEADS),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), MOE),
    **{"falcon": {}, "llama4_text": MOE | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1}},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), HYBRID),
    **dict.fromkeys(("gpt_neox", "phi", "starcoder2", "persimmon", "nemotron", "apertus", "stablelm", "cohere2"), {}),
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode", "codegen", "bloom"), {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("opt", "xglm"), {"ffn_dim": 96, "d_model": 64, "word_embed_proj_dim": 64, "num_layers": 2}),
    **{"mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2}, "mamba": {"state_size": 8}},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "bamba": SSM | {"attn_layer_indices": [1]},
    "jamba": MOE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "falcon_h1": SSM | HEADS | {"mamba_d_ssm": 128},
    "nemotron_h": MOE | NEMOTRON_H,
    **{"lfm2": LFM2, "lfm2_moe": LFM2 | MOE | {"num_dense_layers": 1}},
    "recurrent_gemma": HEADS | {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    "minimax": MOE | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    **dict.fromkeys(("granitemoe", "jetmoe", "granitemoeshared"), MOE | {"shared_intermediate_size": 96}),
    "granitemoehybrid": MOE | SSM | {"shared_intermediate_size": 96, "layer_types": ["mamba", "attention"]},
    **dict.fromkeys(("bert", "roberta"), {}),
}
NOT_QUANTIZED = re.compile(
    r"lm_head|embed_out|gate$|router|in_proj_b|in_proj_a|conv1d|mixer\.(?:x|dt)_proj|mamba\.(?:x|dt)_proj|cls\.|^head"
)


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
    kept_roles = ("router", "shared-gate", "embedding", "table", "head", "conv", "small", "attention-experts")
    allowed = {KEPT[role] for role in kept_roles}
    assert set(kept.values()) <= allowed | {"convolution", "bias, cut by expert", "bias", "small parameter"}, kept
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    inside = [name for name in linears if not NOT_QUANTIZED.search(name)]
    assert inside
    for name in inside:
        stored = name.replace("model.", "backbone.") if family == "nemotron_h" else name
        stored = stored.replace(".mlp.", ".block_sparse_moe.") if family in {"minimax", "mixtral"} else stored
        assert plan.fates[f"{stored}.weight"].kind == "quantized", name
