"""The plans of all ranks that share a model, and how many ranks may share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.kernels.tensors import Reject

from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import is_packed
from ..garbage import uncollected
from ..plan import Degree, Plan
from .planner import WHOLE, plan_pack, plan_share
from .sharding import sharding_of_rank
from .source import PackSource
from .target import PackTarget


@uncollected()
def plan_ranks(checkpoint: Checkpoint, target: PackTarget, tp: int, ep: int) -> list[Plan]:
    """The plan of every rank of a tensor- and expert-parallel run; if it is refused, with the degrees that are not."""
    if is_packed(checkpoint):
        return [plan_pack(checkpoint, target)]
    source = PackSource(checkpoint, target)
    plans = [plan_share(source, sharding_of_rank(0, tp, ep))]
    if not plans[0].rejects:
        plans += [plan_share(source, sharding_of_rank(rank, tp, ep)) for rank in range(1, max(tp, ep))]
    elif not plan_share(source, WHOLE).rejects:
        legal, dealt = _possible(plans[0].tensor_parallel or ()), _possible(plans[0].expert_parallel)
        hint = f"possible are --tp {legal}; alone, --ep {dealt}"
        asked = Reject(f"--tp {tp} --ep {ep}", "this model cannot be cut so", hint)
        plans[0] = replace(plans[0], rejects=(asked, *plans[0].rejects))
    return plans


def _possible(degrees: Sequence[Degree]) -> str:
    return ", ".join(["1", *(str(degree.size) for degree in degrees if degree.reason is None)])
