"""Opening a packed directory: views of the mapped files, and everything that is wrong with it at once."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tilewright
from tilewright.kernels.errors import CheckpointError, KernelUnavailableError, LayoutError
from tilewright.kernels.modules import PackedExperts
from tilewright.kernels.packed.directory import PackedCheckpoint, RankSharding, load_packed
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents

Call = Callable[..., Path]
FILE = "model.safetensors"


@pytest.fixture
def directory(packed: Call, tmp_path: Path) -> Path:
    """A packed directory that may be damaged."""
    return Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))


def rewrite(directory: Path, **metadata: str) -> None:
    """Change the header's metadata; the manifest is made to fit."""
    header = read_header(directory / FILE)
    save_file(load_file(directory / FILE), directory / FILE, header.metadata | metadata)
    trust(directory)


def trust(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][FILE]["size"] = (directory / FILE).stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))


def refusal(directory: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as error:
        load_packed(directory, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_modules_are_views_of_the_mapped_file(directory: Path) -> None:
    packed = tilewright.load_packed(directory, verify_checksums=True)
    assert (packed.scheme, packed.sharding) == ("int8", RankSharding())
    assert len(packed) == len(list(packed)) == 17
    assert "model.embed_tokens.weight" in packed.plain
    module = packed["model.layers.0.self_attn.o_proj"]
    assert module is packed["model.layers.0.self_attn.o_proj"]
    for suffix, tensor in zip(module.kernel.suffixes, module.tensors(), strict=True):
        file = packed.tensor(f"model.layers.0.self_attn.o_proj.{suffix}")
        assert tensor.data_ptr() == file.data_ptr()
        assert torch.equal(tensor, load_file(directory / FILE)[f"model.layers.0.self_attn.o_proj.{suffix}"])
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line.split() for line in maps.read_text().splitlines() if str(directory) in line]
        address = module.weight.data_ptr()
        spans = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in lines]
        assert any(start <= address < end for start, end in spans)


def test_a_tensor_outlives_the_checkpoint(directory: Path) -> None:
    tensor = load_packed(directory).tensor("model.norm.weight")
    shutil.rmtree(directory)
    assert tensor.float().isfinite().all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_copies_map_the_files_anew(directory: Path, duplicate: Callable[[PackedCheckpoint], PackedCheckpoint]) -> None:
    packed = load_packed(directory)
    module = packed["model.layers.0.self_attn.q_proj"]
    other = duplicate(packed)["model.layers.0.self_attn.q_proj"]
    x = torch.randn(2, module.in_features)
    assert other.weight.data_ptr() != module.weight.data_ptr()
    assert torch.equal(other(x), module(x))


def test_not_finished(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    assert "no manifest.json, so this is no finished packed directory" in refusal(directory)
    assert "no such directory" in refusal(directory / "nothing")
    assert f"{FILE}: not a directory" in refusal(directory / FILE)


def test_not_packed(quantized: Call) -> None:
    assert "its header has no `tilewright.packed`" in refusal(quantized("tiny-qwen3-moe", "int8"))


def test_wrong_version(directory: Path) -> None:
    rewrite(directory, **{"tilewright.packed": "2"})
    assert "packed by version 2 of the format, this release reads 1" in refusal(directory)


def test_everything_wrong_is_listed(directory: Path) -> None:
    tensors = load_file(directory / FILE)
    del tensors["model.layers.0.self_attn.qkv_proj.weight_scale"]
    tensors["model.layers.3.mlp.experts.w2.weight"] = tensors["model.layers.3.mlp.experts.w2.weight"][:, :-32]
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / FILE,
        read_header(directory / FILE).metadata,
    )
    trust(directory)
    message = refusal(directory)
    assert "`model.layers.0.self_attn.qkv_proj.weight_scale` is missing" in message
    assert (
        "`model.layers.3.mlp.experts.w2.weight` is torch.int8 [8, 224, 132], layout `cpu-vnni-int8` demands" in message
    )


def test_unknown_layout_version(directory: Path) -> None:
    modules = json.loads(read_header(directory / FILE).metadata["tilewright.modules"])
    modules["lm_head"]["version"] = 7
    modules["model.layers.0.self_attn.o_proj"]["layout"] = "cpu-amx-int2"
    rewrite(directory, **{"tilewright.modules": json.dumps(modules)})
    message = refusal(directory)
    assert "lm_head: layout `cpu-vnni-bf16` has version 1 here, the file has 7" in message
    assert "model.layers.0.self_attn.o_proj: unknown layout `cpu-amx-int2`" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tp": [0], "ep": [0, 1]}', '{"tp": ["x", 1], "ep": [0, 1]}'])
def test_broken_cut(directory: Path, text: str) -> None:
    rewrite(directory, **{"tilewright.cut": text})
    with pytest.raises(LayoutError, match="describes no cut"):
        load_packed(directory)


