"""Conversions that calibrate: what they write loads, is better, is the same again, and has the scales engines want."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from tilewright.cli.main import run  # noqa: E402
from tilewright.cli.quantize_model import quantize_model  # noqa: E402
from tilewright.kernels.formats import INT4_G64  # noqa: E402
from tilewright.packer.calibrate.observe import ENOUGH  # noqa: E402
from tilewright.packer.calibrate.solve import LISTED, rarely_hit  # noqa: E402
from tilewright.packer.calibrate.store import Solution, Store  # noqa: E402
from tilewright.packer.checkpoint.files import open_checkpoint  # noqa: E402
from tilewright.packer.checkpoint.reading import read_contents  # noqa: E402
from tilewright.packer.solvers import SOLVERS  # noqa: E402
from tilewright.packer.solvers.gptq import ErrorFeedback  # noqa: E402
from tilewright.packer.verify.dequantized import stream_dequantized  # noqa: E402
from tilewright.packer.verify.model import compare_models  # noqa: E402
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens  # noqa: E402
from tilewright.packer.verify.weight_error import coded_error  # noqa: E402
from tilewright.packer.verify.weights import compare_weights  # noqa: E402

MODELS = Path(__file__).parents[3] / "examples" / "models"
TEXT = MODELS / "heldout.txt"
TINY = ("tiny-qwen3-moe", "tiny-deepseek-v3")
CALIBRATE = ("--calibrate", str(TEXT), "--calibrate-windows", "16", "--calibrate-window", "64")


def convert(model: str, output: Path, *options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(quantize_model, [str(MODELS / model), str(output), *options, "--debug"])
    assert result.exit_code == code, result.output
    return result


def divergence(model: str, output: Path) -> float:
    """KL divergence of the output from its source on windows between those of the calibration."""
    windows = evenly_spaced_windows(read_tokens(MODELS / model, TEXT)[100:], 17, 64)
    sides = [
        stream_dequantized(transformers.AutoConfig.from_pretrained(path), read_contents(open_checkpoint(path)))
        for path in (MODELS / model, output)
    ]
    return compare_models(sides[0], sides[1], windows, 0).overall.kl


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("tiny-qwen3-moe", ("int4", "--group-size", "64")), ("tiny-deepseek-v3", ("w4afp8",))],
    ids=("int4", "w4afp8"),
)
def test_gptq_comes_closer_to_the_source(model: str, scheme: tuple[str, ...], tmp_path: Path) -> None:
    convert(model, tmp_path / "rtn", "--scheme", *scheme, "--solver", "rtn")
    convert(model, tmp_path / "gptq", "--scheme", *scheme, "--solver", "gptq", *CALIBRATE)
    shapes = [
        {name: (t.dtype, t.shape) for name, t in load_file(tmp_path / solver / "model.safetensors").items()}
        for solver in ("rtn", "gptq")
    ]
    assert shapes[0] == shapes[1]
    assert divergence(model, tmp_path / "gptq") < 0.8 * divergence(model, tmp_path / "rtn")
    sides = [read_contents(open_checkpoint(path)) for path in (MODELS / model, tmp_path / "gptq")]
    assert not [result for result, _ in compare_weights(sides[0], sides[1]) if result.failed]
    assert json.loads((tmp_path / "gptq" / "manifest.json").read_text())["options"]["solver"] == "gptq"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_damage_shows_in_weights_that_feedback_chose() -> None:
    weight, inputs = torch.randn(64, 128), torch.randn(500, 32) @ torch.randn(32, 128)
    q = ErrorFeedback(SOLVERS["mse"]).solve(weight, inputs.T @ inputs, INT4_G64)
    assert q.scales is not None
    assert coded_error(weight, q, exact=False, feedback=True).sound
    for damaged in (
        replace(q, scales=q.scales * 2),
        replace(q, codes=q.codes.roll(1, 1)),
        replace(q, codes=q.codes.roll(1, 0)),
        replace(q, codes=torch.cat((q.codes[:, :64].roll(1, 0), q.codes[:, 64:]), 1)),
    ):
        assert not coded_error(weight, damaged, exact=False, feedback=True).sound


def test_w4afp8_has_a_static_scale_for_every_expert(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--scheme", "w4afp8", "--solver", "rtn", *CALIBRATE)
    with pytest.raises(SystemExit, match="0"):
        run(quantize_model, "quantize-model", [str(MODELS / "tiny-qwen3-moe"), str(tmp_path / "full"), *options])
    note = re.search(r"^note: (\d+ of 32 experts saw fewer than .*)$", capfd.readouterr().err, re.MULTILINE)
    assert note
    assert note[1] in json.loads((tmp_path / "full" / "ledger.json").read_text())["notes"]
    convert("tiny-qwen3-moe", tmp_path / "cut", *options, "--percentile", "99")
    full, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "cut"))
    stems = {name.rpartition(".")[0].rpartition(".")[0] for name in full if ".experts." in name}
    assert len(stems) == 8 * 4
    for stem in stems:
        w1, w2, w3 = (full[f"{stem}.{w}.input_scale"] for w in ("w1", "w2", "w3"))
        assert torch.equal(w1, w3)
        for scale, smaller in ((w1, cut[f"{stem}.w1.input_scale"]), (w2, cut[f"{stem}.w2.input_scale"])):
            assert scale.dtype == torch.bfloat16
            assert scale.shape == (1,)
            assert 0 < float(smaller) < float(scale) < 1
    weights = [name for name in full if not name.endswith("input_scale")]
    assert all(torch.equal(full[name].view(torch.uint8), cut[name].view(torch.uint8)) for name in weights)


def test_an_interrupted_calibration_goes_on_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--scheme", "w4afp8", "--solver", "rtn", *CALIBRATE)
    convert("tiny-qwen3-moe", tmp_path / "once", *arguments)
    saved: list[Path] = []
    save = Solution.save

    def interrupt(self: Solution, path: Path) -> None:
        saved.append(path)
        if len(saved) == 3:
            raise KeyboardInterrupt
        save(self, path)

    output = tmp_path / "twice"
    with monkeypatch.context() as patch:
        patch.setattr(Solution, "save", interrupt)
        convert("tiny-qwen3-moe", output, *arguments, code=1)
    folder = Store.beside(output).folder
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(kept) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Solution, "save", lambda self, path: (saved.append(path), save(self, path)))
        convert("tiny-qwen3-moe", output, *arguments, "--resume")
    assert len(saved) == 3 + 2  # the two layers that were there were not solved again
    assert not folder.exists()
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes()
    convert("tiny-qwen3-moe", output, *arguments, "--resume")
    assert not folder.exists()


def test_another_calibration_does_not_use_what_is_left(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.begin("first")
    Solution(tokens={"model.layers.0.mlp.experts.0": 3}).save(store.file("model.layers.0"))
    store.finish(["noticed"])
    store.begin("first")
    assert store.finished() == ["noticed"]
    assert store.find("model.layers.0.mlp.experts.0.up_proj").tokens
    store.begin("second")
    assert store.finished() is None
    assert not store.find("model.layers.0.mlp.experts.0.up_proj").tokens
    assert not store.find("lm_head").weights
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(Exception, match="holds something else"):
        Store(tmp_path / "mine").begin("first")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--scheme", "int4", "--solver", "gptq"), 2, "needs --calibrate"),
        (("--scheme", "int4", *CALIBRATE), 1, "nothing would use it"),
        (("--scheme", "w4afp8", "--act-order", *CALIBRATE), 2, "belongs to --solver gptq"),
    ],
)
def test_a_calibration_without_use_is_refused(
    options: tuple[str, ...], code: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(quantize_model, "quantize-model", [str(MODELS / TINY[0]), str(tmp_path / "out"), *options])
    assert message in capfd.readouterr().err
    assert left.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_the_note_on_rare_experts_names_the_rarest() -> None:
    tokens = {f"mlp.experts.{number}": number for number in range(ENOUGH + 100)}
    (note,) = rarely_hit(tokens)
    assert note.startswith(f"{ENOUGH} of {len(tokens)} experts saw fewer than {ENOUGH} tokens")
    assert "first): mlp.experts.0 (0), mlp.experts.1 (1), " in note
    assert note.endswith(f"mlp.experts.{LISTED - 1} ({LISTED - 1}) and {ENOUGH - LISTED} more")
    assert rarely_hit({"mlp.experts.0": ENOUGH}) == []
    assert rarely_hit({"mlp.experts.0": 1})[0].endswith("first): mlp.experts.0 (1)")
