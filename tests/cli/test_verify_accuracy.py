"""`verify-accuracy` and `inspect-model` as commands: output, exit codes, report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.cli import verify_accuracy
from tilewright.cli.main import load, run
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.verify.options import LEVELS

MODELS = Path(__file__).parents[2] / "examples" / "models"
QWEN, TEXT = MODELS / "tiny-qwen3-moe", MODELS / "heldout.txt"


def leave(command: str, *arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        run(load(command), command, [str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("int8")
    assert leave("quantize-model", QWEN, root / "int8", "--scheme", "int8") == 0
    return root / "int8"


@pytest.fixture(scope="module")
def packed(int8: Path) -> Path:
    assert leave("pack-for-cpu", int8, int8.parent / "packed") == 0
    return int8.parent / "packed"


def test_levels_are_those_of_the_package() -> None:
    assert verify_accuracy.LEVELS == LEVELS


def test_all_levels_of_a_packed_model(packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    options = ("--level", "model", "--text", TEXT, "--windows", 4, "--window", 32)
    assert leave("verify-accuracy", QWEN, packed, *options, "--report", page) == 0
    out, err = capfd.readouterr()
    assert out.startswith("PASS  level model\n")
    assert "135 tensors: 112 int8, 1 bf16, 22 kept bit for bit" in out
    assert "perplexity" in out
    assert all(line.startswith("verifying ") for line in err.splitlines())
    assert page.read_text().startswith("<!doctype html>")


def test_json_is_one_document(int8: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("verify-accuracy", QWEN, int8, "--level", "layers", "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["verdict"] == "pass"
    assert document["layers"] == []
    assert "not packed" in " ".join(document["notes"])
    ratios = [tensor["ratio"] or 0 for tensor in document["weights"]["tensors"]]
    assert ratios == sorted(ratios, reverse=True)


def test_below_the_threshold_exits_with_3(int8: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(int8, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.3.self_attn.q_proj.weight_scale"] *= 2
    save_file(tensors, bad / "model.safetensors")
    assert leave("verify-accuracy", QWEN, bad, "--no-checksums") == 3
    out = capfd.readouterr().out
    assert out.startswith("FAIL  level weights\n")
    assert "below the threshold: 1\n  model.layers.3.self_attn.q_proj.weight: above the bound" in out
    assert leave("verify-accuracy", QWEN, bad, "--json", "--no-checksums") == 3
    document = json.loads(capfd.readouterr().out)
    assert document["files"] is None
    assert document["weights"]["tensors"][0]["name"] == "model.layers.3.self_attn.q_proj.weight"
    assert leave("verify-accuracy", QWEN, bad, "--max-weight-error", 1.1, "--no-checksums") == 0


def test_files_are_what_was_written(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    count = len(json.loads((packed / "manifest.json").read_text())["files"])
    assert leave("verify-accuracy", packed, packed) == 0
    assert f"files      {count} are what their manifest says\n" in capfd.readouterr().out
    assert leave("inspect-model", packed, "--checksums", "--json") == 0
    found = capfd.readouterr()
    assert json.loads(found.out)["kind"] == "packed"
    assert found.err == f"{count} files are what manifest.json says\n"


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]), "has SHA-256"),
        ("tokenizer.json", lambda content: content.replace(b"1", b"2", 1), "has SHA-256"),
        ("tokenizer.json", lambda content: content[:-1], r"has \d+ bytes, manifest.json says"),
        ("tokenizer.json", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_not_is_named(
    file: str,
    change: Callable[[bytes], bytes] | None,
    reason: str,
    packed: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bad = Path(shutil.copytree(packed, tmp_path / "bad"))
    if change:
        (bad / file).write_bytes(change((packed / file).read_bytes()))
    else:
        (bad / file).unlink()
    assert leave("verify-accuracy", packed, bad) == 3
    assert re.search(f"  {bad / file}: {reason}", capfd.readouterr().out)
    assert leave("inspect-model", bad, "--checksums") == 1
    assert re.search(f"  {bad / file}: {reason}", capfd.readouterr().err)
    assert leave("inspect-model", bad) == 0
    assert file != "tokenizer.json" or leave("verify-accuracy", packed, bad, "--no-checksums") == 0


def test_only_what_this_tool_wrote_has_checksums(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("inspect-model", QWEN, "--checksums") == 1
    assert "no manifest.json of Tilewright" in capfd.readouterr().err
    assert leave("verify-accuracy", QWEN, QWEN, "--json") == 0
    assert json.loads(capfd.readouterr().out)["files"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"files": {"config.json": {}}}, "file `config.json` has no `sha256`"),
        ({"files": {"config.json": {"sha256": "0" * 64}}}, "file `config.json` has no `size`"),
        (
            {"files": {"config.json": {"sha256": "x", "size": 1}}},
            "`sha256` of file `config.json` is not 64 hex",
        ),
        ({"files": [1]}, "`files` is an array, a JSON object is expected"),
        ({"options": None}, "`options` is null, a JSON object is expected"),
        ({"layouts": {"cpu-vnni-int8": "one"}}, "the version of layout `cpu-vnni-int8` is `one`, an integer"),
        ({"schema": 99}, "has schema version 99, this release reads up to 2"),
    ],
)
def test_a_broken_manifest_is_named(
    change: dict[str, object], reason: str, packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(packed, tmp_path / "broken"))
    manifest = json.loads((packed / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps(manifest | change))
    for command in (("verify-accuracy", packed, broken), ("inspect-model", broken)):
        assert leave(*command) == 1
        assert f"{broken / 'manifest.json'}: {reason}" in capfd.readouterr().err
    del manifest["plan"]
    (broken / "manifest.json").write_text(json.dumps(manifest))
    assert leave("inspect-model", broken) == 1
    assert f"{broken / 'manifest.json'}: has no `plan`" in capfd.readouterr().err


def test_thresholds_of_layers_and_models(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("verify-accuracy", QWEN, packed, "--level", "layers", "--max-layer-error", 1e-5) == 3
    options = ("--level", "model", "--text", TEXT, "--windows", 2, "--window", 16, "--max-kl", 1e-9)
    assert leave("verify-accuracy", QWEN, packed, *options) == 3
    assert "model: KL divergence" in capfd.readouterr().out


def test_usage_and_refusals(int8: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("verify-accuracy", QWEN, int8, "--level", "model") == 2
    assert leave("verify-accuracy", QWEN, int8, "--window", 4, "--decode-steps", 4) == 2
    assert leave("verify-accuracy", QWEN, int8, "--report", tmp_path / "none" / "report.html") == 2
    (tmp_path / "taken.html").mkdir()
    assert leave("verify-accuracy", QWEN, int8, "--report", tmp_path / "taken.html") == 1
    assert "taken.html: the report cannot be written" in capfd.readouterr().err
    assert leave("verify-accuracy", QWEN, tmp_path / "nowhere") == 1
    assert "nowhere" in capfd.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert leave("verify-accuracy", QWEN, int8, "--level", "model", "--text", short) == 1
    assert "9 tokens, one window needs 128" in capfd.readouterr().err
    assert leave("verify-accuracy", QWEN, int8, "--level", "model", "--text", tmp_path / "none.txt") == 1
    assert "none.txt" in capfd.readouterr().err


@pytest.mark.parametrize("key", ["tilewright.modules", "tilewright.cut"])
def test_broken_descriptions_are_named(
    packed: Path, key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metadata = read_header(packed / "model.safetensors").metadata
    broken = Path(shutil.copytree(packed, tmp_path / "broken"))
    save_file(load_file(packed / "model.safetensors"), broken / "model.safetensors", metadata | {key: "["})
    assert leave("inspect-model", broken) == 1
    assert leave("pack-for-cpu", broken, tmp_path / "out", "--unpack") == 1
    message = capfd.readouterr().err
    assert message.count(f"`{key}` is") == 2
    assert "bug" not in message


def test_models_that_transformers_cannot_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare, odd = tmp_path / "bare", tmp_path / "odd"
    for copy in (bare, odd):
        shutil.copytree(QWEN, copy)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    config = json.loads((QWEN / "config.json").read_text()) | {"num_hidden_layers": 3}
    (odd / "config.json").write_text(json.dumps(config))
    options = ("--level", "model", "--text", TEXT, "--windows", 1, "--window", 8)
    assert leave("verify-accuracy", bare, bare, *options) == 1
    assert "no tokenizer" in capfd.readouterr().err
    assert leave("verify-accuracy", QWEN, odd, *options) == 1
    assert "the candidate has 3 decoder layers, the reference 4" in capfd.readouterr().err
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    assert leave("verify-accuracy", QWEN, odd, *options) == 1
    shown = capfd.readouterr().err
    assert f"error: {odd}" in shown
    assert "`unheard_of` but Transformers does not recognize this architecture" in shown
    assert "need no architecture" in shown


@pytest.mark.parametrize("kind", ["plain", "quantized", "packed"])
def test_inspect_says_what_a_directory_is(
    kind: str, int8: Path, packed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = {"plain": QWEN, "quantized": int8, "packed": packed}[kind]
    assert leave("inspect-model", path) == 0
    text = capfd.readouterr().out
    assert "qwen3_moe, 4 layers, hidden size 256, 8 experts of width 128, 2 per token" in text
    assert "router" in text
    assert ("router: " in text) == (kind != "plain")
    assert leave("inspect-model", path, "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["kind"] == kind
    assert document["parameters"] == sum(tensor.numel() for tensor in load_file(QWEN / "model.safetensors").values())
    files = [load_file(path / "model.safetensors")]
    assert document["nbytes"] == sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    assert document["bits"] == pytest.approx(8 * document["nbytes"] / document["parameters"])
    assert sum(share["nbytes"] for share in document["shares"]) == document["nbytes"]
    assert {share["layout"] for share in document["shares"]} - {""} == (
        {"cpu-vnni-int8", "cpu-vnni-bf16"} if kind == "packed" else set()
    )


def test_inspect_refuses_what_is_no_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("inspect-model", tmp_path) == 1
    assert str(tmp_path) in capfd.readouterr().err


def test_inspect_tells_of_announced_layers(capfd: pytest.CaptureFixture[str]) -> None:
    assert leave("inspect-model", MODELS / "tiny-deepseek-v3") == 0
    assert "config.json announces 1 MTP layer, the files hold none" in capfd.readouterr().out


def test_inspect_counts_other_dtypes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert leave("inspect-model", tmp_path, "--json") == 0
    (share,) = json.loads(capfd.readouterr().out)["shares"]
    assert (share["role"], share["encoding"], share["bits"]) == ("linear", "fp32", 32)
