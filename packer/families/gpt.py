"""Decoders whose MLP has two matrices and no gate, from GPT-2 to Phi-2 and Starcoder2."""

from __future__ import annotations

from .family import ModelFamily
from .parallel import ParallelAxes
from .roles import Rule, tail

_CONV1D = ("attn.c_attn", "attn.c_proj", "crossattention.c_attn", "crossattention.q_attn", "crossattention.c_proj")
_MLP = ("mlp.c_fc", "mlp.c_proj")
_C_NAMES = (Rule(tail("c_attn", "q_attn", "c_proj", "c_fc"), "linear"),)
_DENSE = (Rule(tail(r"(?:\w+_)?(?:attention|attn)\.dense"), "linear"),)
_TWO = ParallelAxes(
    rows=("q_proj", "k_proj", "v_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "up_proj"),
    columns=("o_proj", "out_proj", "dense", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "down_proj"),
    fused=("query_key_value", "qkv_proj", "c_attn", "Wqkv"),
)

GPT2 = ModelFamily(
    id="gpt2",
    model_types=("gpt2", "openai-gpt", "decision_transformer", "imagegpt"),
    rules=_C_NAMES,
    axes=_TWO,
    transposed=(*_CONV1D, *_MLP),
)
GPT = ModelFamily(
    id="gpt",
    model_types=(
        *("gpt_bigcode", "gpt_neo", "gptj", "codegen", "phi", "starcoder2", "opt", "xglm", "biogpt", "persimmon"),
        *("mpt", "nemotron", "arcee", "apertus"),
    ),
    rules=(*_C_NAMES, *_DENSE, Rule(tail("Wqkv"), "linear")),
    axes=_TWO,
)
GPT_NEOX = ModelFamily(
    id="gpt-neox", model_types=("gpt_neox", "gpt_neox_japanese"), rules=_DENSE, axes=_TWO, head="embed_out"
)
