"""Checkpoints damaged as published ones are: each damage is found, named and mended; the rest keeps its bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import FineGrainedFP8Config

import tilewright
from tilewright import CheckpointError, OptionError, PlanError, QuantizeOptions, RepairOptions, RunOptions, Silent
from tilewright.cli.main import load, run
from tilewright.cli.repair import ENGINES
from tilewright.packer.quant_config.exclusions import ENGINES as KNOWN_ENGINES

MODELS = Path(__file__).parents[3] / "examples" / "models"
QWEN = MODELS / "tiny-qwen3-moe"
INDEX = "model.safetensors.index.json"
QUIET = Silent()
SMALL = RunOptions(max_shard_size=200_000)  # several shards


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with nothing wrong."""
    root = tmp_path_factory.mktemp("right")
    options = {
        "fp8": QuantizeOptions("block-fp8"),
        "int8": QuantizeOptions("int8"),
        "ct-int8": QuantizeOptions("int8", "compressed-tensors"),
        "ct-fp8": QuantizeOptions("block-fp8", "compressed-tensors"),
        "ct-int4": QuantizeOptions("int4", group_size=32),
        "excluded": QuantizeOptions("block-fp8", exclude=("o_proj", "*.layers.1.*")),
    }
    for name, option in options.items():
        tilewright.quantize(QWEN, root / name, option, run=SMALL, progress=QUIET)
    return {name: root / name for name in options}


def tensors(root: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(root.glob("*.safetensors")) for name, value in load_file(file).items()}


def rewrite(root: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> None:
    """Change tensors of every shard, and the index with them."""
    weight_map = {}
    for file in sorted(root.glob("*.safetensors")):
        changed = dict(pair for name, value in load_file(file).items() if (pair := change(name, value)))
        save_file(changed, file, {"format": "pt"})
        weight_map |= dict.fromkeys(changed, file.name)
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def config(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / "config.json").read_text())
    return document


