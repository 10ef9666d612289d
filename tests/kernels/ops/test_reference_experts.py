"""The specification of expert layers against torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tilewright.kernels.ops import reference_experts


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


EXACT = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": lambda x: x * torch.special.erfc(-x * math.sqrt(0.5)) / 2,
    "gelu_tanh": _gelu_tanh,
}


@pytest.mark.parametrize("name", EXACT)
def test_functions_to_the_last_digits(name: str) -> None:
    """Within a few units in the last place, and the rounding of an exponent that grows as x^2 or x^3."""
    x = torch.linspace(-12, 12, 50001)
    expected = EXACT[name](x.double())
    y = getattr(reference_experts, name)(x).double()
    grown = 1 + x.double().abs() ** 3
    assert ((y - expected).abs() <= 6e-7 * grown * expected.abs() + 1e-37).all()
    ends = torch.tensor([-1e38, -1e9, -200.0, 200.0, 1e9, 1e38])
    limits = torch.tensor([0.0] * 3 + [1.0] * 3) if name == "sigmoid" else functional.relu(ends)
    assert torch.allclose(getattr(reference_experts, name)(ends), limits, rtol=1e-6, atol=1e-30)


def test_polynomials_are_as_close_as_they_are_said_to_be() -> None:
    """In float64, so that nothing but the coefficients is measured."""
    r = torch.linspace(-math.log(2) / 2, math.log(2) / 2, 20001, dtype=torch.float64)
    e = reference_experts._polynomial(r, reference_experts.EXP_TERMS) * r * r + r + 1
    assert (e / r.exp() - 1).abs().max() < 2**-26
    z = torch.linspace(0, 9, 20001, dtype=torch.float64)
    t = 1 / (1 + z / 2)
    erfc = t * (reference_experts._polynomial(t, reference_experts.ERFC_TERMS) - z * z).exp()
    assert (erfc / torch.special.erfc(z) - 1).abs().max() < 1.1e-7


def test_exponential_has_its_ends() -> None:
    values = reference_experts.exponential(torch.tensor([-1e9, -0.0, 1e9, torch.nan]))
    assert values[:3].tolist() == [0.0, 1.0, torch.inf]
    assert values[3].isnan()


def test_experts_are_the_plain_loop() -> None:
    torch.manual_seed(0)
    tokens, hidden, inner, count, top_k = 7, 16, 24, 5, 3
    w13, w2 = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = torch.rand(tokens, count).argsort(-1)[:, :top_k]
    ids[3, 1] = -1
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                expected[t] += weight * (w2[e] @ (functional.silu(gate) * up))

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        return reference_experts.expert(rows, lambda r: r @ w13[e].T, lambda r: r @ w2[e].T, "silu")

    y = reference_experts.fused_experts(x, weights, ids, expert, 2.0)
    assert (y - 2 * expected).norm() < 2**-8 * (2 * expected).norm()  # inner values are rounded to bf16


def test_clamped_swiglu_by_hand() -> None:
    gate, up = torch.tensor([2.0, -3.0, 0.5]), torch.tensor([3.0, -2.0, 0.25])
    g, u = torch.tensor([1.5, -3.0, 0.5]), torch.tensor([1.5, -1.5, 0.25])
    expected = (u + 1) * g * torch.sigmoid(0.7 * g)
    assert torch.allclose(reference_experts.gated(gate, up, "clamped_swiglu", 0.7, 1.5), expected)
