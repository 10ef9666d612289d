"""The packed directory of a served model: which share of it this process holds, opened once."""

from __future__ import annotations

from functools import lru_cache

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.directory import PackedCheckpoint, load_packed

from ..pack_once import local_directory

_opened = lru_cache(maxsize=4)(load_packed)  # quantization config and loader both ask for it


def open_rank(model: str, revision: str | None, config: VllmConfig, device: str) -> PackedCheckpoint:
    """The share of a packed model that this process runs.

    Args:
        model: The packed directory or its hub id; of a model that is cut, the directory that holds all ranks.
        revision: Commit, branch or tag on the hub.
        config: Tells into how many processes vLLM cuts the model.
        device: Where to run.

    Raises:
        CheckpointError: It is no packed directory, damaged, or cut for another number of processes.
    """
    path = local_directory(model, revision)
    parallel = config.parallel_config
    tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    replicas = parallel.data_parallel_size if parallel.enable_expert_parallel else 1  # replicas share out the experts
    experts = tp_size * replicas if parallel.enable_expert_parallel else 1
    rank = parallel.data_parallel_rank * tp_size + tp_rank if replicas > 1 else tp_rank
    cut = any(path.glob("rank-*-of-*/"))
    packed = _opened(str(path), rank if cut else None, device)
    found = packed.sharding.tp[1], packed.sharding.ep[1]
    if found != (tp_size, experts):
        wanted = f"--tp {tp_size}" + (f" --ep {experts}" if experts > 1 else "")
        raise CheckpointError(
            f"{path}: is cut for tensor parallel {found[0]} and expert parallel {found[1]}, "
            f"vLLM runs it with {tp_size} and {experts}",
            hint=f"pack it with `pack-for-cpu {wanted}`, or start vLLM with --tensor-parallel-size {found[0]}",
        )
    return packed
