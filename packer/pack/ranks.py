"""The plans of all ranks that share a model, and how many ranks may share it."""

from __future__ import annotations

from dataclasses import replace

from tilewright.kernels.tensors import Reject

from ..checkpoint.files import Checkpoint
from ..plan import Plan
from .planner import plan_pack
from .sharding import sharding_of_rank
from .target import PackTarget

DEGREES = (1, 2, 4, 8, 16, 32, 64)


def plan_ranks(checkpoint: Checkpoint, target: PackTarget, tp: int, ep: int) -> list[Plan]:
    """The plan of every rank of a tensor- and expert-parallel run; if it is refused, with the degrees that are not."""
    plans = [plan_pack(checkpoint, target, sharding_of_rank(rank, tp, ep)) for rank in range(max(tp, ep))]
    if plans[0].rejects and not plan_pack(checkpoint, target).rejects:
        legal = [size for size in DEGREES if not plan_pack(checkpoint, target, sharding_of_rank(0, size, 1)).rejects]
        dealt = [size for size in DEGREES if not plan_pack(checkpoint, target, sharding_of_rank(0, 1, size)).rejects]
        hint = f"possible are --tp {', '.join(map(str, legal))}; alone, --ep {', '.join(map(str, dealt))}"
        asked = Reject(f"--tp {tp} --ep {ep}", "this model cannot be cut so", hint)
        plans[0] = replace(plans[0], rejects=(asked, *plans[0].rejects))
    return plans
