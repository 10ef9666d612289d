"""Routed experts of vLLM run by a layer's two packed stacks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from tilewright.kernels.errors import CheckpointError, KernelUnavailableError
from tilewright.kernels.modules import PackedExperts, PackedStack

from .gating import ACTIVATIONS, BOUND, SLOPE, refusal


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
        if reason := refusal(layer, activation):
            raise KernelUnavailableError(f"{name}: {reason}", hint="serve the checkpoint that it was packed from")
        slope, bound = layer.swiglu_alpha or SLOPE, layer.swiglu_limit or BOUND
        stated = w13.spec.gating
        if stated and stated.activation != ACTIVATIONS[activation]:
            raise CheckpointError(f"{name}: experts are packed for `{stated.activation}`, vLLM runs `{activation}`")
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
