"""Routed experts of vLLM run by a layer's two packed stacks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from tilewright.kernels.errors import CheckpointError, KernelUnavailableError
from tilewright.kernels.modules import PackedExperts, PackedStack

# vLLM's name of what an expert computes between its products -> ours.
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "clamped_swiglu",
    "swigluoai_uninterleave": "clamped_swiglu",
}
SLOPE, BOUND = 1.702, 7.0  # of `clamped_swiglu`, where the model states none


class PackedExpertsMethod(FusedMoEMethodBase):
    """Runs packed experts behind vLLM's router.

    Args:
        layer: vLLM's experts.
        name: Name of the packed experts.
        w13: Gate and up [E, 2I, H].
        w2: Down [E, H, I].
    """

    def __init__(self, layer: Any, name: str, w13: PackedStack, w2: PackedStack) -> None:
        super().__init__(layer.moe_config)
        activation = layer.moe_config.activation.value
        if reason := _refusal(layer, activation):
            raise KernelUnavailableError(f"{name}: {reason}", hint="serve the checkpoint that it was packed from")
        slope, bound = layer.swiglu_alpha or SLOPE, layer.swiglu_limit or BOUND
        self.experts = PackedExperts(name, w13, w2, ACTIVATIONS[activation], slope, bound)

    def create_weights(self, layer: Any, hidden_size: int, intermediate_size_per_partition: int, **_: Any) -> None:
        """Check that vLLM's experts are those that were packed.

        Raises:
            CheckpointError: Their sizes or numbers differ.
        """
        spec = self.experts.w13.spec
        first = _first_expert(layer)
        found = [*spec.shape, spec.first_expert]
        wanted = [layer.local_num_experts, 2 * intermediate_size_per_partition, hidden_size, first]
        if found != wanted:
            raise CheckpointError(
                f"{layer.layer_name}: gate and up are packed as {found[:3]} from expert {found[3]} on, "
                f"vLLM runs {wanted[:3]} from expert {wanted[3]} on"
            )

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        """Sizes stay what they are: packed stacks are padded within."""
        return hidden_size, intermediate_size

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels run nothing of this."""

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Weighted sum of each token's experts: x [T, H], topk_weights [T, k], topk_ids [T, k] -> [T, H]."""
        y: Tensor = self.experts(x, topk_ids, topk_weights)
        return y


def _refusal(layer: Any, activation: str) -> str | None:
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


def _first_expert(layer: Any) -> int:
    """Number of the first expert that this process runs; vLLM deals them out in runs."""
    if layer.expert_map is None:
        return 0
    mine = (layer.expert_map >= 0).nonzero().flatten()
    if len(mine) == 0 or int(mine[-1]) - int(mine[0]) + 1 != len(mine):
        reason = "its experts are not dealt out in runs of neighbours"
        raise CheckpointError(
            f"{layer.layer_name}: {reason}", hint="start vLLM with --expert-placement-strategy linear"
        )
    return int(mine[0])
