"""A source encoding that lives outside of the package: this file and one line are all that it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.kernels.formats import FORMATS, INT8, WeightFormat
from tilewright.kernels.tensors import QTensor, Reject
from tilewright.packer.checkpoint.declared import QuantMethod
from tilewright.packer.checkpoint.encoding import Decoder, StoredWeight, TensorGroup
from tilewright.packer.checkpoint.encodings import ENCODINGS
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.inspect import inspect
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.verify.weights import compare_weights


@dataclass(frozen=True)
class BackwardsDecoder(Decoder):
    """Columns are stored from the last to the first, and scales are halved."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        return tensors[0][rows].flip(1).float() * (tensors[1][rows].reshape(-1, 1) * 2)

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor:
        return QTensor(fmt, tensors[0].flip(1).contiguous(), tensors[1].reshape(-1, 1) * 2)


@dataclass(frozen=True)
class Backwards:
    """`backwards` int8 [N, K] beside `halves` fp32 [N]."""

    id: str = "backwards"
    suffixes: tuple[str, ...] = ("backwards", "halves")
    methods: tuple[QuantMethod, ...] = ()

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        if "backwards" not in group.specs:
            return None
        if "halves" not in group.specs:
            return group.reject("has no halves", suffix="backwards")
        names = (group.names["backwards"], group.names["halves"])
        shape = group.specs["backwards"].shape
        return StoredWeight(group.module, names, (), shape, "backwards int8", BackwardsDecoder(), INT8.id)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with ENCODINGS.extended(Backwards()):
        yield


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory of two Linears in the toy encoding and a norm, and the values of the Linears."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(96)}
    values = {}
    for name, n in (("self_attn.o_proj", 64), ("mlp.down_proj", 96)):
        codes = torch.randint(-127, 128, (n, 96), dtype=torch.int8, generator=generator)
        codes[:, 5] = 127  # so that a second quantization meets the same scale
        halves = torch.rand(n, generator=generator) + 0.01
        tensors |= {f"model.layers.0.{name}.backwards": codes, f"model.layers.0.{name}.halves": halves}
        values[f"model.layers.0.{name}.weight"] = codes.float().flip(1) * (halves * 2)[:, None]
    root = tmp_path / "source"
    root.mkdir()
    save_file(tensors, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    return root, values


def test_every_job_reads_it(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    root, values = source
    checkpoint = open_checkpoint(root)
    contents = read_contents(checkpoint)
    assert set(values) < set(contents.weights)
    assert all(torch.equal(contents.weights[name].values(), expected) for name, expected in values.items())

    items = {item.name: item for item in inspect(checkpoint, str(root)).items}
    assert {items[name.removesuffix(".weight")].encoding for name in values} == {INT8.id}

    for scheme in ("int8", "block-fp8"):
        plan = plan_quantize(checkpoint, QuantizeOptions(scheme))
        assert not plan.rejects
        execute(plan, checkpoint, tmp_path / scheme)
    packed = plan_pack(checkpoint, CpuTarget())
    assert not packed.rejects
    execute(packed, checkpoint, tmp_path / "packed")

    for output in ("int8", "block-fp8", "packed"):
        results = list(compare_weights(contents, read_contents(open_checkpoint(tmp_path / output))))
        assert {result.name for result, _ in results} == {*values, "model.norm.weight"}
        assert not [result for result, _ in results if result.failed]
        if output != "block-fp8":  # the codes are taken over as they are
            assert all(result.status == "equal" for result, _ in results)
    assert FORMATS[INT8.id] is INT8


def test_its_refusals_are_told(tmp_path: Path) -> None:
    save_file({"a.backwards": torch.ones(4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    plan = plan_quantize(open_checkpoint(tmp_path), QuantizeOptions("int8"))
    assert "a.backwards: has no halves" in [str(reject) for reject in plan.rejects]