@pytest.mark.parametrize(
    ("module", "field", "value", "message"),
    [
        ("self_attn.o_proj", "sources", ["a", "b"], "sources: a, b are not 1 modules"),
        ("self_attn.o_proj", "sources", ["a{}"], "must stand once in those of a stack"),
        ("mlp.experts.w13", "sources", ["a.{}", "a.{}"], "are not 2 modules"),
        ("mlp.experts.w13", "sources", ["a.{}", "b"], "must stand once in those of a stack"),
        ("mlp.experts.w13", "sources", ["a.{}", "b.{}.{x}"], "must stand once in those of a stack"),
        ("mlp.experts.w2", "parts", 2, "are not 2 modules"),
        ("self_attn.qkv_proj", "whole", [256], r"whole: \[256\] has no share of"),
        ("self_attn.qkv_proj", "whole", [256, 32], r"whole: \[256, 32\] has no share of"),
        ("self_attn.qkv_proj", "sources", ["a", "a", "b"], "are not 3 modules"),
        ("self_attn.qkv_proj", "joined", [], "are not 1 modules"),
        ("self_attn.o_proj", "joined", [64], "are not the rows of its 1 sources"),
        ("self_attn.o_proj", "shape", [], "broken description"),
        ("self_attn.o_proj", "parts", 0, "0 parts of shape"),
        ("mlp.experts.w13", "parts", 3, "3 parts of shape"),
        ("self_attn.qkv_proj", "sources", ["a", "lm_head", "b"], "`lm_head`, a part of it, is a module already"),
        ("self_attn.qkv_proj", "sources", ["a", "model.layers.1.self_attn.q_proj", "b"], "is a module already"),
    ],
)
def test_broken_fields_of_a_module(directory: Path, module: str, field: str, value: object, message: str) -> None:
    modules = json.loads(read_header(directory / FILE).metadata["tilewright.modules"])
    modules[f"model.layers.0.{module}"][field] = value
    rewrite(directory, **{"tilewright.modules": json.dumps(modules)})
    assert re.search(message, refusal(directory))


@pytest.mark.parametrize("text", ["{", "[]", "5"])
def test_broken_modules(directory: Path, text: str) -> None:
    rewrite(directory, **{"tilewright.modules": text})
    assert "`tilewright.modules` is" in refusal(directory)


