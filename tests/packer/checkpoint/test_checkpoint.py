"""Opening sources: every kind is read, everything wrong with one is said at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tilewright.kernels.errors import CheckpointError
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.plan import Source

MakeSource = Callable[..., Path]
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(source: Path, **changes: str | None) -> None:
    index = json.loads((source / INDEX).read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    (source / INDEX).write_text(json.dumps(index))


def refusal(source: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_directories(make_source: MakeSource, shards: int) -> None:
    source = make_source(shards=shards)
    checkpoint = open_checkpoint(str(source))
    want = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert set(checkpoint.files) == set(want)
    for name, tensor in want.items():
        assert checkpoint.tensor(Source(name)).equal(tensor)
        assert checkpoint.spec(name).shape == tensor.shape
    assert checkpoint.config["model_type"] == "test"


def test_one_file_needs_no_index(make_source: MakeSource, tmp_path: Path) -> None:
    """needs.md 96: one-file model works with and without index."""
    source = make_source(shards=1)
    plain = open_checkpoint(source)
    index = {"weight_map": dict.fromkeys(plain.files, "model.safetensors")}
    (source / INDEX).write_text(json.dumps(index))
    assert open_checkpoint(source) == plain
    file = open_checkpoint(source / "model.safetensors")
    assert file.files == plain.files
    assert file.config == plain.config
    assert file.side_files == ()
    save_file({"a": torch.ones(2)}, tmp_path / "lone.safetensors")
    lone = open_checkpoint(tmp_path / "lone.safetensors")
    assert lone.config == {}
    assert "no config.json" in lone.notes[0]


def test_shards_without_an_index(make_source: MakeSource) -> None:
    source = make_source(shards=2)
    files = open_checkpoint(source).files
    (source / INDEX).unlink()
    assert open_checkpoint(source).files == files


def test_slices_of_a_stack(make_source: MakeSource) -> None:
    checkpoint = open_checkpoint(make_source())
    name = "layers.0.experts.weight"
    whole = checkpoint.tensor(Source(name))
    for index in range(3):
        assert checkpoint.tensor(Source(name, index)).equal(whole[index])
        path, start, size = checkpoint.extent(Source(name, index))
        raw = whole[index].reshape(-1).view(torch.uint8)
        assert path.read_bytes()[start : start + size] == raw.numpy().tobytes()
        checkpoint.forget(Source(name, index))
    assert checkpoint.tensor(Source(name)).equal(whole)


def test_hub_cache_of_links(make_source: MakeSource, tmp_path: Path) -> None:
    """needs.md 90: links are followed on read."""
    source = make_source()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(path for path in sorted(source.rglob("*")) if path.is_file()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    linked, plain = open_checkpoint(snapshot), open_checkpoint(source)
    assert linked.files == plain.files
    assert linked.side_files == plain.side_files
    (snapshot / FIRST).resolve().unlink()
    assert f"{FIRST} (a dangling link)" in refusal(snapshot)


def test_missing_shards_are_all_listed_at_once(make_source: MakeSource) -> None:
    """Case O6, needs.md 81 and 82: within seconds, all of them."""
    source = make_source(shards=3)
    for number in (1, 3):
        (source / f"model-0000{number}-of-00003.safetensors").unlink()
    start = time.monotonic()
    message = refusal(source)
    assert time.monotonic() - start < 5
    assert (
        "2 of 3 shards are missing: `model-00001-of-00003.safetensors`, `model-00003-of-00003.safetensors`" in message
    )


def test_everything_wrong_is_said_at_once(make_source: MakeSource) -> None:
    source = make_source(shards=3)
    (source / "config.json").unlink()
    (source / "model-00001-of-00003.safetensors").unlink()
    second = source / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-3])  # needs.md 83
    third = source / "model-00003-of-00003.safetensors"
    third.write_bytes(third.read_bytes() + b"x")  # needs.md 84
    message = refusal(source)
    assert "4 problems" in message
    for part in ("no config.json", "00001-of-00003", "00002-of-00003.safetensors: the file is cut off", "longer than"):
        assert part in message
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "\xff\xfe"])
def test_broken_config(make_source: MakeSource, text: str) -> None:
    source = make_source()
    (source / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(source)


def test_nothing_there(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent")
    assert "no such file" in refusal("./a/b")
    assert refusal("x" * 9999).split("\n")[0].isprintable()
    assert refusal("a\nb").split("\nhint")[0].isprintable()
    assert "2 problems" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no .safetensors file" in refusal(tmp_path)
    assert "not a .safetensors file" in refusal(tmp_path / "config.json")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "dangling" in refusal(tmp_path / "link")


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/a.safetensors", "x/../../a.safetensors", "a.bin", "", "a\n.safetensors"]
)
def test_an_index_that_leads_elsewhere(make_source: MakeSource, file: str) -> None:
    source = make_source()
    edit_index(source, **{"layers.0.norm": file})
    message = refusal(source)
    assert INDEX in message
    assert "no plain .safetensors names" in message


def test_an_index_that_names_what_is_not_there(make_source: MakeSource) -> None:
    source = make_source()
    edit_index(source, ghost=FIRST)
    assert "1 tensors that are not in their shard: `ghost`" in refusal(source)


def test_a_tensor_in_two_shards(make_source: MakeSource) -> None:
    """needs.md 86: the index wins and that is reported; without one there is no way to know."""
    source = make_source()
    extra = load_file(source / SECOND)
    extra["embed.weight"] = torch.zeros(2, 2)
    save_file(extra, source / SECOND)
    checkpoint = open_checkpoint(source)
    assert checkpoint.files["embed.weight"] == FIRST
    assert checkpoint.spec("embed.weight").shape == (100, 40)
    assert any("embed.weight" in note and "decides" in note for note in checkpoint.notes)
    (source / INDEX).unlink()
    assert "embed.weight" in refusal(source)


def test_a_second_set_of_shards_is_ignored(make_source: MakeSource) -> None:
    """needs.md 85: the index decides."""
    source = make_source()
    plain = open_checkpoint(source)
    save_file({"embed.weight": torch.zeros(1)}, source / "consolidated.safetensors")
    checkpoint = open_checkpoint(source)
    assert checkpoint.files == plain.files
    assert any("consolidated.safetensors" in note and "ignored" in note for note in checkpoint.notes)


def test_what_the_index_forgot_is_kept_and_told(make_source: MakeSource) -> None:
    source = make_source()
    edit_index(source, **{"layers.0.norm": None})
    checkpoint = open_checkpoint(source)
    assert "layers.0.norm" in checkpoint.files
    assert any("layers.0.norm" in note for note in checkpoint.notes)


def test_side_files(make_source: MakeSource) -> None:
    """needs.md 93 and 94: everything but weights, sub-folders too."""
    source = make_source()
    wanted = ["chat_template.jinja", "a/b/c.txt", "merges.txt", "sub/config.json", "model.py", "x.index"]
    unwanted = ["old.bin", "w.gguf", "sub/x.safetensors", "pytorch_model.bin.index.json", "a/t.pth"]
    hidden = [".git/HEAD", ".env", "a/.b"]
    for name in wanted + unwanted + hidden + ["manifest.json", "ledger.json"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    checkpoint = open_checkpoint(source)
    assert {str(path) for path in checkpoint.side_files} == {*wanted, "tokenizer.json", "code/modeling.py"}
    note = next(note for note in checkpoint.notes if note.startswith("not copied"))
    for name in ("old.bin", "w.gguf", "sub/x.safetensors"):
        assert f"`{name}`" in note
    assert "hidden, and so not copied: `.env`, `.git/`, `a/.b`" in checkpoint.notes


@settings(max_examples=100)
@given(
    index=st.fixed_dictionaries({
        "weight_map": st.dictionaries(
            st.sampled_from(["a", "b", "c", "\n", "\ud800"]),
            st.sampled_from([FIRST, SECOND, "../x.safetensors", "\x00.safetensors", "\ud800.safetensors", "m/" * 300])
            | st.text(max_size=5)
            | st.integers(),
            max_size=5,
        )
        | st.none()
        | st.lists(st.integers(), max_size=1)
    })
    | st.lists(st.none(), max_size=1)
)  # fmt: skip
def test_fuzzed_index(tmp_path: Path, index: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / FIRST)
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps(index))
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CheckpointError:
        return
    assert {name: checkpoint.files.get(name) for name in index["weight_map"]} == index["weight_map"]


def test_shares_of_a_cut_model_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}-of-2").mkdir()
    assert "name one of them: rank-0-of-2, rank-1-of-2" in refusal(tmp_path)
