from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.kernels.formats import INT4_BY_GROUP, INT4_G32, INT4_G64, INT4_G128, INT8, WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.gpu_hopper import GPU_HOPPER_W4, decode, encode
from tilewright.kernels.tensors import QTensor, TensorSpec


def random_weight(fmt: WeightFormat, *shape: int, parts: int = 1) -> QTensor:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scales = (torch.rand(*shape[:-1], shape[-1] // fmt.block_k) + 0.01).to(torch.bfloat16).float()
    return QTensor(fmt, codes, scales, parts=parts)


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.arange(256, dtype=torch.int16)
    return (grid & 15).to(torch.uint8), (grid >> 4).to(torch.uint8)


def test_encode_is_the_documented_byte_and_a_bijection() -> None:
    low, high = every_pair()
    tiles = encode(low, high)
    for code_low, code_high, byte in zip(low.tolist(), high.tolist(), tiles.tolist(), strict=True):
        v_low, v_high = code_low - 8, code_high - 8
        m_low, m_high = (v if v >= 0 else -v - 1 for v in (v_low, v_high))
        assert byte == (v_low < 0) << 7 | m_low << 1 | m_high << 4 | (v_high < 0)
    assert len(set(tiles.tolist())) == 256
    assert all(torch.equal(a, b) for a, b in zip(decode(tiles), (low, high), strict=True))


def test_seven_integer_operations_give_e4m3_numbers() -> None:
    low, high = every_pair()
    w = encode(low, high).numpy().view(np.uint32)
    fp8_low = (w & np.uint32(0x8E8E8E8E)) + ((w & np.uint32(0x80808080)) >> np.uint32(6))
    fp8_high = ((w >> np.uint32(3)) & np.uint32(0x0E0E0E0E)) + (w & np.uint32(0x01010101)) * np.uint32(0x82)
    for codes, bits in ((low, fp8_low), (high, fp8_high)):
        values = torch.from_numpy(bits.view(np.uint8)).view(torch.float8_e4m3fn).float() * 256
        assert torch.equal(values, codes.float() - 8)


@pytest.mark.parametrize("fmt", INT4_BY_GROUP.values(), ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_tiles_hold_the_documented_columns(fmt: WeightFormat, groups: int) -> None:
    k = groups * fmt.block_k
    q = random_weight(fmt, 2, 128, k)
    packed = GPU_HOPPER_W4.pack(q)
    tiles = -(-k // 128)
    assert packed["tiles"].shape == (2, 2, tiles, 64, 64)
    codes = torch.full((2, 128, tiles * 128), 8, dtype=torch.uint8)
    codes[..., :k] = q.codes
    for e, i, t in np.ndindex(2, 2, tiles):
        rows = codes[e, 64 * i : 64 * i + 64, 128 * t : 128 * t + 128]
        assert torch.equal(packed["tiles"][e, i, t], encode(rows[:, :64], rows[:, 64:]))
    scales = torch.zeros(2, tiles * 128 // fmt.block_k, 128)
    scales[:, :groups] = q.scales.transpose(1, 2)
    assert torch.equal(packed["scales"].float(), scales)


@pytest.mark.parametrize("fmt", INT4_BY_GROUP.values(), ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("shape", [(64, 128), (3, 192, 320), (2, 128, 640)])
def test_unpack_is_exact(fmt: WeightFormat, shape: tuple[int, ...]) -> None:
    if shape[-1] % fmt.block_k:
        assert "320" in str(GPU_HOPPER_W4.accepts(fmt, shape))
        return
    parts = 2 if shape[-2] == 128 else 1
    q = random_weight(fmt, *shape, parts=parts)
    packed = GPU_HOPPER_W4.pack(q)
    assert {name: TensorSpec.of(tensor) for name, tensor in packed.items()} == GPU_HOPPER_W4.specs(fmt, shape, parts)
    back = GPU_HOPPER_W4.unpack(packed, fmt, shape, parts)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scales, q.scales)
    assert (back.format, back.parts) == (fmt, parts)


@pytest.mark.parametrize(
    ("fmt", "shape", "word"),
    [
        (INT8, (64, 128), "int8"),
        (INT4_G128, (64, 192), "192"),
        (INT4_G64, (64, 96), "96"),
        (INT4_G32, (96, 128), "96"),
    ],
)
def test_refusals_name_the_value(fmt: WeightFormat, shape: tuple[int, ...], word: str) -> None:
    assert word in str(GPU_HOPPER_W4.accepts(fmt, shape))


def test_registry_lists_it() -> None:
    assert LAYOUTS["gpu-hopper-w4"] is GPU_HOPPER_W4
