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
        weights_only: The reference and the candidate's weights in fp32 arithmetic: what quantized weights cost. The
            rest is what rounded activations and kernels cost. None if it was not asked for, or if nothing is packed.
    """

    windows: int
    window: int
    decode_steps: int
    overall: Agreement
    decode: Agreement | None
    drift: tuple[LayerDrift, ...]
    weights_only: Agreement | None = None

    @property
    def advice(self) -> str:
        """What would bring the larger part of the loss down; empty if it was not split."""
        if self.weights_only is None:
            return ""
        if 2 * self.weights_only.kl >= self.overall.kl:
            return "most of it comes from the weights: a smaller --group-size or --solver gptq brings that down"
        return (
            "most of it comes from rounded activations: --scheme block-fp8 keeps them in bf16 on CPUs, "
            "--exclude leaves modules in 16 bits"
        )
