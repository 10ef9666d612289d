"""Logits of all ranks beside those of the whole head, for vocabularies and ranks of any size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.engines.vocabulary import RankHead
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.formats import FORMATS
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.cpu_blocks import round_up
from tilewright.kernels.modules import PackedLinear
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

PADDING = 64  # what vLLM and SGLang round a vocabulary up to


def layer_of(rank: int, ranks: int, n: int, k: int) -> Any:
    """What a rank's `ParallelLMHead` tells of itself."""
    each = round_up(n, PADDING) // ranks
    start, stop = min(rank * each, n), min((rank + 1) * each, n)
    shard = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    return SimpleNamespace(
        org_vocab_size=n, embedding_dim=k, tp_size=ranks, num_embeddings_per_partition=each, shard_indices=shard
    )


def packed_head(layout_id: str, format_id: str, n: int, k: int, generator: torch.Generator) -> PackedLinear:
    """A random head with a bias."""
    layout, fmt = LAYOUTS[layout_id], FORMATS[format_id]
    values = torch.randn(n, k, generator=generator)
    codes, scales = values.to(torch.bfloat16), None
    if fmt.has_scales:
        scales = torch.rand(fmt.scale_rows(n), fmt.scale_columns(k), generator=generator) / 32
        codes = ((values * 3).round() + fmt.zero_point).clamp(-15 + fmt.zero_point * 2, 15).to(fmt.code_dtype)
    tensors = layout.pack(QTensor(fmt, codes, scales)) | {"bias": torch.randn(n, generator=generator)}
    return PackedLinear("lm_head", ModuleSpec(layout, fmt, (n, k), bias_dtype=torch.float32), tensors)


PAIRS = [
    ("cpu-vnni-bf16", "bf16"),
    ("cpu-vnni-int8", "int8"),
    ("cpu-vnni-fp8", "fp8"),
    ("cpu-vnni-int4", "int4-g128"),
]


@pytest.mark.parametrize(("layout_id", "format_id"), PAIRS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_ranks_together_are_the_head(layout_id: str, format_id: str, data: st.DataObject) -> None:
    n, k, ranks = data.draw(st.integers(1, 400)), 128, data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    head, x = packed_head(layout_id, format_id, n, k, generator), torch.randn(3, 2, k, generator=generator)
    parts = [RankHead(head, layer_of(rank, ranks, n, k))(x) for rank in range(ranks)]
    assert all(part.is_contiguous() and part.shape == parts[0].shape for part in parts)
    assert torch.equal(torch.cat(parts, -1)[..., :n], head(x))


def test_another_vocabulary_is_refused() -> None:
    head = packed_head("cpu-vnni-bf16", "bf16", 100, 64, torch.Generator())
    with pytest.raises(CheckpointError, match=r"packed as \[100, 64\], the engine's layer is \[101, 64\]"):
        RankHead(head, layer_of(0, 2, 101, 64))
