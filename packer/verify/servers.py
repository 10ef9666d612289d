"""Running servers that say how probable the tokens of a prompt are: vLLM, and SGLang through its own /generate."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tilewright.kernels.errors import VerifyError

TIMEOUT = 600.0  # seconds for one answer: a server may compile or page in the model for the first one
USUAL_CHOICES = 20  # what vLLM gives at most, unless it was started with another --max-logprobs
ALL = -1
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Prediction:
    """What a server says of one token of a prompt, given those before it.

    Attributes:
        choices: Token id -> logarithm of its probability: the most probable ones, and the token itself.
        first: The most probable token.
    """

    choices: dict[int, float]
    first: int


class Server(Protocol):
    """One running model.

    Attributes:
        name: Kind of server and model, for messages.
    """

    name: str

    def tokenize(self, text: str) -> list[int] | None:
        """The server's tokens of a text, without special ones; None if it does not say."""

    def predict(self, tokens: Sequence[int], count: int) -> list[Prediction]:
        """A prediction for each token after the first.

        Args:
            tokens: A prompt.
            count: Choices of each; `ALL` for the whole vocabulary.

        Raises:
            VerifyError: The server gives none.
        """


class RefusedError(VerifyError):
    """The server answered a request with an error."""


@dataclass(frozen=True)
class Connection:
    """Where a server is.

    Attributes:
        url: Its address, without `/v1`.
    """

    url: str

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that it answers.

        Raises:
            RefusedError: It answers with an error.
            VerifyError: It cannot be reached, or answers something else.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise RefusedError(f"{self.url}{path}: {error.code}: {reason}") from error
        except (URLError, OSError) as error:
            raise VerifyError(
                f"{self.url}: cannot be reached: {getattr(error, 'reason', None) or error}",
                hint="is the server running?",
            ) from error
        except ValueError as error:
            raise VerifyError(f"{self.url}{path}: answers no JSON") from error

    def answers(self, path: str) -> Any:
        """The JSON that it answers; None if it refuses or has no such path."""
        try:
            return self.call(path)
        except RefusedError:
            return None
        except VerifyError as error:
            if isinstance(error.__cause__, ValueError):
                return None
            raise


class VllmServer:
    """A model that vLLM serves."""

    def __init__(self, connection: Connection, model: str) -> None:
        self.name = f"vLLM `{model}`"
        self._connection, self._model = connection, model

    def tokenize(self, text: str) -> list[int] | None:
        """See `Server`."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return list(self._connection.call("/tokenize", body)["tokens"])
        except RefusedError:
            return None

    def predict(self, tokens: Sequence[int], count: int) -> list[Prediction]:
        """See `Server`."""
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        answer = self._connection.call(
            "/v1/completions", body | {"prompt_logprobs": count, "add_special_tokens": False}
        )
        rows = answer["choices"][0].get("prompt_logprobs")
        if not rows:
            raise VerifyError(f"{self.name}: gives no log-probabilities of prompts")
        found = []
        for row in rows[1:]:
            choices = {int(token): float(entry["logprob"]) for token, entry in row.items()}
            found.append(Prediction(choices, next(int(token) for token, entry in row.items() if entry["rank"] == 1)))
        return found


class SglangServer:
    """A model that SGLang serves."""

    def __init__(self, connection: Connection, model: str) -> None:
        self.name = f"SGLang `{model}`"
        self._connection = connection

    def tokenize(self, text: str) -> list[int] | None:
        """See `Server`."""
        try:
            return list(self._connection.call("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])
        except RefusedError:
            return None

    def predict(self, tokens: Sequence[int], count: int) -> list[Prediction]:
        """See `Server`."""
        if count == ALL:
            raise RefusedError(f"{self.name}: gives a stated number of choices, not all")
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": count,
        }
        meta = self._connection.call("/generate", body)["meta_info"]
        if not meta.get("input_top_logprobs"):
            raise VerifyError(f"{self.name}: gives no log-probabilities of prompts")
        found = []
        for own, top in zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True):
            choices = {int(token): float(logarithm) for logarithm, token, *_ in [own, *top]}
            found.append(Prediction(choices, int(max(top)[1])))
        return found


def connect(url: str, model: str | None) -> Server:
    """The model that a server at `url` serves.

    Args:
        url: Its address, with or without `/v1`.
        model: Which of its models; None if it has one only.

    Raises:
        VerifyError: It is no such server, does not serve this model, or gives no log-probabilities of prompts.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise VerifyError(f"--served {url}: is no address", hint="such as http://127.0.0.1:8000")
    connection = Connection(url)
    models = connection.answers("/v1/models")
    names = [str(entry.get("id")) for entry in models.get("data", [])] if isinstance(models, dict) else []
    if isinstance(connection.answers("/props"), dict):
        raise VerifyError(
            f"{url}: is llama.cpp's own server, which gives no log-probabilities of prompts",
            hint="compare the files: verify-accuracy REFERENCE CANDIDATE",
        )
    if not names:
        raise VerifyError(f"{url}: lists no models under /v1/models, so it is no server that this can ask")
    if model is None and len(names) > 1:
        raise VerifyError(f"{url}: serves several models: {', '.join(names)}", hint="say which: --model NAME")
    chosen = model or names[0]
    if chosen not in names:
        raise VerifyError(f"{url}: does not serve `{chosen}`, but {', '.join(names)}", hint="say which: --model NAME")
    if isinstance(connection.answers("/get_model_info"), dict):
        return SglangServer(connection, chosen)
    if isinstance(version := connection.answers("/version"), dict) and "version" in version:
        return VllmServer(connection, chosen)
    raise VerifyError(
        f"{url}: is neither vLLM nor SGLang; others are not known to give log-probabilities of prompts",
        hint="compare the files: verify-accuracy REFERENCE CANDIDATE",
    )
