"""Compile the Hopper kernel for a shape, and start it with little work on the host.

Triton's own way to a launch takes as long as a short product. Here everything that shapes decide is made once, tensor
maps are kept by address, and the compiled launcher is called directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from .gluon_kernel import w4a8_grouped
from .support import Launch

X_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)
Box = tuple[int, int, int, tuple[int, ...]]  # swizzle, bytes and number of an element's type, shape


def constants(n: int, groups: int, per_token: bool, launch: Launch) -> dict[str, Any]:
    """Compile-time arguments of the kernel."""
    return {
        "N": n,
        "GROUPS": groups,
        "PER_TOKEN": per_token,
        "BLOCKS": launch.blocks,
        "TILE_M": launch.tile_m,
        "STAGES": launch.stages,
        "PRODUCTS": launch.products,
        "PIECE": launch.piece,
        "REGISTERS": launch.registers,
    }


class Address:
    """What a descriptor needs of a tensor, without keeping memory alive."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """An aligned address."""
        return 0


def descriptor(dtype: torch.dtype, rows: int, columns: int, layout: Any) -> TensorDescriptor:
    """A descriptor with boxes of this size, to compile with."""
    return TensorDescriptor(Address(dtype), [rows, columns], [columns, 1], [rows, columns], layout)


@dataclass(frozen=True)
class Compiled:
    """A kernel ready to start.

    Attributes:
        start: The launcher that Triton compiled for it.
        head: Its arguments between the stream and the kernel's own.
        tail: Its arguments after the kernel's own.
        boxes: What it copies at once: few activation rows, more of them, a weight tile.
        programs: How many programs fill the device.
    """

    start: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    boxes: tuple[Box, Box, Box]
    programs: int


@functools.cache
def compiled(device: int, n: int, groups: int, per_token: bool, launch: Launch) -> Compiled:
    """The kernel for one shape on one device."""
    x16, x64 = (descriptor(torch.float8_e4m3fn, rows, 128, X_LAYOUT) for rows in (16, 64))
    w = descriptor(torch.int8, 64, 64, W_LAYOUT)
    pointers = (Address(dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.int32))
    values = constants(n, groups, per_token, launch)
    with torch.cuda.device(device):
        options = {"num_warps": 4, "maxnreg": launch.max_registers}
        kernel = w4a8_grouped.warmup(x16, x64, w, *pointers, 2, grid=(1,), **options, **values)
        run = kernel.run  # loads the kernel onto the device
    assert not run.global_scratch_size
    assert not run.profile_scratch_size
    start = inspect.getclosurevars(run.launch).nonlocals["launcher"]
    boxes = (
        (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], tuple(meta["block_size"]))
        for meta in kernel.metadata.tensordesc_meta
    )
    head = kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, kernel.packed_metadata
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Compiled(
        start,
        (*head, None, None, None),
        tuple(values.values()),
        tuple(boxes),  # type: ignore[arg-type]
        multiprocessors * launch.programs,
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A kernel, and what the shapes of its operands say.

    Attributes:
        kernel: The kernel.
        device: Index of its device.
        grid: Programs to start.
        x_shape: Rows and columns of the activations.
        w_rows: Rows of 64 bytes of the weight tiles.
        tail: Arguments after the addresses.
    """

    kernel: Compiled
    device: int
    grid: int
    x_shape: tuple[int, int]
    w_rows: int
    tail: tuple[Any, ...]


def prepare(device: int, rows: int, columns: int, experts: int, n: int, per_token: bool, launch: Launch) -> Prepared:
    """The kernel for `rows` activation rows and weights [experts, n, columns]."""
    groups = -(-columns // 128)
    kernel = compiled(device, n, groups, per_token, launch)
    most = (-(-rows // launch.tile_m) + min(experts, rows)) * -(-n // (128 * launch.blocks))  # tiles there can be
    grid = min(kernel.programs, most)
    return Prepared(kernel, device, grid, (rows, columns), experts * n * groups, (experts, *kernel.tail))


def tensor_map(box: Box, address: int, rows: int, columns: int) -> tuple[Any, ...]:
    """The launcher's arguments for a matrix of bytes [rows, columns] read in boxes; what lies beyond reads as zero."""
    swizzle, size, dtype, shape = box
    fill = driver.active.utils.fill_tma_descriptor
    tensor = fill(address, swizzle, size, dtype, list(shape), [rows, columns], [columns, 1], 0)
    return tensor, rows, columns, columns, 1


@functools.lru_cache(maxsize=16384)
def tensor_maps(prepared: Prepared, x: int, w: int) -> tuple[Any, ...]:
    """The launcher's arguments for activations and weight tiles at these addresses."""
    few, more, tile = prepared.kernel.boxes
    shape = prepared.x_shape
    return *tensor_map(few, x, *shape), *tensor_map(more, x, *shape), *tensor_map(tile, w, prepared.w_rows, 64)


def start(prepared: Prepared, x: int, w: int, scales: int, a_scale: int, out: int, offsets: int) -> None:
    """Start a kernel with operands at these addresses, on the current stream of its device."""
    kernel, device = prepared.kernel, prepared.device
    if torch._C._cuda_getDevice() != device:  # asking costs less than the context
        with torch.cuda.device(device):
            return start(prepared, x, w, scales, a_scale, out, offsets)
    kernel.start(
        prepared.grid,
        1,
        1,
        torch._C._cuda_getCurrentRawStream(device),
        *kernel.head,
        *tensor_maps(prepared, x, w),
        scales,
        a_scale,
        out,
        offsets,
        *prepared.tail,
    )
    return None
