"""Modules whose weights are packed tensors, used as they lie in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from . import ops
from .errors import KernelUnavailableError
from .layouts.base import check_tensors
from .linear_kernels import LINEAR_KERNELS, LinearKernel
from .module_spec import ModuleSpec

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


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
        self.spec = spec
        self.kernel = find_kernel(name, spec, next(iter(tensors.values())).device.type)
        self.suffixes = tuple(spec.layout.specs(spec.format, spec.shape, spec.parts))
        for suffix in self.suffixes:
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
        return (
            f"[{shape}], {self.spec.format.id}, {self.spec.layout.id}, {self.kernel.op}, bias={self.bias is not None}"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the weight by suffix, without the bias."""
        return {suffix: self.get_buffer(suffix) for suffix in self.suffixes}


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


class PackedLinear(PackedWeight):
    """`y = x W^T + b` with a packed `W` [N, K]; `reference.py` states the arithmetic of each layout's operator."""

    def __init__(self, name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name, spec, tensors)
        self.out_features, self.in_features = spec.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x fp32, bf16 or fp16 [.., K] -> [.., N] in the same dtype."""
        return self.kernel.run(x, self.tensors(), self.out_features, self.bias)


class PackedStack(PackedWeight):
    """A stack of packed matrices [E, N, K], of which one is multiplied at a time."""

    def matmul(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """`x W[expert]^T + b[expert]`: [M, K] -> [M, N] in the dtype of `x`."""
        *_, n, _ = self.spec.shape
        parts = self.spec.parts
        tensors = {suffix: tensor[expert] for suffix, tensor in self.tensors().items()}
        bias = None if self.bias is None else self.bias[expert]
        if parts == 1:
            return self.kernel.run(x, tensors, n, bias)
        return torch.cat([self._part(x, tensors, bias, part) for part in range(parts)], -1)

    def _part(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], bias: torch.Tensor | None, part: int
    ) -> torch.Tensor:
        """One part's columns: every tensor of a layout is made of equal runs for the parts along its first axis."""
        rows = self.spec.shape[-2] // self.spec.parts
        mine = {suffix: tensor.chunk(self.spec.parts)[part] for suffix, tensor in tensors.items()}
        return self.kernel.run(x, mine, rows, None if bias is None else bias[part * rows : (part + 1) * rows])


class PackedExperts(nn.Module):
    """The routed experts of one layer: `sum_k weight_k * W2[id_k] (act(gate) * up)`, `gate, up = W13[id_k] x`.

    The activation is computed in fp32 and rounded to bf16 before the second product; routing weights are applied in
    fp32, experts are added in ascending order in fp32, and the sum is rounded once.

    Args:
        name: Name of the module, for messages.
        w13: Gate and up [E, 2I, H], parts 2, gate first.
        w2: Down [E, H, I].
        activation: Name of the activation.

    Raises:
        KernelUnavailableError: The activation is unknown.
    """

    def __init__(self, name: str, w13: PackedStack, w2: PackedStack, activation: str = "silu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise KernelUnavailableError(f"{name}: unknown activation `{activation}`; known are {known}")
        self.w13 = w13
        self.w2 = w2
        self.activation = activation
        self.num_experts = w13.spec.shape[0]

    def extra_repr(self) -> str:
        """Number of experts and the activation."""
        return f"experts={self.num_experts}, activation={self.activation}"

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            x: Activations [T, H].
            top_k_index: Expert numbers, integers [T, k]; one outside of this stack (such as -1) contributes nothing.
            top_k_weights: Routing weights [T, k].

        Returns:
            [T, H] in the dtype of `x`.
        """
        rows = x.to(torch.bfloat16)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = top_k_weights.to(torch.float32)
        first = self.w13.spec.first_expert
        for number in torch.unique(top_k_index).tolist():
            expert = number - first
            if not 0 <= expert < self.num_experts:
                continue
            token, slot = torch.where(top_k_index == number)
            gate, up = self.w13.matmul(expert, rows[token]).to(torch.float32).chunk(2, -1)
            inner = (ACTIVATIONS[self.activation](gate) * up).to(torch.bfloat16)
            y = self.w2.matmul(expert, inner).to(torch.float32)
            total.index_add_(0, token, y * weights[token, slot, None])
        return total.to(x.dtype)


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
    return [
        KernelUse(name, module.spec.layout.id, f"{module.kernel.op} on {statuses[chosen].name}", faster)
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
    ]
