"""Windows of tokens out of a text: what whole models are compared on."""

from __future__ import annotations

from pathlib import Path

import torch

from tilewright.kernels.errors import VerifyError


def evenly_spaced_windows(tokens: torch.Tensor, windows: int, length: int) -> torch.Tensor:
    """Cut `windows` windows of `length` tokens whose starts are spread evenly over the text.

    Args:
        tokens: int64 [T], the whole text.
        windows: How many; they overlap where the text is shorter than their sum.
        length: Tokens in each.

    Returns:
        int64 [windows, length]; the first starts with the text, the last ends with it.

    Raises:
        VerifyError: The text is shorter than one window.
    """
    last = tokens.numel() - length
    if last < 0:
        raise VerifyError(
            f"the text has {tokens.numel()} tokens, one window needs {length}", hint="give a longer text or --window"
        )
    starts = torch.linspace(0, last, windows, dtype=torch.float64).round().to(torch.int64)
    return tokens[starts[:, None] + torch.arange(length)]


def read_tokens(model: Path, text: Path) -> torch.Tensor:
    """Tokenize a text file with the tokenizer of a model directory, without special tokens.

    Returns:
        int64 [T].
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"{text}: cannot be read as UTF-8 text: {error}") from error
    return torch.tensor(tokenize(model, content), dtype=torch.int64)


def tokenize(model: Path, content: str) -> list[int]:
    """The tokens of a text by the tokenizer of a model directory, without special tokens."""
    from transformers import AutoTokenizer  # extra `hf`

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise VerifyError(f"{model}: no tokenizer that transformers reads: {error}") from error
    ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if content and not ids:
        raise VerifyError(f"{model}: no tokenizer there makes tokens of the text", hint="is tokenizer.json missing?")
    return ids
