"""A cluster gives the bytes of one machine, whoever is lost on the way."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tilewright import OptionError, PackOptions, QuantizeOptions, RunOptions, Silent, TilewrightError
from tilewright.kernels.packed.safetensors_file import FileStamp
from tilewright.packer.engine import cluster

ray = pytest.importorskip("ray", reason="Ray is an extra")
cluster_utils = pytest.importorskip("ray.cluster_utils")

MODELS = Path(__file__).parents[3] / "examples" / "models"
QWEN = MODELS / "tiny-qwen3-moe"
QUIET = Silent()
SMALL = 300_000  # bytes of a shard: a dozen tasks or so
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


def tree(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of three machines of one CPU each, which are processes here."""
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def on(nodes: Any, **more: Any) -> RunOptions:
    return RunOptions(max_shard_size=SMALL, ray=nodes.address, **more)


HERE = RunOptions(max_shard_size=SMALL)


@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_the_bytes_are_those_of_one_machine(scheme: str, nodes: Any, tmp_path: Path) -> None:
    options = QuantizeOptions(scheme, group_size=32 if scheme == "int4" else None)
    tilewright.quantize(QWEN, tmp_path / "here", options, run=HERE, progress=QUIET)
    tilewright.quantize(QWEN, tmp_path / "there", options, run=on(nodes), progress=QUIET)
    assert tree(tmp_path / "there") == tree(tmp_path / "here")
    if scheme == "int8":
        for name, run in (("packed", HERE), ("packed-there", on(nodes))):
            tilewright.pack(tmp_path / "here", tmp_path / name, PackOptions(tp=2), run=run, progress=QUIET)
        assert tree(tmp_path / "packed-there") == tree(tmp_path / "packed")


def test_a_relative_source_and_consume(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(QWEN, tmp_path / "source")
    tilewright.quantize(QWEN, tmp_path / "here", "int8", run=HERE, progress=QUIET)
    monkeypatch.chdir(tmp_path)
    tilewright.quantize("source", "there", "int8", run=on(nodes, consume=True), progress=QUIET)
    assert tree(tmp_path / "there") == tree(tmp_path / "here")
    assert not list((tmp_path / "source").glob("*.safetensors"))


def running() -> list[int]:
    """Process ids of workers that write a file; Ray titles them with the name of their task."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            title = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        found += [int(process.name)] if title.startswith(b"ray::model-") else []
    return found


@pytest.mark.parametrize("who", ["worker", "another worker", "machine"])
def test_somebody_is_killed(who: str, nodes: Any, tmp_path: Path) -> None:
    tilewright.quantize(QWEN, tmp_path / "here", "int8", run=HERE, progress=QUIET)
    killed = []

    def kill() -> None:
        until = time.monotonic() + 60
        while not (workers := running()) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        raylet = nodes.list_all_nodes()[-1].all_processes["raylet"][0].process.pid
        killed.append(raylet if who == "machine" else workers[0])
        with contextlib.suppress(ProcessLookupError):  # it may just have finished
            os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        tilewright.quantize(QWEN, tmp_path / "there", "int8", run=on(nodes), progress=QUIET)
    finally:
        killer.join()
        if who == "machine":
            nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
            nodes.add_node(num_cpus=1)
    assert killed
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_a_driver_is_killed_and_resumed(nodes: Any, tmp_path: Path) -> None:
    tilewright.quantize(QWEN, tmp_path / "here", "int8", run=HERE, progress=QUIET)
    output = tmp_path / "there"
    words = ["quantize", QWEN, output, "--scheme", "int8", "--max-shard-size", SMALL, "--ray", nodes.address]
    command = [sys.executable, "-m", "tilewright", *map(str, words)]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while driver.poll() is None and not any(output.glob(".tilewright-partial/model-*.safetensors")):
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    tilewright.quantize(QWEN, output, "int8", run=on(nodes, resume=True), progress=QUIET)
    assert tree(output) == tree(tmp_path / "here")


def test_a_file_that_a_machine_does_not_see(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = next(QWEN.glob("*.safetensors"))
    stamp = FileStamp.of(header.stat())
    assert cluster.look({header: stamp}, tmp_path, tilewright.__version__) is None
    assert "does not see the source" in str(cluster.look({tmp_path / "no": stamp}, tmp_path, tilewright.__version__))
    assert "does not see the output" in str(cluster.look({header: stamp}, tmp_path / "no", tilewright.__version__))
    assert "has Tilewright" in str(cluster.look({header: stamp}, tmp_path, "0.0"))
    monkeypatch.setattr(cluster, "look", lambda *_: "does not see the source: /elsewhere")
    with pytest.raises(TilewrightError, match=r"machine [\d.]+ does not see the source"):
        tilewright.quantize(QWEN, tmp_path / "output", "int8", run=on(nodes), progress=QUIET)
    assert not (tmp_path / "output" / "manifest.json").exists()


def test_a_weight_that_cannot_be_converted(nodes: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(QWEN, source)
    file = sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][1, 2] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TilewrightError, match=r"q_proj\.weight\[1, 2\] is inf"):
        tilewright.quantize(source, tmp_path / "output", "int8", run=on(nodes), progress=QUIET)
    assert not (tmp_path / "output").exists()


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match="--ray needs Ray"):
        tilewright.quantize(QWEN, tmp_path / "output", "int8", run=RunOptions(ray="auto"), progress=QUIET)
    assert not (tmp_path / "output").exists()
