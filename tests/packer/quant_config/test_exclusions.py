"""The linter of exclusion lists: what we write means the same to every engine; other lists are seen through."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tilewright.cli.main import load, run
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.quant_config.exclusions import View, described, engine_views
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.schemes import SCHEMES

MODELS = Path(__file__).parents[3] / "examples" / "models"
LAYER = "model.layers.0"
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj")


def views_of(root: Path) -> list[View]:
    checkpoint = open_checkpoint(root)
    return engine_views({name: checkpoint.spec(name) for name in checkpoint.files}, checkpoint.config)


def directory(root: Path, block: dict[str, Any], unquantized: tuple[str, ...], prefix: str = LAYER) -> dict[str, View]:
    """The views on a checkpoint of FP8 modules, some of which are in 16 bits."""
    tensors: dict[str, torch.Tensor] = {f"{prefix}.mlp.gate.weight": torch.ones(2, 128, dtype=torch.bfloat16)}
    for module in MODULES:
        weight = torch.ones(128, 128)
        if module in unquantized:
            tensors[f"{prefix}.{module}.weight"] = weight.bfloat16()
        else:
            tensors[f"{prefix}.{module}.weight"] = weight.to(torch.float8_e4m3fn)
            tensors[f"{prefix}.{module}.weight_scale_inv"] = torch.ones(1, 1)
    root.mkdir()
    save_file(tensors, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": block}))
    return {view.engine: view for view in views_of(root)}


def fp8(*entries: str, key: str = "modules_to_not_convert") -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], key: list(entries)}


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
@pytest.mark.parametrize(("scheme", "form"), [(s.id, f) for s in SCHEMES.values() for f in s.checkpoint_formats])
def test_engines_agree_with_what_we_write(name: str, scheme: str, form: str, tmp_path: Path) -> None:
    source = open_checkpoint(MODELS / name)
    exclude = () if (scheme, form) == ("w4afp8", "native") else ("layers.1.self_attn", "layers.2.mlp")
    execute(plan_quantize(source, QuantizeOptions(scheme, form, exclude=exclude)), source, tmp_path / "out")
    views = [view for view in views_of(tmp_path / "out") if view.reads]
    assert views
    for view in views:
        assert (view.missing, view.surplus, view.torn) == ((), (), ())
        assert bool(view.excluded) == ((scheme, form) != ("w4afp8", "native"))


@pytest.mark.parametrize(
    ("entries", "blind"),
    [
        ((f"{LAYER}.self_attn.o_proj",), set()),
        (("self_attn.o_proj",), {"vLLM", "TensorRT-LLM"}),
        (("layers.0.self_attn.o_proj",), {"vLLM", "TensorRT-LLM"}),
        ((r"model\.layers\.\d+\.self_attn\.o_proj",), {"vLLM", "SGLang", "TensorRT-LLM"}),
        (("*o_proj",), {"vLLM", "SGLang", "transformers"}),
    ],
)
def test_forms_that_only_some_engines_understand(entries: tuple[str, ...], blind: set[str], tmp_path: Path) -> None:
    views = directory(tmp_path / "model", fp8(*entries), ("self_attn.o_proj",))
    for engine, view in views.items():
        assert view.missing == ((f"{LAYER}.self_attn.o_proj",) if engine in blind else ()), engine
        assert not view.surplus


def test_a_listed_module_that_is_quantized_is_surplus(tmp_path: Path) -> None:
    views = directory(tmp_path / "model", fp8(f"{LAYER}.self_attn.q_proj", key="ignored_layers"), ())
    assert all(view.surplus == (f"{LAYER}.self_attn.q_proj",) for view in views.values())


def test_experts_are_looked_up_as_a_whole(tmp_path: Path) -> None:
    experts = MODULES[2:]
    one_by_one = directory(tmp_path / "listed", fp8(*(f"{LAYER}.{module}" for module in experts)), experts)
    assert not one_by_one["vLLM"].missing
    assert len(one_by_one["SGLang"].missing) == 2
    container = directory(tmp_path / "container", fp8(f"{LAYER}.mlp.experts"), experts)
    assert not container["SGLang"].missing
    assert not container["vLLM"].missing


def test_a_text_only_load_sees_another_path(tmp_path: Path) -> None:
    wrapped = "model.language_model.layers.0"
    views = directory(tmp_path / "one", fp8(f"{wrapped}.self_attn.o_proj"), ("self_attn.o_proj",), wrapped)
    assert views["vLLM"].torn == (f"{wrapped}.self_attn.o_proj",)
    both = fp8(f"{wrapped}.self_attn.o_proj", f"{LAYER}.self_attn.o_proj")
    assert not directory(tmp_path / "two", both, ("self_attn.o_proj",), wrapped)["vLLM"].torn


def test_description_and_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    views = directory(tmp_path / "model", fp8("o_proj"), ("self_attn.o_proj",))
    text = described(list(views.values()))
    assert f"in 16 bits on disk, taken for quantized: {LAYER}.self_attn.o_proj" in text
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as left:
            run(load("inspect-model"), "inspect-model", [str(tmp_path / "model"), "--excluded", *arguments])
        assert left.value.code == 0
    plain, _, document = capfd.readouterr().out.partition("[\n")
    assert plain.strip() == text
    assert json.loads("[" + document)[0]["engine"] == "SGLang"


def test_methods_that_an_engine_does_not_read(tmp_path: Path) -> None:
    views = directory(tmp_path / "model", {"quant_method": "w8a8_int8", "ignore": ["o_proj"]}, ("self_attn.o_proj",))
    assert [engine for engine, view in views.items() if view.reads] == ["SGLang"]
    assert not views["SGLang"].missing
