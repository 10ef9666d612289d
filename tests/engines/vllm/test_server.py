"""The OpenAI server over a packed directory, started as a user would: the model's name and no other option."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import tilewright

Served = Callable[[str, str], Path]
FAMILY = "tiny-qwen3-moe"
TEXT = Path(__file__).parents[3] / "examples" / "models" / "heldout.txt"


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """A running server's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), f"--port={port}"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options], stdout=file, stderr=file, env=variables | own, start_new_session=True
        )
    try:
        for _ in range(600):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (URLError, OSError):
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def packed_server(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(served(FAMILY, "int8"), tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def lines(url: str, body: dict[str, Any]) -> list[str]:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return [line.decode().strip() for line in answer if line.strip()]


def test_streams(packed_server: str, served: Served) -> None:
    model = str(served(FAMILY, "int8"))
    body = {"model": model, "prompt": "The city of ", "max_tokens": 12, "temperature": 0}
    (whole,) = lines(f"{packed_server}/v1/completions", body)
    parts = lines(f"{packed_server}/v1/completions", body | {"stream": True})
    assert parts[-1] == "data: [DONE]"
    texts = [json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts[:-1]]
    assert len(texts) >= 12
    assert "".join(texts) == json.loads(whole)["choices"][0]["text"]


def test_verify_served_agrees_with_level_model(
    packed_server: str, source: Callable[[str], Path], served: Served
) -> None:
    options = tilewright.VerifyOptions(level="model", text=TEXT, windows=16, window=64)
    found = tilewright.verify_served(source(FAMILY), packed_server, options, progress=tilewright.Silent())
    files = tilewright.verify(source(FAMILY), served(FAMILY, "int8"), options, progress=tilewright.Silent())
    assert found.model
    assert files.model
    assert found.passed
    assert found.model.overall.candidate_perplexity == pytest.approx(files.model.overall.candidate_perplexity, rel=5e-3)
    assert found.model.overall.kl < 0.02  # with the bound for what 20 of 256 choices leave
    assert files.model.overall.kl < 0.02


def test_verify_served_of_the_source(source: Callable[[str], Path], tmp_path: Path) -> None:
    options = tilewright.VerifyOptions(level="model", text=TEXT, windows=16, window=64)
    with serving(source(FAMILY), tmp_path / "log", "--max-logprobs=-1", "--enforce-eager") as url:
        whole = tilewright.verify_served(source(FAMILY), url, options, progress=tilewright.Silent()).model
        some = tilewright.verify_served(source(FAMILY), url, options, choices=20, progress=tilewright.Silent())
    assert whole
    assert some.model
    assert whole.overall.kl < 1e-3
    (note,) = [note for note in some.notes if "choices" in note]
    least = float(note.split("the divergence is ")[1].split()[0])
    assert least <= whole.overall.kl <= some.model.overall.kl
