"""The packed bytes are those that engines' own packing gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.formats import BF16, FP8, INT4_BY_GROUP, INT8, WeightFormat
from tilewright.kernels.formats.integer import IntegerFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor

GOLDEN = Path(__file__).parents[2] / "golden"
FLOATS = load_file(GOLDEN / "pack_float.safetensors")
INTS = load_file(GOLDEN / "pack_int.safetensors")
INT4 = load_file(GOLDEN / "pack_int4_zp.safetensors")


def _keys(pairs: dict[str, torch.Tensor], *kinds: str) -> list[str]:
    """Names of the pairs of these kinds but for 2-D weights of fewer than 16 rows, which engines turn into float32."""
    return [
        key.removesuffix(".in")
        for key, tensor in pairs.items()
        if key.endswith(".in") and key.split(".")[0] in kinds and (tensor.dim() == 3 or tensor.shape[0] >= 16)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _wide(codes: torch.Tensor, fmt: WeightFormat) -> QTensor:
    *lead, n, k = codes.shape
    if not fmt.has_scales:
        return QTensor(fmt, codes)
    return QTensor(fmt, codes, torch.ones(*lead, fmt.scale_rows(n), fmt.scale_columns(k)))


@pytest.mark.parametrize("key", _keys(FLOATS, "bf16", "f16", "fp8"))
def test_float(key: str) -> None:
    codes, expected = FLOATS[f"{key}.in"], FLOATS[f"{key}.out"]
    layout, fmt = (LAYOUTS["cpu-vnni-fp8"], FP8) if key.startswith("fp8") else (LAYOUTS["cpu-vnni-bf16"], BF16)
    if key.startswith("f16"):  # the same permutation of 16-bit elements
        codes, expected = codes.view(torch.bfloat16), expected.view(torch.bfloat16)
    packed = layout.pack(_wide(codes, fmt))["weight"]
    n, k = codes.shape[-2:]
    if n % 32:  # engines make a last block of 16 rows where we pad to 32: the same pairs, 16 apart
        tail = packed[..., n // 32 * 32 :, :].reshape(*codes.shape[:-2], k // 2, 32, 2)
        assert not _bytes(tail[..., 16:, :]).any()
        packed = torch.cat([packed[..., : n // 32 * 32, :], tail[..., :16, :].reshape(*codes.shape[:-2], 16, k)], -2)
    assert torch.equal(_bytes(packed), _bytes(expected))


@pytest.mark.parametrize("key", _keys(INTS, "int8"))
def test_int8(key: str) -> None:
    packed = LAYOUTS["cpu-vnni-int8"].pack(_wide(INTS[f"{key}.in"], INT8))
    assert torch.equal(packed["weight"], INTS[f"{key}.out"])


@pytest.mark.parametrize("key", [key.removesuffix(".q") for key in INT4 if key.endswith(".q")])
def test_int4(key: str) -> None:
    group = int(key.split(".g")[1])
    fmt = INT4_BY_GROUP.get(group) or IntegerFormat(f"int4-g{group}", 4, torch.uint8, 7.0, 1, group, 8)
    scales = INT4[f"{key}.scales"].transpose(-1, -2).float().contiguous()
    q = QTensor(fmt, INT4[f"{key}.q"], scales, INT4[f"{key}.zp"])
    layout = LAYOUTS["cpu-vnni-int4"]
    packed = layout.pack(q)
    for suffix, kind in {"weight": "w", "weight_zero_point": "z", "weight_scale": "s"}.items():
        assert torch.equal(packed[suffix], INT4[f"{key}.out_{kind}"]), suffix
    back = layout.unpack(packed, fmt, q.shape)
    assert back.zeros is not None
    assert torch.equal(back.zeros, INT4[f"{key}.zp"])
    assert torch.equal(back.codes, q.codes)
