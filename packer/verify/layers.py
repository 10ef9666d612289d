"""Level `layers`: packed layers run by the bundled kernels, against float products of what their codes stand for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import VerifyError
from tilewright.kernels.modules import (
    PackedExperts,
    PackedLinear,
    PackedStack,
    PackedWeight,
    build_module,
)
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import packed_modules
from ..plan import Source
from .results import LayerResult

ROWS = (1, 5, 33)  # a decode step, a small batch, more rows than a tile
TOP_K = 2


def layer_names(checkpoint: Checkpoint) -> list[str]:
    """Linears by their name, the two stacks of a layer's experts by the name that they share."""
    return list(dict.fromkeys(_layer(name, spec) for name, spec in packed_modules(checkpoint).items()))


def check_layers(checkpoint: Checkpoint) -> Iterator[LayerResult]:
    """Run every packed layer of a checkpoint, one in memory at a time; none if it is not packed."""
    specs = packed_modules(checkpoint)
    for layer in layer_names(checkpoint):
        members = {name: spec for name, spec in specs.items() if _layer(name, spec) == layer}
        sources = [Source(f"{name}.{suffix}") for name, spec in members.items() for suffix in spec.tensors()]
        modules = {name.removeprefix(layer): _module(checkpoint, name, spec) for name, spec in members.items()}
        generator = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
        with torch.inference_mode():
            if "" in modules:
                yield _check_linear(layer, modules[""], generator)
            else:
                yield _check_experts(layer, modules, generator)
        for source in sources:
            checkpoint.forget(source)


def _layer(name: str, spec: ModuleSpec) -> str:
    return name if len(spec.shape) == 2 else name.rpartition(".")[0]


def _module(checkpoint: Checkpoint, name: str, spec: ModuleSpec) -> PackedWeight:
    return build_module(name, spec, {s: checkpoint.tensor(Source(f"{name}.{s}")) for s in spec.tensors()})


def _check_linear(name: str, module: PackedWeight, generator: torch.Generator) -> LayerResult:
    assert isinstance(module, PackedLinear)
    linear = _Float(module)
    errors = []
    for rows in ROWS:
        x = _activations(rows, module.in_features, generator)
        errors.append(_relative(linear(x), module(x)))
    return LayerResult(
        name, module.spec.format.id, module.spec.layout.id, module.kernel.op.__name__, ROWS, _worst(errors)
    )


def _check_experts(name: str, modules: dict[str, PackedWeight], generator: torch.Generator) -> LayerResult:
    upper, lower = modules.get(".w13"), modules.get(".w2")
    if not isinstance(upper, PackedStack) or not isinstance(lower, PackedStack):
        raise VerifyError(f"{name}: holds {', '.join(modules)}, experts are the stacks .w13 and .w2")
    experts = upper.spec.shape[0]
    module = PackedExperts(name, upper, lower)
    top_k = min(TOP_K, experts)
    pairs = []
    rows = (*ROWS[:-1], max(ROWS[-1], math.ceil(experts / top_k)))  # the last run reaches every expert
    for count in rows:
        x = _activations(count, upper.spec.shape[-1], generator)
        ids = torch.arange(count * top_k).reshape(count, top_k) % experts
        weights = torch.rand(count, top_k, generator=generator) + 0.1
        expected = torch.zeros(count, lower.spec.shape[-2])
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            gate, up = _Float(upper, expert)(x[token]).to(x.dtype).to(torch.float32).chunk(2, -1)
            hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
            expected.index_add_(0, token, _Float(lower, expert)(hidden) * weights[token, slot, None])
        pairs.append((expected, module(x, ids + upper.spec.first_expert, weights)))
    # All runs together: between the products an activation that lies on the border of two int8 codes may fall either
    # way, which is no error, but 1% of a lone token.
    relative = _relative(*(torch.cat(side) for side in zip(*pairs, strict=True)))
    kernel = f"experts, {upper.kernel.op.__name__}"
    return LayerResult(name, upper.spec.format.id, upper.spec.layout.id, kernel, rows, relative)


@dataclass
class _Float:
    """A packed matrix, or one of a stack, as a float product of what its codes stand for."""

    module: PackedWeight
    expert: int | None = None

    def __post_init__(self) -> None:
        spec, bias = self.module.spec, self.module.bias
        tensors = {
            suffix: self.module.get_buffer(suffix) for suffix in spec.layout.specs(spec.format, spec.stored, spec.parts)
        }
        shape = spec.stored
        if self.expert is not None:
            tensors = {suffix: tensor[self.expert : self.expert + 1] for suffix, tensor in tensors.items()}
            shape, bias = (1, *shape[1:]), None if bias is None else bias[self.expert]
        q: QTensor = spec.layout.unpack(tensors, spec.format, shape, spec.parts)
        self._values = q.dequantize().reshape(shape[-2:])
        self._bias = torch.zeros(shape[-2]) if bias is None else bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module.sees(x.to(torch.float32)) @ self._values.T + self._bias


def _activations(rows: int, k: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator).exp()
    return x.to(torch.bfloat16)


def _relative(expected: torch.Tensor, actual: torch.Tensor) -> float:
    norm = float(expected.norm())
    error = float((actual.to(torch.float32) - expected).norm())
    return error / norm if norm else error


def _worst(errors: list[float]) -> float:
    """The largest; NaN is the worst."""
    return max(errors, key=lambda error: (math.isnan(error), error))
