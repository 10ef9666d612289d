"""What is asked of a verification."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tilewright.kernels.errors import OptionError, check_choice, check_least

Level = Literal["weights", "layers", "model"]
LEVELS: tuple[Level, ...] = ("weights", "layers", "model")


@dataclass(frozen=True)
class Thresholds:
    """What passes.

    Attributes:
        weight_error: Largest relative Frobenius error of a tensor; None means the bound of its format.
        layer_error: Largest relative error of a packed layer's output.
        kl: Largest mean KL divergence of a model, in nats per token.
    """

    weight_error: float | None = None
    layer_error: float = 1e-2
    kl: float = 0.02


@dataclass(frozen=True)
class VerifyOptions:
    """How two directories are compared.

    Attributes:
        level: How far to go; each level includes those before it.
        thresholds: What passes.
        text: UTF-8 file that whole models are compared on; needed for level `model`.
        windows: Windows out of it, evenly spaced.
        window: Tokens in each.
        decode_steps: Last tokens of each window that are fed one at a time, with a key-value cache.
        split_loss: Whether level `model` also runs a packed candidate's weights in fp32, to tell what weights cost from
            what rounded activations cost.
        checksums: Whether files are compared with their manifests first, which reads all of them.
    """

    level: Level = "weights"
    thresholds: Thresholds = field(default_factory=Thresholds)
    text: Path | None = None
    windows: int = 256
    window: int = 128
    decode_steps: int = 4
    split_loss: bool = False
    checksums: bool = True

    def __post_init__(self) -> None:
        check_choice("--level", self.level, LEVELS)
        check_least("--windows", self.windows, 1)
        check_least("--window", self.window, 2)
        check_least("--decode-steps", self.decode_steps, 0)
        if self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        if self.level == "model" and self.text is None:
            raise OptionError("--level model needs --text FILE")
        if self.split_loss and self.level != "model":
            raise OptionError("--split-loss belongs to --level model")
        if self.decode_steps >= self.window:
            raise OptionError(f"--decode-steps {self.decode_steps} must be less than --window {self.window}")

    def includes(self, level: Level) -> bool:
        """Whether `level` is to be carried out."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def command(self, reference: str, candidate: str) -> str:
        """The command line that asks for the same, without what is the default."""
        words = ["verify-accuracy", reference, candidate]
        for name, option, value in (
            ("level", "--level", self.level),
            ("text", "--text", self.text),
            ("windows", "--windows", self.windows),
            ("window", "--window", self.window),
            ("decode_steps", "--decode-steps", self.decode_steps),
        ):
            if value != getattr(DEFAULTS, name):
                words += [option, str(value)]
        words += ["--split-loss"] if self.split_loss else []
        words += [] if self.checksums else ["--no-checksums"]
        for name, option in (
            ("weight_error", "--max-weight-error"),
            ("layer_error", "--max-layer-error"),
            ("kl", "--max-kl"),
        ):
            value = getattr(self.thresholds, name)
            if value != getattr(DEFAULTS.thresholds, name):
                words += [option, str(value)]
        return shlex.join(words)


DEFAULTS = VerifyOptions()
