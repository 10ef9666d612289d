"""How many devices may share a model: where tensor-parallel cuts would fall inside a block of scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.kernels.formats import FORMATS

from ..checkpoint.encoding import StoredWeight
from ..families import family_of
from ..families.config import HEADS, KV_HEADS, expert_count, text_config
from ..families.parallel import ParallelAxes
from ..plan import Degree

SIZES = (2, 4, 8, 16, 32)


def tensor_parallel(weights: Sequence[StoredWeight], config: Mapping[str, Any]) -> list[Degree]:
    """Tensor-parallel degrees without expert parallelism, each with the first reason against it."""
    text = text_config(config)
    axes = family_of(config).axes
    heads, kv_heads = text.get(HEADS), text.get(KV_HEADS)
    alike = {(weight.module.rpartition(".")[2], weight.shape, weight.stored_format): weight for weight in weights[::-1]}
    return [
        Degree(
            size,
            _why_not_heads(heads, size) or _first(_why_not(weight, size, kv_heads, axes) for weight in alike.values()),
        )
        for size in SIZES
    ]


def expert_parallel(config: Mapping[str, Any]) -> list[Degree]:
    """Expert-parallel degrees: whole experts on every device."""
    count = expert_count(config)
    if not count:
        return []
    return [Degree(size, f"{count} experts" if count % size else None) for size in SIZES]


def described(kind: str, degrees: Sequence[Degree]) -> list[str]:
    """One line with the degrees that are possible, and one for each other reason against a degree."""
    fine = ["1", *(str(degree.size) for degree in degrees if degree.reason is None)]
    lines = [f"{kind}: {', '.join(fine)}"]
    said: set[str] = set()
    for degree in degrees:
        if degree.reason and degree.reason.split(":")[0] not in said:
            said.add(degree.reason.split(":")[0])
            lines.append(f"  not {degree.size}: {degree.reason}")
    return lines


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)


def _why_not_heads(heads: Any, size: int) -> str | None:
    return f"{heads} attention heads" if isinstance(heads, int) and heads % size else None


def _why_not(weight: StoredWeight, size: int, kv_heads: Any, axes: ParallelAxes) -> str | None:
    """Why this weight cannot be cut into `size` parts."""
    name = weight.module.rpartition(".")[2]
    fmt = FORMATS[weight.stored_format] if weight.quantized and weight.stored_format else None
    n, k = weight.shape[-2:]
    if name in axes.keys_values and isinstance(kv_heads, int) and size > kv_heads > 0:
        size = kv_heads  # devices beyond the number of heads hold copies
    if name in axes.rows:
        return _why_not_divided(weight, n, size, fmt.block_n if fmt else 1, "rows")
    if name in axes.columns:
        rotated = weight.rotation.block if weight.rotation else 1
        return _why_not_divided(weight, k, size, max(fmt.block_k, rotated, 1) if fmt else 1, "columns")
    return None


def _why_not_divided(weight: StoredWeight, extent: int, size: int, block: int, what: str) -> str | None:
    part = extent / size
    if part % block == 0:
        return None
    need = f"no multiple of {block}" if block > 1 else "not whole"
    return f"{weight.module}: {extent} {what} / {size} = {part:g}, {need}"
