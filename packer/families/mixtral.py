"""Mixtral: `block_sparse_moe.gate`, experts called w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from .family import ModelFamily

MIXTRAL = ModelFamily(id="mixtral", model_types=("mixtral", "phimoe", "minimax_m2"))
