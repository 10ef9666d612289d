"""The jobs from Python: what the commands print, and what bad input leaves behind."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tilewright
from tilewright import CalibrationOptions, PackOptions, QuantizeOptions, RunOptions, Silent, VerifyOptions
from tilewright.cli.main import load, run
from tilewright.packer import summary as figures
from tilewright.packer.engine import preflight

MODELS = Path(__file__).parents[3] / "examples" / "models"
QWEN, TEXT = MODELS / "tiny-qwen3-moe", MODELS / "heldout.txt"
QUIET = Silent()


def command(capfd: pytest.CaptureFixture[str], name: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        run(load(name), name, [str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, *capfd.readouterr()


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    varies = {"seconds", "estimated_seconds", "output", "disk_free"}
    return {key: value for key, value in document.items() if key not in varies}


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("jobs") / "int8"
    tilewright.quantize(QWEN, output, "int8", progress=QUIET)
    return output


def test_the_chain_from_python(int8: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = tilewright.pack(int8, tmp_path / "packed", progress=QUIET)
    assert not packed.dry_run
    assert packed.summary.bytes_after == packed.to_json()["bytes_after"]
    found = tilewright.verify(QWEN, tmp_path / "packed", VerifyOptions("layers"), progress=QUIET)
    assert found.passed
    assert found.layers
    assert tilewright.inspect(tmp_path / "packed", checksums=True).kind == "packed"
    tilewright.unpack(tmp_path / "packed", tmp_path / "back", progress=QUIET)
    assert not tilewright.verify(int8, tmp_path / "back", progress=QUIET).failures()
    assert capfd.readouterr().out == ""


def test_to_json_is_what_the_commands_print(int8: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capfd, "quantize-model", QWEN, tmp_path / "a", "--scheme", "w4afp8", "--json")
    result = tilewright.quantize(QWEN, tmp_path / "b", "w4afp8", progress=QUIET)
    assert code == 0
    assert without_times(json.loads(out)) == without_times(json.loads(json.dumps(result.to_json())))
    _, out, _ = command(capfd, "pack-for-cpu", QWEN, tmp_path / "c", "--tp", 2, "--dry-run", "--json")
    ranks = tilewright.pack(QWEN, tmp_path / "c", PackOptions(tp=2), dry_run=True, progress=QUIET).to_json()
    assert [without_times(rank) for rank in json.loads(out)] == [
        without_times(rank) for rank in json.loads(json.dumps(ranks))
    ]
    _, out, _ = command(capfd, "verify-accuracy", QWEN, int8, "--json")
    assert json.loads(out) == tilewright.verify(QWEN, int8, progress=QUIET).to_json()
    _, out, _ = command(capfd, "inspect-model", int8, "--json")
    assert json.loads(out) == json.loads(json.dumps(tilewright.inspect(int8).to_json()))


def no_tokenizer(folder: Path) -> Path:
    source = Path(shutil.copytree(QWEN, folder / "no-tokenizer"))
    for path in source.glob("tokenizer*"):
        path.unlink()
    return source


def broken_norm(folder: Path) -> Path:
    source = Path(shutil.copytree(QWEN, folder / "nan"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors")
    return source


BAD: dict[str, tuple[Callable[[Path, Path], Any], Callable[[Path], list[object]]]] = {
    "no source": (
        lambda root, out: tilewright.quantize(root / "none", out, "int8"),
        lambda root: ["quantize-model", root / "none", "OUT", "--scheme", "int8"],
    ),
    "scheme": (
        lambda root, out: tilewright.quantize(QWEN, out, "int5"),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int5"],
    ),
    "format": (
        lambda root, out: tilewright.quantize(QWEN, out, QuantizeOptions("int4", "native")),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int4", "--format", "native"],
    ),
    "group size": (
        lambda root, out: tilewright.quantize(QWEN, out, QuantizeOptions("int4", group_size=16)),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int4", "--group-size", 16],
    ),
    "pattern": (
        lambda root, out: tilewright.quantize(QWEN, out, QuantizeOptions("int8", exclude=("re:(",))),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int8", "--exclude", "re:("],
    ),
    "solver without a text": (
        lambda root, out: tilewright.quantize(QWEN, out, QuantizeOptions("int4", solver="gptq")),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int4", "--solver", "gptq"],
    ),
    "no text": (
        lambda root, out: tilewright.quantize(QWEN, out, "int4", calibration=CalibrationOptions(root / "none.txt")),
        lambda root: ["quantize-model", QWEN, "OUT", "--scheme", "int4", "--calibrate", root / "none.txt"],
    ),
    "no tokenizer": (
        lambda root, out: tilewright.quantize(
            no_tokenizer(root), out, QuantizeOptions("int4", solver="gptq"), calibration=CalibrationOptions(TEXT)
        ),
        lambda root: [
            *("quantize-model", root / "no-tokenizer", "OUT", "--scheme", "int4"),
            *("--solver", "gptq", "--calibrate", TEXT),
        ],
    ),
    "percentile": (
        lambda root, out: CalibrationOptions(TEXT, percentile=10.0),
        lambda root: [
            *("quantize-model", QWEN, "OUT", "--scheme", "w4afp8", "--calibrate", TEXT),
            *("--percentile", 10),
        ],
    ),
    "jobs": (
        lambda root, out: tilewright.pack(QWEN, out, run=RunOptions(jobs=0)),
        lambda root: ["pack-for-cpu", QWEN, "OUT", "--jobs", 0],
    ),
    "both ways to go on": (
        lambda root, out: tilewright.pack(QWEN, out, run=RunOptions(resume=True, overwrite=True)),
        lambda root: ["pack-for-cpu", QWEN, "OUT", "--resume", "--overwrite"],
    ),
    "layout": (
        lambda root, out: tilewright.pack(QWEN, out, PackOptions("gpu", layout="cpu-vnni-int8")),
        lambda root: ["pack-for-gpu", QWEN, "OUT", "--layout", "cpu-vnni-int8"],
    ),
    "ranks": (
        lambda root, out: tilewright.pack(QWEN, out, PackOptions(tp=3)),
        lambda root: ["pack-for-cpu", QWEN, "OUT", "--tp", 3],
    ),
    "not packed": (
        lambda root, out: tilewright.unpack(QWEN, out),
        lambda root: ["pack-for-cpu", QWEN, "OUT", "--unpack"],
    ),
    "a value that no scheme takes": (
        lambda root, out: tilewright.quantize(broken_norm(root), out, "int8", progress=QUIET),
        lambda root: ["quantize-model", root / "nan", "OUT", "--scheme", "int8"],
    ),
    "level without a text": (
        lambda root, out: tilewright.verify(QWEN, QWEN, VerifyOptions("model")),
        lambda root: ["verify-accuracy", QWEN, QWEN, "--level", "model"],
    ),
    "level": (
        lambda root, out: tilewright.verify(QWEN, QWEN, VerifyOptions("all")),  # type: ignore[arg-type]
        lambda root: ["verify-accuracy", QWEN, QWEN, "--level", "all"],
    ),
    "nothing to inspect": (
        lambda root, out: tilewright.inspect(root / "none"),
        lambda root: ["inspect-model", root / "none"],
    ),
    "no checksums": (
        lambda root, out: tilewright.inspect(QWEN, checksums=True),
        lambda root: ["inspect-model", QWEN, "--checksums"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_what_the_command_prints_and_leaves_nothing(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask, arguments = BAD[case]
    out, root = tmp_path / "place" / "out", tmp_path / "sources"
    out.parent.mkdir()
    root.mkdir()
    with pytest.raises(tilewright.TilewrightError) as refused:
        ask(root, out)
    assert list(out.parent.iterdir()) == []
    name, *rest = (out if argument == "OUT" else argument for argument in arguments(root))
    code, printed, said = command(capfd, str(name), *rest)
    assert code == (2 if isinstance(refused.value, tilewright.OptionError) else 1)
    assert printed == ""
    assert f"error: {refused.value}\n" in said
    assert list(out.parent.iterdir()) == []


def test_a_job_is_planned_and_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    plan_hash = preflight.plan_hash
    monkeypatch.setattr(preflight, "plan_hash", lambda *given: checked.append(1) or plan_hash(*given))
    tilewright.quantize(QWEN, tmp_path / "out", "int8", progress=QUIET)
    assert checked == [1]


def test_nobody_else_writes_while_a_calibration_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Meanwhile(Silent):
        def start(self, stage: str, total: int, done: int = 0, unit: str = "B") -> None:
            if stage == "calibrating":
                for options in (tilewright.RunOptions(), tilewright.RunOptions(overwrite=True)):
                    with pytest.raises(tilewright.PlanError, match=r"another run|holds an unfinished"):
                        tilewright.quantize(QWEN, out, "int8", run=options, progress=QUIET)

    text = CalibrationOptions(TEXT, windows=2, window=16)
    tilewright.quantize(QWEN, out, "w4afp8", calibration=text, progress=Meanwhile())
    assert json.loads((out / "manifest.json").read_text())["options"]["scheme"] == "w4afp8"


def test_a_progress_of_ones_own_hears_every_stage(tmp_path: Path) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.stages: list[tuple[str, list[int]]] = []

        def start(self, stage: str, total: int, done: int = 0, unit: str = "B") -> None:
            self.now = [total, done]
            self.stages.append((stage, self.now))

        def advance(self, count: int = 1) -> None:
            self.now[1] += count

    heard = Heard()
    calibration = CalibrationOptions(TEXT, windows=2, window=16)
    tilewright.quantize(QWEN, tmp_path / "q", "w4afp8", calibration=calibration, run=RunOptions(jobs=1), progress=heard)
    tilewright.pack(tmp_path / "q", tmp_path / "p", run=RunOptions(jobs=1), progress=heard)
    options = VerifyOptions("model", text=TEXT, windows=2, window=16)
    tilewright.verify(tmp_path / "q", tmp_path / "p", options, progress=heard)
    assert {stage for stage, _ in heard.stages} == {
        *("calibrating", "writing", "reading files"),
        *("verifying weights", "verifying layers", "verifying the model"),
    }
    assert all(total == done for _, (total, done) in heard.stages), heard.stages


def test_notes_are_logged_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("tilewright").propagate = True
    first = tilewright.quantize(QWEN, tmp_path / "g32", QuantizeOptions("int4", group_size=32), progress=QUIET)
    assert first.second_quantization is None
    result = tilewright.quantize(tmp_path / "g32", tmp_path / "again", "w4afp8", progress=QUIET)
    assert result.second_quantization is not None
    said = [record.getMessage() for record in caplog.records if record.name == "tilewright"]
    assert any("int4 quantized a second time" in line for line in said)
    assert set(result.notes) <= set(said)


def test_everything_exported_is_there_and_import_is_light() -> None:
    for name in tilewright.__all__:
        assert getattr(tilewright, name) is not None
    errors = [getattr(tilewright, name) for name in tilewright.__all__ if name.endswith("Error")]
    assert all(issubclass(error, tilewright.TilewrightError) for error in errors)
    code = (
        "import sys, tilewright\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'click', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "tilewright.load_packed\n"
        "heavy = {'transformers', 'triton', 'click', 'tilewright.packer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_of_a_dry_run(tmp_path: Path) -> None:
    result = tilewright.quantize(QWEN, tmp_path / "out", "int4", dry_run=True)
    assert result.dry_run
    assert isinstance(result.summary, figures.Summary)
    assert result.summary.seconds is not None
    assert not (tmp_path / "out").exists()


def test_what_the_page_names_is_there() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    named = set(re.findall(r"tilewright\.([A-Za-z_]+)", page))
    named |= {name for line in re.findall(r"from tilewright import (.*)", page) for name in line.split(", ")}
    assert named <= {*tilewright.__all__, "packer", "kernels", "engines", "cli"}, named
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        compile(block, "docs/python.md", "exec")


def test_a_source_that_goes_after_the_end_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(QWEN, source)
    tilewright.quantize(source, tmp_path / "undisturbed", "int8", progress=QUIET)

    def then_it_goes(*_: object) -> None:
        next(source.glob("*.safetensors")).unlink()

    monkeypatch.setattr("tilewright.packer.jobs.quantize.measure", then_it_goes)
    done = tilewright.quantize(source, tmp_path / "output", "int8", progress=QUIET)
    assert any("the output is complete, but" in note and "cannot be read any more" in note for note in done.notes)
    for file in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "output" / file.name).read_bytes() == file.read_bytes()
