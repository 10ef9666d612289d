"""Names inside a model that a server has to know: what engines merge into one Linear, and the parts of a gated MLP."""

from __future__ import annotations

GATE, UP, DOWN, GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"

# What config.json calls an activation -> the operators' name of it.
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Linears of the same input that are packed as one, under the name that engines give it: name -> its parts in row order.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), GATE_UP: (GATE, UP)}
