from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import INT4_G64, INT4_G128
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.gpu_cutlass import GPU_CUTLASS_W4, GPU_TRTLLM_W4, GpuCutlassW4
from tilewright.kernels.tensors import QTensor, TensorSpec

WIDTHS = [512, 1024, 640, 256, 128]


def experts(e: int, n: int, k: int, parts: int = 1) -> QTensor:
    codes = torch.randint(0, 16, (e, n, k), dtype=torch.uint8)
    scales = (torch.rand(e, n, k // 128) + 0.01).to(torch.bfloat16).float()
    return QTensor(INT4_G128, codes, scales, parts=parts)


def expected_bytes(q: QTensor, layout: GpuCutlassW4) -> tuple[np.ndarray, np.ndarray]:
    """The engines' formula, element by element: row n of the reader is row `source[n]` of the weight."""
    codes, scales = q.codes.numpy().astype(int), q.scales.to(torch.bfloat16).view(torch.int16).numpy()
    e, n, k = codes.shape
    groups = k // 128
    a = 4 if groups % 4 == 0 else 2 if groups % 2 == 0 and layout is GPU_TRTLLM_W4 else 1
    source = list(range(n))
    if layout is GPU_TRTLLM_W4 and q.parts == 2:
        source = source[n // 2 :] + source[: n // 2]
    weight = np.zeros(e * n * k // 2, dtype=np.uint8)
    flat = np.zeros(e * n * groups, dtype=np.int16)
    for x in range(e):
        for row, src in enumerate(source):
            pairs = (codes[x, src] - 8) & 15
            start = (x * n + row) * k // 2
            weight[start : start + k // 2] = pairs[0::2] | pairs[1::2] << 4
            for g in range(groups):
                flat[x * n * groups + g // a * a * n + a * row + g % a] = scales[x, src, g]
    return weight.view(np.int8), flat


@pytest.mark.parametrize("layout", [GPU_CUTLASS_W4, GPU_TRTLLM_W4], ids=lambda layout: layout.id)
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("parts", [1, 2])
def test_bytes_are_those_that_the_engines_read(layout: GpuCutlassW4, k: int, parts: int) -> None:
    q = experts(3, 6, k, parts)
    packed = layout.pack(q)
    weight, scales = expected_bytes(q, layout)
    assert np.array_equal(packed["weight"].numpy().ravel(), weight)
    assert np.array_equal(packed["scales"].view(torch.int16).numpy().ravel(), scales)
    assert {name: TensorSpec.of(tensor) for name, tensor in packed.items()} == layout.specs(q.format, q.shape, parts)
    assert all(tensor.is_contiguous() for tensor in packed.values())
    back = layout.unpack(packed, q.format, q.shape, parts)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scales, q.scales)
    assert back.parts == parts


def test_published_examples() -> None:
    """q = [3, -2] is byte -29; with N = 256 and 8 groups, scale (n 5, g 6) lies at element 1046."""
    q = experts(1, 256, 1024)
    q.codes[0, 0, :2] = torch.tensor([3 + 8, -2 + 8])
    q.scales[0, 5, 6] = 123.0
    packed = GPU_CUTLASS_W4.pack(q)
    assert packed["weight"][0, 0, 0] == -29
    assert packed["scales"].shape == (1, 2, 1024)
    assert packed["scales"].flatten()[1046] == 123.0


def test_a_single_weight_has_no_expert_axis() -> None:
    q = experts(1, 64, 512)
    single = QTensor(q.format, q.codes[0], q.scales[0])
    for name, tensor in GPU_CUTLASS_W4.pack(single).items():
        assert torch.equal(tensor, GPU_CUTLASS_W4.pack(q)[name][0])


def test_scales_round_to_bf16_as_the_readers_do() -> None:
    q = experts(1, 2, 512)
    fine = QTensor(q.format, q.codes, torch.full_like(q.scales, 1.001))
    assert torch.equal(GPU_CUTLASS_W4.pack(fine)["scales"].float(), torch.ones(1, 1, 8))


@pytest.mark.parametrize(
    ("fmt", "shape", "parts", "word"),
    [
        (INT4_G64, (2, 64, 256), 1, "int4-g64"),
        (INT4_G128, (2, 64, 192), 1, "192"),
        (INT4_G128, (2, 63, 128), 2, "63"),
        (INT4_G128, (128,), 1, "128"),
    ],
)
def test_refusals_name_the_value(fmt: object, shape: tuple[int, ...], parts: int, word: str) -> None:
    reject = GPU_CUTLASS_W4.accepts(fmt, shape, parts)
    assert reject is not None
    assert word in str(reject)
    with pytest.raises(LayoutError, match=word):
        GPU_CUTLASS_W4.specs(fmt, shape, parts)


def test_zero_points_are_refused() -> None:
    q = experts(1, 2, 128)
    with pytest.raises(LayoutError, match="zero points"):
        GPU_CUTLASS_W4.pack(QTensor(q.format, q.codes, q.scales, zeros=torch.full((1, 2, 1), 7, dtype=torch.uint8)))


def test_damaged_tensors_are_refused() -> None:
    q = experts(1, 2, 512)
    packed = GPU_CUTLASS_W4.pack(q)
    with pytest.raises(LayoutError, match="missing"):
        GPU_CUTLASS_W4.unpack({"weight": packed["weight"]}, q.format, q.shape)
    with pytest.raises(LayoutError, match=r"\[1, 1, 7\]"):
        GPU_CUTLASS_W4.unpack({**packed, "scales": packed["scales"][..., :7]}, q.format, q.shape)


def test_registry_lists_both() -> None:
    assert LAYOUTS["gpu-cutlass-w4"] is GPU_CUTLASS_W4
    assert LAYOUTS["gpu-trtllm-w4"] is GPU_TRTLLM_W4
