"""A model that was cut for several ranks: whose results are added up."""

from __future__ import annotations

import torch
from torch import distributed, nn

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.modules import PackedExperts, PackedLinear, PackedMlp
from tilewright.kernels.packed.directory import PackedCheckpoint


def add_up(model: nn.Module, packed: PackedCheckpoint) -> None:
    """Let modules that hold some of the columns or experts add up their results over the ranks."""
    size = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if size != packed.sharding.ranks:
        raise CheckpointError(
            f"{packed.root}: is cut for {packed.sharding.ranks} ranks, this process is one of {size}",
            hint=f"start it with `torchrun --nproc-per-node {packed.sharding.ranks}` and `init_process_group`",
        )
    for module in model.modules():
        match module:
            case PackedExperts():
                spec = module.w2.spec
            case PackedMlp():
                spec = module.down_proj.spec
            case PackedLinear():
                spec = module.spec
            case _:
                continue
        module.reduce = sum_over_ranks if spec.needs_all_reduce else None


# The last sum stays ours until the next one. Otherwise a thread of gloo may be its last owner and free its tensor while
# the interpreter ends, which takes the process down (seen with torch 2.13 and Python 3.11).
_LAST_WORK: list[distributed.Work] = []


def sum_over_ranks(y: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `y`, added in fp32."""
    total = y.to(torch.float32)
    work = distributed.all_reduce(total, async_op=not torch.compiler.is_compiling())
    if work is not None:
        work.wait()
        _LAST_WORK[:] = [work]
    return total.to(y.dtype)
