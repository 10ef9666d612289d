"""What runs of layers and models found; apart from how they are made, which needs kernels and transformers."""

from __future__ import annotations

from dataclasses import dataclass

from .distributions import Agreement


@dataclass(frozen=True)
class LayerResult:
    """One packed layer on random activations.

    Attributes:
        name: Name of the packed module; the two stacks of a layer's experts are one layer.
        format: Format id.
        layout: Layout id.
        kernel: The kernel that ran it.
        rows: Numbers of tokens that it was run with.
        relative: Relative Frobenius error: the largest of these runs, for experts that of all runs together.
    """

    name: str
    format: str
    layout: str
    kernel: str
    rows: tuple[int, ...]
    relative: float


@dataclass(frozen=True)
class LayerDrift:
    """How far the hidden states have come apart after a decoder layer.

    Attributes:
        layer: Index of the layer.
        relative: Frobenius norm of the difference over that of the reference.
        cosine: Mean cosine between the two hidden states of a token.
    """

    layer: int
    relative: float
    cosine: float


@dataclass(frozen=True)
class ModelResult:
    """Two models on the same text.

    Attributes:
        windows: Windows compared.
        window: Tokens per window.
        decode_steps: Last tokens of each window that are fed one at a time, with a key-value cache.
        overall: Agreement over all tokens.
        decode: Agreement over the decode steps alone, or None without any.
        drift: One entry per decoder layer.
    """

    windows: int
    window: int
    decode_steps: int
    overall: Agreement
    decode: Agreement | None
    drift: tuple[LayerDrift, ...]
