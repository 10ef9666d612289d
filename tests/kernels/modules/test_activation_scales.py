"""How modules round activations: chosen when a directory is loaded, stated by the file, told by the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.kernels.errors import KernelUnavailableError
from tilewright.kernels.formats import BF16, INT8
from tilewright.kernels.layouts.cpu_float import CPU_VNNI_BF16
from tilewright.kernels.layouts.cpu_int8 import CPU_VNNI_INT8
from tilewright.kernels.modules import build_module, report_kernels
from tilewright.kernels.ops import reference
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.rotation import Rotation, rotate
from tilewright.kernels.tensors import QTensor

SPEC = ModuleSpec(CPU_VNNI_INT8, INT8, (48, 128))


def weight() -> QTensor:
    return QTensor(INT8, torch.randint(-128, 128, (48, 128), dtype=torch.int8), torch.rand(48, 1) * 0.01)


@pytest.mark.parametrize(("scales", "group"), [("token", 0), ("group", 64)])
@pytest.mark.parametrize("block", [0, 32])
def test_a_linear_is_its_reference(scales: str, group: int, block: int) -> None:
    q = weight()
    assert q.scales is not None
    spec = replace(SPEC, rotation=Rotation(block)) if block else SPEC
    module = build_module("m", spec, CPU_VNNI_INT8.pack(q), scales)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    assert torch.equal(module(x), reference.linear_int8(x, q.codes, q.scales, None, group, block))
    (use,) = report_kernels(torch.nn.Sequential(module))
    told = "int8 by group of 64" if group else "int8 by token"
    assert use.activations == told + (", rotated in blocks of 32" if block else "")


def test_a_rotated_weight_gives_the_product_of_the_weight_that_was_rotated() -> None:
    plain, x = torch.randn(48, 128), torch.randn(5, 128)
    turned = rotate(plain, 64)
    scales = turned.abs().amax(1, keepdim=True) / 127
    q = QTensor(INT8, (turned / scales).round().to(torch.int8), scales)
    module = build_module("m", replace(SPEC, rotation=Rotation(64)), CPU_VNNI_INT8.pack(q), "group")
    exact = x @ plain.T
    assert (module(x) - exact).norm() < 0.01 * exact.norm()


def test_what_cannot_rotate_is_refused() -> None:
    spec = replace(SPEC, layout=CPU_VNNI_BF16, format=BF16, rotation=Rotation(64))
    tensors = CPU_VNNI_BF16.pack(QTensor(BF16, torch.randn(48, 128).bfloat16()))
    with pytest.raises(KernelUnavailableError, match="m: `linear_bf16` does not rotate its input"):
        build_module("m", spec, tensors)


def test_a_rotation_survives_the_file() -> None:
    spec = replace(SPEC, rotation=Rotation(32))
    assert ModuleSpec.from_json("m", spec.to_json()) == spec
    assert "rotation" not in SPEC.to_json()


def test_a_directory_is_loaded_with_either(packed: Callable[..., Path]) -> None:
    root = packed("tiny-qwen3-moe", "int8")
    x = torch.randn(3, 256)
    results = []
    for scales in ("token", "group"):
        opened = tilewright.load_packed(root, activation_scales=scales)
        name = next(name for name in opened if name.endswith("o_proj"))
        module = opened[name]
        assert module.activation_group == (64 if scales == "group" else 0)
        results.append(module(x[:, : module.in_features]))
    assert not torch.equal(*results)
    assert torch.allclose(*results, rtol=0.1, atol=0.1)
    default = tilewright.load_packed(root)
    assert default[name].activation_scales == "token"
    with pytest.raises(KernelUnavailableError, match="activation_scales is `row`"):
        tilewright.load_packed(root, activation_scales="row")
