"""Activations scaled by token and group of columns, and rotated: the reference's bits, on every instruction set."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.formats import INT4_BY_GROUP, INT8
from tilewright.kernels.layouts.cpu_int4 import CPU_VNNI_INT4
from tilewright.kernels.layouts.cpu_int8 import CPU_VNNI_INT8
from tilewright.kernels.ops import reference, reference_experts
from tilewright.kernels.rotation import largest_block
from tilewright.kernels.tensors import QTensor

KINDS = ["int8", "int4-g32", "int4-g64", "int4-g128"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Weight:
    """A random weight [.., N, K] of one kind, packed, with its operator and its reference."""

    def __init__(self, kind: str, shape: tuple[int, ...], parts: int = 1) -> None:
        self.group = 0 if kind == "int8" else int(kind.split("-g")[1])
        fmt = INT4_BY_GROUP[self.group] if self.group else INT8
        grid = (*shape[:-1], fmt.scale_columns(shape[-1]))
        self.scales = torch.rand(grid) * 0.01 + 1e-4
        if self.group:
            self.codes, self.zeros = torch.randint(0, 16, shape).byte(), torch.randint(0, 17, grid).byte()
            packed = CPU_VNNI_INT4.pack(QTensor(fmt, self.codes, self.scales, self.zeros, parts))
            self.packed = (packed["weight"], packed["weight_zero_point"], packed["weight_scale"])
        else:
            self.codes = torch.randint(-128, 128, shape, dtype=torch.int8)
            packed = CPU_VNNI_INT8.pack(QTensor(INT8, self.codes, self.scales, parts=parts))
            self.packed = (packed["weight"], packed["weight_scale"])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, group: int, rotation: int) -> torch.Tensor:
        n = self.codes.shape[0]
        if self.group:
            return ops.linear_int4(x, *self.packed, n, bias, activation_group=group, rotation=rotation)
        return ops.linear_int8(x, *self.packed, n, bias, group, rotation)

    def reference(
        self, x: torch.Tensor, bias: torch.Tensor | None, group: int, rotation: int, expert: int | None = None
    ) -> torch.Tensor:
        codes, scales = (t if expert is None else t[expert] for t in (self.codes, self.scales))
        if not self.group:
            return reference.linear_int8(x, codes, scales, bias, group, rotation)
        zeros = self.zeros if expert is None else self.zeros[expert]
        return reference.linear_int4(x, codes, zeros, scales, self.group, bias, True, group, rotation)


def outliers(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Activations as models have them: a few columns are much larger than all others."""
    x = torch.randn(m, k)
    x[:, torch.randint(0, k, (max(1, k // 50),))] *= 100
    return x.to(dtype)


def test_one_rounding_is_one_rounding() -> None:
    """Against exact fractions, with sums that lie next to a tie of fp32."""
    dot = torch.randint(-(2**21), 2**21, (4000,))
    factor = torch.randn(4000) * torch.exp2(torch.randint(-12, 12, (4000,)).float())
    total = torch.randn(4000)
    near = (-(dot.double() * factor.double()) * (1 + 2**-24)).float()
    total[:1000] = near[:1000]  # cancels almost all of it
    total[1000:2000] = torch.exp2(torch.randint(10, 40, (1000,)).float())
    found = reference.fused_multiply_add(dot, factor, total)
    for d, f, t, y in zip(dot.tolist(), factor.tolist(), total.tolist(), found.tolist(), strict=True):
        exact = Fraction(d) * Fraction(f) + Fraction(t)
        step = Fraction(torch.nextafter(torch.tensor(y).abs(), torch.tensor(torch.inf)).item()) - abs(Fraction(y))
        assert abs(Fraction(y) - exact) <= step / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("k", [33, 96, 100, 640])
def test_odd_sizes(isa: str, kind: str, group: int, k: int) -> None:
    for n in (17, 65):
        weight, bias = Weight(kind, (n, k)), torch.randn(n) if n == 65 else None
        for m in (0, 1, 3, 17) if isa == "amx_emu" else (0, 1, 2, 4, 5, 7, 17, 33):
            x = outliers(m, k, DTYPES[(m + n) % 3])
            rotation = (0, largest_block(k, 64))[m % 2] if k % 2 == 0 else 0
            y = weight(x, bias, group, rotation)
            assert torch.equal(y, weight.reference(x, bias, group, rotation)), (n, m, rotation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [64, 128])
def test_long_and_many(isa: str, kind: str, group: int) -> None:
    """Several chunks of K, several tasks of rows; a row does not depend on the others or on the threads."""
    weight = Weight(kind, (65, 1248))
    m = 35 if isa in {"portable", "amx_emu"} else 391
    x = outliers(m, 1248, torch.bfloat16)
    y = weight(x, None, group, 32)
    assert torch.equal(y, weight.reference(x, None, group, 32))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(weight(x, None, group, 32), y)
        assert torch.equal(weight(x[-1:], None, group, 32), y[-1:])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["int8", "int4-g64"])
@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64, 128])
def test_rotations_of_every_block(isa: str, kind: str, block: int) -> None:
    weight = Weight(kind, (32, 384))
    x = outliers(5, 384, torch.float32)
    for group in (0, 64):
        assert torch.equal(weight(x, None, group, block), weight.reference(x, None, group, block))


def test_rotated_activations_rounded_to_bf16(isa: str) -> None:
    """W4A16 rotates as well: the same file serves both."""
    weight = Weight("int4-g64", (40, 256))
    x = outliers(6, 256, torch.bfloat16)
    y = ops.linear_int4(x, *weight.packed, 40, None, False, rotation=64)
    exact = reference.linear_int4(x.float(), weight.codes, weight.zeros, weight.scales, 64, None, False, 0, 64)
    assert (y.double() - exact.double()).norm() < 2**-8 * exact.double().norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "rotations"), [(64, (0, 0)), (128, (32, 16)), (0, (64, 16)), (128, (0, 16))])
