"""What runs of layers and models found; apart from how they are made, which needs kernels and transformers."""

from __future__ import annotations

from dataclasses import dataclass

from .distributions import Agreement

FEW = 3  # Linears that are worth leaving in 16 bits
MOST = 0.5  # share of the loss that makes it worth it


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
class LinearLoss:
    """What one Linear adds to the divergence, if it alone is served as packed and all else is the source.

    Attributes:
        name: Its path.
        kl: Mean divergence with its weight and its activations, in nats.
        weight_kl: With its weight alone.
    """

    name: str
    kl: float
    weight_kl: float


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
        worst: The Linears that add most, the worst first; empty where `weights_only` is None.
    """

    windows: int
    window: int
    decode_steps: int
    overall: Agreement
    decode: Agreement | None
    drift: tuple[LayerDrift, ...]
    weights_only: Agreement | None = None
    worst: tuple[LinearLoss, ...] = ()

    @property
    def advice(self) -> str:
        """What would bring the larger part of the loss down; empty if it was not split."""
        if self.weights_only is None:
            return ""
        if 2 * self.weights_only.kl >= self.overall.kl:
            return "most of it comes from the weights: a smaller --group-size or --solver gptq brings that down"
        return (
            'most of it comes from rounded activations: load_model(activation_scales="group") brings that down with '
            "this file, --rotate-inputs or --solver smooth with others; --scheme block-fp8 keeps them in bf16 on CPUs"
        )

    def told(self) -> dict[str, str]:
        """What the figures say, for people."""
        return {"advice": self.advice, "outliers": self.outliers}

    @property
    def outliers(self) -> str:
        """What would mend the few Linears that add most of the loss; empty where it is spread over many."""
        total = sum(loss.kl for loss in self.worst)
        few: list[str] = []
        for loss in self.worst[:FEW]:
            few.append(loss.name)
            share = sum(one.kl for one in self.worst[: len(few)])
            if share > MOST * total and share > MOST * self.overall.kl:
                return f"{' '.join(f'--exclude {name}' for name in few)} leaves in 16 bits what adds most of it"
        return ""
