"""Batched products: each matrix of the batch as the linear operator multiplies it, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.formats import BF16, FP8
from tilewright.kernels.layouts.cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from tilewright.kernels.tensors import QTensor


def stack(kind: str, batch: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Packed weight, scale and values."""
    codes = torch.randn(batch, n, k)
    if kind == "bf16":
        q = QTensor(BF16, codes.bfloat16())
        return CPU_VNNI_BF16.pack(q)["weight"], None, q.dequantize()
    scales = torch.rand(batch, FP8.scale_rows(n), FP8.scale_columns(k)) + 0.1
    q = QTensor(FP8, (codes * 50).clamp(-448, 448).to(torch.float8_e4m3fn), scales)
    return CPU_VNNI_FP8.pack(q)["weight"], scales, q.dequantize()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(128, 96), (130, 160), (33, 100)])
def test_equal_to_linear(isa: str, kind: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, scale, values = stack(kind, 3, n, k)
    linear = ops.linear_bf16 if kind == "bf16" else ops.linear_fp8
    for m, dtype in ((0, torch.float32), (1, torch.bfloat16), (5, torch.float16), (40, torch.float32)):
        a = torch.randn(3, m, k).to(dtype)
        y = ops.bmm(a, weight, n, scale)
        assert (y.shape, y.dtype) == ((3, m, n), dtype)
        for b in range(3):
            own = (weight[b],) if scale is None else (weight[b], scale[b])
            assert torch.equal(y[b], linear(a[b], *own, n))
        exact = a.bfloat16().double() @ values.double().transpose(1, 2)
        assert (y.double() - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_strides_and_threads(isa: str, kind: str) -> None:
    """Heads come as the middle axis of a projection; what lies between them must not be read or written."""
    torch.manual_seed(3)
    weight, scale, _ = stack(kind, 4, 64, 64)
    m = 40 if isa in {"portable", "amx_emu"} else 250  # more than one tile of rows
    wide = torch.full((m, 4, 96), torch.nan)
    wide[..., 16:80] = torch.randn(m, 4, 64)
    a = wide[..., 16:80].transpose(0, 1)
    before = wide.clone()
    expected = ops.bmm(a.contiguous(), weight, 64, scale)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(ops.bmm(a, weight, 64, scale), expected)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(wide.nan_to_num(7.0), before.nan_to_num(7.0))
    assert torch.equal(ops.bmm(a.transpose(1, 2).contiguous().transpose(1, 2), weight, 64, scale), expected)


def test_refusals_name_the_value_and_the_rule() -> None:
    weight, scale, _ = stack("fp8", 2, 64, 64)
    a = torch.randn(2, 1, 64)
    with pytest.raises(RuntimeError, match=r"weight is \[2, 64, 64\], it must be \[3, 64, 64\]"):
        ops.bmm(torch.randn(3, 1, 64), weight, 64, scale)
    with pytest.raises(RuntimeError, match="weight_scale is missing"):
        ops.bmm(a, weight, 64)
    with pytest.raises(RuntimeError, match="weight must be packed in bfloat16 or float8_e4m3fn"):
        ops.bmm(a, torch.zeros(2, 64, 68, dtype=torch.int8), 64)
