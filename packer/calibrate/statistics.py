"""What the inputs of one weight look like, summed up over any number of batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch

MAGNITUDES = 1 << 15  # non-negative bf16 numbers, infinity and NaN among them; their bit patterns are in their order
SAMPLE = 256  # inputs of a batch that are kept themselves
CHUNK = 1 << 22  # elements whose magnitudes are counted at a time


@dataclass
class InputStatistics:
    """Sums over the inputs x [K] of a weight [N, K].

    Attributes:
        columns: K.
        with_hessian: Whether `hessian` is wanted.
        with_sample: Whether `sample` is wanted.
        tokens: Inputs seen.
        channel_amax: fp32 [K], largest magnitude of each column.
        magnitudes: int64 [32768], how often each magnitude occurred, rounded to bf16.
        hessian: fp32 [K, K], sum of x x^T, or None. Twice that is the Hessian of the squared output error; solvers
            ask for it up to a factor.
        samples: Some inputs, evenly spaced over each batch.
    """

    columns: int
    with_hessian: bool = True
    with_sample: bool = False
    tokens: int = 0
    channel_amax: torch.Tensor = field(init=False)
    magnitudes: torch.Tensor = field(init=False)
    hessian: torch.Tensor | None = None
    samples: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channel_amax = torch.zeros(self.columns)
        self.magnitudes = torch.zeros(MAGNITUDES, dtype=torch.int64)
        if self.with_hessian:
            self.hessian = torch.zeros(self.columns, self.columns)

    def add(self, inputs: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Take in a batch.

        Args:
            inputs: [.., K] of any float dtype.
            weights: fp32 [tokens], how much each input counts in the Hessian; None means 1.
        """
        x = inputs.reshape(-1, self.columns).to(torch.float32)
        if not len(x):
            return
        self.tokens += len(x)
        magnitude = x.abs()
        torch.maximum(self.channel_amax, magnitude.amax(0), out=self.channel_amax)
        for part in magnitude.flatten().split(CHUNK):
            bits = part.to(torch.bfloat16).view(torch.int16).to(torch.int64)
            self.magnitudes += torch.bincount(bits, minlength=MAGNITUDES)
        if self.with_sample:
            self.samples.append(x[:: -(-len(x) // SAMPLE)].clone())
        if self.hessian is not None:
            scaled = x if weights is None else x * weights[:, None]
            self.hessian.addmm_(scaled.T, x)

    @property
    def sample(self) -> torch.Tensor:
        """Some of the inputs, fp32 [S, K]."""
        return torch.cat(self.samples)

    def divide(self, factors: torch.Tensor) -> None:
        """Take every input for what it is after a division of its channels by `factors` [K].

        Magnitudes of single elements are not followed, since nothing asks for them where channels are divided.
        """
        self.channel_amax /= factors
        self.samples = [part / factors for part in self.samples]
        if self.hessian is not None:
            self.hessian /= factors * factors[:, None]

    @property
    def amax(self) -> float:
        """Largest magnitude of any input element."""
        return float(self.channel_amax.max())

    def percentile(self, percent: float) -> float:
        """The smallest bf16 magnitude that `percent` of all input elements do not exceed; 0 without inputs.

        Args:
            percent: In (0, 100]; 100 is the largest magnitude, in fp32.
        """
        if percent == 100:
            return self.amax
        seen = self.magnitudes.cumsum(0)
        if seen[-1] == 0:
            return 0.0
        share = math.ceil(Fraction(str(percent)) / 100 * int(seen[-1]))
        position = int(torch.searchsorted(seen, share))
        return float(torch.tensor(position, dtype=torch.int16).view(torch.bfloat16))
