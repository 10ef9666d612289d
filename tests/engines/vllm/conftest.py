"""vLLM in processes of its own, and the checkpoints that it serves; run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright.packer.progress import Silent
from tilewright.packer.quantize.options import QuantizeOptions

HERE = Path(__file__).parent
TEXT = (HERE.parents[2] / "examples" / "models" / "heldout.txt").read_text(encoding="utf-8")
PROMPTS = [list(TEXT[start : start + 100].encode()) for start in range(0, 4000, 997)]

if importlib.util.find_spec("vllm") is None:  # it needs an environment of its own: `make test-vllm` makes one
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(HERE))  # pytest imports test files by their paths; they share `models` and `compare`
    import models


def pytest_configure(config: pytest.Config) -> None:
    """`make test-vllm` leaves out what is marked so, `make test-vllm-all` does not."""
    config.addinivalue_line("markers", "matrix: one of the many combinations of family, kind and instruction set")


class Engine:
    """vLLM in a process that serves one model after the other."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        self._log = (folder / "vllm.log").open("w+")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables | environment,
        )

    def ask(self, model: Path, **request: Any) -> dict[str, Any]:
        """What a model generates after the prompts, or `error`."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps({"model": str(model), "prompts": PROMPTS} | request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM has gone: {self._log.read()[-4000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def distributions(self, model: Path, **arguments: Any) -> torch.Tensor:
        """Logarithms of the probabilities of every token of the prompts: fp64 [T, V]."""
        out = self._folder / "distributions.pt"
        reply = self.ask(model, out=str(out), arguments=arguments)
        assert "error" not in reply, reply["error"]
        table: torch.Tensor = torch.load(out)
        return table

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)
        self._log.close()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids, 100 of each prompt."""
    return PROMPTS


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """VLLM on the best instruction set of this machine."""
    made = Engine(tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def engine_avx2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """VLLM and our kernels on AVX2, whatever the machine has."""
    made = Engine(tmp_path_factory.mktemp("engine-avx2"), TILEWRIGHT_ISA="avx2")
    yield made
    made.close()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """source(family): a shipped model, or a random one of a family of `models.py`."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def find(family: str) -> Path:
        shipped = models.SHIPPED / family
        return shipped if shipped.is_dir() else models.write(family, folder / family)

    return find


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, source: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """served(family, scheme): packed directory of a family's model; scheme "none" is bf16."""
    folder = tmp_path_factory.mktemp("served")

    @cache
    def pack(family: str, scheme: str) -> Path:
        checkpoint, output = source(family), folder / f"{family}-{scheme}-packed"
        if scheme != "none":
            tilewright.quantize(checkpoint, folder / f"{family}-{scheme}", QuantizeOptions(scheme), progress=Silent())
            checkpoint = folder / f"{family}-{scheme}"
        tilewright.pack(checkpoint, output, progress=Silent())
        return output

    return pack


@pytest.fixture(scope="session")
def reference(engine: Any, source: Callable[[str], Path]) -> Callable[[str], torch.Tensor]:
    """reference(family): the distributions of vLLM's bf16."""
    return cache(lambda family: engine.distributions(source(family)))
