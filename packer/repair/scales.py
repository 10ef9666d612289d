"""Scales under other names, types or shapes than engines look for: what the layouts say is right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.files import Checkpoint
from ..plan import Source, Step
from ..schemes.scheme import StorageSpec
from ..solvers.blocks import block_amax, block_view, encode, scales_from_amax
from .draft import Draft

ALIASES = (  # what tools have called the scales of a weight, in place of the names that engines look for
    *("weight_scale_inv", "weight_scale", "scale_inv", "scale", "scales", "weight_scales", "weight_inv_scale"),
    *("weight.scale_inv", "weight.scale", "weight_packed.scale"),
)
CODES_IN_A_COLUMN = (1, 2, 8)  # weights for each column of the tensor of codes


@dataclass(frozen=True)
class Quantized:
    """A weight whose codes and scales are those of a layout, whatever the scales are called.

    Attributes:
        module: Path of the module.
        storage: Its numbers and layout.
        codes: Name of the tensor of codes.
        scales: Name of the tensor of scales.
        wanted: Suffix, type and shape that the layout has for the scales.
    """

    module: str
    storage: StorageSpec
    codes: str
    scales: str
    wanted: tuple[str, TensorSpec]

    @property
    def is_right(self) -> bool:
        """Whether the scales have the right name already."""
        return self.scales == f"{self.module}.{self.wanted[0]}"


def quantized_weights(specs: Mapping[str, TensorSpec], storages: Sequence[StorageSpec]) -> Iterator[Quantized]:
    """Every 2-D weight of the specifications that is stored in one of the ways, the first that fits."""
    for name, spec in specs.items():
        module, _, last = name.rpartition(".")
        if module and len(spec.shape) == 2:
            fitting = (_fit(module, last, spec, specs, storage) for storage in storages)
            if found := next((weight for weight in fitting if weight), None):
                yield found


def _fit(
    module: str, last: str, codes: TensorSpec, specs: Mapping[str, TensorSpec], storage: StorageSpec
) -> Quantized | None:
    layout, fmt = storage.checkpoint_layout, storage.weight_format
    for count in CODES_IN_A_COLUMN:
        shape = (codes.shape[0], codes.shape[1] * count)
        if layout.accepts(fmt, shape):
            continue
        (suffix, first), *others = layout.specs(fmt, shape).items()
        if suffix != last or first != codes or not others:
            continue
        scale, wanted = others[0]
        for alias in (scale, *ALIASES):
            found = specs.get(f"{module}.{alias}")
            if found and found.dtype.is_floating_point and _same_grid(found.shape, wanted.shape):
                return Quantized(module, storage, f"{module}.{last}", f"{module}.{alias}", (scale, wanted))
    return None


def _same_grid(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the scales are as many, along the same axes; an axis of one may be left out."""
    return math.prod(found) == math.prod(wanted) and [n for n in found if n > 1] == [n for n in wanted if n > 1]


