"""State-space models, and models that have such layers, convolutions or linear attention between attention layers."""

from __future__ import annotations

from .family import ModelFamily
from .parallel import ParallelAxes
from .roles import Rule, tail

# No rule cuts the heads, groups and gates that these matrices hold side by side.
_AXES = ParallelAxes(fused=("qkv_proj", "gate_up_proj", "in_proj", "output_gate", "linear_x", "receptance"))
SSM_RULES = (
    Rule(tail(r"(?:mixer|mamba|conv)\.(?:in|out)_proj"), "linear"),
    Rule(tail(r"(?:mixer|mamba)\.(?:x|dt|bcdt)_proj"), "small"),
)
MAMBA = ModelFamily(
    id="mamba", model_types=("mamba", "mamba2", "falcon_mamba", "codestral_mamba"), rules=SSM_RULES, axes=_AXES
)
HYBRID = ModelFamily(
    id="hybrid",
    model_types=("bamba", "jamba", "falcon_h1", "nemotron_h", "zamba", "zamba2", "lfm2", "lfm2_moe", "lfm2_vl"),
    rules=(
        *SSM_RULES,
        Rule(tail(r"\w+_adapter_list\.\d+\.\d+"), "small"),
        Rule(tail(r"layers\.\d+\.linear", r"feed_forward\.w[123]"), "linear"),
        Rule(tail(r"fc[12]_latent_proj"), "linear"),
    ),
    axes=_AXES,
)
RECURRENT = ModelFamily(
    id="recurrent",
    model_types=("recurrent_gemma", "rwkv", "minimax", "minimax_m1", "minimax_text_01"),
    rules=(
        Rule(r"(?:^|\.)rg_lru\.|time_\w+$|(?:diagonal|key|query)_decay$|slope_rate$", "small"),
        Rule(tail("conv_1d"), "conv"),
        Rule(
            tail(r"linear_(?:x|y|out)", "output_gate", r"(?:attention|feed_forward)\.(?:key|value|receptance|output)"),
            "linear",
        ),
        Rule(r"^head$", "head"),
    ),
    axes=_AXES,
    head="lm_head",
)
