"""What a running server predicts beside the reference, on the same windows of a text.

A server gives the logarithms of the probabilities of some choices for each token, or of all. Let p be the reference, q
the server, S the choices given, and P, Q what both leave to all others. Of the divergence, the choices' part is exact:

    sum over S of p log(p / q)  +  P log(P / Q)   <=   KL(p || q)

The others add P times the divergence of what both say about them, which no server tells. It is bounded here by P times
the largest |log(p / q)| of the choices: a bound as long as no other token is further off than the worst of those given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import VerifyError

from ..progress import Progress
from .distributions import Agreement
from .model import BATCH_TOKENS
from .results import ModelResult
from .servers import ALL, USUAL_CHOICES, Prediction, RefusedError, Server
from .stream import StreamedModel

SMALL_VOCABULARY = 8192  # all choices of larger ones would be hundreds of megabytes of JSON for a window
SAMPLE = 2000  # characters of the text by which tokenizers are compared


@dataclass
class ServedSum:
    """Sums over predictions, in float64.

    Attributes:
        least: Of the divergence: the part that is known.
        most: The same with the bound for the rest.
        largest: Largest bound of one prediction.
        rest: Of what the reference gives to tokens that the server did not tell of.
    """

    positions: int = 0
    same: int = 0
    least: float = 0.0
    most: float = 0.0
    largest: float = 0.0
    rest: float = 0.0
    reference_loss: float = 0.0
    server_loss: float = 0.0

    def add(self, logs: torch.Tensor, target: int, said: Prediction) -> None:
        """Add one prediction.

        Args:
            logs: Logarithms of the reference's probabilities [V], fp64.
            target: The token that follows.
            said: What the server says.
        """
        ids = torch.tensor(list(said.choices), dtype=torch.int64)
        q = torch.tensor(list(said.choices.values()), dtype=torch.float64)
        p = logs[ids]
        ratios = p - q
        least, rest = float((p.exp() * ratios).sum()), 0.0
        if len(ids) < len(logs):
            rest = max(0.0, 1 - float(p.exp().sum()))
            theirs = max(1e-12, 1 - float(q.exp().sum()))
            least += rest * math.log(rest / theirs) if rest else 0.0
        most = least + rest * float(ratios.abs().max())
        self.positions += 1
        self.same += int(logs.argmax()) == said.first
        self.least, self.most, self.rest = self.least + least, self.most + most, self.rest + rest
        self.largest = max(self.largest, most)
        self.reference_loss -= float(logs[target])
        self.server_loss -= said.choices[target]

    def result(self) -> Agreement:
        """Means; the divergence with its bound for the rest."""
        count = max(self.positions, 1)
        reference, server = (math.exp(min(loss / count, 700.0)) for loss in (self.reference_loss, self.server_loss))
        return Agreement(self.positions, reference, server, self.most / count, self.largest, self.same / count)


def check_tokenizer(server: Server, text: str, tokens: Sequence[int]) -> None:
    """Refuse a server whose tokens are others than those of the reference.

    Args:
        server: The server.
        text: The beginning of the text.
        tokens: The reference's tokens of it.

    Raises:
        VerifyError: They differ.
    """
    theirs = server.tokenize(text)
    if theirs is not None and theirs != list(tokens):
        raise VerifyError(
            f"{server.name}: has another tokenizer than the reference: {len(theirs)} tokens where it has {len(tokens)}",
            hint="compare a server with the checkpoint that it serves",
        )


def compare_served(
    reference: StreamedModel, server: Server, windows: torch.Tensor, count: int | None, progress: Progress
) -> tuple[ModelResult, list[str]]:
    """Compare what a server predicts with the reference.

    Args:
        reference: The source.
        server: The server.
        windows: int64 [B, T] tokens.
        count: Choices to ask for; None asks for all of a small vocabulary, else as many as servers usually give.
        progress: Hears of windows.

    Returns:
        The result, whose divergence includes the bound for the rest, and notes.
    """
    total, notes = ServedSum(), []
    progress.start("asking the server", windows.shape[0], unit="windows")
    try:
        for tokens, logits in predictions(reference, windows):
            for window, rows in zip(tokens.tolist(), logits, strict=True):
                said, count = _ask(server, window, count, rows.shape[-1])
                logs = rows[:-1].double().log_softmax(-1)
                for row, target, prediction in zip(logs, window[1:], said, strict=True):
                    total.add(row, target, prediction)
                progress.advance()
    finally:
        progress.finish()
    if total.rest:
        least, most, rest = (value / total.positions for value in (total.least, total.most, total.rest))
        notes.append(
            f"the server tells of some choices only, which leave {100 * rest:.2g}% of the probability to others: "
            f"the divergence is {least:.3g} at least, and {most:.3g} with a bound for the rest"
        )
    result = ModelResult(windows.shape[0], windows.shape[1], 0, total.result(), None, ())
    return result, notes


def _ask(server: Server, window: list[int], count: int | None, vocabulary: int) -> tuple[list[Prediction], int | None]:
    """Predictions for a window, and how many choices to ask for from now on: fewer, where the server refuses all."""
    asked = count or (ALL if vocabulary <= SMALL_VOCABULARY else USUAL_CHOICES)
    try:
        said = server.predict(window, asked)
    except RefusedError:
        if asked != ALL:
            raise
        count = USUAL_CHOICES
        said = server.predict(window, count)
    if len(said) != len(window) - 1 or any(t not in row.choices for t, row in zip(window[1:], said, strict=True)):
        raise VerifyError(f"{server.name}: did not answer for the tokens that it was asked about")
    return said, count


def predictions(model: StreamedModel, windows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens [B, T] and logits [B, T, V], batch by batch, with one layer of the model in memory at a time."""
    length = windows.shape[1]
    with torch.inference_mode():
        batches = list(windows.split(max(1, BATCH_TOKENS // length)))
        hidden, calls = map(list, zip(*(model.embed(tokens, [length]) for tokens in batches), strict=True))
        for layer in range(model.depth):
            with model.layer(layer) as run:
                hidden = [run(states, call[layer]) for states, call in zip(hidden, calls, strict=True)]
        for tokens, states in zip(batches, hidden, strict=True):
            yield tokens, model.head(tokens, states)
