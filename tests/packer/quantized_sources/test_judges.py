"""verify-accuracy asks the library that defines a format: a mistake of the reader that all jobs share is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright.packer.checkpoint.encodings import int4_groups, mlx, pack_quantized, scaled
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.verify.judges import second_opinion

from . import compressed_sources, library_sources  # noqa: F401  # add their variants
from .sources import VARIANTS
from .test_packed_directly import write

JUDGED = [
    name
    for name in VARIANTS
    if name.startswith(("ct-", "mlx-")) and name not in {"ct-pack4-order", "ct-pack4-order-asym"}
]


@pytest.mark.parametrize("name", JUDGED)
def test_the_library_agrees(name: str, tmp_path: Path) -> None:
    failures, notes = second_opinion(open_checkpoint(write(tmp_path / "source", VARIANTS[name]())))
    assert not failures
    assert len(notes) == 1
    assert "1 quantized weights were read by" in notes[0]


@pytest.mark.parametrize("name", ["gptq-4-128-asym-gptq", "awq-128"])
def test_without_a_library_that_reads_it_nothing_is_said(name: str, tmp_path: Path) -> None:
    assert second_opinion(open_checkpoint(write(tmp_path / "source", VARIANTS[name]()))) == ([], [])


def test_what_the_library_reads_no_more_is_counted(tmp_path: Path) -> None:
    failures, notes = second_opinion(open_checkpoint(write(tmp_path / "source", VARIANTS["ct-pack4-order"]())))
    assert not failures
    assert ": 0 quantized weights were read by compressed-tensors" in notes[0]
    assert notes[0].endswith("; of 1 it gave no reading")


Rows = Callable[..., torch.Tensor]


def _mistaken(rows: Rows) -> Rows:
    """A reader of rows that takes each pair of columns in the wrong order."""

    def read(self: Any, tensors: Sequence[torch.Tensor], which: Any) -> torch.Tensor:
        values = rows(self, tensors, which)
        return values.unflatten(1, (-1, 2)).flip(2).flatten(1)

    return read


MISTAKES = {
    "ct-pack4-asym": (pack_quantized.PackedDecoder, "unpack"),
    "ct-pack4-g32": (int4_groups.Int4Decoder, "rows"),
    "ct-pack3-g64": (pack_quantized.PackedDecoder, "unpack"),
    "ct-pack8-channel": (pack_quantized.PackedDecoder, "rows"),
    "ct-int8-g64-asym": (scaled.ShiftedDecoder, "zeros"),
    "ct-fp8-block": (scaled.ScaledDecoder, "rows"),
    "mlx-4": (mlx.MlxDecoder, "rows"),
}


@pytest.mark.parametrize("name", [name for name in MISTAKES if name in VARIANTS])
def test_a_mistake_of_the_shared_reader_fails_the_verification(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, method = MISTAKES[name]
    monkeypatch.setattr(holder, method, _mistaken(getattr(holder, method)))
    source = write(tmp_path / "source", VARIANTS[name]())
    tilewright.quantize(source, tmp_path / "out", "int8")
    verification = tilewright.verify(source, tmp_path / "out")
    notes = [result.note for result in verification.tensors if result.failed]
    assert not verification.passed
    assert any(note.startswith(("compressed-tensors reads", "mlx reads")) for note in notes)


def test_without_the_mistake_it_passes(tmp_path: Path) -> None:
    source = write(tmp_path / "source", VARIANTS["ct-pack4-asym"]())
    tilewright.quantize(source, tmp_path / "out", "int4")
    verification = tilewright.verify(source, tmp_path / "out")
    assert verification.passed
    assert sum("were read by compressed-tensors" in note for note in verification.notes) == 2
