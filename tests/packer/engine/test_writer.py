"""Pieces in any order from several threads give the bytes and the hash of the whole."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import pytest
import torch

from tilewright.kernels.errors import CheckpointError
from tilewright.packer.engine.writer import FileWriter
from tilewright.packer.plan import CHUNK
from tilewright.packer.records.atomic import atomic_write, opened


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_in_any_order(tmp_path: Path, threads: int, seed: int) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(3 * CHUNK + 12345)
    source = tmp_path / "source"
    source.write_bytes(b"head" + content)
    cuts = sorted({0, len(content), *(rng.randrange(len(content)) for _ in range(9)), CHUNK - 1})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    rng.shuffle(pieces)
    heard: list[int] = []
    writer = FileWriter(tmp_path / "file", len(content), heard.append)

    def work(mine: list[tuple[int, int]]) -> None:
        for start, end in mine:
            if start % 2:
                writer.write(start, torch.frombuffer(bytearray(content[start:end]), dtype=torch.uint8))
            elif start % 4:
                writer.write(start, content[start:end])
            else:
                with opened(source) as fd:
                    writer.copy(start, fd, 4 + start, end - start, source)
            writer.sync()

    workers = [threading.Thread(target=work, args=(pieces[i::threads],)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert writer.complete
    assert sum(heard) == len(content)
    assert writer.finish() == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


def test_every_dtype_is_written_as_it_lies(tmp_path: Path) -> None:
    tensors = [torch.tensor(1.5), torch.ones(3, 2).bfloat16(), torch.ones(3).to(torch.float8_e4m3fn), torch.ones(2) > 0]
    tensors += [torch.empty(0, 3), torch.arange(3)]
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    writer = FileWriter(tmp_path / "file", len(b"".join(raw)))
    position = 0
    for tensor, data in zip(tensors, raw, strict=True):
        writer.write(position, tensor)
        position += len(data)
    writer.finish()
    assert (tmp_path / "file").read_bytes() == b"".join(raw)


def test_a_source_that_shrinks_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10))
    writer = FileWriter(tmp_path / "file", 11)
    with opened(tmp_path / "source") as fd, pytest.raises(CheckpointError, match="source: became shorter"):
        writer.copy(0, fd, 0, 11, tmp_path / "source")
    with pytest.raises(AssertionError):
        writer.finish()
    writer.close()


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"
    assert atomic_write(path, b"abc", tmp_path / "temporary") == hashlib.sha256(b"abc").hexdigest()
    assert atomic_write(path, b"", tmp_path / "temporary") == hashlib.sha256(b"").hexdigest()
    assert path.read_bytes() == b""
    assert not (tmp_path / "temporary").exists()
