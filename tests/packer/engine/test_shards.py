"""Where every byte of the output lies."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tilewright.kernels.packed.safetensors_file import DTYPES, read_header
from tilewright.kernels.tensors import TensorSpec
from tilewright.packer.engine.shards import encode_index, plan_shards
from tilewright.packer.plan import Copy, Piece, Plan, Source, Task


def plan_of(
    tensors: dict[str, TensorSpec],
    groups: list[list[str]] | None = None,
    modules: dict[str, dict[str, object]] | None = None,
) -> Plan:
    """Every group of tensors comes from one task; what is in no group, each from its own."""
    grouped = {name for group in groups or [] for name in group}
    tasks = [
        Task((Source("s"),) * len(group), tuple(Piece(name, tensors[name]) for name in group), Copy())
        for group in [*(groups or []), *([name] for name in tensors if name not in grouped)]
    ]
    return Plan(tensors, tuple(tasks), {}, {}, modules=modules or {}, metadata={"tilewright.packed": "1"})


def u8(*sizes: int) -> dict[str, TensorSpec]:
    return {chr(97 + i): TensorSpec(torch.uint8, (size,)) for i, size in enumerate(sizes)}


def names(plan: Plan, max_size: int) -> list[str]:
    return ["".join(sorted(shard.offsets)) for shard in plan_shards(plan, max_size)]


def test_files_are_filled_in_order() -> None:
    assert names(plan_of(u8(4, 4, 4, 4)), 8) == ["ab", "cd"]
    assert names(plan_of(u8(4, 5, 4)), 8) == ["a", "b", "c"]
    assert names(plan_of(u8(3, 20, 3)), 8) == ["a", "b", "c"]
    assert names(plan_of(u8(20)), 8) == ["a"]
    assert names(plan_of(u8(0, 8, 0)), 8) == ["abc"]


def test_what_belongs_together_stays_together() -> None:
    assert names(plan_of(u8(4, 4, 4), [["a", "c"]]), 8) == ["ac", "b"]
    assert names(plan_of(u8(9, 9, 1), [["a", "b"], ["b", "c"]]), 8) == ["abc"]
    tensors = {"m.w13.weight": TensorSpec(torch.uint8, (6,)), "x": TensorSpec(torch.uint8, (6,))}
    tensors["m.w13.bias"] = TensorSpec(torch.float32, (1,))
    plan = plan_of(tensors, modules={"m.w13": {"layout": "l", "version": 1}})
    assert [sorted(shard.offsets) for shard in plan_shards(plan, 8)] == [["m.w13.bias", "m.w13.weight"], ["x"]]


def test_standard_names_and_index() -> None:
    plan = plan_of(u8(4, 4, 4))
    shards = plan_shards(plan, 4)
    assert [s.file for s in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert json.loads(encode_index(plan, shards)) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": shards[0].file, "b": shards[1].file, "c": shards[2].file},
    }
    assert plan_shards(plan, 100)[0].file == "model.safetensors"


def test_a_shard_describes_the_modules_that_it_holds(tmp_path: Path) -> None:
    tensors = {f"m{i}.weight": TensorSpec(torch.uint8, (64,)) for i in range(3)} | u8(1)
    modules: dict[str, dict[str, object]] = {f"m{i}": {"layout": "l", "version": 1, "shape": [i]} for i in range(3)}
    for shard in plan_shards(plan_of(tensors, modules=modules), 128):
        path = tmp_path / shard.file
        path.write_bytes(shard.header + bytes(shard.size - len(shard.header)))
        metadata = read_header(path).metadata
        assert metadata["tilewright.packed"] == "1"
        held = {name.removesuffix(".weight") for name in shard.offsets if name != "a"}
        described = json.loads(metadata.get("tilewright.modules", "{}"))
        assert described == {name: modules[name] for name in held}


SPECS = st.builds(
    TensorSpec,
    st.sampled_from([dtype for dtype in DTYPES.values() if dtype not in {torch.complex64, torch.float8_e8m0fnu}]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda s: s != "__metadata__" and s.isprintable()),
        SPECS,
        min_size=1,
        max_size=9,
    ),
    max_size=st.integers(1, 900),
)
def test_any_tensors_make_valid_files(tmp_path_factory: object, tensors: dict[str, TensorSpec], max_size: int) -> None:
    folder = tmp_path_factory.mktemp("files")  # type: ignore[attr-defined]
    plan = plan_of(tensors)
    found: dict[str, TensorSpec] = {}
    for shard in plan_shards(plan, max_size):
        path = folder / shard.file
        path.write_bytes(shard.header + bytes(shard.size - len(shard.header)))
        header = read_header(path)
        assert header.data_start % 64 == 0
        assert {name: entry.start for name, entry in header.entries.items()} == shard.offsets
        for name, entry in header.entries.items():
            assert entry.start % entry.spec.dtype.itemsize == 0 or entry.spec.nbytes == 0
            assert entry.start % 64 == 0 or entry.spec.nbytes % 64 != 0 or entry.spec.nbytes == 0
            assert name not in found
            found[name] = entry.spec
        assert len(shard.offsets) == 1 or sum(tensors[name].nbytes for name in shard.offsets) <= max_size
        with safe_open(path, "pt") as file:
            for name in shard.offsets:
                assert tuple(file.get_tensor(name).shape) == tensors[name].shape
    assert found == tensors
    assert [task for shard in plan_shards(plan, max_size) for task in shard.tasks] == list(plan.tasks)
