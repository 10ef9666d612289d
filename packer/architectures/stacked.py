"""Families that publish their experts as stacks of an order of their own."""

from __future__ import annotations

from .base import Architecture

GPT_OSS = Architecture(id="gpt-oss", model_types=("gpt_oss",), experts_order="interleaved")
LLAMA4 = Architecture(id="llama4", model_types=("llama4", "llama4_text"))
GEMMA_MOE = Architecture(id="gemma-moe", model_types=("gemma4", "gemma4_text"))
