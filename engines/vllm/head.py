"""Heads and embeddings of vLLM's models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tilewright.kernels.modules import PackedLinear

from ..vocabulary import RankHead
from .linear import PackedLinearMethod


class PackedHeadMethod(PackedLinearMethod):
    """Runs a packed head."""

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """Find the rank's rows."""
        self.rank = RankHead(self.modules[0], layer)
        layer.weight_packed = self.modules[0].tensors()[0]  # LoRA layers look here for the device

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits: x [.., K] -> [.., V / ranks]; the bias is the module's own."""
        return self.rank(x)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """A tied head is packed apart from the embedding, so there is nothing to share."""
        return layer


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Rows of the embedding as they lie in the mapped file; the head of the same matrix, where it is tied, is packed.

    Args:
        head: The packed head; None if there is none, or if it is a layer of its own.
    """

    def __init__(self, head: PackedLinear | None) -> None:
        super().__init__()
        self.head = head
        self.rank: RankHead | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """The embedding's own weight, and the rank's rows of the head."""
        super().create_weights(layer, *args, **kwargs)
        if self.head is not None:
            self.rank = RankHead(self.head, layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing: vLLM would make a second copy of the matrix, in case that it is a head too."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of a tied head: x [.., K] -> [.., V / ranks]."""
        return functional.linear(x, layer.weight, bias) if self.rank is None else self.rank(x)
