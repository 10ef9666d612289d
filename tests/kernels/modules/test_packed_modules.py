"""Packed modules: what they compute, that they leave their weights alone, and what they say about themselves."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.errors import KernelUnavailableError, LayoutError
from tilewright.kernels.formats import BF16, FORMATS, FP8, INT4_G32, INT8, WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.modules import (
    PackedExperts,
    PackedLinear,
    PackedStack,
    build_module,
    report_kernels,
)
from tilewright.kernels.modules.linear_kernels import LINEAR_KERNELS
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

KINDS = {"bf16": BF16, "int8": INT8, "fp8": FP8, "int4": INT4_G32}


def random_weight(fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1, seed: int = 0) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if not fmt.has_scales:
        return QTensor(fmt, values.to(torch.bfloat16), parts=parts)
    *lead, n, k = shape
    scales = torch.rand(*lead, fmt.scale_rows(n, parts), fmt.scale_columns(k), generator=generator) + 0.5
    spread = 2.0 if fmt.bits == 4 else 40.0
    codes = (values * spread).round() + fmt.zero_point
    codes = codes.clamp(0, 15) if fmt.bits == 4 else codes.clamp(-127, 127)
    return QTensor(fmt, codes.to(fmt.code_dtype), scales / spread, parts=parts)


def module_of(q: QTensor, bias: torch.Tensor | None = None) -> PackedLinear | PackedStack:
    layout = next(LAYOUTS[name] for name in LINEAR_KERNELS if not LAYOUTS[name].accepts(q.format, q.shape, q.parts))
    spec = ModuleSpec(layout, q.format, q.shape, q.parts, bias_dtype=None if bias is None else torch.float32)
    tensors = layout.pack(q) | ({} if bias is None else {"bias": bias})
    module = build_module("m", spec, tensors)
    assert isinstance(module, PackedLinear | PackedStack)
    return module


def expected(x: torch.Tensor, q: QTensor) -> torch.Tensor:
    """The product in float64, after the rounding of activations that the format implies."""
    if q.format.id == "int8" or q.format.bits == 4:
        codes, scale = quantize_rows(x)
        rounded = codes.double() * scale.double()
    else:
        rounded = x.to(torch.bfloat16).double()
    return rounded @ q.dequantize().double().transpose(-1, -2)


def close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 5e-3) -> bool:
    return bool((actual.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_linear(kind: str, dtype: torch.dtype) -> None:
    q = random_weight(KINDS[kind], (40, 96))
    bias = torch.randn(40)
    x = torch.randn(2, 3, 96).to(dtype)
    module = module_of(q, bias)
    before = x.clone()
    y = module(x)
    assert (y.dtype, y.shape) == (dtype, (2, 3, 40))
    assert close(y, expected(x.reshape(-1, 96), q).reshape(2, 3, 40) + bias.double())
    assert torch.equal(x, before)


def plain_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: QTensor, w2: QTensor) -> torch.Tensor:
    """Token by token, slot by slot, in float64 between the roundings that the modules promise."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        if not 0 <= expert < w13.shape[0]:
            continue
        upper, lower = (
            QTensor(q.format, q.codes[expert], None if q.scales is None else q.scales[expert], parts=q.parts)
            for q in (w13, w2)
        )
        gate, up = expected(x[token, None], upper).to(torch.bfloat16).float().chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        total[token] += float(weights[token, slot]) * expected(inner, lower)[0].to(torch.bfloat16).double()
    return total


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=12)
def test_experts_equal_a_plain_loop(kind: str, data: st.DataObject) -> None:
    count, inner, hidden = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([32, 64, 96])), 64
    w13 = random_weight(KINDS[kind], (count, 2 * inner, hidden), 2, seed=1)
    w2 = random_weight(KINDS[kind], (count, hidden, inner), 1, seed=2)
    experts = PackedExperts("mlp.experts", module_of(w13), module_of(w2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tokens, top_k = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.randint(-1, count + 1, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    before = x.clone()
    y = experts(x, ids, weights)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(x, before)
    assert close(y, plain_experts(x, ids, weights, w13, w2), 2e-2)


def test_gate_and_up_of_odd_size() -> None:
    w13, w2 = random_weight(FP8, (2, 2 * 200, 64), 2), random_weight(FP8, (2, 64, 200))
    x, ids = torch.randn(3, 64).to(torch.bfloat16), torch.tensor([[0, 1], [1, 0], [1, 1]])
    weights = torch.rand(3, 2)
    y = PackedExperts("e", module_of(w13), module_of(w2))(x, ids, weights)
    assert close(y, plain_experts(x, ids, weights, w13, w2), 2e-2)


def test_unknown_activations_are_refused() -> None:
    w13, w2 = module_of(random_weight(BF16, (1, 64, 32), 2)), module_of(random_weight(BF16, (1, 32, 32)))
    with pytest.raises(KernelUnavailableError, match="unknown activation `swiglu_oai`; known are silu"):
        PackedExperts("mlp.experts", w13, w2, "swiglu_oai")


def test_weights_are_buffers_that_stay_as_they_are() -> None:
    module = module_of(random_weight(INT8, (40, 64)), torch.randn(40))
    tensors = {name: (buffer.data_ptr(), buffer.dtype) for name, buffer in module.named_buffers()}
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {"weight", "weight_scale", "bias"} == set(tensors)
    for change in (lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.double(), lambda m: m.cpu()):
        change(module)
        assert {name: (buffer.data_ptr(), buffer.dtype) for name, buffer in module.named_buffers()} == tensors
    twin = copy.deepcopy(module)
    x = torch.randn(2, 64)
    assert torch.equal(twin(x), module(x))
    twin.load_state_dict(module_of(random_weight(INT8, (40, 64), seed=9), torch.zeros(40)).state_dict())
    assert not torch.equal(twin(x), module(x))


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_pickled_and_compiled_modules_run_their_own_tensors(kind: str) -> None:
    x = torch.randn(2, 1, 64)
    module, other = (module_of(random_weight(KINDS[kind], (40, 64), seed=seed), torch.randn(40)) for seed in (1, 2))
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(x), module(x))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))
    for name, tensor in other.named_buffers():
        twin.register_buffer(name, tensor)
    assert torch.equal(twin(x), other(x))
    assert torch.equal(compiled(x), other(x))
    other.bias = None
    twin.bias = None
    assert torch.equal(twin(x), other(x))


