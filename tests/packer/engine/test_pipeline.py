"""The pipeline end to end: the same bytes however it runs, nothing lost, refusals before any work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.errors import PlanError, SchemeError, TilewrightError
from tilewright.kernels.packed.safetensors_file import MappedFile, read_header
from tilewright.kernels.tensors import Reject
from tilewright.packer.checkpoint.files import Checkpoint, open_checkpoint
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.plan import Copy, Plan

MakeSource = Callable[..., Path]
MakePlan = Callable[..., Plan]


def hashes(root: Path) -> dict[str, str]:
    """sha256 of every file below `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def expected(checkpoint: Checkpoint, plan: Plan) -> dict[str, torch.Tensor]:
    """Every output tensor, computed task by task in memory."""
    buffers = {name: torch.zeros(spec.nbytes, dtype=torch.uint8) for name, spec in plan.tensors.items()}
    for task in plan.tasks:
        sources = [checkpoint.tensor(source) for source in task.sources]
        copied = {piece.name: tensor for piece, tensor in zip(task.pieces, sources, strict=False)}
        given = copied if isinstance(task.step, Copy) else task.run(sources)
        for piece in task.pieces:
            raw = given[piece.name].reshape(-1).view(torch.uint8)
            buffers[piece.name][piece.offset : piece.offset + len(raw)] = raw
    return {name: buffers[name].view(spec.dtype).reshape(spec.shape) for name, spec in plan.tensors.items()}


@pytest.mark.parametrize("max_shard_size", [3000, 10**9])
def test_output_holds_every_planned_tensor(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path, max_shard_size: int
) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    execute(plan, checkpoint, tmp_path / "out", RunOptions(max_shard_size=max_shard_size))
    found = {}
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    for shard in shards:
        tensors = load_file(shard)
        assert not set(tensors) & set(found)
        found |= tensors
    want = expected(checkpoint, plan)
    assert set(found) == set(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    assert (len(shards) > 1) == (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_tensors_are_aligned_without_holes(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    execute(make_plan(checkpoint), checkpoint, tmp_path / "out", RunOptions(max_shard_size=3000))
    for path in (tmp_path / "out").glob("*.safetensors"):
        header = read_header(path)  # refuses holes
        assert header.data_start % 64 == 0
        base = torch.empty(0).data_ptr()
        for name, entry in header.entries.items():
            assert entry.start % entry.spec.dtype.itemsize == 0
            assert entry.start % 64 == 0 or entry.spec.nbytes % 64 != 0, name
            assert MappedFile(header).tensor(name).data_ptr() % entry.spec.dtype.itemsize == base


def test_bytes_do_not_depend_on_jobs_or_memory(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    trees = []
    for number, (jobs, memory) in enumerate([(1, None), (2, None), (7, None), (7, 1)]):
        output = tmp_path / f"out{number}"
        execute(plan, checkpoint, output, RunOptions(jobs=jobs, memory=memory, max_shard_size=4000))
        trees.append(hashes(output))
    assert trees.count(trees[0]) == len(trees)


def test_manifest_and_ledger_account_for_everything(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path
) -> None:
    source = make_source()
    checkpoint = open_checkpoint(source)
    plan = replace(make_plan(checkpoint), extra_files={"hf_quant_config.json": b"{}"}, notes=("a note",))
    output = tmp_path / "out"
    execute(plan, checkpoint, output, RunOptions(max_shard_size=4000))
    manifest = json.loads((output / "manifest.json").read_text())
    tree = hashes(output)
    del tree["manifest.json"]
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == tree
    ledger = json.loads((output / "ledger.json").read_text())
    assert set(ledger["tensors"]) == set(checkpoint.files)
    assert "a note" in ledger["notes"]
    text = (output / "manifest.json").read_text() + (output / "ledger.json").read_text()
    assert str(tmp_path) not in text
    assert (output / "code" / "modeling.py").read_bytes() == (source / "code" / "modeling.py").read_bytes()
    assert not (output / "pytorch_model.bin").exists()
    assert json.loads((output / "config.json").read_text())["unknown"] == [1, {"ä": None}]


def test_all_rejects_come_at_once(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    rejects = (Reject("a.weight", "K = 3 is odd", "leave it out"), Reject("b.weight", "has no scale"))
    with pytest.raises(PlanError) as caught:
        execute(replace(make_plan(checkpoint), rejects=rejects), checkpoint, tmp_path / "out")
    assert "a.weight: K = 3 is odd; leave it out" in str(caught.value)
    assert "b.weight: has no scale" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_plan_that_loses_a_tensor_is_our_own_error(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    for broken in (
        replace(plan, fates={name: fate for name, fate in plan.fates.items() if name != "ids"}),
        replace(plan, tasks=plan.tasks[1:]),
        replace(plan, tasks=(*plan.tasks, plan.tasks[0])),
    ):
        with pytest.raises(AssertionError, match="inconsistent"):
            execute(broken, checkpoint, tmp_path / "out")


def test_places_that_would_harm_the_source_are_refused(make_source: MakeSource, make_plan: MakePlan) -> None:
    source = make_source()
    before = hashes(source)
    checkpoint = open_checkpoint(source)
    for output in (source, source / "out", source.parent, source / ".." / source.name / "x"):
        for options in (RunOptions(), RunOptions(overwrite=True), RunOptions(resume=True)):
            with pytest.raises(PlanError, match="the source"):
                execute(make_plan(checkpoint), checkpoint, output, options)
    assert hashes(source) == before


def test_foreign_and_finished_outputs_are_refused(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    for options in (RunOptions(), RunOptions(resume=True), RunOptions(overwrite=True)):
        with pytest.raises(PlanError, match="not empty"):
            execute(plan, checkpoint, output, options)
    (output / "thesis.txt").unlink()
    execute(plan, checkpoint, output, RunOptions(resume=True))
    first = hashes(output)
    with pytest.raises(PlanError, match="finished output"):
        execute(plan, checkpoint, output)
    assert execute(plan, checkpoint, output, RunOptions(resume=True)).written == 0
    with pytest.raises(PlanError, match="other options"):
        execute(make_plan(checkpoint, {"scheme": "u"}), checkpoint, output, RunOptions(resume=True))
    (output / "tokenizer.json").unlink()
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        execute(plan, checkpoint, output, RunOptions(resume=True))
    assert execute(plan, checkpoint, output, RunOptions(overwrite=True)).written > 0
    assert hashes(output) == first


def test_a_bad_weight_leaves_nothing(make_plan: MakePlan, make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    path = source / "model-00001-of-00002.safetensors"
    header = read_header(path)
    name = next(name for name in header.entries if name.endswith("proj.weight"))
    content = bytearray(path.read_bytes())
    content[header.entries[name].start : header.entries[name].start + 2] = b"\xc0\x7f"  # a bf16 NaN
    path.write_bytes(content)
    checkpoint = open_checkpoint(source)
    with pytest.raises(SchemeError, match="not finite"):
        execute(make_plan(checkpoint), checkpoint, tmp_path / "out", RunOptions(max_shard_size=1000))
    assert not (tmp_path / "out").exists()


def test_no_room_is_said_before_any_work(
    make_source: MakeSource, make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(make_source())
    monkeypatch.setattr("tilewright.packer.engine.preflight.disk_free", lambda output: 1000)
    with pytest.raises(PlanError, match=r"needed, 1000 bytes are free[\s\S]*hint: free some"):
        execute(make_plan(checkpoint), checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file_is_one_message(make_source: MakeSource, make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(TilewrightError, match="directory"):
            execute(make_plan(checkpoint), checkpoint, output)
