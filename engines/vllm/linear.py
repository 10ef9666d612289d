"""Linears of vLLM run by packed modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.modules import PackedLinear, PackedWeight


class PackedLinearMethod(LinearMethodBase):
    """Runs packed Linears whose results, one behind the other, are those of a layer; nothing is loaded or copied.

    Args:
        modules: In the order of the layer's rows; one, if they were packed as one.
    """

    def __init__(self, modules: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.modules = list(modules)

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *_: Any, **__: Any
    ) -> None:
        """Check that the layer is of the size of the packed modules.

        Raises:
            CheckpointError: It is not.
        """
        found = [sum(module.out_features for module in self.modules), self.modules[0].in_features]
        wanted = [sum(output_partition_sizes), input_size_per_partition]
        if found != wanted:
            name = getattr(layer, "prefix", type(layer).__name__)
            raise CheckpointError(f"{name}: is packed as {found}, vLLM's layer is {wanted}")
        layer.weight_packed = self.modules[0].tensors()[0]  # LoRA layers look here for the device

    def take_bias(self, layer: Any) -> None:
        """Leave adding the bias to the packed modules, which hold it.

        Raises:
            CheckpointError: The layer and the modules differ in whether there is one, or vLLM adds it elsewhere.
        """
        name = getattr(layer, "prefix", type(layer).__name__)
        wanted, found = layer.bias is not None, [module.bias is not None for module in self.modules]
        if wanted and not all(found) or any(found) and not wanted and not getattr(layer, "tp_rank", 0):
            raise CheckpointError(
                f"{name}: vLLM's layer has {'a' if wanted else 'no'} bias, the packed one is different"
            )
        if wanted and layer.skip_bias_add:
            raise CheckpointError(f"{name}: vLLM adds its bias elsewhere, packed Linears add it themselves")
        layer.register_parameter("bias", None)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: x fp32, bf16 or fp16 [.., K] -> [.., N] in the same dtype; the bias is the modules' own."""
        if len(self.modules) == 1:
            return self.modules[0](x)  # type: ignore[no-any-return]
        return torch.cat([module(x) for module in self.modules], -1)


class PlainLinearMethod(UnquantizedLinearMethod):
    """Hands packed Linears over as a plain weight, for layers whose matrix vLLM itself computes with.

    `kv_b_proj` of latent attention is one: vLLM makes the absorbed matrices of it.

    Args:
        modules: As those of `PackedLinearMethod`.
    """

    def __init__(self, modules: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.modules = list(modules)

    def create_weights(self, layer: Any, *_: Any, params_dtype: torch.dtype, **__: Any) -> None:
        """Fill the layer's weight [N, K]."""
        weight = torch.cat([dequantized(module).to(params_dtype) for module in self.modules])
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def dequantized(module: PackedWeight) -> Tensor:
    """The weight that a packed module stands for: fp32 [.., N, K]."""
    spec = module.spec
    tensors = dict(zip(module.kernel.suffixes, module.tensors(), strict=True))
    return spec.layout.unpack(tensors, spec.format, spec.shape, spec.parts).dequantize()
