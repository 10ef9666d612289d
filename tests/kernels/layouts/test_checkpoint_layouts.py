"""Checkpoint layouts: exact inverses, the byte formulas of the formats, and an independent decompressor."""

import random

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import BF16, FORMATS, FP8, INT4_BY_GROUP, INT4_G128, INT8, WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor, TensorSpec

CHECKPOINT = tuple(name for name in LAYOUTS if not name.startswith(("cpu-", "gpu-")))


def random_weight(fmt: WeightFormat, n: int, k: int) -> QTensor:
    if fmt == FP8:
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    elif fmt == INT8:
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    elif fmt == BF16:
        return QTensor(fmt, torch.randn(n, k).to(torch.bfloat16))
    else:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.rand(fmt.scale_rows(n), fmt.scale_columns(k)).add(0.01).to(torch.bfloat16).to(torch.float32)
    return QTensor(fmt, codes, scales)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=60)
@given(st.sampled_from(CHECKPOINT), st.sampled_from(list(FORMATS)), st.integers(1, 300), st.integers(1, 300))
def test_unpack_inverts_pack(layout_id: str, fmt_id: str, n: int, k: int) -> None:
    layout, fmt = LAYOUTS[layout_id], FORMATS[fmt_id]
    k = -(-k // fmt.block_k) * fmt.block_k if fmt.bits == 4 else k
    if layout.accepts(fmt, (n, k)) is not None:
        return
    q = random_weight(fmt, n, k)
    tensors = layout.pack(q)
    assert {name: TensorSpec.of(tensor) for name, tensor in tensors.items()} == layout.specs(fmt, (n, k))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = layout.unpack(tensors, fmt, (n, k))
    assert torch.equal(raw(back.codes), raw(q.codes))
    assert (q.scales is None) == (back.scales is None)
    assert q.scales is None or torch.equal(back.scales, q.scales)


def test_every_checkpoint_layout_holds_some_format() -> None:
    for layout_id in CHECKPOINT:
        assert any(LAYOUTS[layout_id].accepts(fmt, (128, 128)) is None for fmt in FORMATS.values()), layout_id


def test_stated_examples_of_nibble_order() -> None:
    q = torch.tensor([[3, -2] * 64]) + 8
    weight = LAYOUTS["w4afp8-expert"].pack(QTensor(INT4_G128, q.to(torch.uint8), torch.ones(1, 1)))["weight"]
    assert weight.unique().tolist() == [-29]
    q = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -4] * 4]) + 8
    packed = LAYOUTS["pack-quantized"].pack(QTensor(INT4_BY_GROUP[32], q.to(torch.uint8), torch.ones(1, 1)))
    assert packed["weight_packed"].unique().tolist() == [1269274864]


def test_all_256_nibble_pairs_survive() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).flatten().to(torch.uint8).reshape(4, 128)
    q = QTensor(INT4_G128, pairs, torch.ones(4, 1))
    for layout_id in ("w4afp8-expert", "pack-quantized"):
        tensors = LAYOUTS[layout_id].pack(q)
        assert torch.equal(LAYOUTS[layout_id].unpack(tensors, INT4_G128, (4, 128)).codes, pairs)
    native, packed = (LAYOUTS[name].pack(q) for name in ("w4afp8-expert", "pack-quantized"))
    words_as_bytes = packed["weight_packed"].view(torch.uint8) ^ 0x88
    assert torch.equal(native["weight"].view(torch.uint8), words_as_bytes)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_compressed_tensors_reads_the_same_codes(group: int) -> None:
    q = random_weight(INT4_BY_GROUP[group], 37, 384)
    packed = LAYOUTS["pack-quantized"].pack(q)
    theirs = unpack_from_int32(packed["weight_packed"], 4, torch.Size((37, 384)))
    assert torch.equal(theirs + 8, q.codes.to(torch.int8))


def test_refusals_name_the_numbers() -> None:
    reject = LAYOUTS["w4afp8-expert"].accepts(INT4_G128, (5, 192))
    assert reject is not None
    assert "K = 192 is not a multiple of group 128" in str(reject)
    for layout_id in CHECKPOINT:
        assert LAYOUTS[layout_id].accepts(FP8, (2, 128, 128)) is not None


def test_unpack_refuses_what_does_not_fit() -> None:
    q = random_weight(INT4_G128, 4, 256)
    layout = LAYOUTS["pack-quantized"]
    tensors = layout.pack(q)
    with pytest.raises(LayoutError, match="`weight_scale` is missing"):
        layout.unpack({"weight_packed": tensors["weight_packed"]}, INT4_G128, (4, 256))
    with pytest.raises(LayoutError, match=r"\[4, 32\], expected torch.int32 \[4, 48\]"):
        layout.unpack(tensors, INT4_G128, (4, 384))
    with pytest.raises(LayoutError, match=r"says \[5, 256\], the weight is \[4, 256\]"):
        layout.unpack(tensors | {"weight_shape": torch.tensor([5, 256])}, INT4_G128, (4, 256))
    with pytest.raises(LayoutError, match="no such numbers"):
        layout.pack(QTensor(INT4_G128, q.codes, torch.full((4, 2), 0.1)))
    zeros = torch.full((4, 2), random.randint(0, 15), dtype=torch.uint8)
    with pytest.raises(LayoutError, match="symmetric"):
        layout.pack(QTensor(INT4_G128, q.codes, q.scales, zeros))
