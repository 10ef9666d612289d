"""The shipped models through every scheme and form: exact names, dtypes, shapes, and errors inside the bounds."""

from collections.abc import Callable

import pytest
import torch

from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor
from tilewright.packer.checkpoint.files import Checkpoint
from tilewright.packer.plan import Plan, Source
from tilewright.packer.schemes import SCHEMES

FORMS = [(scheme.id, form) for scheme in SCHEMES.values() for form in scheme.checkpoint_formats]


def error_bound(q: QTensor) -> torch.Tensor:
    """Largest error of each element that rounding may make: half a step of the format."""
    if q.format.id == "mxfp4":
        assert q.scales is not None
        return q.format.half_step(q.format.decode(q.codes)) * q.scales.repeat_interleave(32, 1)
    spread = QTensor(q.format, torch.ones_like(q.codes, dtype=torch.float32), q.scales)
    one = spread.dequantize() if not q.format.zero_point else spread.dequantize() / (1 - q.format.zero_point)
    if q.format.id == "fp8":
        return q.dequantize().abs() / 15 + one * 2**-10
    return one / 2 * (1 + 1e-5)


@pytest.mark.parametrize(("scheme", "form"), FORMS)
def test_every_weight_is_inside_the_bound(
    scheme: str, form: str, tiny_model: Checkpoint, convert: Callable[..., object]
) -> None:
    done = convert(tiny_model, scheme, checkpoint_format=form, solver="rtn")
    chosen = SCHEMES[scheme].checkpoint_formats[form]
    seen = 0
    for name, fate in done.plan.fates.items():
        source = tiny_model.tensor(Source(name))
        if fate.kind == "copied":
            assert torch.equal(done.tensors[name].view(torch.uint8), source.view(torch.uint8))
            continue
        role = "expert" if ".experts." in name else "linear"
        target = chosen.target(role, 128)
        module = name.removesuffix(".weight")
        suffixes = target.checkpoint_layout.specs(target.weight_format, tuple(source.shape))
        parts = {suffix: done.tensors[f"{module}.{suffix}"] for suffix in suffixes}
        q = LAYOUTS[target.layout].unpack(parts, target.weight_format, tuple(source.shape))
        error = (q.dequantize() - source.to(torch.float32)).abs()
        assert (error <= error_bound(q)).all(), name
        seen += 1
    assert seen >= 72


def test_default_rules_on_the_shipped_models(tiny_model: Checkpoint, plan: Callable[..., Plan]) -> None:
    fates = plan(tiny_model, "int8").fates
    kept = {name for name, fate in fates.items() if fate.kind == "copied" and len(tiny_model.spec(name).shape) == 2}
    routers = {name for name in fates if name.endswith("mlp.gate.weight")}
    assert kept == routers | {"lm_head.weight", "model.embed_tokens.weight"}
    assert not any("no architecture rule" in fate.reason for fate in fates.values())


def test_exact_names_of_native_w4afp8(convert: Callable[..., object], tiny_model: Checkpoint) -> None:
    done = convert(tiny_model, "w4afp8")
    stem = "model.layers.2.mlp.experts.5"
    found = {name for name in done.tensors if name.startswith(stem + ".")}
    projections = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    assert found == {
        f"{stem}.{name}"
        for projection, short in projections.items()
        for name in (f"{projection}.weight", f"{projection}.weight_scale_inv", f"{short}.input_scale")
    }
    assert done.tensors[f"{stem}.down_proj.weight"].shape == (256, 64)
    assert done.tensors[f"{stem}.w1.input_scale"].dtype == torch.bfloat16
    experts = [name for name in done.tensors if name.endswith("input_scale")]
    assert len(experts) == sum(name.endswith("_proj.weight") and ".experts." in name for name in done.tensors)
    assert done.plan.config["quantization_config"]["quant_method"] == "w4afp8"
    assert set(done.plan.extra_files) == {"hf_quant_config.json", "quant_cfg.json"}
