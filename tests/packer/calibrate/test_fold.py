"""Moving scales of channels: the same function bit for bit, followed by verification, refused where unknown."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import tilewright  # noqa: E402
from tilewright.cli.quantize_model import quantize_model  # noqa: E402
from tilewright.kernels.errors import SchemeError  # noqa: E402
from tilewright.packer.calibrate.fold import Folder  # noqa: E402
from tilewright.packer.calibrate.method import CalibrationTargets, Method  # noqa: E402
from tilewright.packer.calibrate.observe import observe  # noqa: E402
from tilewright.packer.calibrate.store import Solution  # noqa: E402
from tilewright.packer.checkpoint.files import Checkpoint, open_checkpoint  # noqa: E402
from tilewright.packer.checkpoint.reading import read_contents  # noqa: E402
from tilewright.packer.families import known_folds, known_passages  # noqa: E402
from tilewright.packer.families.config import head_size  # noqa: E402
from tilewright.packer.families.layers import LAYER  # noqa: E402
from tilewright.packer.families.norms import Fold, of_columns, reads  # noqa: E402
from tilewright.packer.progress import Silent  # noqa: E402
from tilewright.packer.schemes.scheme import StorageSpec  # noqa: E402
from tilewright.packer.verify.dequantized import stream_dequantized  # noqa: E402
from tilewright.packer.verify.folds import follow_folds  # noqa: E402
from tilewright.packer.verify.model import compare_models  # noqa: E402
from tilewright.packer.verify.stream import StreamedModel  # noqa: E402
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens  # noqa: E402
from tilewright.packer.verify.weights import compare_weights  # noqa: E402

MODELS = Path(__file__).parents[3] / "examples" / "models"
TEXT = MODELS / "heldout.txt"
TINY = ("tiny-qwen3-moe", "tiny-deepseek-v3")


@pytest.fixture(scope="module", params=TINY)
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is the same function as the trained one, but feeds a few channels 16 times as large inputs."""
    path = tmp_path_factory.mktemp("uneven") / request.param
    shutil.copytree(MODELS / request.param, path)
    tensors = load_file(path / "model.safetensors")
    folds = known_folds()[json.loads((path / "config.json").read_text())["model_type"]]
    torch.manual_seed(0)
    for name in list(tensors):
        layer = LAYER.match(name.removesuffix(".weight"))
        fold = next((fold for fold in folds if layer and layer[2] == fold.norm), None)
        if layer is None or fold is None:
            continue
        factors = torch.ones(len(tensors[name]))
        factors[torch.randperm(len(factors))[:6]] = 16
        tensors[name] = (tensors[name].float() * factors).to(tensors[name].dtype)
        for reader, weight in tensors.items():
            if reader.startswith(f"{layer[1]}.") and reads(reader.removesuffix(".weight"), fold):
                tensors[reader] = (weight.float() / factors).to(weight.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def opened(path: Path) -> tuple[Checkpoint, StreamedModel, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    stream = stream_dequantized(transformers.AutoConfig.from_pretrained(path), read_contents(checkpoint))
    return checkpoint, stream, evenly_spaced_windows(read_tokens(path, TEXT), 4, 48)


def wanted(checkpoint: Checkpoint, folds: tuple[Fold, ...]) -> CalibrationTargets:
    """Experts and MLPs in int4, attention and router left alone: both kinds of readers have to follow."""
    names = [name.removesuffix(".weight") for name in checkpoint.files if name.endswith("_proj.weight")]
    targets = {name: StorageSpec("int4-g64", "pack-quantized") for name in names if ".mlp." in name}
    targets |= {name: target for name, target in zip(names, targets.values(), strict=False) if "q_" in name}
    copied = {name: checkpoint.spec(name).dtype for name in checkpoint.files}
    return CalibrationTargets(targets, frozenset(), copied, folds)


def test_the_folded_layer_is_the_same_function_bit_for_bit(uneven: Path) -> None:
    checkpoint, stream, windows = opened(uneven)
    family = known_folds()[checkpoint.config["model_type"]]
    moved: set[str] = set()
    with torch.inference_mode():
        hidden, calls = stream.embed(windows, [48])
        for index in range(2):  # dense and sparse layers, where a model has both
            path, layer = stream.module(index)
            with stream.layer(index) as run:
                with observe(layer, path, with_hessian=True) as observed:
                    output = run(hidden, calls[index])
                modules = dict(layer.named_modules(prefix=path))
                solution = Solution()
                Folder(Method("awq"), wanted(checkpoint, family), path, modules, observed).fold(solution)
                for name, values in solution.replaced.items():
                    module = modules[name.removesuffix(".weight")]
                    if "norm" in name:
                        moved |= {name} if bool((module.weight != values).any()) else set()
                        module.weight.copy_(values)
                    assert torch.equal(module.weight, values.float())  # other readers were changed in place
                assert torch.equal(run(hidden, calls[index]), output)
                hidden = output
    assert len(moved) > 2


def test_an_unlisted_reader_is_refused() -> None:
    checkpoint, stream, windows = opened(MODELS / "tiny-qwen3-moe")
    lacking = (Fold("input_layernorm", ("self_attn.q_proj", "self_attn.v_proj")),)
    with torch.inference_mode():
        hidden, calls = stream.embed(windows, [48])
        path, layer = stream.module(0)
        with stream.layer(0) as run, observe(layer, path, with_hessian=True) as observed:
            run(hidden, calls[0])
            folder = Folder(
                Method("awq"), wanted(checkpoint, lacking), path, dict(layer.named_modules(prefix=path)), observed
            )
            with pytest.raises(SchemeError, match="k_proj: reads what"):
                folder.fold(Solution())


def test_awq_output_is_what_the_source_is_after_the_same_move(uneven: Path, tmp_path: Path) -> None:
    options = ["--scheme", "int4", "--group-size", "64", "--debug"]
    calibrate = ["--calibrate", str(TEXT), "--calibrate-windows", "8", "--calibrate-window", "64"]
    for solver, more in (("mse", []), ("awq", calibrate)):
        result = CliRunner().invoke(
            quantize_model, [str(uneven), str(tmp_path / solver), *options, "--solver", solver, *more]
        )
        assert result.exit_code == 0, result.output
    source, mse, awq = (read_contents(open_checkpoint(path)) for path in (uneven, tmp_path / "mse", tmp_path / "awq"))
    kind = json.loads((uneven / "config.json").read_text())["model_type"]
    assert follow_folds(source, mse, kind) is source
    assert not [result for result, _ in compare_weights(follow_folds(source, awq, kind), awq) if result.failed]
    assert [result for result, _ in compare_weights(source, awq) if result.failed]
    before, after = load_file(uneven / "model.safetensors"), load_file(tmp_path / "awq" / "model.safetensors")
    changed = [name for name in before if name in after and not torch.equal(before[name], after[name])]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} >= {"input_layernorm", "gate"}
    assert all(before[name].dtype == after[name].dtype for name in changed)
    config = transformers.AutoConfig.from_pretrained(uneven)
    windows = evenly_spaced_windows(read_tokens(uneven, TEXT), 8, 64)
    kl = [
        compare_models(stream_dequantized(config, source), stream_dequantized(config, side), windows, 0).overall.kl
        for side in (mse, awq)
    ]
    assert kl[1] < 0.8 * kl[0]


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MODELS / "tiny-qwen3-moe", source)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "olmo2"}
    (source / "config.json").write_text(json.dumps(config))
    options = ["--scheme", "int4", "--group-size", "64", "--solver", "awq", "--calibrate", str(TEXT), "--dry-run"]
    result = CliRunner().invoke(quantize_model, [str(source), str(tmp_path / "out"), *options])
    assert result.exit_code == 1
    assert "which weights of model_type `olmo2` read which norm" in str(result.exception)


