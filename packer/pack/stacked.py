"""Experts that a source holds in one tensor for each projection, taken apart into one matrix for each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.kernels.tensors import Reject

from ..checkpoint.base import SourceWeight, StackedAt
from ..checkpoint.stacks import StackLayout, TransposedReader, container_of, decide, output_rows
from ..families.base import Architecture

SIXTEEN_BITS = ("bf16", "fp16")
ORDER_HINT = "`quantize-model --experts-order` declares it and writes experts one by one"


def unstack(
    weights: Sequence[SourceWeight], config: Mapping[str, Any], architecture: Architecture
) -> tuple[list[SourceWeight], list[Reject]]:
    """All weights, 16-bit stacks of experts as the matrices that they hold, under the names of separate experts.

    Args:
        weights: Weights of a source; stacks of other encodings are passed on as they are.
        config: config.json of the source.
        architecture: The family, which knows the order of gate and up.

    Returns:
        The weights in their order, and why the experts of a layer cannot be told apart.
    """
    stacks: dict[str, list[SourceWeight]] = {}
    for weight in weights:
        if container := _container(weight):
            stacks.setdefault(container, []).append(weight)
    layouts = {container: _layout(members, config, architecture) for container, members in stacks.items()}
    matrices: list[SourceWeight] = []
    for weight in weights:
        layout = layouts.get(_container(weight) or "")
        if isinstance(layout, StackLayout):
            matrices += _experts(weight, layout)
        elif layout is None:
            matrices.append(weight)
    return matrices, [layout for layout in layouts.values() if isinstance(layout, Reject)]


def _container(weight: SourceWeight) -> str | None:
    is_stack = len(weight.shape) == 3 and weight.encoding in SIXTEEN_BITS
    return container_of(weight.module) if is_stack else None


def _layout(
    members: Sequence[SourceWeight], config: Mapping[str, Any], architecture: Architecture
) -> StackLayout | Reject:
    if architecture.experts_order is None:
        reason = f"model_type `{config.get('model_type')}` is not known, so it may hold gate over up or up over gate"
        return Reject(members[0].tensors[0], reason, ORDER_HINT)
    found = decide(members, config, architecture, None, transposed=False)
    return replace(found, hint=ORDER_HINT) if isinstance(found, Reject) and found.hint else found


def _experts(weight: SourceWeight, layout: StackLayout) -> Iterator[SourceWeight]:
    """The matrices of every expert in one stack."""
    experts, *matrix = weight.shape
    n, k = reversed(matrix) if layout.transposed else matrix
    reader = TransposedReader(weight.reader) if layout.transposed else weight.reader
    for expert in range(experts):
        for projection, rows in output_rows(weight.module, n, layout.order).items():
            yield replace(
                weight,
                module=f"{container_of(weight.module)}.{expert}.{projection}",
                companions=(),
                shape=(len(range(*rows)), k),
                reader=reader,
                bare=False,
                stacked_at=StackedAt(weight.module, expert, rows),
            )
