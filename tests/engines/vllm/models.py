"""Random checkpoints, small but of the families' own shapes, whose outputs are peaked enough that errors show.

Routers are steep and what experts add is small: a token whose second and third expert are nearly equal may then take
either, by the last bit of its activations, without another next token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

SHIPPED = Path(__file__).parents[3] / "examples" / "models"
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
TWO_KINDS = ["sliding_attention", "full_attention"]
DEEPSEEK: dict[str, Any] = {  # the only latent attention that vLLM's back end for CPUs runs has 512 + 64 columns
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
NOT_SAVED = {"deepseek": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}  # vLLM reads them, transformers not


def config_of(family: str) -> transformers.PreTrainedConfig:
    """The config of a small model of a family."""
    match family:
        case "qwen3":
            return transformers.Qwen3Config(**COMMON, intermediate_size=512)
        case "mixtral":
            return transformers.MixtralConfig(**COMMON, **EXPERTS, sliding_window=None)
        case "gemma3":
            fields = COMMON | {"tie_word_embeddings": True, "layer_types": TWO_KINDS}
            return transformers.Gemma3TextConfig(
                **fields, intermediate_size=512, sliding_window=64, query_pre_attn_scalar=64
            )
        case "gpt-oss":
            return transformers.GptOssConfig(**COMMON, **EXPERTS, sliding_window=128, layer_types=TWO_KINDS)
        case "deepseek":
            fields = {name: value for name, value in COMMON.items() if name != "head_dim"}
            return transformers.DeepseekV3Config(**fields | DEEPSEEK)
    raise ValueError(family)


def write(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a random checkpoint with the shipped models' tokenizer of bytes."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data = (values * _deviation(name)).to(parameter.dtype)
        elif "bias" in name or "sinks" in name:
            parameter.data = (values * 0.1).to(parameter.dtype)
    model.save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | NOT_SAVED.get(family, {})
    path.write_text(json.dumps(fields, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "tiny-qwen3-moe" / name, directory)
    return directory


def _deviation(name: str) -> float:
    if "lm_head" in name:
        return 0.2
    if name.endswith(("gate.weight", "router.weight")):
        return 0.4
    return 0.015 if "experts" in name and "down_proj" in name else 0.06
