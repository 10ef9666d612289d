"""Names inside a model that a server has to know: layers, head, what engines merge, and the parts of a gated MLP."""

from __future__ import annotations

import re

HEAD, TIED = "lm_head", "tie_word_embeddings"  # the output head, and the key of config.json that makes it the embedding
KV_B = "kv_b_proj"  # the projection of latent attention that makes keys and values of all heads
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
GATE, UP, DOWN, GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"

# What config.json calls an activation -> the operators' name of it.
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Linears of the same input that are packed as one, under the name that engines give it: name -> its parts in row order.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), GATE_UP: (GATE, UP)}
