"""q, k, v and gate, up as one packed Linear: the rows of each, unchanged, and apart where they cannot be joined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.modules import PackedLinear
from tilewright.kernels.packed.directory import load_packed
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.inspect import inspect
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.plan import Plan

Call = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0"
QKV, SHARED = f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.shared_expert.gate_up_proj"
ROWS = {QKV: (256, 128, 128), SHARED: (384, 384)}
PARTS = {QKV: [f"{LAYER}.self_attn.{name}_proj" for name in "qkv"]}
PARTS[SHARED] = [f"{LAYER}.mlp.shared_expert.{name}_proj" for name in ("gate", "up")]
SCHEMES = ("none", "int8", "block-fp8", "int4")
K = 256


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def source_tensors(rows: dict[str, tuple[int, ...]] = ROWS, *, bias: bool = True) -> Tensors:
    """q, k, v with biases and the gate and up of a shared expert."""
    tensors = {f"{LAYER}.self_attn.o_proj.weight": random(K, K)}
    for joined, names in PARTS.items():
        for seed, (name, n) in enumerate(zip(names, rows[joined], strict=True)):
            tensors[f"{name}.weight"] = random(n, K, seed=seed + n)
            if bias and joined == QKV:
                tensors[f"{name}.bias"] = random(n, seed=seed)
    return tensors


@pytest.fixture
def directories(write: Call, convert: Call, tmp_path: Path) -> Callable[..., tuple[Path, Path, Path]]:
    """directories(scheme, tensors): a source in that scheme, and it packed with Linears joined and each on its own."""

    def make(scheme: str, tensors: Tensors) -> tuple[Path, Path, Path]:
        source = convert(write(tensors, model_type="qwen2_moe"), scheme)
        outputs = tmp_path / "joined", tmp_path / "apart"
        for output, joins in zip(outputs, (True, False), strict=True):
            pack(source, output, CpuTarget(joins=joins))
        return source, *outputs

    return make


def pack(source: Path, output: Path, target: CpuTarget, tp: int = 1) -> list[Path]:
    checkpoint = open_checkpoint(source)
    ranks = [output / f"rank-{rank}-of-{tp}" for rank in range(tp)] if tp > 1 else [output]
    for directory, plan in zip(ranks, plan_ranks(checkpoint, target, tp, 1), strict=True):
        execute(plan, checkpoint, directory)
    return ranks


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_are_views_equal_to_linears_of_their_own(
    scheme: str, directories: Callable[..., tuple[Path, Path, Path]]
) -> None:
    _, first, second = directories(scheme, source_tensors())
    joined, apart = load_packed(first), load_packed(second)
    assert {name: joined.specs[name].joined for name in (QKV, SHARED)} == ROWS
    assert sorted(joined) == [f"{LAYER}.mlp.shared_expert.gate_up_proj", f"{LAYER}.self_attn.o_proj", QKV]
    assert not any(spec.joined for spec in apart.specs.values())
    x = random(5, K, seed=9)
    for name, parts in PARTS.items():
        assert name in joined
        whole = joined[name]
        assert isinstance(whole, PackedLinear)
        assert whole.spec.sources == tuple(parts)
        for part, y in zip(parts, whole(x).split(ROWS[name], -1), strict=True):
            view, alone = joined[part], apart[part]
            assert part in joined
            assert view is joined[part]
            assert view.spec == alone.spec
            assert same_bits(view(x), alone(x))
            assert same_bits(y.contiguous(), alone(x))
            mine, theirs = dict(view.named_buffers()), dict(alone.named_buffers())
            assert mine.keys() == theirs.keys()
            assert all(same_bits(mine[suffix], theirs[suffix]) for suffix in theirs)
            for suffix, tensor in mine.items():
                held = joined.tensor(f"{name}.{suffix}")
                assert held.data_ptr() <= tensor.data_ptr() < held.data_ptr() + held.nbytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacked_they_are_the_source(
    scheme: str,
    directories: Callable[..., tuple[Path, Path, Path]],
    unpack: Call,
    differences: Callable[[Path, Path], list[str]],
) -> None:
    source, joined, _ = directories(scheme, source_tensors())
    assert differences(source, unpack(joined)) == []


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_joined_equal_uncut(scheme: str, tp: int, write: Call, convert: Call, tmp_path: Path) -> None:
    rows = {QKV: (1024, 512, 512), SHARED: (1536, 1536)}
    source = convert(write(source_tensors(rows), model_type="qwen2_moe"), scheme)
    pack(source, tmp_path / "whole", CpuTarget())
    pack(source, tmp_path / "cut", CpuTarget(), tp)
    whole = load_packed(tmp_path / "whole")
    ranks = [load_packed(tmp_path / "cut", rank) for rank in range(tp)]
    x = random(3, K, seed=4)
    for name, parts in PARTS.items():
        mine = tuple(n // tp for n in rows[name])
        assert all(rank.specs[name].joined == mine for rank in ranks)
        outputs = [rank[name](x).split(mine, -1) for rank in ranks]
        assert same_bits(torch.cat([torch.cat(part, -1) for part in zip(*outputs, strict=True)], -1), whole[name](x))
        for part, n in zip(parts, rows[name], strict=True):
            assert same_bits(torch.cat([rank[part](x) for rank in ranks], -1), whole[part](x))
            assert all(rank[part].spec.whole == (n, K) and not rank[part].spec.needs_all_reduce for rank in ranks)


def test_shares_that_are_no_whole_blocks_stay_apart(write: Call, convert: Call, tmp_path: Path) -> None:
    """Ranks may share a block of FP8 scales, but it cannot be joined with another's."""
    source = convert(write(source_tensors(ROWS | {SHARED: (512, 512)}), model_type="qwen2_moe"), "block-fp8")
    plans = plan_ranks(open_checkpoint(source), CpuTarget(), 2, 1)
    each = "its parts of 256, 128, 128 rows are no whole blocks of 128 for each of 2 ranks"
    for made in plans:
        assert made.rejects == ()
        assert {SHARED, *PARTS[QKV]} < made.modules.keys()
        assert QKV not in made.modules
        assert made.notes == (f"{QKV} is not joined: {each}",)


