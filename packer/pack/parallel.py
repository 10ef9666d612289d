"""How many devices may share a model: where tensor-parallel cuts would fall inside a block of scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.formats import FORMATS

from ..checkpoint.encoding import StoredWeight
from ..families.config import expert_count, text_config

SIZES = (2, 4, 8, 16, 32)
KV = ("k_proj", "v_proj")
BY_ROWS = ("q_proj", *KV, "qkv_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")  # cut along N
BY_COLUMNS = ("o_proj", "out_proj", "down_proj", "w2")  # cut along K; all others are held whole by every device


@dataclass(frozen=True)
class Degree:
    """Whether a model may be cut into `size` parts.

    Attributes:
        size: Number of parts.
        reason: Why not; None if it may.
    """

    size: int
    reason: str | None


def tensor_parallel(weights: Sequence[StoredWeight], config: Mapping[str, Any]) -> list[Degree]:
    """Tensor-parallel degrees without expert parallelism, each with the first reason against it."""
    text = text_config(config)
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    alike = {(weight.module.rpartition(".")[2], weight.shape, weight.stored_format): weight for weight in weights[::-1]}
    return [
        Degree(
            size, _against_heads(heads, size) or _first(_against(weight, size, kv_heads) for weight in alike.values())
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


def _against_heads(heads: Any, size: int) -> str | None:
    return f"{heads} attention heads" if isinstance(heads, int) and heads % size else None


def _against(weight: StoredWeight, size: int, kv_heads: Any) -> str | None:
    """Why this weight cannot be cut into `size` parts."""
    name = weight.module.rpartition(".")[2]
    fmt = FORMATS[weight.stored_format] if weight.quantized and weight.stored_format else None
    n, k = weight.shape[-2:]
    if name in KV and isinstance(kv_heads, int) and size > kv_heads > 0:
        size = kv_heads  # devices beyond the number of heads hold copies
    if name in BY_ROWS:
        return _against_cut(weight, n, size, fmt.block_n if fmt else 1, "rows")
    if name in BY_COLUMNS:
        return _against_cut(weight, k, size, (fmt.block_k or 1) if fmt else 1, "columns")
    return None


def _against_cut(weight: StoredWeight, extent: int, size: int, block: int, what: str) -> str | None:
    part = extent / size
    if part % block == 0:
        return None
    need = f"no multiple of {block}" if block > 1 else "not whole"
    return f"{weight.module}: {extent} {what} / {size} = {part:g}, {need}"
