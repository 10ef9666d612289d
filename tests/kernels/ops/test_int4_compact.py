"""Compact int4 gives the bits of int4: the same numbers, read from another order of bytes."""

from __future__ import annotations

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import INT4_BY_GROUP
from tilewright.kernels.layouts.cpu_int4 import CPU_VNNI_INT4
from tilewright.kernels.layouts.cpu_int4_compact import CPU_INT4_COMPACT
from tilewright.kernels.tensors import QTensor


def random_weight(group: int, shape: tuple[int, ...], parts: int = 1) -> QTensor:
    fmt = INT4_BY_GROUP[group]
    *lead, n, k = shape
    scales = (torch.rand(*lead, n, fmt.scale_columns(k)) * 0.02 + 1e-4).bfloat16().float()
    return QTensor(fmt, torch.randint(0, 16, shape, dtype=torch.uint8), scales, parts=parts)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("int8_activations", [True, False])
def test_linears_have_the_bits_of_int4(isa: str, group: int, int8_activations: bool) -> None:
    torch.manual_seed(group)
    for n, k in ((40, 100), (130, 1280)):
        q, bias = random_weight(group, (n, k)), torch.randn(n)
        wide, compact = CPU_VNNI_INT4.pack(q), CPU_INT4_COMPACT.pack(q)["weight"]
        given = wide["weight"], wide["weight_zero_point"], wide["weight_scale"], n, bias, int8_activations
        for m in (0, 1, 3, 8, 37):
            x = torch.randn(m, k).bfloat16()
            expected = ops.linear_int4(x, *given)
            assert torch.equal(ops.linear_int4_compact(x, compact, n, bias, int8_activations), expected)
        if int8_activations:
            options = {"activation_group": 64, "rotation": 4}
            expected = ops.linear_int4(x, *given, **options)
            assert torch.equal(ops.linear_int4_compact(x, compact, n, bias, **options), expected)


@pytest.mark.parametrize("int8_activations", [True, False])
def test_experts_and_mlps_have_the_bits_of_int4(isa: str, int8_activations: bool) -> None:
    torch.manual_seed(2)
    upper, lower = random_weight(32, (3, 80, 100), 2), random_weight(32, (3, 100, 40))
    wide = [CPU_VNNI_INT4.pack(q) for q in (upper, lower)]
    compact = [CPU_INT4_COMPACT.pack(q)["weight"] for q in (upper, lower)]
    names = {"scale": "weight_scale", "zeros": "weight_zero_point"}
    rest = {f"{name}_{key}": w[of] for name, w in zip(("w13", "w2"), wide, strict=True) for key, of in names.items()}
    for m in (1, 30):
        x, ids, share = torch.randn(m, 100), torch.randint(0, 3, (m, 2)), torch.rand(m, 2)
        options = {"int8_activations": int8_activations}
        expected = ops.fused_experts(x, share, ids, wide[0]["weight"], wide[1]["weight"], 40, **rest, **options)
        y = ops.fused_experts(x, share, ids, *compact, 40, packing="int4-compact", **options)
        assert torch.equal(y, expected)
        one = {name: tensor[0] for name, tensor in rest.items()}
        expected = ops.fused_mlp(x, wide[0]["weight"][0], wide[1]["weight"][0], 40, **one, **options)
        y = ops.fused_mlp(x, compact[0][0], compact[1][0], 40, packing="int4-compact", **options)
        assert torch.equal(y, expected)


def test_what_it_cannot_hold_is_refused() -> None:
    q = random_weight(32, (32, 64))
    assert q.scales is not None
    with pytest.raises(LayoutError, match="zero points"):
        CPU_INT4_COMPACT.pack(QTensor(q.format, q.codes, q.scales, torch.full_like(q.scales, 7, dtype=torch.uint8)))
    with pytest.raises(LayoutError, match="bf16 scales"):
        CPU_INT4_COMPACT.pack(QTensor(q.format, q.codes, q.scales * 1.001))
    with pytest.raises(RuntimeError, match=r"16 \* group \+ 64"):
        ops.linear_int4_compact(torch.zeros(1, 64), CPU_VNNI_INT4.pack(q)["weight"], 32)
