"""Entry points: what is imported when, error messages, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import click
import pytest
import torch

import tilewright
from tilewright.cli import quantize_model
from tilewright.cli.main import COMMANDS, load, run
from tilewright.cli.options import SIZE
from tilewright.packer.calibrate.method import Kind
from tilewright.packer.jobs.calibration import CALIBRATING
from tilewright.packer.schemes import SCHEMES
from tilewright.packer.solvers import SOLVERS

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3-moe"


def leave(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        run(load("quantize-model"), "quantize-model", arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['x', '--help']\n"
        "from tilewright.cli.main import {}\n"
        "try: {}()\n"
        "except SystemExit as left: assert left.code == 0\n"
        "heavy = {{'torch', 'numpy', 'transformers', 'safetensors'}} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for function in ("main", "quantize_model"):
        subprocess.run([sys.executable, "-c", code.format(function, function)], check=True, capture_output=True)


def test_choices_are_what_the_registries_hold() -> None:
    assert set(quantize_model.SCHEMES) == set(SCHEMES)
    calibrating = set(get_args(Kind)) - {"scales"}
    assert set(CALIBRATING) == calibrating
    assert set(quantize_model.SOLVERS) == set(SOLVERS) | calibrating
    assert set(quantize_model.CHECKPOINT_FORMATS) == {
        form for scheme in SCHEMES.values() for form in scheme.checkpoint_formats
    }
    assert list(COMMANDS)[0] == "quantize-model"


def test_success_prints_sizes_on_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "int8"]) == 0
    assert "112 tensors quantized" in capfd.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"] == "w8a8_int8"


def test_json_is_one_document_and_dry_run_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "w4afp8", "--dry-run", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["fates"] == {"quantized": 112, "copied": 23}
    assert 0 < document["estimated_seconds"] < 60
    assert 5 < document["bits_per_weight"] < 6
    assert sum(group["bytes_after"] for group in document["groups"]) == document["bytes_after"]
    assert not (tmp_path / "out").exists()


def test_refusals_have_a_hint_and_exit_code_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave([str(tmp_path / "nothing"), str(tmp_path / "out"), "--scheme", "int8"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert "nothing" in error
    assert "hint: " in error
    assert "Traceback" not in error
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "int4", "--format", "native"]) == 1
    assert "use --format compressed-tensors" in capfd.readouterr().err


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave([str(MODEL), str(tmp_path / "out")]) == 2
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "int5"]) == 2
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "int8", "--memory", "lots"]) == 2
    assert "`lots` is not a size" in capfd.readouterr().err


def test_a_bug_shows_its_traceback_only_on_demand(capfd: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--debug", is_flag=True)
    def broken(debug: bool) -> None:
        raise ValueError("oops")

    for arguments, traced in (([], False), (["--debug"], True)):
        with pytest.raises(SystemExit) as left:
            run(broken, "broken", arguments)
        assert left.value.code == 1
        assert ("Traceback" in capfd.readouterr().err) is traced


def test_one_entry_point_for_those_who_like_it() -> None:
    module = [sys.executable, "-m", "tilewright"]
    version = subprocess.run([*module, "--version"], check=True, capture_output=True, text=True).stdout
    assert version.strip() == tilewright.__version__
    listed = subprocess.run([*module, "--help"], check=True, capture_output=True, text=True).stdout
    assert all(name in listed for name in COMMANDS)
    assert subprocess.run([*module, "quantise-model"], check=False, capture_output=True).returncode == 2


def test_sizes() -> None:
    assert SIZE.convert("5GB", None, None) == 5_000_000_000
    assert SIZE.convert("1.5 GiB", None, None) == 3 << 29
    assert SIZE.convert("300", None, None) == 300
    for wrong in ("", "-1", "0", "5XB", "GB"):
        with pytest.raises(click.BadParameter):
            SIZE.convert(wrong, None, None)


def test_a_second_int4_quantization_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "g32", tmp_path / "w4afp8"
    assert leave([str(MODEL), str(first), "--scheme", "int4", "--group-size", "32"]) == 0
    capfd.readouterr()
    assert leave([str(first), str(second), "--scheme", "w4afp8", "--json"]) == 0
    output = capfd.readouterr()
    loss = json.loads(output.out)["second_quantization"]
    assert loss["count"] == 96  # every expert; the other Linears become FP8
    assert 0.02 < loss["mean"] <= loss["largest"] < 0.2
    assert "int4 quantized a second time: relative error 0." in output.err
    assert leave([str(MODEL), str(tmp_path / "once"), "--scheme", "int4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["second_quantization"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave([str(MODEL), str(tmp_path / "out"), "--scheme", "int8", "--device", "cuda"]) == 1
    assert "torch finds no CUDA device" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_no_bug() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", "from tilewright.cli.main import inspect_model; inspect_model()", str(MODEL)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: output: No space left on device\n"
