"""The operator `tilewright::w4a8_grouped_mm`: int4 weights of many experts by FP8 activations sorted by expert.

Nothing here reads device memory on the host: the kernel finds its tiles from `offsets` itself, so the operator can be
captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch._C import _len_torch_dispatch_stack

from ..errors import LayoutError
from . import reference, support

with contextlib.suppress(ImportError):  # CPU builds of torch come without Triton
    import triton

    from . import triton_kernel
with contextlib.suppress(ImportError, AttributeError):  # other releases have another interface
    from . import gluon_launch

FP8 = torch.float8_e4m3fn
FEWEST_COLUMNS = 512  # below, the Gluon kernel compiles for minutes, and a product is too short to matter
LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
LIBRARY.define(
    "w4a8_grouped_mm(Tensor x, Tensor tiles, Tensor scales, Tensor offsets, Tensor a_scale, int group=128, "
    "int expected_rows=0) -> Tensor"
)


def w4a8_grouped_mm(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    group: int = 128,
    expected_rows: int = 0,
) -> torch.Tensor:
    """Out[m] = a_scale[m] * (x[m] @ w[e].T) for `offsets[e] <= m < offsets[e + 1]`.

    Each group's products are summed in fp32 and multiplied by the group's scale in fp32. On a CPU the reference runs.

    Args:
        x: float8_e4m3fn [M, K] activations, rows sorted by expert; K a multiple of `group`.
        tiles: uint8 [E, N/64, T, 64, 64] weights of layout `gpu-hopper-w4`, T = ceil(K / 128).
        scales: bf16 [E, 128T/group, N] weight scales of that layout.
        offsets: int32 [E + 1] first row of each expert, and the end of the last.
        a_scale: fp32 [1], or [M] for a scale per row.
        group: Columns that share a weight scale: 128, 64 or 32, as the file says.
        expected_rows: About how many of the rows are below `offsets[E]`, to choose the kernel's sizes by; 0 for all.
            The result does not depend on it.

    Returns:
        bf16 [M, N]; rows from `offsets[E]` on are unspecified.

    Raises:
        LayoutError: An operand does not have the dtype or shape above.
        KernelUnavailableError: No kernel runs on this device.
    """
    if x.is_cuda and not torch.compiler.is_compiling() and type(x) is torch.Tensor and not _len_torch_dispatch_stack():
        return _cuda(x, tiles, scales, offsets, a_scale, group, expected_rows)  # the dispatcher takes as long as this
    return torch.ops.tilewright.w4a8_grouped_mm.default(  # type: ignore[no-any-return]
        x, tiles, scales, offsets, a_scale, group, expected_rows
    )


Fact = tuple[torch.dtype, torch.Size, bool, torch.device]


def fact(tensor: torch.Tensor) -> Fact:
    """Dtype, shape, contiguity and device."""
    return tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.device


def check(x: Fact, tiles: Fact, scales: Fact, offsets: Fact, a_scale: Fact, group: int) -> None:
    """Refuse operands that do not fit together."""
    m, k = x[1]
    experts, blocks, depth = tiles[1][:3]
    if group not in {128, 64, 32}:
        raise LayoutError(f"w4a8_grouped_mm: group {group} is not 128, 64 or 32")
    if k % group:
        raise LayoutError(f"w4a8_grouped_mm: K = {k} is not a multiple of the group, {group}")
    wanted = {
        "x": (x, FP8, (m, k)),
        "tiles": (tiles, torch.uint8, (experts, blocks, -(-k // 128), 64, 64)),
        "scales": (scales, torch.bfloat16, (experts, depth * (128 // group), blocks * 64)),
        "offsets": (offsets, torch.int32, (experts + 1,)),
        "a_scale": (a_scale, torch.float32, (1,) if a_scale[1] == (1,) else (m,)),
    }
    for name, ((got_dtype, got_shape, contiguous, device), dtype, shape) in wanted.items():
        if got_dtype != dtype or tuple(got_shape) != shape or not contiguous:
            got = f"{got_dtype} {list(got_shape)}"
            raise LayoutError(f"w4a8_grouped_mm: `{name}` is {got}, not contiguous {dtype} {list(shape)}")
        if device != x[3]:
            raise LayoutError(f"w4a8_grouped_mm: `{name}` is on {device}, x on {x[3]}")


@functools.lru_cache(maxsize=4096)
def prepared(
    x: Fact, tiles: Fact, scales: Fact, offsets: Fact, a_scale: Fact, group: int, expected_rows: int
) -> gluon_launch.Prepared | None:
    """Check the operands, and prepare the Gluon kernel for them if it is to run."""
    check(x, tiles, scales, offsets, a_scale, group)
    (m, k), (experts, blocks), device = x[1], tiles[1][:2], x[3].index
    if not m or group != 128 or k < FEWEST_COLUMNS or not support.gluon_on(device):
        return None
    launch = support.launch_for(min(expected_rows or m, m), experts)
    return gluon_launch.prepare(device, m, k, experts, blocks * 64, a_scale[1][0] > 1, launch)


def _meta(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    group: int = 128,
    expected_rows: int = 0,
) -> torch.Tensor:
    check(fact(x), fact(tiles), fact(scales), fact(offsets), fact(a_scale), group)
    return x.new_empty(x.shape[0], tiles.shape[1] * 64, dtype=torch.bfloat16)


def _cpu(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    group: int = 128,
    expected_rows: int = 0,
) -> torch.Tensor:
    check(fact(x), fact(tiles), fact(scales), fact(offsets), fact(a_scale), group)
    return reference.grouped_mm(x, tiles, scales, offsets, a_scale, group).to(torch.bfloat16)


def _cuda(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    group: int = 128,
    expected_rows: int = 0,
) -> torch.Tensor:
    facts = fact(x), fact(tiles), fact(scales), fact(offsets), fact(a_scale)
    kernel = prepared(*facts, group, expected_rows)
    out = torch.empty((x.shape[0], tiles.shape[1] * 64), dtype=torch.bfloat16, device=x.device)
    if kernel:
        x_address, w_address, s_address = x.data_ptr(), tiles.data_ptr(), scales.data_ptr()
        if (x_address | w_address | s_address) % 16:
            raise LayoutError("w4a8_grouped_mm: x, tiles and scales must start at multiples of 16 bytes")
        addresses = x_address, w_address, s_address, a_scale.data_ptr(), out.data_ptr(), offsets.data_ptr()
        gluon_launch.start(kernel, *addresses)
    elif x.shape[0]:
        _run_triton(x, tiles, scales, offsets, a_scale, out, group)
    return out


LIBRARY.impl("w4a8_grouped_mm", _cuda, "CUDA")
LIBRARY.impl("w4a8_grouped_mm", _cpu, "CPU")
torch.library.register_fake("tilewright::w4a8_grouped_mm", _meta, lib=LIBRARY)


def _run_triton(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    out: torch.Tensor,
    group: int,
) -> None:
    (m, k), n, experts = x.shape, out.shape[1], tiles.shape[0]
    launch = support.triton_launch_for(m, experts)
    grid = (triton.cdiv(m, launch.block_m) + min(experts, m), triton.cdiv(n, launch.block_n))
    with torch.cuda.device(x.device):
        triton_kernel.w4a8_grouped[grid](
            x,
            tiles.view(torch.int8),
            scales,
            a_scale,
            out,
            offsets,
            experts,
            N=n,
            K=k,
            GROUP=group,
            EXPERTS=triton.next_power_of_2(experts),
            BLOCK_N=launch.block_n,
            BLOCK_M=launch.block_m,
            PER_TOKEN=a_scale.numel() > 1,
            num_stages=launch.stages,
            num_warps=launch.warps,
        )


def linear_w4a8(
    x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, n: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + bias` for one matrix in layout `gpu-hopper-w4`, each row of x rounded to FP8 by its own magnitude.

    Args:
        x: fp32, bf16 or fp16 [.., K].
        tiles: uint8 [N/64, T, 64, 64].
        scales: bf16 [G, N].
        n: N.
        bias: fp32 [N] or None.

    Returns:
        [.., N] in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    a_scale = reference.activation_scales(rows, "token", None)
    offsets = torch.arange(2, dtype=torch.int32, device=x.device) * rows.shape[0]
    group = tiles.shape[-3] * 128 // scales.shape[-2]
    quantized = reference.quantize(rows, a_scale)
    y = w4a8_grouped_mm(quantized, tiles[None], scales[None], offsets, a_scale.contiguous(), group)
    y = y if bias is None else y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], n)
