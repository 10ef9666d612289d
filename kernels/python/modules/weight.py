"""One packed weight as a module: its tensors, used as they lie in the file, and the kernel that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..errors import KernelUnavailableError
from ..layouts.base import check_tensors
from ..ops.reference import quantize_rows
from ..packed.module_spec import ModuleSpec
from .linear_kernels import LINEAR_KERNELS, LinearKernel

Reduce = Callable[[torch.Tensor], torch.Tensor]

ACTIVATION_GROUP = 64  # columns that share a scale by group; docs/runtime.md compares it with 128
ACTIVATION_SCALES = ("token", "group")


class PackedWeight(nn.Module):
    """Holds one packed module's tensors as buffers that keep their dtype; base of what runs them.

    The tensors are never copied, trained or converted: they are no parameters, `to(dtype)` and its kin leave them as
    they are, and `state_dict` gives them under the names that they have in the file.

    Args:
        name: Name of the module, for messages.
        spec: What it is.
        tensors: Its tensors by suffix, on the device that is to run it.
        activation_scales: Where its operator rounds activations to int8: one scale for each "token", or for each
            "group" of `ACTIVATION_GROUP` columns of it, which costs less accuracy.

    Attributes:
        activation_group: Columns that share a scale; 0 for all of a token, and where activations stay 16-bit.
        rotation: Columns of a block of the input that are multiplied by a Hadamard matrix; 0 for none.

    Raises:
        LayoutError: A tensor is missing, or its dtype or shape is not what the layout says.
        KernelUnavailableError: No bundled kernel reads this layout on this device, or rotates its input.
    """

    bias: torch.Tensor | None

    def __init__(
        self, name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor], activation_scales: str = "token"
    ) -> None:
        super().__init__()
        check_tensors(name, tensors, spec.tensors())
        self.reduce: Reduce | None = None
        self.spec = spec
        self.kernel = find_kernel(name, spec, next(iter(tensors.values())).device.type)
        check_activation_scales(activation_scales)
        if spec.rotation and not self.kernel.quantizes:
            raise KernelUnavailableError(f"{name}: `{self.kernel.op.__name__}` does not rotate its input")
        self.activation_scales = activation_scales
        self.activation_group = ACTIVATION_GROUP if activation_scales == "group" and self.kernel.quantizes else 0
        self.rotation = spec.rotation.block if spec.rotation else 0
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
    def activations(self) -> str:
        """What its operator makes of its activations, in words."""
        if not self.kernel.quantizes:
            return "as the operator takes them"
        scales = f"group of {self.activation_group}" if self.activation_group else "token"
        return f"int8 by {scales}" + (f", rotated in blocks of {self.rotation}" if self.rotation else "")

    def sees(self, x: torch.Tensor) -> torch.Tensor:
        """What its operator takes activations for, before it multiplies them by the weight: fp32 of fp32 [M, K]."""
        if not self.kernel.quantizes:
            return x.clone()
        codes, scales = quantize_rows(x, self.activation_group, self.rotation)
        if self.activation_group:
            scales = scales.repeat_interleave(self.activation_group, 1)[:, : x.shape[1]]
        return codes.to(torch.float32) * scales

    @property
    def operator(self) -> str:
        """Name of the operator that multiplies by it, `torch.ops.tilewright.<operator>`."""
        return self.kernel.op.__name__

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight in the order of its kernel, without the bias."""
        buffers = self._buffers
        return [buffers[suffix] for suffix in self.kernel.suffixes]  # type: ignore[misc]  # none of them is None


def check_activation_scales(value: str) -> None:
    """Refuse a choice that there is not.

    Raises:
        KernelUnavailableError: It is neither "token" nor "group".
    """
    if value not in ACTIVATION_SCALES:
        raise KernelUnavailableError(f"activation_scales is `{value}`", hint="`token` or `group`")


def find_kernel(name: str, spec: ModuleSpec, device: str) -> LinearKernel:
    """The kernel that runs this layout on this device.

    Raises:
        KernelUnavailableError: There is none; the message says what there is.
    """
    known = ", ".join(f"{kernel.id} on {kernel.device}" for kernel in LINEAR_KERNELS.values())
    if spec.layout.id in LINEAR_KERNELS and LINEAR_KERNELS[spec.layout.id].device == device:
        return LINEAR_KERNELS[spec.layout.id].loaded()
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
