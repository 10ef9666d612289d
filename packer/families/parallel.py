"""Along which axis each Linear is cut for tensor-parallel runs, and which of them are merged into one."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels.model_names import JOINED

from .experts import LONG, SHORT

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")  # weights of norms inside attention heads


@dataclass(frozen=True)
class MergedLinear:
    """Linears of the same input that engines load as one.

    Attributes:
        name: What the merged one is called.
        parts: Its parts, in row order.
        packed: Whether packed directories hold them as one.
    """

    name: str
    parts: tuple[str, ...]
    packed: bool = True


MERGED = (
    *(MergedLinear(name, parts) for name, parts in JOINED.items()),
    MergedLinear("w13", (SHORT.gate, SHORT.up), packed=False),
    MergedLinear("fused_a", ("q_a_proj", "kv_a_proj_with_mqa"), packed=False),
)


# Linears that compute nothing without others beside them: those that are there, and those that have to be.
TOGETHER: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"q_proj", "k_proj"}), frozenset({"v_proj"})),
    (frozenset({"q_proj", "v_proj"}), frozenset({"k_proj"})),
    (frozenset({"k_proj", "v_proj"}), frozenset({"q_proj"})),
    (frozenset({LONG.gate, LONG.up}), frozenset({LONG.down})),
    (frozenset({LONG.gate, LONG.down}), frozenset({LONG.up})),
    (frozenset({LONG.up, LONG.down, "gate_up_proj"}), frozenset({LONG.gate})),
    (frozenset({"q_a_proj"}), frozenset({"q_b_proj"})),
    (frozenset({"kv_a_proj_with_mqa"}), frozenset({"kv_b_proj"})),
)


@dataclass(frozen=True)
class ParallelAxes:
    """How the matrices of a family are cut; what is named nowhere is held whole by every device.

    Attributes:
        rows: Cut along N: each device makes some of the outputs.
        columns: Cut along K: the products of all devices are added.
        keys_values: Those of `rows` that have one part for each key-value head.
        fused: Linears that hold several matrices in one in the source, which no rule cuts.
    """

    rows: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "qkv_proj", LONG.gate, LONG.up, SHORT.gate, SHORT.up),
        *("q_b_proj", "kv_b_proj"),
    )
    columns: tuple[str, ...] = ("o_proj", "out_proj", LONG.down, SHORT.down)
    keys_values: tuple[str, ...] = ("k_proj", "v_proj")
    fused: tuple[str, ...] = ("qkv_proj", LONG.gate_up, "query_key_value", "in_proj_qkvz")