def test_experts(isa: str, kind: str, group: int, rotations: tuple[int, int]) -> None:
    experts, hidden, inner = 3, 192, 80
    w13, w2 = Weight(kind, (experts, 2 * inner, hidden), parts=2), Weight(kind, (experts, hidden, inner))
    names = ("w13", "w13_zeros", "w13_scale") if w13.group else ("w13", "w13_scale")
    given = dict(zip(names, w13.packed, strict=True))
    given |= dict(zip((name.replace("13", "2") for name in names), w2.packed, strict=True))

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        def gate_up(x: torch.Tensor) -> torch.Tensor:
            return w13.reference(x, None, group, rotations[0], number)

        def down(x: torch.Tensor) -> torch.Tensor:
            return w2.reference(x, None, group, rotations[1], number)

        return reference_experts.expert(rows, gate_up, down, "silu")

    options = {"activation_group": group, "w13_rotation": rotations[0], "w2_rotation": rotations[1]}
    for m in (1, 9, 40):
        x = outliers(m, hidden, DTYPES[m % 3])
        weights, ids = torch.rand(m, 2), torch.stack([torch.randperm(experts)[:2] for _ in range(m)])
        y = ops.fused_experts(x, weights, ids, inner=inner, **given, **options)
        assert torch.equal(y, reference_experts.fused_experts(x, weights, ids, expert, 1.0)), m
        first = {name: tensor[0] for name, tensor in given.items()}
        one = reference_experts.fused_experts(x, torch.ones(m, 1), torch.zeros(m, 1, dtype=torch.int64), expert, 1.0)
        assert torch.equal(ops.fused_mlp(x, inner=inner, **first, **options), one), m


def test_outliers_cost_less(isa: str) -> None:
    """What it is for: the error of a row with a few large columns, by token, by group, rotated."""
    weight = Weight("int8", (64, 1024))
    x = outliers(20, 1024, torch.float32)
    exact = x.double() @ (weight.codes.double() * weight.scales.double()).T
    by_token, by_group = (weight(x, None, group, 0).double() for group in (0, 64))
    assert (by_group - exact).norm() < 0.8 * (by_token - exact).norm()


@pytest.mark.parametrize("wrong", [{"activation_group": 32}, {"activation_group": 96}, {"activation_group": -64},
                                   {"rotation": 48}, {"rotation": 256}, {"rotation": 64}, {"rotation": 1},
                                   {"rotation": -2}])  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, int]) -> None:
    weight = Weight("int8", (32, 96))
    with pytest.raises(RuntimeError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}, it must be 0"):
        ops.linear_int8(torch.zeros(1, 96), *weight.packed, 32, **wrong)


def test_only_integers_have_groups() -> None:
    weight = Weight("int4-g32", (32, 96))
    with pytest.raises(RuntimeError, match="0 where activations are not int8"):
        ops.linear_int4(torch.zeros(1, 96), *weight.packed, 32, None, False, 64)
