"""Modules whose weights are packed tensors, used as they lie in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .. import ops
from ..errors import KernelUnavailableError
from ..gpu.moe import w4a8_fused_experts
from ..layouts.base import check_tensors
from ..ops.experts import ACTIVATIONS, fused_experts, shared_expert
from ..packed.module_spec import ModuleSpec
from .linear_kernels import LINEAR_KERNELS, LinearKernel

Reduce = Callable[[torch.Tensor], torch.Tensor]


class PackedWeight(nn.Module):
    """Holds one packed module's tensors as buffers that keep their dtype; base of what runs them.

    The tensors are never copied, trained or converted: they are no parameters, `to(dtype)` and its kin leave them as
    they are, and `state_dict` gives them under the names that they have in the file.

    Args:
        name: Name of the module, for messages.
        spec: What it is.
        tensors: Its tensors by suffix, on the device that is to run it.

    Raises:
        LayoutError: A tensor is missing, or its dtype or shape is not what the layout says.
        KernelUnavailableError: No bundled kernel reads this layout on this device.
    """

    bias: torch.Tensor | None

    def __init__(self, name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        check_tensors(name, tensors, spec.tensors())
        self.reduce: Reduce | None = None
        self.spec = spec
        self.kernel = find_kernel(name, spec, next(iter(tensors.values())).device.type)
        if spec.rotation:  # never run as if it were not there
            raise KernelUnavailableError(f"{name}: no bundled kernel rotates its input")
        for suffix in self.kernel.suffixes:
            self.register_buffer(suffix, tensors[suffix])
        self.register_buffer("bias", tensors.get("bias"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedWeight:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def extra_repr(self) -> str:
        """Shape, format, layout, operator."""
        shape = ", ".join(str(size) for size in self.spec.shape)
        kernel = f"{self.spec.layout.id}, {self.operator}"
        return f"[{shape}], {self.spec.format.id}, {kernel}, bias={self.bias is not None}"

    @property
    def operator(self) -> str:
        """Name of the operator that multiplies by it, `torch.ops.tilewright.<operator>`."""
        return self.kernel.op.__name__

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight in the order of its kernel, without the bias."""
        buffers = self._buffers
        return [buffers[suffix] for suffix in self.kernel.suffixes]  # type: ignore[misc]  # none of them is None


def find_kernel(name: str, spec: ModuleSpec, device: str) -> LinearKernel:
    """The kernel that runs this layout on this device.

    Raises:
        KernelUnavailableError: There is none; the message says what there is.
    """
    known = ", ".join(f"{kernel.id} on {kernel.device}" for kernel in LINEAR_KERNELS.values())
    if spec.layout.id in LINEAR_KERNELS and LINEAR_KERNELS[spec.layout.id].device == device:
        return LINEAR_KERNELS[spec.layout.id]
    raise KernelUnavailableError(
        f"{name}: no bundled kernel runs layout `{spec.layout.id}` on {device}; there are {known}",
        hint="pack the checkpoint for this device with `pack-for-cpu` or `pack-for-gpu`",
    )