@dataclass(frozen=True)
class Restate(Step):
    """The same scales in another type and shape.

    Attributes:
        output: Name of the output tensor.
        spec: Its type and shape.
    """

    output: str
    spec: TensorSpec

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Step.run`."""
        return {self.output: sources[0].to(self.spec.dtype).reshape(self.spec.shape).contiguous()}


@dataclass(frozen=True)
class Recover(Step):
    """Scales in fp32 that somebody rounded to 16 bits after the codes were made.

    Where the model that was quantized gives, as `amax / qmax` of a block, a scale that rounds to the stored one and
    gives the very codes that are stored, that is the scale; elsewhere the stored value stays.

    Attributes:
        output: Name of the output tensor.
        spec: Its type and shape.
        original: The model that was quantized.
        weight: Name of the weight in it.
        storage: The numbers of the codes.
    """

    output: str
    spec: TensorSpec
    original: Checkpoint
    weight: str
    storage: StorageSpec

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Step.run`; the sources are the scales and the codes."""
        stored, codes = sources
        fmt = replace(self.storage.weight_format, scale_dtype=torch.float32)
        weight = self.original.tensor(Source(self.weight))
        scales = scales_from_amax(block_amax(weight, fmt), fmt)
        stored = stored.reshape(scales.shape)
        differs = encode(weight.to(torch.float32), scales, fmt).view(torch.uint8) != codes.view(torch.uint8)
        right = (block_view(differs.to(torch.float32), fmt).amax((1, 3)) == 0) & (scales.to(stored.dtype) == stored)
        return {self.output: torch.where(right, scales, stored.to(torch.float32)).reshape(self.spec.shape)}


def mend_scales(draft: Draft, storages: Sequence[StorageSpec], original: Checkpoint | None, *, keep_type: bool) -> None:
    """Name, type and shape of all scales as the layouts have them; one finding for each kind of damage.

    Args:
        draft: The checkpoint.
        storages: How weights may be stored.
        original: The model that was quantized, if it is at hand.
        keep_type: Engines read scales of this format in any type.
    """
    files = draft.checkpoint.files
    sources = {tensor.name: name for name, tensor in draft.tensors.items()}
    renamed: dict[tuple[str, str], list[str]] = {}
    restated: dict[tuple[TensorSpec, TensorSpec], list[str]] = {}
    recovered = 0
    for weight in list(quantized_weights(draft.specs, storages)):
        source = sources[weight.scales]
        tensor = draft.tensors[source]
        suffix, wanted = weight.wanted
        if not weight.is_right:
            tensor = replace(tensor, name=f"{weight.module}.{suffix}")
            renamed.setdefault((weight.scales.removeprefix(f"{weight.module}."), suffix), []).append(source)
        spec = TensorSpec(tensor.spec.dtype if keep_type else wanted.dtype, wanted.shape)
        if spec != tensor.spec:
            restated.setdefault((_without_size(tensor.spec, spec)), []).append(source)
            lost_digits = tensor.spec.dtype.itemsize < spec.dtype.itemsize
            if original and lost_digits and _holds(original, weight, draft.specs):
                step: Step = Recover(tensor.name, spec, original, weight.codes, weight.storage)
                tensor = replace(tensor, spec=spec, step=step, beside=(sources[weight.codes],))
                recovered += 1
            else:
                tensor = replace(tensor, spec=spec, step=Restate(tensor.name, spec))
        draft.tensors[source] = tensor
    for (old, new), names in renamed.items():
        problem = f"the scales of {len(names)} weights are called `{old}`, where engines look for `{new}` ({names[0]})"
        draft.found(files[names[0]], "scale-name", draft.engines, problem, f"called `{new}`")
    for (before, after), names in restated.items():
        problem = f"{len(names)} scales are {_told(before)}, where engines read {_told(after)} ({names[0]})"
        again = f"; {recovered} tensors of scales are taken anew from the model that was quantized" if recovered else ""
        draft.found(files[names[0]], "scale-type", draft.engines, problem, f"written as {_told(after)}{again}")


def _without_size(before: TensorSpec, after: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Both, with shapes only as far as they differ, so that one line can tell of all such tensors."""
    if before.shape == after.shape:
        return TensorSpec(before.dtype, ()), TensorSpec(after.dtype, ())
    return TensorSpec(before.dtype, before.shape), TensorSpec(after.dtype, after.shape)


def _told(spec: TensorSpec) -> str:
    kind = str(spec.dtype).removeprefix("torch.")
    return f"{kind} {list(spec.shape)}" if spec.shape else kind


def _holds(original: Checkpoint, weight: Quantized, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether the original has this weight as plain numbers, so that its scales can be worked out again."""
    if weight.codes not in original.files:
        return False
    spec = original.spec(weight.codes)
    return spec.shape == specs[weight.codes].shape and spec.dtype.is_floating_point and spec.dtype.itemsize > 1