def edit(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = config(root)
    change(document)
    (root / "config.json").write_text(json.dumps(document))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name.removesuffix(old) + new if name.endswith(old) else name, value

    return lambda root: rewrite(root, change)


def scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        rewrite(root, lambda name, value: (name, change(value).contiguous() if "weight_scale" in name else value))

    return damage


def block(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda root: edit(root, lambda document: change(document["quantization_config"]))


def listed(key: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    return block(lambda found: found.update({key: change(found.get(key) or [])}))


def one_shard_less_in_the_index(root: Path) -> None:
    document = json.loads((root / INDEX).read_text())
    document["weight_map"] = {name: file for name, file in document["weight_map"].items() if "_scale" not in name}
    (root / INDEX).write_text(json.dumps(document))


def of_another_model(root: Path) -> None:
    document = json.loads((root / INDEX).read_text())
    document["weight_map"] = {
        name: f"model-{n % 2 + 1:05}-of-00002.safetensors" for n, name in enumerate(document["weight_map"])
    }
    (root / INDEX).write_text(json.dumps(document))


def tied_and_silent(root: Path) -> None:
    rewrite(root, lambda name, value: None if name == "lm_head.weight" else (name, value))
    edit(root, lambda document: document.update(tie_word_embeddings=True))
    listed("ignore", lambda names: [name for name in names if name != "lm_head"])(root)


def nested(root: Path) -> None:
    edit(
        root, lambda document: document.update(text_config={"quantization_config": document.pop("quantization_config")})
    )


@dataclass(frozen=True)
class Damage:
    """One kind of damage.

    Attributes:
        name: For people.
        source: Which right checkpoint is damaged.
        inflict: Does it.
        rules: What is found.
    """

    name: str
    source: str
    inflict: Callable[[Path], Any]
    rules: set[str]

    def __str__(self) -> str:
        return self.name


DAMAGES = [
    Damage(
        "fp8 scales called as in compressed-tensors", "fp8", renamed("weight_scale_inv", "weight_scale"), {"scale-name"}
    ),
    Damage("ct scales called as in DeepSeek", "ct-fp8", renamed("weight_scale", "weight_scale_inv"), {"scale-name"}),
    Damage("scales called scale", "fp8", renamed("weight_scale_inv", "scale"), {"scale-name"}),
    Damage("int8 scales called scales", "int8", renamed("weight_scale", "scales"), {"scale-name"}),
    Damage("int4 scales called scales", "ct-int4", renamed("weight_scale", "scales"), {"scale-name"}),
    Damage("fp8 scales in bf16", "fp8", scales(torch.Tensor.bfloat16), {"scale-type"}),
    Damage(
        "int8 scales in fp16, without an axis", "int8", scales(lambda value: value.half().flatten()), {"scale-type"}
    ),
    Damage("no list at all", "excluded", block(lambda found: found.pop("modules_to_not_convert")), {"exclusion-list"}),
    Damage("an empty list of int8", "int8", listed("ignore", lambda names: []), set()),
    Damage(
        "a list of globs",
        "excluded",
        listed("modules_to_not_convert", lambda names: ["*o_proj", "model.layers.1.*"]),
        {"exclusion-list"},
    ),
    Damage(
        "a list of tails",
        "excluded",
        listed("modules_to_not_convert", lambda names: [n.rpartition(".")[2] for n in names]),
        {"exclusion-list"},
    ),
    Damage(
        "a list that names quantized modules",
        "ct-int8",
        listed("ignore", lambda names: [*names, "re:.*q_proj"]),
        {"exclusion-list"},
    ),
    Damage("no activation scheme", "fp8", block(lambda found: found.pop("activation_scheme")), {"config-keys"}),
    Damage("no block size", "fp8", block(lambda found: found.update(weight_block_size=None)), {"config-keys"}),
    Damage("no method", "ct-int8", block(lambda found: found.pop("quant_method")), {"config-keys"}),
    Damage(
        "method with another dash",
        "ct-int4",
        block(lambda found: found.update(quant_method="compressed_tensors")),
        {"config-keys"},
    ),
    Damage("no groups", "ct-int4", block(lambda found: found.pop("config_groups")), {"config-keys"}),
    Damage("no format", "ct-int4", block(lambda found: found.pop("format")), {"config-keys"}),
    Damage(
        "no quantization config",
        "fp8",
        lambda root: edit(root, lambda d: d.pop("quantization_config")),
        {"config-keys"},
    ),
    Damage("config where nobody looks", "ct-fp8", nested, {"config-keys"}),
    Damage(
        "no dtype", "fp8", lambda root: edit(root, lambda d: (d.pop("torch_dtype", 0), d.pop("dtype", 0))), {"dtype"}
    ),
    Damage("an index without the scales", "fp8", one_shard_less_in_the_index, {"index"}),
    Damage("an index of another model", "fp8", of_another_model, {"index"}),
    Damage("no index", "ct-int4", lambda root: (root / INDEX).unlink(), {"index"}),
    Damage("a tied head that is not listed", "ct-int8", tied_and_silent, {"tied-head"}),
    Damage(
        "three at once",
        "fp8",
        lambda root: (
            renamed("weight_scale_inv", "weight.scale")(root),
            scales(torch.Tensor.half)(root),
            (root / INDEX).unlink(),
            block(lambda found: found.pop("activation_scheme"))(root),
        ),
        {"scale-name", "index", "config-keys"},
    ),
]


@pytest.fixture
def damaged(right: dict[str, Path], tmp_path: Path) -> Callable[[Damage], Path]:
    def make(damage: Damage) -> Path:
        root = tmp_path / "damaged"
        shutil.copytree(right[damage.source], root)
        for own in ("manifest.json", "ledger.json"):
            (root / own).unlink()
        damage.inflict(root)
        return root

    return make


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_found_and_mended(
    damage: Damage, damaged: Callable[[Damage], Path], right: dict[str, Path], tmp_path: Path
) -> None:
    source = damaged(damage)
    found = tilewright.repair(source, None, progress=QUIET)
    assert {finding.rule for finding in found.findings} == damage.rules
    assert found.conversion is None
    if not damage.rules:
        return
    assert all(
        finding.repair and finding.engines and (source / finding.file).parent == source for finding in found.findings
    )

    output = tmp_path / "repaired"
    done = tilewright.repair(source, output, run=SMALL, progress=QUIET)
    assert done.findings == found.findings
    assert tilewright.repair(output, None, progress=QUIET).findings == ()

    before, after, good = tensors(source), tensors(output), tensors(right[damage.source])
    assert set(after) == set(good) - ({"lm_head.weight"} if "tied-head" in damage.rules else set())
    for name, value in after.items():
        assert value.dtype == good[name].dtype
        assert value.shape == good[name].shape
        if name in before and before[name].dtype == value.dtype and before[name].shape == value.shape:
            assert torch.equal(before[name].view(torch.uint8), value.view(torch.uint8)), name
        assert torch.allclose(value.float(), good[name].float(), rtol=2**-8, atol=0)  # 16 bits lose no more
    weight_map = json.loads((output / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(after)
    accepted(config(output))
    tilewright.pack(output, tmp_path / "packed", progress=QUIET)  # our own reader demands every key, name and type


def accepted(document: dict[str, Any]) -> None:
    """By the classes that define these configs."""
    said = dict(document["quantization_config"])
    if said["quant_method"] == "compressed-tensors":
        parsed = QuantizationConfig.model_validate(said)
        assert parsed.config_groups
    elif said["quant_method"] == "fp8":
        parsed = FineGrainedFP8Config(**{
            key: value for key, value in said.items() if key not in {"quant_method", "fmt"}
        })
        assert tuple(parsed.weight_block_size) == (128, 128)


@pytest.mark.parametrize("name", ["fp8", "int8", "ct-int8", "ct-fp8", "ct-int4", "excluded"])
def test_nothing_is_found_where_nothing_is_wrong(name: str, right: dict[str, Path], tmp_path: Path) -> None:
    found = tilewright.repair(right[name], tmp_path / "output", progress=QUIET)
    assert found.findings == ()
    assert found.conversion is None
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(("name", "weight"), [("fp8", "weight_scale_inv"), ("int8", "weight_scale")])
def test_lost_digits_come_from_the_original(name: str, weight: str, right: dict[str, Path], tmp_path: Path) -> None:
    source, good = tmp_path / "damaged", tensors(right[name])
    shutil.copytree(right[name], source)
    scales(torch.Tensor.bfloat16)(source)
    spoiled = f"model.layers.0.self_attn.q_proj.{weight}"
    rewrite(source, lambda key, value: (key, value * 2 if key == spoiled else value))  # not of this original
    tilewright.repair(source, tmp_path / "cast", progress=QUIET)
    tilewright.repair(source, tmp_path / "recovered", RepairOptions(original=QWEN), progress=QUIET)
    cast, recovered = tensors(tmp_path / "cast"), tensors(tmp_path / "recovered")
    names = [key for key in good if key.endswith(weight) and key != spoiled]
    assert any(not torch.equal(cast[key], good[key]) for key in names)
    assert all(torch.equal(recovered[key], good[key]) for key in names)
    assert torch.equal(recovered[spoiled], cast[spoiled])


def test_only_what_concerns_the_named_engines(right: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(right["excluded"], source)
    listed("modules_to_not_convert", lambda names: ["o_proj", "layers.1"])(source)  # whole parts, as SGLang matches
    every = tilewright.repair(source, None, progress=QUIET)
    assert {engine for finding in every.findings for engine in finding.engines} == {
        "vLLM",
        "TensorRT-LLM",
        "transformers",
    }
    assert tilewright.repair(source, None, RepairOptions(("SGLang",)), progress=QUIET).findings == ()


def test_what_is_not_there_is_refused(right: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(right["fp8"], source)
    document = json.loads((source / INDEX).read_text())
    document["weight_map"]["model.layers.9.mlp.gate.weight"] = next(iter(document["weight_map"].values()))
    (source / INDEX).write_text(json.dumps(document))
    found = tilewright.repair(source, None, progress=QUIET)
    assert {finding.rule: finding.repair is None for finding in found.findings} == {
        "index": False,
        "absent-tensors": True,
    }
    with pytest.raises(PlanError, match=r"model\.layers\.9\.mlp\.gate\.weight"):
        tilewright.repair(source, tmp_path / "output", progress=QUIET)
    assert not (tmp_path / "output").exists()
    next(source.glob("*.safetensors")).write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="safetensors"):
        tilewright.repair(source, tmp_path / "output", progress=QUIET)


def test_a_repair_that_was_killed_goes_on(right: dict[str, Path], tmp_path: Path) -> None:
    source, output = tmp_path / "damaged", tmp_path / "output"
    shutil.copytree(right["fp8"], source)
    renamed("weight_scale_inv", "scale")(source)
    tilewright.repair(source, output, run=SMALL, progress=QUIET)
    tree = {file.name: file.read_bytes() for file in output.iterdir()}
    tilewright.repair(source, output, run=RunOptions(max_shard_size=200_000, resume=True), progress=QUIET)
    assert {file.name: file.read_bytes() for file in output.iterdir()} == tree


def test_the_command(right: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(right["fp8"], source)

    def code(*arguments: object) -> int:
        with pytest.raises(SystemExit) as left:
            run(load("repair"), "tilewright repair", [str(argument) for argument in arguments])
        return int(str(left.value.code))

    assert code(source, "--check") == 0
    assert "nothing is wrong" in capfd.readouterr().out
    renamed("weight_scale_inv", "weight_scale")(source)
    assert code(source, "--check", "--json") == 3
    (finding,) = json.loads(capfd.readouterr().out)["findings"]
    assert finding["rule"] == "scale-name"
    assert code(source, tmp_path / "output") == 0
    shown = capfd.readouterr()
    assert "weight_scale_inv" in shown.out
    assert "--check" in shown.err
    assert code(source) == 2
    assert code(source, tmp_path / "output", "--consume", "--overwrite") == 2
    assert code(source, tmp_path / "output") == 1  # it is there already
    assert tuple(KNOWN_ENGINES) == ENGINES


def test_wrong_use(right: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--engine"):
        RepairOptions(("llama.cpp",))
    tilewright.pack(right["int8"], tmp_path / "packed", progress=QUIET)
    with pytest.raises(OptionError, match="packed"):
        tilewright.repair(tmp_path / "packed", tmp_path / "output", progress=QUIET)
