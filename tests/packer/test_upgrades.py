"""What release 0.1 wrote is read by this one, or refused by its version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.kernels.errors import PlanError
from tilewright.kernels.packed.manifest import read_manifest
from tilewright.kernels.packed.safetensors_file import MappedFile, read_header
from tilewright.packer.progress import Silent
from tilewright.packer.records.journal import PARTIAL
from tilewright.packer.records.ledger import read_ledger

OLD = Path(__file__).parents[1] / "golden" / "release-0.1"


def tensors(root: Path) -> dict[str, torch.Tensor]:
    header = read_header(root / "model.safetensors")
    file = MappedFile(header)
    return {name: file.tensor(name) for name in header.entries}


def test_finished_directories_are_read() -> None:
    for name in ("int8", "packed"):
        manifest, ledger = read_manifest(OLD / name), read_ledger(OLD / name)
        assert manifest is not None
        assert ledger is not None
        assert manifest.tool == "0.1.0"
        assert {entry.fate for entry in ledger.tensors.values()} <= {"quantized", "packed", "copied", "dropped"}
        assert tilewright.inspect(OLD / name, checksums=True).made_by == "0.1.0"


def test_a_packed_directory_runs_as_one_of_today(tmp_path: Path) -> None:
    tilewright.pack(OLD / "int8", tmp_path / "packed", progress=Silent())
    old = tilewright.load_packed(OLD / "packed", verify_checksums=True)
    new = tilewright.load_packed(tmp_path / "packed")
    assert old.specs == new.specs
    before, now = tensors(OLD / "packed"), tensors(tmp_path / "packed")
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name].view(torch.uint8), now[name].view(torch.uint8)) for name in before)


def test_a_finished_output_is_not_taken_for_one_of_today(tmp_path: Path) -> None:
    output = shutil.copytree(OLD / "int8", tmp_path / "out")
    with pytest.raises(PlanError, match="finished already"):
        tilewright.quantize(OLD / "source", output, "int8", run=tilewright.RunOptions(resume=True), progress=Silent())
    tilewright.quantize(OLD / "source", output, "int8", run=tilewright.RunOptions(overwrite=True), progress=Silent())
    before, now = tensors(OLD / "int8"), tensors(output)
    assert all(torch.equal(before[name].view(torch.uint8), now[name].view(torch.uint8)) for name in before)


@pytest.mark.parametrize("consumed", [False, True])
def test_an_unfinished_output_is_refused_by_version(tmp_path: Path, consumed: bool) -> None:
    folder = tmp_path / "out" / PARTIAL
    folder.mkdir(parents=True)
    shutil.copyfile(OLD / "journal", folder / "journal")
    if consumed:
        (folder / "source").mkdir()

    def run(**options: bool) -> None:
        running = tilewright.RunOptions(max_shard_size=20_000, **options)
        tilewright.quantize(OLD / "source", tmp_path / "out", "int8", run=running, progress=Silent())

    for options in ({}, {"resume": True}, *([{"overwrite": True}] if consumed else [])):
        with pytest.raises(PlanError, match=r"release 0\.1"):
            run(**options)
    if not consumed:
        run(overwrite=True)
        assert (tmp_path / "out" / "manifest.json").exists()
