"""Modules whose experts a GPU runs: on a CPU their operators compute the reference, so the wiring is testable there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilewright.kernels.errors import CheckpointError, KernelUnavailableError, LayoutError
from tilewright.kernels.formats import INT4_G64, INT4_G128, WeightFormat
from tilewright.kernels.gpu import reference
from tilewright.kernels.gpu.experts import GpuExperts
from tilewright.kernels.gpu.grouped import linear_w4a8
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.gpu_hopper import GPU_HOPPER_W4
from tilewright.kernels.modules import PackedExperts, PackedStack
from tilewright.kernels.modules import weight as modules
from tilewright.kernels.modules.linear_kernels import LINEAR_KERNELS
from tilewright.kernels.packed import directory as packed
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.packed.reorder import REORDERED, reorder, reordered_spec
from tilewright.kernels.tensors import QTensor
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import GpuTarget

Call = Callable[..., Path]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def runs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules in the GPU's layout be built on a CPU."""
    monkeypatch.setattr(modules, "find_kernel", lambda name, spec, device: LINEAR_KERNELS[spec.layout.id])


def stack(*shape: int, fmt: WeightFormat = INT4_G128, parts: int = 1) -> tuple[QTensor, ModuleSpec]:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scales = (torch.rand(*shape[:-1], shape[-1] // fmt.block_k) * 0.02 + 0.002).bfloat16().float()
    return QTensor(fmt, codes, scales, parts=parts), ModuleSpec(GPU_HOPPER_W4, fmt, shape, parts, first_expert=0)


def packed_stack(q: QTensor, spec: ModuleSpec, name: str = "stack") -> PackedStack:
    return PackedStack(name, spec, GPU_HOPPER_W4.pack(q))


@pytest.mark.parametrize("scales", [None, (torch.tensor([0.01]), torch.tensor([0.02]))])
@pytest.mark.parametrize("fmt", [INT4_G128, INT4_G64])
def test_experts_are_the_reference(
    fmt: WeightFormat, scales: tuple[torch.Tensor, torch.Tensor] | None, runs_on_cpu: None
) -> None:
    (q13, spec13), (q2, spec2) = stack(3, 256, 128, fmt=fmt, parts=2), stack(3, 128, 128, fmt=fmt)
    first = 4
    spec13, spec2 = (ModuleSpec(s.layout, s.format, s.shape, s.parts, first_expert=first) for s in (spec13, spec2))
    layer = GpuExperts("layer", packed_stack(q13, spec13), packed_stack(q2, spec2), input_scales=scales)
    x = torch.randn(6, 128).to(torch.bfloat16)
    ids = torch.tensor([[4, 5], [0, 6], [-1, 5], [7, 3], [6, 4], [5, 6]])
    weights = torch.rand(6, 2)
    want = reference.fused_experts(
        x,
        q13.dequantize().double(),
        q2.dequantize().double(),
        weights,
        ids - first,
        "token" if scales is None else "static",
        *(scales or ()),
    )
    assert torch.equal(layer(x, ids, weights), want.to(torch.bfloat16))
    assert not layer(x, ids, weights)[3].any()  # its experts are another rank's


def test_what_no_gpu_kernel_computes_is_refused(runs_on_cpu: None) -> None:
    upper, lower = packed_stack(*stack(2, 256, 128, parts=2)), packed_stack(*stack(2, 128, 128))
    with pytest.raises(KernelUnavailableError, match="layer: no kernel for GPUs computes activation `gelu`"):
        GpuExperts("layer", upper, lower, "gelu")


@pytest.mark.parametrize("bias", [None, torch.randn(64)])
def test_linear_rounds_every_row_by_its_magnitude(bias: torch.Tensor | None) -> None:
    q, _ = stack(64, 256)
    tensors = GPU_HOPPER_W4.pack(q)
    x = torch.randn(2, 3, 256) * torch.tensor([1.0, 100.0])[:, None, None]
    got = linear_w4a8(x, tensors["tiles"], tensors["scales"], 64, bias)
    want = x @ q.dequantize().T + (0 if bias is None else bias)
    assert (got.shape, got.dtype) == ((2, 3, 64), torch.float32)
    assert (got - want).norm() < 0.04 * want.norm()  # FP8 has 3 mantissa bits


@pytest.mark.parametrize("layout", REORDERED)
@pytest.mark.parametrize("shape", [(3, 128, 512), (2, 64, 640), (128, 256)])
def test_reordered_is_packed_directly(layout: str, shape: tuple[int, ...]) -> None:
    q, spec = stack(*shape, parts=2 if shape[-2] == 128 else 1)
    stored = ModuleSpec(LAYOUTS[layout], spec.format, spec.shape, spec.parts)
    got = reorder(stored, LAYOUTS[layout].pack(q))
    want = GPU_HOPPER_W4.pack(q)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[suffix], tensor) for suffix, tensor in want.items())
    assert reordered_spec("m", stored) == spec
    assert reordered_spec("m", spec) is spec


def test_what_cannot_be_reordered_says_so() -> None:
    spec = ModuleSpec(LAYOUTS["gpu-cutlass-w4"], INT4_G128, (2, 96, 128))
    with pytest.raises(LayoutError, match="m: .*96 is not a multiple of 64"):
        reordered_spec("m", spec)


@pytest.fixture(name="packed_for_cpu")
def _packed_for_cpu(request: pytest.FixtureRequest) -> Call:
    """The shared fixture, whose name is a module's here."""
    return request.getfixturevalue("packed")