class _NoGradient(torch.autograd.Function):
    """Passes a result on and refuses a backward pass; without it torch would warn and lose the gradient."""

    @staticmethod
    def forward(ctx: object, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[None, None]:
        raise KernelUnavailableError(
            "packed layers compute no gradients", hint="run them under torch.inference_mode() or torch.no_grad()"
        )


def refuse_gradient(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result `y` of a packed layer for an `x` that wants a gradient; none can be taken through it."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return y
    result: torch.Tensor = _NoGradient.apply(y.detach(), x)
    return result


class PackedLinear(PackedWeight):
    """`y = x W^T + b` with a packed `W` [N, K]; `reference.py` states the arithmetic of each layout's operator.

    Attributes:
        reduce: Adds up the results of all ranks, where this one has some of the columns only; None by default.
    """

    def __init__(self, name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name, spec, tensors)
        self.out_features, self.in_features = spec.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x fp32, bf16 or fp16 [.., K] -> [.., N] in the same dtype."""
        # Decoding calls this hundreds of times a token: buffers are read where nn.Module keeps them, not as attributes.
        y = self.kernel.run(x, self._buffers, self.out_features)
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)


class PackedStack(PackedWeight):
    """Packed matrices that are multiplied within a larger operator.

    A stack [E, N, K] of `PackedExperts` or `GpuExperts`, a single one [N, K] of `PackedMlp`.
    """

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Weight, scale, zero points and bias as `fused_experts` takes them; None where the format has none."""
        find = self._buffers.get
        weight = find("weight")
        assert weight is not None
        return weight, find(self.kernel.scale), find("weight_zero_point"), find("bias")

    @property
    def operator(self) -> str:
        """One operator for all kinds of weights."""
        if len(self.spec.shape) == 2:
            return shared_expert.__name__
        return fused_experts.__name__ if self.kernel.device == "cpu" else w4a8_fused_experts.__name__


class PackedExperts(nn.Module):
    """The routed experts of one layer; `reference_experts.fused_experts` states what they compute.

    Args:
        name: Name of the module, for messages.
        w13: Gate and up [E, 2I, H], parts 2, gate first.
        w2: Down [E, H, I].
        activation: One of `ops_experts.ACTIVATIONS`.
        alpha: Slope of `clamped_swiglu`.
        limit: Bound of `clamped_swiglu`.

    Attributes:
        reduce: Adds up the results of all ranks, where this one has some of the experts or columns; None by default.

    Raises:
        KernelUnavailableError: The activation is unknown, or the stacks are of different kinds.
    """

    def __init__(
        self,
        name: str,
        w13: PackedStack,
        w2: PackedStack,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise KernelUnavailableError(f"{name}: unknown activation `{activation}`; known are {known}")
        if w13.kernel is not w2.kernel:
            layouts = f"w13 is in layout `{w13.kernel.id}`, w2 in `{w2.kernel.id}`"
            raise KernelUnavailableError(f"{name}: {layouts}, the kernel needs one for both")
        self.w13 = w13
        self.w2 = w2
        self.activation = activation
        self.alpha = alpha
        self.limit = limit
        self.reduce: Reduce | None = None

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation}"

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            x: Activations [T, H].
            top_k_index: Expert numbers, integers [T, k]; one outside of this stack (such as -1) contributes nothing.
            top_k_weights: Routing weights [T, k].

        Returns:
            [T, H] in the dtype of `x`.
        """
        w13, w2 = self.w13, self.w2
        (weight13, scale13, zeros13, bias13), (weight2, scale2, zeros2, bias2) = w13.operands(), w2.operands()
        y = fused_experts(
            x,
            top_k_weights.float().contiguous(),
            top_k_index.contiguous(),
            weight13,
            weight2,
            w2.spec.shape[-1],
            w13_scale=scale13,
            w2_scale=scale2,
            w13_zeros=zeros13,
            w2_zeros=zeros2,
            w13_bias=bias13,
            w2_bias=bias2,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
            first_expert=w13.spec.first_expert,
        )
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)


def build_module(name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    """The module that runs a packed weight: `PackedLinear` for [N, K], `PackedStack` for [E, N, K]."""
    kind = PackedLinear if len(spec.shape) == 2 else PackedStack
    return kind(name, spec, tensors)


@dataclass(frozen=True)
class KernelUse:
    """Which kernel runs one module.

    Attributes:
        module: Its name.
        layout: Id of its layout.
        kernel: Operator and instruction set.
        faster: Each faster instruction set and why it is not taken.
    """

    module: str
    layout: str
    kernel: str
    faster: tuple[str, ...]


def report_kernels(model: nn.Module) -> list[KernelUse]:
    """For each packed module below `model`: which kernel runs it, and why not a faster one."""
    statuses = ops.kernel_report()
    chosen = next(number for number, status in enumerate(statuses) if status.chosen)
    faster = tuple(f"{status.name}: {status.reason}" for status in statuses[:chosen])
    uses = []
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            on_cpu = module.kernel.device == "cpu"
            kernel = f"{module.operator} on {statuses[chosen].name if on_cpu else module.kernel.device}"
            uses.append(KernelUse(name, module.spec.layout.id, kernel, faster if on_cpu else ()))
    return uses
