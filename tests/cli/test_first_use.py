"""The command line as a new user meets it: help pages, refusals that say the way out first, and what comes next."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tilewright.cli.help import Command
from tilewright.cli.main import COMMANDS, SHORT, load, run, tilewright
from tilewright.kernels.tensors import Reject
from tilewright.packer.calibrate.store import Solution
from tilewright.packer.folding import fold_rejects, with_ranges
from tilewright.packer.schemes import SCHEMES

MODELS = Path(__file__).parents[2] / "examples" / "models"
QWEN, DEEPSEEK = MODELS / "tiny-qwen3-moe", MODELS / "tiny-deepseek-v3"
ROOT = Path(__file__).parents[2]


def command(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        run(tilewright, "tilewright", [str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, *capfd.readouterr()


def page(name: str) -> str:
    return load(name).get_help(click.Context(load(name), info_name=name))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_once_under_a_heading_and_ends_with_examples(name: str) -> None:
    shown = load(name)
    assert isinstance(shown, Command)
    text = page(name)
    options = [param for param in shown.params if isinstance(param, click.Option)]
    listed = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    assert sorted(listed) == sorted([*(param.opts[0] for param in options), "--help"])
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[-1] == "Examples:"
    assert "Options:" not in headings
    for line, _ in shown.examples:
        program, *arguments = shlex.split(line)
        assert program == name
        shown.make_context(program, arguments)  # refuses options and values that do not exist


def test_help_states_the_defaults_of_each_scheme() -> None:
    text = " ".join(page("quantize-model").split())
    assert {scheme.id for scheme in SCHEMES.values() if scheme.solver == "mse"} == {"int4", "w4afp8"}
    assert "[default: mse for int4 and w4afp8, rtn for all else]" in text
    assert {scheme.id for scheme in SCHEMES.values() if next(iter(scheme.checkpoint_formats)) != "native"} == {
        "int4",
        "mxfp4",
    }
    assert "[default: native; for int4 and mxfp4 compressed-tensors]" in text
    assert SCHEMES["int4"].groups[0] == 128
    assert "share a scale. [default: 128]" in text


def test_short_names_are_the_long_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert set(SHORT.values()) < set(COMMANDS)
    context = click.Context(tilewright)
    assert all(tilewright.get_command(context, short) is load(name) for short, name in SHORT.items())
    assert command(capfd, "quantize", QWEN, tmp_path / "q", "--scheme", "int8")[0] == 0
    assert command(capfd, "pack", tmp_path / "q", tmp_path / "p")[0] == 0
    assert command(capfd, "verify", QWEN, tmp_path / "p")[0] == 0
    code, out, _ = command(capfd, "inspect", tmp_path / "p", "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "packed"


def test_success_says_how_long_and_what_is_next(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "q"
    code, printed, said = command(capfd, "quantize", QWEN, out, "--scheme", "int8")
    assert code == 0
    assert printed.count("\n") == 1
    assert said.splitlines()[-1].startswith("done in ")
    assert f"next: verify-accuracy {QWEN} {out}" in said
    assert "next:" not in command(capfd, "pack", out, tmp_path / "p", "--json")[2]


def test_refusals_are_folded_and_the_way_out_comes_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, said = command(capfd, "pack", QWEN, tmp_path / "p", "--tp", 3)
    lines = [line for line in said.splitlines() if not line.startswith("note:")]
    assert code == 1
    assert lines[0] == "error: 9 reasons to refuse"
    assert lines[1] == "  --tp 3 --ep 1: this model cannot be cut so; possible are --tp 1, 2; alone, --ep 1, 2, 4, 8"
    assert "  model.layers.0.self_attn.q_proj: 256 rows are not 3 equal shares" in lines  # as in layers 1 to 3
    assert len(lines) == 10
    rejects = [Reject(f"model.layers.{layer}.{name}", "no", "help") for layer in range(4) for name in ("up", "down")]
    folded = ["model.layers.{0-3}.up: no", "model.layers.{0-3}.down: no"]
    assert fold_rejects(rejects) == (folded, "help")
    assert fold_rejects([*rejects, Reject("config.json", "no")]) == (
        [f"{one}; help" for one in folded] + ["config.json: no"],
        None,
    )


def test_numbers_that_occur_are_told() -> None:
    names = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1, 2, 5, 7, 8)]
    assert with_ranges(names) == "model.layers.{0-2,5,7-8}.mlp.gate"
    assert with_ranges(["model.norm.weight"]) == "model.norm.weight"
    assert with_ranges([f"a.{i}.b" for i in range(0, 20, 2)]) == "a.{0,2,…,18}.b"
    assert fold_rejects([]) == ([], None)


def test_a_packed_directory_is_refused_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(capfd, "pack", QWEN, tmp_path / "p")[0] == 0
    code, _, said = command(capfd, "quantize", tmp_path / "p", tmp_path / "q", "--scheme", "int8")
    assert code == 1
    assert said.splitlines()[0] == f"error: {tmp_path / 'p'}: is packed already"
    assert said.splitlines()[1].startswith("hint: pack-for-cpu --unpack turns it back")
    assert len(said.splitlines()) == 2


def test_a_wrong_pair_is_said_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(capfd, "quantize", QWEN, tmp_path / "q", "--scheme", "int8")[0] == 0
    code, out, _ = command(capfd, "verify", DEEPSEEK, tmp_path / "q")
    assert code == 3
    assert out.split("below the threshold: ")[1].splitlines()[1] == (
        "  model_type differs: the reference is `deepseek_v3`, the candidate `qwen3_moe`"
    )
    code, out, said = command(capfd, "verify", tmp_path / "q", QWEN)
    assert code == 3
    assert out.split("below the threshold: ")[1].splitlines()[1].endswith("are they swapped?")
    assert said.startswith("note: the reference is quantized and the candidate is not")
    assert command(capfd, "verify", QWEN, tmp_path / "q")[2] == ""


def test_resume_names_the_option_that_differs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(capfd, "quantize", QWEN, tmp_path / "q", "--scheme", "int8")[0] == 0
    again = ("quantize", QWEN, tmp_path / "q", "--scheme", "int8", "--resume", "--exclude", "lm_head")
    code, _, said = command(capfd, *again)
    assert code == 1
    assert "with other options: --exclude not given, now [lm_head]" in said.replace('"', "")


def test_an_interrupt_exits_with_130_and_what_is_left_has_a_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def interrupt(self: Solution, path: Path) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "q"
    arguments = ("quantize", QWEN, out, "--scheme", "w4afp8", "--calibrate", MODELS / "heldout.txt")
    few = ("--calibrate-windows", 2, "--calibrate-window", 16)
    with monkeypatch.context() as patch:
        patch.setattr(Solution, "save", interrupt)
        code, printed, said = command(capfd, *arguments, *few)
    assert code == 130
    assert printed == ""
    assert f"error: {out}: interrupted\nhint: the same command with --resume goes on\n" in said
    (out / ".tilewright-partial").mkdir(parents=True, exist_ok=True)
    for name in ("inspect", "verify"):
        code, _, said = command(capfd, name, out, *([out] if name == "verify" else []))
        assert code == 1
        hint = "the command that writes it goes on with --resume"
        assert said == f"error: {out}: an unfinished output of Tilewright\nhint: {hint}\n"


def test_completion_knows_commands_options_and_values() -> None:
    program = str(Path(sys.executable).parent / "tilewright")
    for words, expected in (
        ("tilewright insp", "inspect-model"),
        ("tilewright quantize --gro", "--group-size"),
        ("tilewright quantize --scheme w4", "w4afp8"),
    ):
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        environment |= {"_TILEWRIGHT_COMPLETE": "bash_complete", "PATH": str(Path(sys.executable).parent)}
        done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
        assert f"plain,{expected}" in done.stdout, done.stderr