@pytest.fixture
def packed_for_gpu(quantized: Call, tmp_path: Path) -> Call:
    """packed_for_gpu(layout): a tiny model's directory."""

    def pack(layout: str) -> Path:
        source = open_checkpoint(quantized("tiny-deepseek-v3", "w4afp8", "native"))
        execute(plan_pack(source, GpuTarget(layout)), source, tmp_path / layout)
        return tmp_path / layout

    return pack


def test_a_cpu_does_not_run_it(packed_for_gpu: Call) -> None:
    with pytest.raises(CheckpointError, match="no bundled kernel runs layout `gpu-hopper-w4` on cpu"):
        packed.load_packed(packed_for_gpu("gpu-hopper-w4"))


@pytest.mark.parametrize("layout", ["gpu-hopper-w4", "gpu-cutlass-w4"])
def test_a_device_gets_the_bundled_order(
    layout: str, packed_for_gpu: Call, runs_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened for a GPU, with the CPU in its place."""
    monkeypatch.setattr(packed.PackedCheckpoint, "tensor", read_on_cpu)
    checkpoint = packed.load_packed(packed_for_gpu(layout), device="cuda")
    name = next(name for name in checkpoint if name.endswith(".w13"))
    stored = checkpoint.specs[name]
    module = checkpoint[name]
    assert module.spec.layout is GPU_HOPPER_W4
    tensors = {suffix: checkpoint.tensor(f"{name}.{suffix}") for suffix in stored.tensors()}
    want = stored.layout.unpack(tensors, stored.format, stored.shape, stored.parts)
    got = GPU_HOPPER_W4.unpack(dict(module.named_buffers()), stored.format, stored.shape, stored.parts)
    assert torch.equal(got.codes, want.codes)
    assert checkpoint.input_scale(name) is None  # nobody calibrated it


def read_on_cpu(self: packed.PackedCheckpoint, name: str) -> torch.Tensor:
    return packed.MappedFile(self._files[name]).tensor(name)


@needs_gpu
@pytest.mark.parametrize("layout", ["gpu-hopper-w4", "gpu-cutlass-w4", "gpu-trtllm-w4"])
def test_gpu_runs_a_layer_of_a_packed_directory(layout: str, packed_for_gpu: Call) -> None:
    checkpoint = packed.load_packed(packed_for_gpu(layout), device="cuda")
    name = next(name for name in checkpoint if name.endswith(".w13")).removesuffix(".w13")
    upper, lower = stacks(checkpoint, name)
    layer = GpuExperts(name, upper, lower)
    experts, _, hidden = upper.spec.shape
    x = torch.randn(20, hidden, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.randint(-1, experts, (20, 4), device="cuda"), torch.rand(20, 4, device="cuda")
    dense13, dense2 = (
        reference.dense(*(t.cpu() for t in module.tensors()), 128, module.spec.shape[-1]) for module in (upper, lower)
    )
    want = reference.fused_experts(x.cpu(), dense13, dense2, weights.cpu(), ids.cpu(), "token")
    got = layer(x, ids, weights).cpu().double()
    assert (got - want).norm() < 2**-5.75 * want.norm()


# FP8 has 3 mantissa bits: the root of the mean square of a rounding is 2**-5.25 of the value. Three of them count, of
# gate, of up (both through x) and of their product. A quarter more is for the CPU's activations, bf16 scales, chance.
FP8_LAYER_ERROR = 1.25 * 3**0.5 * 2**-5.25


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_layer_agrees_with_the_cpu_path_of_the_same_checkpoint(
    device: str, packed_for_gpu: Call, packed_for_cpu: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference in the GPU's place, and the GPU itself."""
    if device == "cpu":
        monkeypatch.setattr(modules, "find_kernel", lambda name, spec, device: LINEAR_KERNELS[spec.layout.id])
        monkeypatch.setattr(packed.PackedCheckpoint, "tensor", read_on_cpu)
    here = packed.load_packed(packed_for_cpu("tiny-deepseek-v3", "w4afp8", "native"))
    there = packed.load_packed(packed_for_gpu("gpu-hopper-w4"), device="cuda")
    layers = [name.removesuffix(".w13") for name in there if name.endswith(".w13")]
    assert layers
    for name in layers:
        slow = PackedExperts(name, *stacks(here, name))
        fast = GpuExperts(name, *stacks(there, name))
        experts, _, hidden = slow.w13.spec.shape
        x, weights = torch.randn(64, hidden, dtype=torch.bfloat16), torch.rand(64, 4)
        ids = torch.stack([torch.randperm(experts)[:4] for _ in range(64)])
        ids[5, 2] = -1
        want = slow(x, ids, weights).float()
        got = fast(x.to(device), ids.to(device), weights.to(device)).cpu().float()
        assert (got - want).norm() <= FP8_LAYER_ERROR * want.norm()


def stacks(checkpoint: packed.PackedCheckpoint, name: str) -> tuple[PackedStack, PackedStack]:
    w13, w2 = checkpoint[f"{name}.w13"], checkpoint[f"{name}.w2"]
    assert isinstance(w13, PackedStack)
    assert isinstance(w2, PackedStack)
    return w13, w2


def test_the_directory_says_what_it_is_for(packed_for_gpu: Call) -> None:
    config = json.loads((packed_for_gpu("gpu-hopper-w4") / "config.json").read_text())
    block = config["quantization_config"]
    assert (block["target"], block["scheme"], block["source"]["quant_method"]) == ("gpu", "w4afp8", "w4afp8")