@pytest.fixture(scope="module", params=TINY)
def outliers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is the same function as the trained one, with outliers before o_proj and down projections."""
    path = tmp_path_factory.mktemp("outliers") / request.param
    shutil.copytree(MODELS / request.param, path)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    head = head_size(config)
    torch.manual_seed(1)
    for name in list(tensors):
        reader = name.replace("v_proj", "o_proj").replace("up_proj", "down_proj")
        if reader == name or reader not in tensors:
            continue
        factors = torch.ones(len(tensors[name]))
        factors[torch.randperm(len(factors))[:4]] = 16
        repeats = tensors[reader].shape[1] // len(factors)
        tensors[name] = (tensors[name].float() * factors[:, None]).bfloat16()
        tensors[reader] = (tensors[reader].float() / of_columns(factors, repeats, head)).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_smoothed_layer_is_the_same_function_bit_for_bit(outliers: Path) -> None:
    checkpoint, stream, windows = opened(outliers)
    kind = checkpoint.config["model_type"]
    names = [name.removesuffix(".weight") for name in checkpoint.files if name.endswith("_proj.weight")]
    targets = {name: StorageSpec("int8", "int8-channel") for name in names}
    copied = {name: checkpoint.spec(name).dtype for name in checkpoint.files}
    passages = known_passages()[kind]
    need = CalibrationTargets(targets, frozenset(), copied, known_folds()[kind], passages, head_size(checkpoint.config))
    moved: set[str] = set()
    with torch.inference_mode():
        hidden, calls = stream.embed(windows, [48])
        for index in range(2):
            path, layer = stream.module(index)
            with stream.layer(index) as run:
                with observe(layer, path, with_hessian=True, with_sample=True) as observed:
                    output = run(hidden, calls[index])
                modules, solution = dict(layer.named_modules(prefix=path)), Solution()
                Folder(Method("smooth"), need, path, modules, observed).fold(solution)
                for name, values in solution.replaced.items():
                    module = modules[name.removesuffix(".weight")]
                    module.weight.copy_(values)
                moved |= {name.rpartition(".")[2] for name in solution.weights}
                torch.testing.assert_close(
                    run(hidden, calls[index]), output, rtol=0, atol=1e-6 * float(output.abs().max())
                )
                hidden = output
    assert moved >= {"up_proj", "down_proj", "gate_proj"}


def test_smoothing_is_followed_and_serves_better(outliers: Path, tmp_path: Path) -> None:
    source, loss = open_checkpoint(outliers), {}
    for solver in ("rtn", "smooth"):
        options = ["--calibrate", str(TEXT), "--calibrate-windows", "4", "--calibrate-window", "64"]
        result = CliRunner().invoke(
            quantize_model,
            [str(outliers), str(tmp_path / solver), "--scheme", "int8", "--solver", solver, "--debug"]
            + options * (solver != "rtn"),
        )
        assert result.exit_code == 0, result.output
        tilewright.pack(tmp_path / solver, tmp_path / f"{solver}-cpu", progress=Silent())
        text = tmp_path / "text"
        text.write_bytes(TEXT.read_bytes()[50_000:60_000])
        passes = tilewright.Thresholds(layer_error=0.1, kl=1)  # such outliers also cost kernels bf16 digits
        check = tilewright.VerifyOptions("model", passes, text, windows=8, window=64)
        verified = tilewright.verify(outliers, tmp_path / f"{solver}-cpu", check, progress=Silent())
        assert verified.passed, verified.failures()
        assert verified.model
        loss[solver] = verified.model.overall.kl
    assert loss["smooth"] < 0.6 * loss["rtn"]
    smooth, kind = read_contents(open_checkpoint(tmp_path / "smooth")), source.config["model_type"]
    reference = read_contents(source)
    assert [
        result
        for result, _ in compare_weights(follow_folds(reference, replace(smooth, smoothed=False), kind), smooth)
        if result.failed
    ]


def test_a_row_that_only_the_writer_doubled_is_damage(outliers: Path, tmp_path: Path) -> None:
    options = ["--scheme", "int8", "--solver", "smooth", "--calibrate", str(TEXT), "--calibrate-windows", "2"]
    result = CliRunner().invoke(quantize_model, [str(outliers), str(tmp_path / "out"), *options, "--debug"])
    assert result.exit_code == 0, result.output
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("up_proj.weight_scale"))
    tensors[name][7] *= 2
    save_file(tensors, file, {"format": "pt"})
    verified = tilewright.verify(
        outliers, tmp_path / "out", tilewright.VerifyOptions(checksums=False), progress=Silent()
    )
    assert any("down_proj" in failure for failure in verified.failures())
