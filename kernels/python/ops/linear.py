"""The operators of packed layers: y = x · wᵀ (+ bias), one function for each kind of weight.

All take activations `x` [..., K] in fp32, bf16 or fp16 and give `y` [..., n] in the same dtype; `weight` is the packed
tensor as it lies in the file (docs/format.md), whose rows are padded with zeros to a multiple of 32 and whose columns
are too; `n` is the logical number of output features and `bias` fp32 [n]. `tilewright.kernels.ops.reference` states
what each computes. On one machine a row gives the same bits whatever the batch and the number of threads.
Inputs are never changed; `out`, contiguous and of the shape and dtype of the result, must not share memory with them.

The same operators are `torch.ops.tilewright.*` and work under `torch.compile`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native  # noqa: F401  (loads the operators)
from . import fakes

# Looked up once: finding an overload by its name takes as long as a small product.
_LINEAR_BF16, _LINEAR_BF16_OUT = torch.ops.tilewright.linear_bf16.default, torch.ops.tilewright.linear_bf16.out
_LINEAR_INT8, _LINEAR_INT8_OUT = torch.ops.tilewright.linear_int8.default, torch.ops.tilewright.linear_int8.out
_LINEAR_FP8, _LINEAR_FP8_OUT = torch.ops.tilewright.linear_fp8.default, torch.ops.tilewright.linear_fp8.out
_LINEAR_INT4, _LINEAR_INT4_OUT = torch.ops.tilewright.linear_int4.default, torch.ops.tilewright.linear_int4.out
_LINEAR_COMPACT = torch.ops.tilewright.linear_int4_compact.default
_LINEAR_COMPACT_OUT = torch.ops.tilewright.linear_int4_compact.out
_LINEAR_MXFP4, _LINEAR_MXFP4_OUT = torch.ops.tilewright.linear_mxfp4.default, torch.ops.tilewright.linear_mxfp4.out


def linear_bf16(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Linear layer with a bf16 weight; activations are rounded to bf16, sums are fp32.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: bf16 [N', K'] packed in pairs of columns; N' is n rounded up to 32 (16 is accepted), K' is K rounded up.
        n: Output features.
        bias: fp32 [n].
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    if out is not None:
        _LINEAR_BF16_OUT(x, weight, n, bias, out=out)
        return out
    result: Tensor = _LINEAR_BF16(x, weight, n, bias)
    return result


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    n: int,
    bias: Tensor | None = None,
    activation_group: int = 0,
    rotation: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with an int8 weight; activations are quantized to int8, sums are exact integers within a scale.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: int8 [N', K' + 4] packed in quads of columns, with 32 int32 corrections at the end of each 32 rows.
        scale: fp32, one per packed row (N' elements, or n).
        n: Output features.
        bias: fp32 [n].
        activation_group: Columns of x that share a scale, 64 or 128; 0: the whole row.
        rotation: Columns of a block of x that a Hadamard matrix multiplies first, as it did the weight's; 0: none.
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    # Torch looks for an override in every argument that it is given, which takes longer than to fill in a default.
    rest = (activation_group, rotation) if activation_group or rotation else ()
    if out is not None:
        _LINEAR_INT8_OUT(x, weight, scale, n, bias, *rest, out=out)
        return out
    result: Tensor = _LINEAR_INT8(x, weight, scale, n, bias, *rest)
    return result


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, n: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Linear layer with an FP8 weight in blocks of 128 x 128; activations are rounded to bf16, codes decoded exactly.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: float8_e4m3fn [N', K'] packed in pairs of columns.
        scale: fp32 [ceil(n / 128), ceil(K / 128)] multipliers, as in the checkpoint.
        n: Output features.
        bias: fp32 [n].
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    if out is not None:
        _LINEAR_FP8_OUT(x, weight, scale, n, bias, out=out)
        return out
    result: Tensor = _LINEAR_FP8(x, weight, scale, n, bias)
    return result


def linear_int4(
    x: Tensor,
    weight: Tensor,
    zeros: Tensor,
    scale: Tensor,
    n: int,
    bias: Tensor | None = None,
    int8_activations: bool = True,
    activation_group: int = 0,
    rotation: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with an int4 weight in groups of 32, 64 or 128 columns.

    Args:
        x: fp32, bf16 or fp16 [..., K]; K is a multiple of the group.
        weight: uint8 [ceil(n / 32), K / group, 16 * group + 128] packed nibbles and sums.
        zeros: int8 [ceil(n / 32), K / group, 32] zero points.
        scale: fp32 [ceil(n / 32), K / group, 32].
        n: Output features.
        bias: fp32 [n].
        int8_activations: Quantize activations to int8 (W4A8); otherwise round them to bf16 (W4A16).
        activation_group: As in `linear_int8`, of W4A8; no smaller than the weight's group, which stands in for it then.
        rotation: As in `linear_int8`.
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    is_usual = int8_activations and not activation_group and not rotation
    rest = () if is_usual else (int8_activations, activation_group, rotation)  # as in `linear_int8`
    if out is not None:
        _LINEAR_INT4_OUT(x, weight, zeros, scale, n, bias, *rest, out=out)
        return out
    result: Tensor = _LINEAR_INT4(x, weight, zeros, scale, n, bias, *rest)
    return result


def linear_int4_compact(
    x: Tensor,
    weight: Tensor,
    n: int,
    bias: Tensor | None = None,
    int8_activations: bool = True,
    activation_group: int = 0,
    rotation: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`linear_int4` of a symmetric weight whose bf16 scales lie before the codes of each block: the same bits.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: uint8 [ceil(n / 32), ceil(K / group), 16 * group + 64], the group 32, 64 or 128.
        n: Output features.
        bias: fp32 [n].
        int8_activations: As in `linear_int4`, like the next two.
        activation_group: Columns of x that share a scale.
        rotation: Columns of a block of x that a Hadamard matrix multiplies first.
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    if out is not None:
        _LINEAR_COMPACT_OUT(x, weight, n, bias, int8_activations, activation_group, rotation, out=out)
        return out
    result: Tensor = _LINEAR_COMPACT(x, weight, n, bias, int8_activations, activation_group, rotation)
    return result


def linear_mxfp4(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Linear layer with an MXFP4 weight; activations are rounded to bf16, weights are exact.

    On AMX, products of bf16, where weights below 2^-126 count as zero. Elsewhere the bf16 activations of each group
    become int16 with a power of two, which changes none of at least 1 / 128 of the largest: sums of a group are exact
    then, and bits the same on all instruction sets but AMX. A weight that fp32 does not reach (6 * 2^126) is infinite,
    and under the scale 255 all are NaN.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: uint8 [ceil(n / 32), ceil(K / 64), 1088], blocks of 32 x 64: scales, then codes.
        n: Output features.
        bias: fp32 [n].
        out: Takes the result.

    Returns:
        [..., n] in the dtype of `x`; `out` if that is given.
    """
    if out is not None:
        _LINEAR_MXFP4_OUT(x, weight, n, bias, out=out)
        return out
    result: Tensor = _LINEAR_MXFP4(x, weight, n, bias)
    return result


