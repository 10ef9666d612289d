"""Families whose experts lie in stacks that are Linears: Granite-MoE, JetMoE, Step-3."""

from __future__ import annotations

from .experts import SHORT, ExpertNames, ExpertSpellings
from .family import ModelFamily
from .hybrid import SSM_RULES
from .parallel import ParallelAxes
from .roles import Rule, tail

# vLLM reads these experts one by one too, under the names that it gives them; transformers only reads the stacks.
_STACKS = ("input_linear", "output_linear")
_GRANITE = ExpertNames(
    SHORT.gate, SHORT.up, SHORT.down, _STACKS[0], "block_sparse_moe.experts", _STACKS[1], "block_sparse_moe"
)
_JETMOE = ExpertNames(SHORT.gate, SHORT.up, SHORT.down, _STACKS[0], "mlp.experts", _STACKS[1], "mlp")
_STEP3 = ExpertNames("gate_proj", "up_proj", "down_proj", "", "moe.experts", "", "moe")

GRANITE_MOE = ModelFamily(
    id="granite-moe",
    model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
    rules=(Rule(tail(r"shared_mlp\.(?:input|output)_linear"), "linear"), *SSM_RULES),
    experts=ExpertSpellings((_GRANITE,), "transformers"),
    axes=ParallelAxes(fused=(_STACKS[0], "in_proj", "qkv_proj")),
)
JETMOE = ModelFamily(
    id="jetmoe",
    model_types=("jetmoe",),
    rules=(
        Rule(tail(r"self_attention\.experts\.(?:input|output)_linear"), "attention-experts"),
        Rule(tail("kv_proj"), "linear"),
    ),
    experts=ExpertSpellings((_JETMOE,), "transformers"),
    axes=ParallelAxes(fused=("kv_proj",)),
)
STEP3 = ModelFamily(
    id="step3",
    model_types=("step3", "step3_text", "step3_vl"),
    rules=(Rule(tail("wq"), "linear"),),
    experts=ExpertSpellings((_STEP3,), "vLLM and the model's own code"),
    axes=ParallelAxes(fused=("wq", "qkv_proj")),
)
