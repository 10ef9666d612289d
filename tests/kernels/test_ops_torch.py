"""The operators as torch sees them: schemas, fake implementations, compilation, untouched inputs."""

from __future__ import annotations

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
