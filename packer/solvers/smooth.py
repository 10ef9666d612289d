"""Scales of input channels that protect the channels which matter (AWQ).

A weight that reads x can read x / c instead if its columns are multiplied by c; the division goes into what wrote x.
Columns that meet large inputs are made large, so that rounding disturbs them less (Lin et al. 2023, arXiv:2306.00978).
Here every c is a power of two: no product or quotient is rounded, so the model is the same function bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.modules.linear_kernels import rounds_activations
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import QTensor

from ..malloc_trim import FreedMemory
from .blocks import block_amax, encode
from .solver import Solver

STRENGTHS = tuple(step / 10 for step in range(1, 11))  # exponents of the input's size; 0, no scales, is the baseline
TEMPORARIES = 5  # of the size of a weight, for its output error
LARGEST = 6  # 2^6 up and down is more than any strength asks for, and far from where bf16 ends


@dataclass(frozen=True)
class Reader:
    """A weight that is to be quantized and reads the input in question.

    Attributes:
        weight: fp32 [N, K].
        format: Its weight format.
        rotation: What its columns are multiplied by before they are rounded; None: nothing.
    """

    weight: torch.Tensor
    format: WeightFormat
    rotation: Rotation | None = None

    def quantized(self, factors: torch.Tensor, solver: Solver) -> QTensor:
        """The weight with its columns multiplied by `factors` [K], rotated and quantized."""
        scaled = self.weight * factors
        scaled = self.rotation.of(scaled) if self.rotation else scaled
        scales = solver.scales(scaled, block_amax(scaled, self.format), self.format)
        return QTensor(self.format, encode(scaled, scales, self.format), scales)

    def sees(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs [S, K] as the quantized weight is multiplied by them: rotated; int8 by token where kernels do so."""
        inputs = self.rotation.of(inputs) if self.rotation else inputs
        if not rounds_activations(self.format):
            return inputs
        codes, scales = quantize_rows(inputs)
        return codes.to(torch.float32) * scales

    def rounded(self, factors: torch.Tensor, solver: Solver) -> torch.Tensor:
        """What that stands for, fp32 [N, K], without rotation and factors."""
        values = self.quantized(factors, solver).dequantize()
        return (self.rotation.of(values) if self.rotation else values) / factors


def channel_exponents(readers: Sequence[Reader], hessian: torch.Tensor, solver: Solver) -> torch.Tensor:
    """Exponents e [K] (int8) such that reading x / 2^e disturbs the outputs of all readers least.

    Args:
        readers: Weights that read the same input.
        hessian: fp32 [K, K], the sum of x x^T over inputs x.
        solver: Chooses the scales of the weights.
    """
    best = torch.zeros(len(hessian), dtype=torch.int8)
    freed = FreedMemory()
    least = _output_error(readers, best, hessian, solver, freed)
    for exponents in _candidates(hessian.diagonal()):
        error = _output_error(readers, exponents, hessian, solver, freed)
        if error < least:
            best, least = exponents, error
    return best


def smoothing_exponents(
    readers: Sequence[Reader], inputs: torch.Tensor, solver: Solver, repeats: int = 1, head: int = 0
) -> torch.Tensor:
    """Exponents e [K] (int8) such that reading x / 2^e disturbs the outputs of all readers least, x being rounded, too.

    Candidates are those of SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): the largest input of a channel to the
    power a over its largest weight to the power 1 - a, for several a; they are compared by what they really do to
    outputs on some inputs, with activations rounded to int8 by token where kernels do so.

    Args:
        readers: Weights that read the same input.
        inputs: fp32 [S, K], some inputs.
        solver: Chooses the scales of the weights.
        repeats: Heads of the input that have to have the same exponents, since they are fed by the same channels: head
            `h` and the others of its `repeats`.
        head: Channels of a head.
    """
    rows = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0)
    size = _shared(inputs.abs().amax(0), repeats, head)
    rows = _shared(rows, repeats, head)
    live = (size > 0) & (rows > 0)
    log_size, log_rows = (torch.where(live, part, torch.ones_like(part)).log2() for part in (size, rows))
    best = torch.zeros(inputs.shape[1], dtype=torch.int8)
    wanted = [inputs @ reader.weight.T for reader in readers]
    least = _rounded_error(readers, best, inputs, wanted, solver)
    for strength in (0.0, *STRENGTHS):
        wished = strength * log_size - (1 - strength) * log_rows
        wished = wished - wished[live].mean() if bool(live.any()) else wished
        exponents = torch.where(live, wished.round().clamp(-LARGEST, LARGEST), torch.zeros_like(wished)).to(torch.int8)
        error = _rounded_error(readers, exponents, inputs, wanted, solver)
        if error < least:
            best, least = exponents, error
    return best


def _shared(values: torch.Tensor, repeats: int, head: int) -> torch.Tensor:
    """The largest of the heads that are fed by the same channels, for each of them."""
    if repeats == 1:
        return values
    by_head = values.view(-1, repeats, head)
    return by_head.amax(1, keepdim=True).expand_as(by_head).reshape(-1)


def _rounded_error(
    readers: Sequence[Reader],
    exponents: torch.Tensor,
    inputs: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    solver: Solver,
) -> float:
    """Squared error of the outputs of all readers."""
    factors = torch.exp2(exponents.to(torch.float32))
    total = 0.0
    for reader, expected in zip(readers, wanted, strict=True):
        found = reader.sees(inputs / factors) @ reader.quantized(factors, solver).dequantize().T
        total += float((found - expected).square().sum(dtype=torch.float64))
    return total


def _candidates(power: torch.Tensor) -> Iterator[torch.Tensor]:
    """Exponents that follow the root mean square of each channel more and more; 0 where a channel saw nothing."""
    live = power > 0
    size = torch.where(live, power, torch.ones_like(power)).log2() / 2
    size = torch.where(live, size - size[live].mean() if bool(live.any()) else size, torch.zeros_like(size))
    for strength in STRENGTHS:
        yield (size * strength).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def _output_error(
    readers: Sequence[Reader], exponents: torch.Tensor, hessian: torch.Tensor, solver: Solver, freed: FreedMemory
) -> float:
    """Sum of tr(D H D^T) over the readers, D being what quantization changes."""
    factors = torch.exp2(exponents.to(torch.float32))
    total = 0.0
    for reader in readers:
        change = reader.rounded(factors, solver) - reader.weight
        total += float(((change @ hessian) * change).sum(dtype=torch.float64))
        freed.add(TEMPORARIES * reader.weight.nbytes)
    return total
