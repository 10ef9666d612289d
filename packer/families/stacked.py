"""Families that publish their experts as stacks of an order of their own."""

from __future__ import annotations

from .experts import ExpertSpellings
from .family import ModelFamily
from .roles import Rule, tail

GPT_OSS = ModelFamily(
    id="gpt-oss",
    model_types=("gpt_oss",),
    experts_order="interleaved",
    experts=ExpertSpellings(read_stacked_by="transformers, vLLM and SGLang"),
    gate="clamped_swiglu",
)
LLAMA4 = ModelFamily(
    id="llama4",
    model_types=("llama4", "llama4_text"),
    experts=ExpertSpellings(read_stacked_by="transformers"),
)
GEMMA4 = ModelFamily(
    id="gemma4",
    model_types=("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    rules=(Rule(tail("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"), "small"),),
)