def test_manifest_without_files(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text("{}")
    assert "manifest.json: was not written by Tilewright" in refusal(directory)
    del manifest["files"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json: has no `files`" in refusal(directory)
    for files, reason in (([], "`files` is an array"), ({"model.safetensors": 5}, "file `model.safetensors` is a num")):
        (directory / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        assert f"manifest.json: {reason}" in refusal(directory)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_map(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    assert "index.json: no `weight_map`" in refusal(directory)


def test_a_device_that_torch_does_not_know(directory: Path) -> None:
    with pytest.raises(KernelUnavailableError, match="device `gpu`"):
        load_packed(directory, device="gpu")


def test_a_device_that_no_kernel_is_for(directory: Path) -> None:
    assert "no bundled kernel runs layout `cpu-vnni-int8` on meta" in refusal(directory, device="meta")


def test_sizes_and_checksums(directory: Path) -> None:
    data = bytearray((directory / FILE).read_bytes())
    data[-3] ^= 1
    (directory / FILE).write_bytes(data)
    load_packed(directory)
    assert "has SHA-256" in refusal(directory, verify_checksums=True)
    with (directory / FILE).open("r+b") as file:
        file.truncate(len(data) - 8)
    assert "the file is cut off" in refusal(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / FILE).write_bytes(data)
    manifest["files"][FILE]["size"] += 1
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert f"manifest.json says {len(data) + 1}" in refusal(directory)


def test_missing_shards_and_paths_out_of_the_directory(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert "missing shards: model-1.safetensors, model-2.safetensors" in refusal(directory)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert "names `../model.safetensors`, which is no plain file name" in refusal(directory)


def test_ranks(directory: Path, tmp_path: Path) -> None:
    assert load_packed(directory, rank=0).sharding.ranks == 1
    assert "holds rank 0 of 1, not rank 1" in refusal(directory, rank=1)
    for rank in range(2):
        share = Path(shutil.copytree(directory, tmp_path / "cut" / f"rank-{rank}-of-2"))
        rewrite(share, **{"tilewright.cut": RankSharding((rank, 2), (rank, 2)).to_json()})
    assert load_packed(tmp_path / "cut", rank=1).sharding == RankSharding((1, 2), (1, 2))
    assert "is cut for several ranks: rank-0-of-2, rank-1-of-2" in refusal(tmp_path / "cut")
    assert "rank 2 is not there" in refusal(tmp_path / "cut", rank=2)
    assert "holds rank 0 of 2, not rank 1" in refusal(tmp_path / "cut" / "rank-0-of-2", rank=1)


def test_load_model_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tilewright.engines.transformers.model", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'tilewright\[hf\]'"):
        _ = tilewright.load_model
    with pytest.raises(AttributeError, match="no attribute 'load_everything'"):
        _ = tilewright.load_everything


def described(directory: Path, module: str, **fields: object) -> None:
    """Change what the file says about one module."""
    modules = json.loads(read_header(directory / FILE).metadata["tilewright.modules"])
    modules[module] |= fields
    rewrite(directory, **{"tilewright.modules": json.dumps(modules)})


EXPERTS = "model.layers.1.mlp.experts"
UPPER = f"{EXPERTS}.w13"


@pytest.mark.parametrize(
    ("module", "fields", "reason"),
    [
        (UPPER, {"shape": [2_000_000, 256, 256]}, "no experts of one layer"),
        (UPPER, {"first_expert": 1}, "beyond"),
        (UPPER, {"first_expert": -1}, "no size or number"),
        (UPPER, {"first_expert": 4, "whole": [16, 256, 256]}, "not the share of rank 0 of 1"),
        (UPPER, {"whole": [8, 512, 256]}, "not the share of one rank of 1"),
        (UPPER, {"whole": [8, 300, 256]}, "no multiple of the share"),
        (UPPER, {"parts": 2.0}, "no size or number"),
        (UPPER, {"parts": True}, "no size or number"),
        (UPPER, {"parts": 10**400}, "no size or number"),
        (UPPER, {"shape": [8, float("inf"), 256]}, "no size or number"),
        (UPPER, {"shape": [8, 1 << 63, 256]}, "no size or number"),
        (UPPER, {"version": float("nan")}, "has version 1 here"),
        (UPPER, {"activation": "silu", "limit": float("inf")}, "broken description"),
        (UPPER, {"activation": "silu", "alpha": "x" * 10_000}, "broken description"),
    ],
)
def test_descriptions_without_sense(directory: Path, module: str, fields: dict[str, object], reason: str) -> None:
    described(directory, module, **fields)
    message = refusal(directory)
    assert reason in message
    assert len(message) < 2000


def test_a_header_that_claims_millions_of_experts_costs_nothing(directory: Path) -> None:
    for stack, shape in (("w13", [2_000_000, 256, 256]), ("w2", [2_000_000, 256, 128])):
        described(directory, f"{EXPERTS}.{stack}", shape=shape)
    tracemalloc.start()
    try:
        assert "demands" in refusal(directory)
        with pytest.raises(CheckpointError, match="is not what its description makes it"):
            read_contents(open_checkpoint(str(directory)))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", [[2, 2], [-1, 2], [0, 0], [0, 1.0], [0, True], [0, 1 << 40], [0, float("inf")]])
def test_cuts_without_sense(directory: Path, cut: list[object]) -> None:
    rewrite(directory, **{"tilewright.cut": json.dumps({"tp": cut, "ep": [0, 1]})})
    with pytest.raises(LayoutError, match="describes no cut"):
        load_packed(directory)


def test_a_directory_without_packed_modules(directory: Path) -> None:
    rewrite(directory, **{"tilewright.modules": "{}"})
    assert "no shard describes a packed module" in refusal(directory)


@pytest.mark.parametrize("file", ["config.json", "manifest.json"])
def test_json_deeper_than_any_reader(directory: Path, file: str) -> None:
    (directory / file).write_text("[" * 200_000)
    assert file in refusal(directory)


def test_experts_are_a_module_that_runs(directory: Path) -> None:
    packed = tilewright.load_packed(directory)
    experts = packed[EXPERTS]
    assert isinstance(experts, PackedExperts)
    assert (experts.activation, EXPERTS in packed, EXPERTS in list(packed)) == ("silu", True, False)
    x, ids = torch.randn(5, 256, dtype=torch.bfloat16), torch.randint(0, 8, (5, 2))
    weights = torch.rand(5, 2)
    model = tilewright.load_model(directory, fused=False)
    assert torch.equal(experts(x, ids, weights), model.get_submodule(EXPERTS)(x, ids, weights))


def test_files_that_say_nothing_of_gating_still_load(directory: Path) -> None:
    modules = json.loads(read_header(directory / FILE).metadata["tilewright.modules"])
    for key in ("activation", "alpha", "limit"):
        del modules[UPPER][key]
    rewrite(directory, **{"tilewright.modules": json.dumps(modules)})
    packed = tilewright.load_packed(directory)
    assert packed[UPPER].spec.gating is None
    with pytest.raises(KernelUnavailableError, match="does not say which activation"):
        packed[EXPERTS]
    assert isinstance(tilewright.load_model(directory).get_submodule(EXPERTS), PackedExperts)


def test_serving_on_a_cpu_imports_nothing_that_it_does_not_need(directory: Path) -> None:
    code = f"""
import sys, tilewright
packed = tilewright.load_packed({str(directory)!r})
for name in packed: packed[name]
packed[{EXPERTS!r}]
print([name for name in ("triton", "transformers", "click", "huggingface_hub") if name in sys.modules])
rooms = ("tilewright.packer", "tilewright.cli", "tilewright.engines", "tilewright.kernels.gpu")
print([name for name in sys.modules if name.startswith(rooms)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
