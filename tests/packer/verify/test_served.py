"""Verifying a running server, against one that answers as vLLM and SGLang do: real ones are for `make test-vllm`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tilewright
from tilewright.cli.verify_accuracy import verify_accuracy
from tilewright.kernels.errors import VerifyError
from tilewright.packer.progress import Silent
from tilewright.packer.verify.served import ServedSum
from tilewright.packer.verify.servers import Prediction

MODELS = Path(__file__).parents[3] / "examples" / "models"
MODEL, TEXT = MODELS / "tiny-qwen3-moe", MODELS / "heldout.txt"
OPTIONS = tilewright.VerifyOptions(level="model", text=TEXT, windows=3, window=24)


class Fake:
    """What a server answers to what it is asked; `logs(tokens)` are its logarithms of probabilities [T, V]."""

    def __init__(self, logs: Callable[[list[int]], torch.Tensor]) -> None:
        self.logs = logs
        self.kind = "vllm"
        self.most_choices = 256
        self.models = ["tiny"]
        self.shift = 0  # of the tokenizer
        self.asked: list[int] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        kinds = {"/version": "vllm", "/get_model_info": "sglang", "/props": "llama.cpp"}
        if path in kinds:
            return (200, {"version": "1"}) if kinds[path] == self.kind else (404, {})
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        if path == "/tokenize":
            return 200, {"tokens": [byte + self.shift for byte in body["prompt"].encode()]}
        if path == "/generate":
            return 200, {"meta_info": self._sglang(body["input_ids"], body["top_logprobs_num"])}
        assert path == "/v1/completions"
        assert "temperature" in body
        return self._vllm(body["prompt"], body["prompt_logprobs"])

    def _rows(self, tokens: list[int], count: int) -> list[list[tuple[int, float, int]]]:
        """For each token after the first: (token, logarithm, rank) of itself and of the most probable ones."""
        found = []
        for logs, own in zip(self.logs(tokens)[:-1], tokens[1:], strict=True):
            order = logs.argsort(descending=True).tolist()
            picked = {own, *order[:count]}
            found.append([(token, float(logs[token]), order.index(token) + 1) for token in picked])
        return found

    def _vllm(self, tokens: list[int], count: int) -> tuple[int, Any]:
        self.asked.append(count)
        if not -1 < count <= self.most_choices and not (count == -1 and self.most_choices == 256):
            return 400, {"error": {"message": "Requested prompt logprobs greater than max allowed"}}
        rows = self._rows(tokens, 256 if count == -1 else count)
        entries = [{str(t): {"logprob": log, "rank": rank} for t, log, rank in row} for row in rows]
        return 200, {"choices": [{"prompt_logprobs": [None, *entries] if self.most_choices else None}]}

    def _sglang(self, tokens: list[int], count: int) -> dict[str, Any]:
        rows = self._rows(tokens, count)
        own = [
            next([log, t, None] for t, log, _ in row if t == token) for row, token in zip(rows, tokens[1:], strict=True)
        ]
        top = [[[log, t, None] for t, log, rank in row if rank <= count] for row in rows]
        return {"input_token_logprobs": [[None, tokens[0], None], *own], "input_top_logprobs": [None, *top]}


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    """A server that predicts what the reference does, a little blurred; and its address."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def logs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return (reference(torch.tensor([tokens])).logits[0].double() * 0.9).log_softmax(-1)

    made = Fake(logs)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:  # noqa: N802
            self._send(*made.answer(self.path, {}))

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*made.answer(self.path, body))

        def _send(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def verify(url: str, **options: Any) -> tilewright.Verification:
    return tilewright.verify_served(MODEL, url, OPTIONS, progress=Silent(), **options)


def test_sums_are_the_divergence_and_bounds_contain_it() -> None:
    p, q = torch.randn(2, 50, 64, dtype=torch.float64).mul(2).log_softmax(-1)
    whole = float((p.exp() * (p - q)).sum(-1).mean())
    for count in (64, 20, 3):
        total = ServedSum()
        for mine, theirs in zip(p, q, strict=True):
            ids = theirs.topk(count).indices.tolist()
            total.add(mine, ids[0], Prediction({token: float(theirs[token]) for token in ids}, ids[0]))
        least, most = total.least / 50, total.most / 50
        assert least <= whole + 1e-9
        assert most >= whole - 1e-9
        if count == 64:
            assert least == pytest.approx(whole, abs=1e-12)
            assert most == pytest.approx(whole, abs=1e-12)
            assert total.result().top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())


def test_all_choices_give_the_divergence(fake: tuple[Fake, str]) -> None:
    server, url = fake
    result = verify(url)
    assert set(server.asked) == {-1}
    assert result.candidate == f"vLLM `tiny` at {url}"
    assert result.model
    found = result.model.overall
    assert 1e-3 < found.kl < 0.1  # logits times 0.9
    assert found.top1 == 1
    assert found.candidate_perplexity != found.reference_perplexity
    assert result.passed == (found.kl <= 0.02)
    assert not [note for note in result.notes if "choices" in note]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_some_choices_give_a_bound_that_contains_it(kind: str, fake: tuple[Fake, str]) -> None:
    server, url = fake
    whole = verify(url).model
    server.kind, server.most_choices = kind, 20
    some = verify(url)
    (note,) = [note for note in some.notes if "choices" in note]
    least = float(note.split("the divergence is ")[1].split()[0])
    assert some.model
    assert whole
    assert least <= whole.overall.kl * 1.001
    assert some.model.overall.kl >= whole.overall.kl * 0.999
    assert some.model.overall.candidate_perplexity == pytest.approx(whole.overall.candidate_perplexity, rel=1e-6)


def test_refusals_by_name(fake: tuple[Fake, str]) -> None:
    server, url = fake
    with pytest.raises(VerifyError, match="does not serve `other`, but tiny"):
        verify(url, model="other")
    server.shift = 1
    with pytest.raises(VerifyError, match="vLLM `tiny`: has another tokenizer"):
        verify(url)
    server.shift, server.most_choices = 0, 0
    with pytest.raises(VerifyError, match="max allowed"):
        verify(url, choices=5)
    server.models = ["tiny", "large"]
    with pytest.raises(VerifyError, match="several models: tiny, large"):
        verify(url)
    server.models, server.kind = ["tiny"], "llama.cpp"
    with pytest.raises(VerifyError, match=r"llama\.cpp's own server"):
        verify(url)
    server.kind = "unknown"
    with pytest.raises(VerifyError, match="neither vLLM nor SGLang"):
        verify(url)
    with pytest.raises(VerifyError, match="cannot be reached"):
        verify("http://127.0.0.1:9")
    with pytest.raises(VerifyError, match="is no address"):
        verify("127.0.0.1:9")


def test_the_command(fake: tuple[Fake, str], tmp_path: Path) -> None:
    _, url = fake
    what = [str(MODEL), "--served", url, "--text", str(TEXT), "--windows", "3", "--window", "24"]
    good = CliRunner().invoke(verify_accuracy, [*what, "--max-kl", "1", "--report", str(tmp_path / "report.html")])
    assert good.exit_code == 0, good.output
    assert "vLLM `tiny`" in good.output
    assert (tmp_path / "report.html").stat().st_size > 1000
    bad = CliRunner().invoke(verify_accuracy, [*what, "--max-kl", "1e-5", "--json"])
    assert bad.exit_code == 3
    assert json.loads(bad.stdout)["verdict"] == "fail"