def test_wrong_tensors_are_refused() -> None:
    layout = LAYOUTS["cpu-vnni-int8"]
    spec = ModuleSpec(layout, INT8, (40, 64))
    tensors = layout.pack(random_weight(INT8, (40, 64)))
    with pytest.raises(LayoutError, match="model.q_proj: `weight_scale` is missing"):
        build_module("model.q_proj", spec, {"weight": tensors["weight"]})
    with pytest.raises(KernelUnavailableError, match="no bundled kernel runs layout `cpu-vnni-int8` on meta"):
        build_module("model.q_proj", spec, {name: tensor.to("meta") for name, tensor in tensors.items()})


def test_every_cpu_layout_has_a_kernel_and_is_reported() -> None:
    on_cpu = {name for name, kernel in LINEAR_KERNELS.items() if kernel.device == "cpu"}
    assert on_cpu == {name for name in LAYOUTS if name.startswith("cpu-")}
    model = torch.nn.Sequential(module_of(random_weight(INT8, (32, 32))), torch.nn.Linear(2, 2))
    (use,) = report_kernels(model)
    assert (use.module, use.layout) == ("0", "cpu-vnni-int8")
    assert use.kernel.startswith("linear_int8 on ")
    assert all(": " in reason for reason in use.faster)
    assert "cpu-vnni-int8" in repr(model)


def test_descriptions_survive_json() -> None:
    for fmt in FORMATS.values():
        layout = next(layout for layout in LAYOUTS.values() if not layout.accepts(fmt, (3, 64, 128), 2))
        spec = ModuleSpec(
            layout, fmt, (3, 64, 128), 2, ("a.{}.b", "a.{}.c"), "plain-bf16", torch.float16, 3, (9, 64, 128)
        )
        assert ModuleSpec.from_json("m", spec.to_json()) == spec
    fields = ModuleSpec(LAYOUTS["cpu-vnni-int8"], INT8, (8, 8)).to_json()
    for change, reason in (
        ({"version": 2}, "has version 1 here, the file has 2"),
        ({"layout": "cpu-vnni-int9"}, "did you mean `cpu-vnni-int8`"),
        ({"shape": [8]}, r"shape \[8\]"),
        ({"format": "int3"}, "unknown weight format `int3`"),
        ({"parts": "two"}, "broken description"),
    ):
        with pytest.raises(LayoutError, match=f"m: .*{reason}"):
            ModuleSpec.from_json("m", fields | change)


def test_compiles_without_graph_breaks() -> None:
    w13, w2 = random_weight(INT8, (3, 128, 64), 2), random_weight(INT8, (3, 64, 64))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = module_of(random_weight(FP8, (64, 96)), torch.randn(64))
            self.experts = PackedExperts("experts", module_of(w13), module_of(w2))

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.experts(self.up(x) * 2, ids, weights) + 1

    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in (1, 5):
        x, ids = torch.randn(tokens, 96).to(torch.bfloat16), torch.randint(0, 3, (tokens, 2))
        weights = torch.rand(tokens, 2)
        assert torch.equal(compiled(x, ids, weights), block(x, ids, weights))


def test_gradients_are_refused_not_lost() -> None:
    module = module_of(random_weight(INT8, (32, 64)))
    x = torch.randn(3, 64)
    y = module(x.clone().requires_grad_())
    assert torch.equal(y, module(x))
    with pytest.raises(KernelUnavailableError, match="no gradients"):
        y.sum().backward()
