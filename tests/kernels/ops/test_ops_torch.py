"""The operators as torch sees them: schemas, fake implementations, compilation, untouched inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright.kernels import ops

X, BIAS = torch.randn(3, 64), torch.randn(40)
INT4 = (
    torch.randint(0, 255, (2, 2, 640), dtype=torch.uint8),
    torch.full((2, 2, 32), 8, dtype=torch.int8),
    torch.rand(2, 2, 32),
)
CASES: dict[str, tuple[Any, ...]] = {
    "linear_bf16": (X.bfloat16(), torch.randn(64, 64).bfloat16(), 40, BIAS),
    "linear_int8": (X, torch.randint(-9, 9, (64, 68), dtype=torch.int8), torch.rand(64, 1), 40, None),
    "linear_fp8": (X.half(), torch.randn(64, 64).to(torch.float8_e4m3fn), torch.rand(1, 1), 40, BIAS),
    "linear_int4": (X.bfloat16(), *INT4, 40, BIAS, False),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name != "linear_fp8":  # torch itself cannot compare FP8 arguments before and after
        checks.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.tilewright, name).default, CASES[name], test_utils=checks)


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_alone(name: str) -> None:
    arguments = CASES[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    getattr(ops, name)(*arguments)
    for a, b in zip(arguments, before, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_graph_break(name: str) -> None:
    function = getattr(ops, name)
    compiled = torch.compile(lambda *a: function(*a) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*CASES[name]), function(*CASES[name]) + 1)
    x, *rest = CASES[name]
    assert compiled(x.repeat(2, 1).view(2, 3, 64), *rest).shape == (2, 3, 40)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of NaN, and the memory around it, 64 elements on both sides."""
    size = math.prod(shape)
    memory = torch.full((size + 128,), torch.nan, dtype=dtype)
    return memory[64 : 64 + size].view(shape), memory


@pytest.mark.parametrize("name", CASES)
def test_out_takes_the_result_and_nothing_more(name: str) -> None:
    x, *rest = CASES[name]
    for rows in (x[:0], x, x.repeat(40, 1).view(8, 15, 64)):
        expected = getattr(ops, name)(rows, *rest)
        out, memory = guarded(expected.shape, x.dtype)
        assert getattr(ops, name)(rows, *rest, out=out) is out
        assert torch.equal(out, expected)
        assert memory[:64].isnan().all()
        assert memory[-64:].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_out_under_torch(name: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    x, *rest = CASES[name]
    operator = getattr(torch.ops.tilewright, name).out
    torch.library.opcheck(operator, (x, *rest), {"out": x.new_empty(3, 40)}, test_utils=checks)

    def layer(given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return getattr(ops, name)(given, *rest, out=out) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = x.new_zeros(3, 40)
    assert torch.equal(compiled(x, out), getattr(ops, name)(x, *rest) + 1)
    assert torch.equal(out, getattr(ops, name)(x, *rest))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(3, 41), r"out is \[3, 41\], it must be contiguous, of the dtype of x"),
        (torch.empty(120), "it must be contiguous"),
        (torch.empty(3, 80)[:, ::2], "it must be contiguous"),
        (torch.empty(3, 40).half(), "of the dtype of x"),
        (X.view(-1)[40:160].view(3, 40), "out must not share memory with x"),
    ],
)
def test_out_of_another_kind_is_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.linear_int8(*CASES["linear_int8"], out=out)
