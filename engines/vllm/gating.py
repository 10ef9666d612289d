"""What vLLM's experts compute between their products, and whether a bundled kernel does."""

from __future__ import annotations

from typing import Any

# vLLM's name of what an expert computes between its products -> ours.
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "clamped_swiglu",
    "swigluoai_uninterleave": "clamped_swiglu",
}
SLOPE, BOUND = 1.702, 7.0  # of `clamped_swiglu`, where the model states none


def refusal(layer: Any, activation: str) -> str | None:
    """Why the kernel cannot run vLLM's experts, or None if it can."""
    if activation not in ACTIVATIONS:
        return f"its experts compute `{activation}`, which no bundled kernel does; known are {', '.join(ACTIVATIONS)}"
    if layer.apply_router_weight_on_input:
        return "its router weights scale the input of the experts, bundled kernels scale their output"
    if ACTIVATIONS[activation] != "clamped_swiglu" and layer.swiglu_limit is not None:
        return f"its experts clamp `{activation}` at {layer.swiglu_limit}, which no bundled kernel does"
    if layer.swiglu_beta not in {None, 1.0}:
        return f"its experts add {layer.swiglu_beta} to up, bundled kernels add 1"
    return None
