"""The operators over experts as torch sees them: schemas, fake implementations, compilation, untouched inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.ops import experts as ops_experts

E, HIDDEN, INNER = 2, 64, 40
X, WEIGHTS, IDS = torch.randn(3, HIDDEN), torch.rand(3, 2), torch.tensor([[0, 1], [1, -1], [0, 0]])


def packed(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A stack of random packed matrices, rows and columns already padded."""
    if kind == "bf16":
        return {"": torch.randn(E, rows, columns).bfloat16()}
    if kind == "int8":
        codes = torch.randint(-9, 9, (E, rows, columns + 4), dtype=torch.int8)
        codes.view(E, -1, 32 * (columns + 4))[:, :, 32 * columns :] = 0
        return {"": codes, "_scale": torch.rand(E, rows, 1)}
    if kind == "fp8":
        grid = (E, max(rows // 64, 1), -(-columns // 128))
        return {"": torch.randn(E, rows, columns).to(torch.float8_e4m3fn), "_scale": torch.rand(grid)}
    grid = (E, rows // 32, columns // 32, 32)
    codes = torch.randint(0, 255, (E, rows // 32, columns // 32, 640), dtype=torch.uint8)
    return {"": codes, "_scale": torch.rand(grid), "_zeros": torch.full(grid, 8, dtype=torch.int8)}


def arguments(kind: str) -> dict[str, Any]:
    w13, w2 = packed(kind, 128, HIDDEN), packed(kind, 64, 64)
    named = {f"w13{suffix}": tensor for suffix, tensor in w13.items()}
    return {"inner": INNER, **named, **{f"w2{suffix}": tensor for suffix, tensor in w2.items()}}


KINDS = ["bf16", "int8", "fp8", "int4"]


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind != "fp8":  # torch itself cannot compare FP8 arguments before and after
        checks.append("test_schema")
    call = arguments(kind)
    torch.library.opcheck(torch.ops.tilewright.fused_experts.default, (X, WEIGHTS, IDS), call, test_utils=checks)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_the_shared_expert(kind: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    call = {name: v[0] if isinstance(v, torch.Tensor) else v for name, v in arguments(kind).items()}
    call |= {"fused_out": X + 1, "gate": torch.randn(3, 1)}
    torch.library.opcheck(torch.ops.tilewright.fused_mlp.default, (X,), call, test_utils=checks)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return ops_experts.fused_mlp(x, **call) * 2

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(X), layer(X))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_opcheck_of_batched_products(kind: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    weight = packed(kind, 64, HIDDEN)
    a = torch.randn(E, 3, HIDDEN).bfloat16()
    call = (a, weight[""], 40, weight.get("_scale"))
    torch.library.opcheck(torch.ops.tilewright.bmm.default, call, test_utils=checks)
    compiled = torch.compile(lambda *given: ops.bmm(*given) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*call), ops.bmm(*call) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone(kind: str) -> None:
    call = {"x": X, "topk_weights": WEIGHTS, "topk_ids": IDS, **arguments(kind)}
    before = {name: a.clone() for name, a in call.items() if isinstance(a, torch.Tensor)}
    ops_experts.fused_experts(**call)
    for name, tensor in before.items():
        assert torch.equal(call[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_graph_break(kind: str) -> None:
    call = arguments(kind)

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ops_experts.fused_experts(x, weights, ids, **call) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X, WEIGHTS, IDS), layer(X, WEIGHTS, IDS))
    assert compiled(X.repeat(2, 1), WEIGHTS.repeat(2, 1), IDS.repeat(2, 1)).shape == (6, HIDDEN)


def test_rows_in_any_arrangement() -> None:
    call = arguments("int8")
    wide = torch.randn(3, 2 * HIDDEN)
    expected = ops_experts.fused_experts(wide[:, HIDDEN:].contiguous(), WEIGHTS, IDS, **call)
    assert torch.equal(ops_experts.fused_experts(wide[:, HIDDEN:], WEIGHTS, IDS, **call), expected)
    columns = wide[:, HIDDEN:].T.contiguous().T
    assert torch.equal(ops_experts.fused_experts(columns, WEIGHTS, IDS, **call), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_out_takes_the_result(kind: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    call = arguments(kind)
    expected = ops_experts.fused_experts(X, WEIGHTS, IDS, **call)
    memory = torch.full((5, HIDDEN), torch.nan)
    assert ops_experts.fused_experts(X, WEIGHTS, IDS, **call, out=memory[1:4]).data_ptr() == memory[1:4].data_ptr()
    assert torch.equal(memory[1:4], expected)
    assert memory[[0, 4]].isnan().all()
    operator = torch.ops.tilewright.fused_experts.out
    torch.library.opcheck(operator, (X, WEIGHTS, IDS), call | {"out": torch.empty(3, HIDDEN)}, test_utils=checks)
    with pytest.raises(RuntimeError, match="out must not share memory with x"):
        ops_experts.fused_experts(X, WEIGHTS, IDS, **call, out=X)

    def layer(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return ops_experts.fused_experts(x, WEIGHTS, IDS, **call, out=out) + 1

    out = torch.zeros(3, HIDDEN)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(X, out), expected + 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shared_expert_is_added_in_place(kind: str) -> None:
    call = {name: v[0] if isinstance(v, torch.Tensor) else v for name, v in arguments(kind).items()}
    x = torch.randn(2, 70, HIDDEN)
    routed = torch.randn(2, 70, HIDDEN)
    expected = ops_experts.fused_mlp(x, **call, fused_out=routed)
    assert ops_experts.fused_mlp(x, **call, fused_out=routed, out=routed) is routed
    assert torch.equal(routed, expected)
    with pytest.raises(RuntimeError, match=r"out is \[140, 64\]"):
        ops_experts.fused_mlp(x, **call, out=routed.view(140, HIDDEN))