def bmm(a: Tensor, weight: Tensor, n: int, scale: Tensor | None = None) -> Tensor:
    """Batched matrix product `a[b] · weight[b]ᵀ`, for the absorbed `w_kc` and `w_vc` of latent attention.

    Each matrix is multiplied as by `linear_bf16` or `linear_fp8`.

    Args:
        a: fp32, bf16 or fp16 [B, M, K], any strides.
        weight: Packed bf16 or float8_e4m3fn [B, N', K'].
        n: Output features.
        scale: fp32 [B, ceil(n / 128), ceil(K / 128)] of FP8.

    Returns:
        [B, M, n] in the dtype of `a`, contiguous.
    """
    result: Tensor = torch.ops.tilewright.bmm(a, weight, n, scale)
    return result


def _fake_linear(x: Tensor, weight: Tensor, n: int, *_rest: object, **_named: object) -> Tensor:
    return fakes.rows_like(x, n, weight.shape[0])


def _fake_scaled(x: Tensor, weight: Tensor, _scale: Tensor, n: int, *_rest: object, **_named: object) -> Tensor:
    return fakes.rows_like(x, n, weight.shape[0])


def _fake_int4(
    x: Tensor, weight: Tensor, _zeros: Tensor, _scale: Tensor, n: int, *_rest: object, **_named: object
) -> Tensor:
    return fakes.rows_like(x, n, 32 * weight.shape[0])


def _fake_blocks(x: Tensor, weight: Tensor, n: int, *_rest: object, **_named: object) -> Tensor:
    return fakes.rows_like(x, n, 32 * weight.shape[0])


def _fake_bmm(a: Tensor, weight: Tensor, n: int, _scale: Tensor | None = None) -> Tensor:
    return fakes.rows_like(a, n, weight.shape[-2])


fakes.register("linear_bf16", _fake_linear)
fakes.register("linear_int8", _fake_scaled)
fakes.register("linear_fp8", _fake_scaled)
fakes.register("linear_int4", _fake_int4)
fakes.register("linear_mxfp4", _fake_blocks)
fakes.register("linear_int4_compact", _fake_blocks)
fakes.register("bmm", _fake_bmm)
for _name in ("linear_bf16", "linear_int8", "linear_fp8", "linear_int4", "linear_mxfp4", "linear_int4_compact"):
    fakes.register(f"{_name}.out", fakes.nothing)
