"""The head of an engine's model: every process computes the logits of its own rows of the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.layouts.cpu_blocks import round_up, row_unit
from tilewright.kernels.modules import PackedLinear


class RankHead:
    """The rows of a packed head [V, K], which every rank's directory holds whole, that are one rank's.

    vLLM and SGLang pad the vocabulary and deal it out in equal runs; they cut the padding off once they have gathered
    the logits of all ranks. A run may begin within a block of packed rows: then all of the block is computed.

    Args:
        head: The packed head.
        layer: The engine's head, or the embedding that is one too.

    Raises:
        CheckpointError: They differ in size.
    """

    def __init__(self, head: PackedLinear, layer: Any) -> None:
        found, wanted = [head.out_features, head.in_features], [layer.org_vocab_size, layer.embedding_dim]
        if found != wanted:
            raise CheckpointError(f"the head: is packed as {found}, the engine's layer is {wanted}")
        self.head: PackedLinear | None = head
        self.width = layer.num_embeddings_per_partition if layer.tp_size > 1 else layer.org_vocab_size
        self.first, self.count = 0, layer.org_vocab_size
        if layer.tp_size > 1:
            mine, unit = layer.shard_indices, row_unit(head.spec.format)
            start, stop = mine.org_vocab_start_index, mine.org_vocab_end_index
            rows = slice(start // unit * unit, min(round_up(stop, unit), layer.org_vocab_size))
            self.first, self.count = start - rows.start, stop - start
            self.head = _with_rows(head, rows) if self.count else None

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of the rank: x [.., K] -> [.., V / ranks], zeros for padding."""
        if self.head is None:
            return x.new_zeros(*x.shape[:-1], self.width)
        y: Tensor = self.head(x)
        if y.shape[-1] == self.width:
            return y
        return functional.pad(y.narrow(-1, self.first, self.count), (0, self.width - self.count)).contiguous()


def _with_rows(head: PackedLinear, rows: slice) -> PackedLinear:
    taken = head.spec.take(dict(head.named_buffers()), rows)
    return PackedLinear("head", head.spec.with_rows(rows), taken, head.activation_scales)
