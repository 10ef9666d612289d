"""Gated MLPs in one operator: the numbers of their Linears, which modules they replace, and what stays as it was."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from tilewright.engines.transformers.mlps import find_activation
from tilewright.kernels.errors import KernelUnavailableError
from tilewright.kernels.formats import BF16, FP8, INT4_G32, INT8
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.modules import PackedLinear, PackedStack, report_kernels
from tilewright.kernels.modules.linear_kernels import LINEAR_KERNELS
from tilewright.kernels.modules.mlp import PackedMlp
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

HIDDEN, INNER = 64, 128
KINDS = {"bf16": BF16, "int8": INT8, "fp8": FP8, "int4": INT4_G32}


def linear_of(kind: str, n: int, k: int, biased: bool = False) -> PackedLinear:
    """A Linear of random codes whose weights are about as large as 1 / sqrt(k)."""
    fmt = KINDS[kind]
    values = torch.randn(n, k) / k**0.5
    if fmt.has_scales:
        top = {"int8": 127, "fp8": 448, "int4": 7}[kind]
        codes = (values * top).round().clamp(-top, top) + fmt.zero_point
        scales = (torch.rand(fmt.scale_rows(n, 1), fmt.scale_columns(k)) + 0.5) / top
        q = QTensor(fmt, codes.to(fmt.code_dtype), scales)
    else:
        q = QTensor(fmt, values.to(torch.bfloat16))
    layout = next(LAYOUTS[name] for name in LINEAR_KERNELS if not LAYOUTS[name].accepts(fmt, (n, k), 1))
    spec = ModuleSpec(layout, fmt, (n, k), bias_dtype=torch.float32 if biased else None)
    return PackedLinear("m", spec, layout.pack(q) | ({"bias": torch.randn(n)} if biased else {}))


def stack_of(linear: PackedLinear) -> PackedStack:
    return PackedStack("m", linear.spec, dict(linear.named_buffers()))


def mlp_of(kind: str, activation: str = "silu", biased: bool = False) -> tuple[PackedMlp, Any]:
    """An MLP, and the same as Linears that are called one by one."""
    function = {"silu": functional.silu, "gelu": functional.gelu}[activation]
    linears = linear_of(kind, 2 * INNER, HIDDEN, biased), linear_of(kind, HIDDEN, INNER, biased)

    def apart(x: torch.Tensor) -> torch.Tensor:
        gate, up = linears[0](x.float()).chunk(2, -1)
        y: torch.Tensor = linears[1]((function(gate) * up).bfloat16().float())
        return y.to(x.dtype)

    return PackedMlp("mlp", *map(stack_of, linears), activation), apart


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_linears_in_fp32(kind: str, activation: str, biased: bool) -> None:
    mlp, apart = mlp_of(kind, activation, biased)
    for dtype, shape in ((torch.bfloat16, (1, 1)), (torch.float32, (2, 5)), (torch.float16, (7,))):
        x = torch.randn(*shape, HIDDEN).to(dtype)
        before = x.clone()
        y, wanted = mlp(x), apart(x)
        assert (y.shape, y.dtype) == (wanted.shape, dtype)
        assert (y.double() - wanted.double()).norm() <= 4e-3 * wanted.double().norm()
        assert torch.equal(x, before)


@pytest.mark.parametrize("kind", KINDS)
def test_moved_saved_copied_and_compiled(kind: str) -> None:
    mlp, _ = mlp_of(kind, biased=True)
    x = torch.randn(2, 3, HIDDEN).bfloat16()
    wanted = mlp(x)
    dtypes = {name: tensor.dtype for name, tensor in mlp.state_dict().items()}
    mlp.to(torch.float16)
    assert {name: tensor.dtype for name, tensor in mlp.state_dict().items()} == dtypes
    assert {"gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias"} <= dtypes.keys()
    assert not list(mlp.parameters())
    torch.save(mlp, file := io.BytesIO())
    file.seek(0)
    for twin in (copy.deepcopy(mlp), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), wanted)
        assert torch.equal(torch.compile(twin, fullgraph=True, backend="aot_eager")(x), wanted)
        twin.load_state_dict(mlp_of(kind, biased=True)[0].state_dict())
        assert not torch.equal(twin(x), wanted)  # the biases are new ones


def test_sums_of_ranks_and_gradients() -> None:
    mlp, _ = mlp_of("int8")
    x = torch.randn(3, HIDDEN)
    y = mlp(x)
    mlp.reduce = lambda part: part * 2
    assert torch.equal(mlp(x), y * 2)
    with pytest.raises(KernelUnavailableError, match="no gradients"):
        mlp(x.requires_grad_()).sum().backward()


def test_report_names_the_operator() -> None:
    mlp, _ = mlp_of("int8")
    uses = {use.module: use.kernel for use in report_kernels(nn.Sequential(mlp))}
    assert uses.keys() == {"0.gate_up_proj", "0.down_proj"}
    assert all(kernel.startswith("fused_mlp on ") for kernel in uses.values())
    assert "activation=silu" in repr(mlp)


def test_what_the_operator_cannot_take_is_refused() -> None:
    upper, lower = (stack_of(linear_of("int8", *shape)) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    with pytest.raises(KernelUnavailableError, match="mlp: unknown activation `relu`; known are silu"):
        PackedMlp("mlp", upper, lower, "relu")
    with pytest.raises(KernelUnavailableError, match="down in `cpu-vnni-bf16`; the CPU kernel needs one"):
        PackedMlp("mlp", upper, stack_of(linear_of("bf16", HIDDEN, INNER)))
    with pytest.raises(KernelUnavailableError, match=r"\[64, 64\]: no MLP"):
        PackedMlp("mlp", upper, stack_of(linear_of("int8", HIDDEN, HIDDEN)))
    with pytest.raises(KernelUnavailableError, match="gate of 40 rows is no whole blocks of 32"):
        PackedMlp("mlp", stack_of(linear_of("int8", 80, HIDDEN)), stack_of(linear_of("int8", HIDDEN, 40)))


class Swapped(LlamaMLP):
    """Gates by up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Clamped(LlamaMLP):
    """Bounds what goes into down."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-1, 1))


def test_activations_are_found_by_trying() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": None}
    for name, expected in names.items():
        with torch.device("meta"):
            llama = LlamaMLP(LlamaConfig(hidden_act=name, **sizes))
            phi3 = Phi3MLP(Phi3Config(hidden_act=name, pad_token_id=None, **sizes))
        for mlp in (llama, phi3):
            children = dict(mlp.named_children())
            assert find_activation(mlp) == expected
            assert dict(mlp.named_children()) == children
    for kind in (Swapped, Clamped):
        assert find_activation(kind(LlamaConfig(**sizes))) is None


class NormedMlp(nn.Module):
    """An MLP with one more part, whose size the small matrices do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down_proj, self.norm = nn.Linear(INNER, HIDDEN), nn.LayerNorm(INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.norm(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def test_an_mlp_with_more_parts_is_left_alone() -> None:
    assert find_activation(NormedMlp()) is None