QUERY, KEY, VALUE = PARTS[QKV]
WHOLE = source_tensors()
APART: dict[str, tuple[Tensors, str]] = {
    "rows are no whole blocks": (
        source_tensors(ROWS | {QKV: (256, 40, 40)}),
        "its parts of 256, 40, 40 rows are no whole blocks of 32",
    ),
    "inputs of different size": (
        WHOLE | {f"{KEY}.weight": random(128, 192)},
        "k_proj bf16 [128, 192] with bias torch.bfloat16",
    ),
    "one without a bias": (
        {name: tensor for name, tensor in WHOLE.items() if name != f"{KEY}.bias"},
        "k_proj bf16 [128, 256], v_proj",
    ),
    "biases of different dtypes": (
        WHOLE | {f"{KEY}.bias": random(128).float()},
        "k_proj bf16 [128, 256] with bias torch.float32",
    ),
    "another dtype": (
        WHOLE | {f"{KEY}.weight": random(128, K).half()},
        "k_proj fp16 [128, 256] with bias",
    ),
    "one stays in fp32": (
        WHOLE | {f"{QUERY}.weight": random(256, K).float()},
        "q_proj fp32 [256, 256] with bias",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_cannot_be_joined_stays_apart(
    case: str, write: Call, pack: Call, unpack: Call, plan: Callable[[Path], Plan]
) -> None:
    tensors, reason = APART[case]
    source = write(tensors, model_type="qwen2_moe")
    made = plan(source)
    assert made.rejects == ()
    assert QKV not in made.modules
    assert made.modules[SHARED]["joined"] == [384, 384]
    (note,) = (note for note in made.notes if note.startswith(f"{QKV} is not joined: "))
    assert reason in note
    back = load_file(unpack(pack(source)) / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor.to(back[name].dtype)) for name, tensor in tensors.items())


def test_a_missing_part_and_a_taken_name(write: Call, plan: Callable[[Path], Plan]) -> None:
    tensors = source_tensors()
    del tensors[f"{VALUE}.weight"], tensors[f"{VALUE}.bias"]
    tensors[f"{SHARED}.weight"] = random(64, K)
    modules = plan(write(tensors, model_type="qwen2_moe")).modules
    assert sorted(modules) == sorted({name.rpartition(".")[0] for name in tensors})
    assert not any("joined" in fields for fields in modules.values())


def test_equal_reasons_are_one_note(write: Call, plan: Callable[[Path], Plan]) -> None:
    tensors = source_tensors(ROWS | {QKV: (256, 40, 40)})
    tensors |= {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items()}
    notes = plan(write(tensors, model_type="qwen2_moe")).notes
    assert notes == (f"{QKV} (and 1 more) is not joined: its parts of 256, 40, 40 rows are no whole blocks of 32",)


def test_excluded_parts_stay_apart(write: Call, convert: Call, plan: Callable[[Path], Plan]) -> None:
    made = plan(convert(write(source_tensors(), model_type="qwen2_moe"), "block-fp8", exclude=(KEY,)))
    assert QKV not in made.modules
    assert any(
        "q_proj block 128x128 FP8 [256, 256] with bias torch.bfloat16, k_proj bf16" in note for note in made.notes
    )


def test_fates_name_the_joined_tensors(write: Call, convert: Call, plan: Callable[[Path], Plan]) -> None:
    source = convert(write(source_tensors(), model_type="qwen2_moe"), "int8")
    fates = plan(source).fates
    assert fates[f"{KEY}.weight_scale"].outputs == (f"{QKV}.weight", f"{QKV}.weight_scale", f"{QKV}.bias")
    assert fates[f"{KEY}.bias"].outputs == (f"{QKV}.bias",)
    assert fates[f"{KEY}.weight"].reason == "int8 codes in layout cpu-vnni-int8, joined to qkv_proj"


def test_inspection_tells_what_is_joined(write: Call, pack: Call) -> None:
    directory = pack(write(source_tensors(), model_type="qwen2_moe"))
    found = inspect(open_checkpoint(directory), str(directory))
    assert found.notes == ("gate_up_proj: 2 Linears joined, 1 times", "qkv_proj: 3 Linears joined, 1 times")
    sizes = {item.name: item.parameters for item in found.items}
    assert sizes[QKV] == sum(ROWS[QKV]) * K


def test_static_activation_scales_keep_their_names(write: Call, pack: Call, unpack: Call, convert: Call) -> None:
    source = convert(write(source_tensors(), model_type="qwen2_moe"), "block-fp8")
    tensors = load_file(source / "model.safetensors")
    scales = {f"{name}.input_scale": torch.tensor(0.5 + number) for number, name in enumerate(PARTS[QKV])}
    save_file(tensors | scales, source / "model.safetensors")
    packed = load_packed(pack(source))
    assert QKV in packed.specs
    assert all(torch.equal(packed.tensor(name), scale) for name, scale in scales.items())
    back = load_file(unpack(packed.root) / "model.safetensors")
    assert back.keys() == (tensors | scales).keys()


BROKEN = {
    "rows that are not all": {"joined": [256, 128]},
    "fewer rows than sources": {"joined": [256, 256]},
    "too few rows": {"joined": [256, 128, 96]},
    "no whole blocks": {"joined": [256, 112, 144]},
    "no rows": {"joined": [512, 0, 0]},
    "rows that count backwards": {"joined": [640, -256, 128]},
    "equal parts besides": {"parts": 2},
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_descriptions_are_refused(case: str, write: Call, pack: Call) -> None:
    directory = pack(write(source_tensors(), model_type="qwen2_moe"))
    file = directory / "model.safetensors"
    metadata = read_header(file).metadata
    modules = json.loads(metadata["tilewright.modules"])
    modules[QKV] |= BROKEN[case]
    save_file(load_file(file), file, metadata | {"tilewright.modules": json.dumps(modules)})
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][file.name]["size"] = file.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{QKV}: (joined: |.*-256 is no size)"):
        load_packed(directory)
