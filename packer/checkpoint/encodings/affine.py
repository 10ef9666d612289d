"""Integer codes with scales and zero points for groups of columns, however they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor

from ..encoding import Decoder


@dataclass(frozen=True)
class AffineDecoder(Decoder):
    """value[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] in fp32, g the group of column k.

    Attributes:
        bits: Bits of a code.
        k: Columns.
        group: Columns that share a scale; 0 for all of them.
        middle: Zero point of symmetric codes.
    """

    bits: int
    k: int
    group: int
    middle: int

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Unsigned codes of some rows: uint8 [rows, K]."""
        raise NotImplementedError

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Scales of some rows: [rows, groups]."""
        raise NotImplementedError

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """Zero points of some rows: uint8 [rows, groups]; None if all of them are `middle`."""
        return None

    def groups(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Group of each column: int64 [K]."""
        return torch.arange(self.k) // (self.group or self.k)

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        codes, index = self.unpack(tensors, rows).to(torch.float32), self.groups(tensors)
        zeros = self.zeros(tensors, rows)
        codes -= self.middle if zeros is None else zeros.to(torch.float32)[:, index]
        return codes.mul_(self.scales(tensors, rows).to(torch.float32)[:, index])

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`: groups wider than those of the format have their scales repeated."""
        everything = self._all_rows(tensors)
        codes = self.unpack(tensors, everything)
        repeats = (self.group or self.k) // fmt.block_k
        scales = self.scales(tensors, everything).to(torch.float32).repeat_interleave(repeats, 1)
        zeros = self.zeros(tensors, everything)
        if zeros is not None:
            zeros = zeros.repeat_interleave(repeats, 1).contiguous()
        return QTensor(fmt, codes.contiguous(), scales.contiguous(), zeros)

    def _all_rows(self, tensors: Sequence[torch.Tensor]) -> slice:
        return slice(0, self.height(tensors), 1)

    def height(self, tensors: Sequence[torch.Tensor]) -> int:
        """Rows of the matrix."""
        raise NotImplementedError
