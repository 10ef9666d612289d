"""The layouts that CUTLASS W4A8 kernels of SGLang and TensorRT-LLM take as they are.

Weight, `weight` int8 [.., N, K/2]: byte (n, j) holds columns 2j (bits 3..0) and 2j + 1 (bits 7..4), each code minus 8
as two's complement.

Scales, `scales` bf16 [.., G/a, a*N] with G = K/128: a scales of neighbouring groups lie together, because one tile of
the kernel covers a groups; element (n, g) is at flat position `(g // a) * a*N + a*n + g % a` of its expert.
`gpu-cutlass-w4` (SGLang) has a = 4 where G is a multiple of 4, else 1. `gpu-trtllm-w4` also has a = 2 where G is a
multiple of 2 alone, and the up rows of a gate-and-up weight (`parts` 2) before its gate rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import INT4_G128, WeightFormat
from ..tensors import QTensor, Reject, TensorSpec

GROUP = INT4_G128.block_k


@dataclass(frozen=True)
class GpuCutlassW4:
    """Int4 weights as on disk, scales interleaved along K groups; see the module for the byte formula.

    Attributes:
        id: Stable name of the layout.
        interleaves: How many groups may lie together, largest first; the first that divides G is taken.
        up_first: Whether the rows of the second part (up) come before those of the first (gate).
        version: Version of the byte formula.
    """

    id: str
    interleaves: tuple[int, ...]
    up_first: bool = False
    version: int = 1

    def interleave(self, k: int) -> int:
        """How many neighbouring groups' scales lie together for a weight of `k` columns."""
        return next(a for a in self.interleaves if k // GROUP % a == 0)

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt != INT4_G128:
            return Reject(self.id, f"weight format {fmt.id} is not {INT4_G128.id}", "quantize with `--scheme w4afp8`")
        if len(shape) not in {2, 3}:
            return Reject(self.id, f"shape {list(shape)} is neither [N, K] nor [E, N, K]")
        if shape[-1] % GROUP:
            return Reject(self.id, f"K = {shape[-1]} is not a multiple of the group, {GROUP}")
        if shape[-2] % parts:
            return Reject(self.id, f"N = {shape[-2]} is not made of {parts} equal parts")
        return None

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of `weight` and `scales`."""
        if reject := self.accepts(fmt, shape, parts):
            raise LayoutError(str(reject))
        *lead, n, k = shape
        a = self.interleave(k)
        return {
            "weight": TensorSpec(torch.int8, (*lead, n, k // 2)),
            "scales": TensorSpec(torch.bfloat16, (*lead, k // GROUP // a, a * n)),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Codes to two's complement nibbles, scales rounded to bf16 as the kernels read them."""
        scales = symmetric_scales(self.id, q)
        self.specs(q.format, q.shape, q.parts)
        weight = nibble_bytes(self._order(q.codes, q.parts))
        groups = self._order(scales, q.parts).to(torch.bfloat16)
        *lead, n, g = groups.shape
        a = self.interleave(q.shape[-1])
        interleaved = groups.view(*lead, n, g // a, a).transpose(-3, -2).reshape(*lead, g // a, a * n)
        return {"weight": weight, "scales": interleaved.contiguous()}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """Codes and scales again; exact for scales that are bf16 numbers.

        Raises:
            LayoutError: A tensor is missing or does not have the dtype and shape that `specs` demands.
        """
        check_tensors(self.id, tensors, self.specs(fmt, shape, parts))
        *lead, n, k = shape
        a = self.interleave(k)
        groups = tensors["scales"].reshape(*lead, k // GROUP // a, n, a).transpose(-3, -2).reshape(*lead, n, k // GROUP)
        codes = nibble_codes(tensors["weight"])
        return QTensor(fmt, self._order(codes, parts), self._order(groups.to(torch.float32), parts), parts=parts)

    def _order(self, rows: torch.Tensor, parts: int) -> torch.Tensor:
        """Change between gate-first and up-first rows (dimension -2) where this layout wants it; its own inverse."""
        if not self.up_first or parts != 2:
            return rows.contiguous()
        gate, up = rows.chunk(2, -2)
        return torch.cat((up, gate), -2)


def symmetric_scales(layout: str, q: QTensor) -> torch.Tensor:
    """The scales of `q`: fp32 [.., N, G].

    Raises:
        LayoutError: `q` has zero points, which kernels for symmetric int4 cannot apply, or no scales.
    """
    if q.zeros is not None:
        raise LayoutError(f"{layout}: the weight has zero points, and this layout holds symmetric codes only")
    if q.scales is None:
        raise LayoutError(f"{layout}: weight format {q.format.id} has no scales")
    return q.scales


def nibble_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, even column low, each minus 8 as two's complement: int8 [.., K/2] of uint8 codes [.., K]."""
    pairs = codes.view(torch.int16)  # one element is column 2j + 256 * column 2j + 1
    return ((pairs >> 4) | pairs).bitwise_xor_(0x88).to(torch.int8)


def nibble_codes(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `nibble_bytes`: uint8 codes [.., K] of int8 [.., K/2]."""
    pairs = weight.contiguous().view(torch.uint8).to(torch.int16)
    return (((pairs << 4) | pairs) & 0x0F0F).bitwise_xor_(0x0808).view(torch.uint8)


def check_tensors(layout: str, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Demand every tensor of `specs`.

    Raises:
        LayoutError: A tensor is missing or differs in dtype or shape.
    """
    for suffix, spec in specs.items():
        if suffix not in tensors:
            raise LayoutError(f"{layout}: tensor `{suffix}` is missing")
        if TensorSpec.of(tensors[suffix]) != spec:
            got = tensors[suffix]
            raise LayoutError(
                f"{layout}: `{suffix}` is {got.dtype} {list(got.shape)}, not {spec.dtype} {list(spec.shape)}"
            )


GPU_CUTLASS_W4 = GpuCutlassW4("gpu-cutlass-w4", interleaves=(4, 1))
GPU_TRTLLM_W4 = GpuCutlassW4("gpu-trtllm-w4", interleaves=(4, 2, 1), up_first=True)
