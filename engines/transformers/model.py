"""Run a whole transformers model from a packed directory (extra `hf`)."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed, nn
from transformers import GenerationConfig, PreTrainedModel

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.huggingface.buffers import compute_buffers
from tilewright.kernels.huggingface.classes import AUTO_MAP, TRUST, build_empty, first_words, read_config
from tilewright.kernels.packed.directory import PackedCheckpoint, load_packed

from .attention import use_attention
from .linears import keep_dtype_of_activations, keep_precision
from .mlps import replace_mlps
from .norms import replace_norms
from .placing import Placing
from .ranks import add_up

WITHOUT_TRANSFORMERS = "`load_packed` gives the packed modules without transformers"


def load_model(
    path: str | Path,
    rank: int | None = None,
    device: str = "cpu",
    verify_checksums: bool = False,
    fused: bool = True,
    *,
    trust_remote_code: bool = False,
    activation_scales: str = "token",
) -> nn.Module:
    """The transformers model of a packed directory, its Linears and experts run by the bundled kernels.

    The model is built without weights; packed modules take the place of its Linears and experts, and what is left
    (norms, embeddings, routers) is filled with views of the same mapped files. Nothing is initialised, converted or
    copied.

    Args:
        path: The packed directory.
        rank: Which share of a model that was cut for several ranks; by default the rank of this process, if
            `torch.distributed` is set up.
        device: Where to run.
        verify_checksums: Compare every file with its checksum first.
        fused: On a CPU, also run gated MLPs, norms and the attention of decode steps by one operator each. False keeps
            the modules of transformers around packed Linears, for those who hook or replace these.
        trust_remote_code: Run the Python code that the directory brings for its model (`auto_map` in config.json).
            Without it, a model that only that code knows is refused.
        activation_scales: "token" or "group", as in `load_packed`.

    Returns:
        A `PreTrainedModel` in evaluation mode with `generate`; its attribute `packed` is the opened directory, and its
        `save_pretrained` copies that directory.

    Raises:
        CheckpointError: The directory cannot be run, or its tensors are not those of the model; lists all of them.
    """
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    packed = load_packed(path, rank, device, verify_checksums, activation_scales)
    model = _empty(packed, trust_remote_code)
    run_packed(model, packed, fused)
    _read_generation_config(model, packed.root)
    return model


def run_packed(model: Any, packed: PackedCheckpoint, fused: bool = True) -> None:
    """Let packed modules run a model that has no weights yet, and give it all its other tensors.

    Args:
        model: What transformers builds of the directory's config, on the meta device.
        packed: The opened directory.
        fused: As for `load_model`.

    Raises:
        CheckpointError: The tensors of the directory are not those of the model; lists all of them.
    """
    placing = Placing.of(model, packed)
    placing.place_linears()
    placing.place_experts()
    fused = fused and packed.device == "cpu"
    if fused:
        replace_mlps(model, packed, placing.places)
    if packed.sharding.ranks > 1:
        add_up(model, packed)
    missing = [*placing.fill(), *compute_buffers(model)]
    unused = placing.unused()
    if missing or unused:
        lines = [f"`{name}` is not in the files" for name in missing]
        lines += [f"`{name}` has no place in {type(model).__name__}" for name in unused]
        reason = f"{packed.root}: does not fit the model:\n  " + "\n  ".join(lines)
        raise CheckpointError(reason, hint=WITHOUT_TRANSFORMERS)
    keep_precision(model)
    keep_dtype_of_activations(model, getattr(model.config.get_text_config(), "dtype", None))
    if fused:
        replace_norms(model)
        use_attention(model)
    model.packed = packed
    model.save_pretrained = partial(_copy_directory, packed.root)
    model.eval()


def _empty(packed: PackedCheckpoint, trust_remote_code: bool) -> PreTrainedModel:
    """The model of the directory's config, without weights."""
    try:
        return build_empty(read_config(packed.root, trust_remote_code), trust_remote_code)
    except CheckpointError as error:
        hint = TRUST if AUTO_MAP in packed.config and not trust_remote_code else WITHOUT_TRANSFORMERS
        reason = error.message if str(packed.root) in error.message else f"{packed.root}: {error.message}"
        raise CheckpointError(reason, hint=hint) from error


def _read_generation_config(model: Any, root: Path) -> None:
    if not (root / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(root)
    except Exception as error:  # transformers raises whatever a broken file makes it come upon
        reason = f"transformers cannot use generation_config.json: {first_words(error)}"
        hint = "correct it, or remove it for transformers' defaults"
        raise CheckpointError(f"{root}: {reason}", hint=hint) from error


def _copy_directory(root: Path, save_directory: str | Path, **_: Any) -> None:
    """What `save_pretrained` of a packed model does: copy the packed directory, which is what it is.

    Raises:
        CheckpointError: There is something at `save_directory` already.
    """
    target = Path(save_directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: is there already", hint="name a directory that is empty or not there")
    shutil.copytree(root, target, dirs_exist_ok=True)
