"""DeepSeek V2 / V3, GLM-4.x-MoE and Kimi-K2: latent attention, shared experts, MTP layers after the last one."""

from __future__ import annotations

from .family import ModelFamily
from .norms import GATED, LATENT
from .roles import Rule, tail

_INDEXER = (
    Rule(tail(r"indexer\.weights_proj", r"indexer\.k_norm"), "small"),
    Rule(tail(r"indexer\.wk", r"indexer\.wq_b"), "linear"),
)
DEEPSEEK = ModelFamily(
    id="deepseek",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl", "longcat_flash"),
    rules=_INDEXER,
    folds={"deepseek_v3": LATENT},
    passages={"deepseek_v3": GATED},  # rows of values lie between those of keys in kv_b_proj
)
GLM_MOE = ModelFamily(
    id="glm-moe",
    model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa"),
    rules=_INDEXER,
)
