"""CPU layout of symmetric int4 weights with bf16 scales and nothing else: scales and codes of a block side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import INT4_BY_GROUP, WeightFormat
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors
from .cpu_blocks import BLOCK_N, check_shape, crop
from .cpu_int4 import CPU_VNNI_INT4, by_row, codes_of

SCALE_BYTES = 2 * BLOCK_N


@dataclass(frozen=True)
class CpuInt4Compact:
    """Blocks of 32 rows and one group of columns: 64 bytes of scales, then the codes.

    `weight` is uint8 [.., Nc, G, 16 * group + 64], Nc and G as in `cpu-vnni-int4`: 4.5 bits a weight in groups of 32,
    4.125 in groups of 128, where that has 6.25 and 4.56. A block begins with the bf16 scales of its rows; its codes
    follow in the order of `cpu-vnni-int4`, each 8 more than what it stands for. Padded rows are zero throughout, padded
    columns hold 8.
    """

    id: str = "cpu-int4-compact"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Any [N, K] or [E, N, K] of int4 in groups of 32, 64 or 128."""
        if fmt not in INT4_BY_GROUP.values():
            return Reject(self.id, f"holds int4 in groups of {', '.join(map(str, INT4_BY_GROUP))}, not {fmt.id}")
        return check_shape(self.id, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """`weight`."""
        *lead, blocks, groups, _ = CPU_VNNI_INT4.specs(fmt, shape, parts)["weight"].shape
        return {"weight": TensorSpec(torch.uint8, (*lead, blocks, groups, 16 * fmt.block_k + SCALE_BYTES))}

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The blocks of `cpu-vnni-int4` without their sums, the scales before them.

        Raises:
            LayoutError: A zero point is not 8, or a scale is no number of bf16.
        """
        if not q.format.has_usual_zeros(q.zeros):
            raise LayoutError(f"{self.id}: holds symmetric codes only, this weight has zero points")
        other = CPU_VNNI_INT4.pack(QTensor(q.format, q.codes, q.scales, parts=q.parts))
        scales = other["weight_scale"].to(torch.bfloat16)
        if not torch.equal(scales.to(torch.float32), other["weight_scale"]):
            raise LayoutError(f"{self.id}: stores bf16 scales, those of this weight are no such numbers")
        codes = other["weight"][..., : 16 * q.format.block_k]
        return {"weight": torch.cat([scales.view(torch.uint8), codes], -1)}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(self.id, tensors, self.specs(fmt, shape, parts))
        weight = tensors["weight"]
        stored = weight[..., :SCALE_BYTES].contiguous().view(torch.bfloat16)
        codes = codes_of(weight[..., SCALE_BYTES:].contiguous().view(torch.int32))
        *_, n, k = shape
        scales = crop(by_row(stored), n, parts, fmt.scale_columns(k))
        scales = scales.to(torch.float32, memory_format=torch.contiguous_format)
        return QTensor(fmt, crop(codes, n, parts, k), scales, parts=parts)


CPU_INT4_COMPACT = CpuInt4Compact()
