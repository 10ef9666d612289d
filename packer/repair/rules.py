"""What is looked at, one function for each kind of damage: index, quantization config, tied head, exclusion list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.model_names import HEAD

from ..checkpoint.declared import quantization_config
from ..checkpoint.shard_index import INDEX_NAME, listing, read_index
from ..families.config import is_tied, text_value
from ..families.layers import has_head
from ..quant_config.exclusions import ENGINES, engine_views, unquantized_paths
from ..quant_config.inputs import QuantConfigInputs
from ..schemes import SCHEMES
from ..schemes.scheme import CheckpointFormat, StorageSpec
from .draft import EVERY_ENGINE, Draft
from .scales import quantized_weights

CONFIG = "config.json"
REQUIRED = {  # keys without which an engine refuses the config, or reads other numbers: quant_method -> key -> engines
    "fp8": {
        "activation_scheme": ("SGLang", "vLLM"),
        "weight_block_size": ("SGLang", "vLLM", "TensorRT-LLM"),
    },
    "compressed-tensors": {
        "format": ("SGLang", "vLLM", "transformers"),
        "config_groups": ("SGLang", "vLLM", "transformers"),
        "quantization_status": ("transformers",),
    },
}
LIST_KEY = {"fp8": "modules_to_not_convert"}  # key of the list of unquantized modules; `ignore` elsewhere
LIST_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint format of ours that a checkpoint may be in.

    Attributes:
        checkpoint_format: It.
        group: int4 group size.
        method: Its `quant_method`.
    """

    checkpoint_format: CheckpointFormat
    group: int
    method: str

    @property
    def storages(self) -> tuple[StorageSpec, ...]:
        """How it stores weights."""
        both = (self.checkpoint_format.linear, self.checkpoint_format.expert)
        return tuple(dict.fromkeys(storage.with_group(self.group) for storage in both if storage))

    def block(self, unquantized: Sequence[str]) -> dict[str, Any]:
        """The quantization config that it has."""
        return self.checkpoint_format.config(QuantConfigInputs(tuple(unquantized), self.group))


def candidates() -> list[Candidate]:
    """Every checkpoint format of every scheme, with each group size."""
    found = []
    for scheme in SCHEMES.values():
        for checkpoint_format in scheme.checkpoint_formats.values():
            for group in scheme.groups or (128,):
                block = checkpoint_format.config(QuantConfigInputs((), group))
                found.append(Candidate(checkpoint_format, group, block["quant_method"]))
    return found


def identify(draft: Draft) -> Candidate | None:
    """The format that the weights are in; None if they are in none that is known here.

    Among formats that hold the same codes, the one is meant that config.json names; without a name, the one that has
    the keys of its quantization config; without these, the one whose names most of the scales have.
    """
    block = draft.block or quantization_config(draft.config)
    known, specs = candidates(), draft.specs
    named = _method(block, known)
    best: tuple[tuple[bool, int, int, int], Candidate] | None = None
    for candidate in known:
        weights = list(quantized_weights(specs, candidate.storages))
        keys = len(block.keys() & candidate.block(()).keys())
        rank = (candidate.method == named, len(weights), keys, sum(weight.is_right for weight in weights))
        if weights and (best is None or rank > best[0]):
            best = rank, candidate
    return best[1] if best else None


def _method(block: Any, known: Sequence[Candidate]) -> str:
    """The `quant_method` as it should be spelled."""
    text = str(block.get("quant_method") or "").lower().replace("_", "-")
    spelled = {candidate.method.replace("_", "-"): candidate.method for candidate in known}
    return spelled.get(text, "")


def check_index(draft: Draft, problem: str | None) -> None:
    """The index says what the shards hold; `problem` is why it could not be used at all."""
    checkpoint = draft.checkpoint
    path = checkpoint.root / INDEX_NAME
    if problem:
        draft.found(INDEX_NAME, "index", EVERY_ENGINE, problem, "written from what the shards hold")
        return
    if len(checkpoint.headers) > 1 and not any(file.name.endswith(".index.json") for file in checkpoint.stamps):
        draft.found(INDEX_NAME, "index", EVERY_ENGINE, "there are several shards and no index", "written anew")
    if not path.exists():
        return
    extra = sorted(set(checkpoint.files) - set(read_index(path)))
    if extra:
        problem = f"{len(extra)} tensors of the shards are missing in it: {listing(extra)}"
        draft.found(INDEX_NAME, "index", EVERY_ENGINE, problem, "written from what the shards hold")


def check_absent(draft: Draft) -> None:
    """Tensors that the index promises and no shard holds cannot be made up."""
    try:
        promised = read_index(draft.checkpoint.root / INDEX_NAME)
    except (CheckpointError, OSError):
        return
    if absent := sorted(set(promised) - set(draft.checkpoint.files)):
        problem = f"{len(absent)} tensors are in no shard: {listing(absent)}"
        draft.found(INDEX_NAME, "absent-tensors", EVERY_ENGINE, problem, None)


def check_config(draft: Draft, candidate: Candidate) -> None:
    """The quantization config stands where engines look for it, under their names, with all keys that they need."""
    said = quantization_config(draft.config)
    method, readers = candidate.method, _readers(candidate.method)
    right = candidate.block(())
    if not said:
        draft.config["quantization_config"] = candidate.block(
            unquantized_paths(draft.specs, _with(draft.config, right))
        )
        problem = f"the weights are {method} and no quantization config says so"
        draft.found(CONFIG, "config-keys", readers, problem, f"`quantization_config` of {method}")
        return
    if draft.config.get("quantization_config") != said:
        for holder in (draft.config, *(value for value in draft.config.values() if isinstance(value, dict))):
            for key in ("quantization_config", "compression_config"):
                holder.pop(key, None)
        problem = "the quantization config stands where engines do not look for it"
        draft.found(CONFIG, "config-keys", readers, problem, "moved to `quantization_config`")
    block = draft.config["quantization_config"] = dict(said)
    if block.get("quant_method") != method:
        stated = f"is `{block['quant_method']}`" if block.get("quant_method") else "is missing"
        draft.found(CONFIG, "config-keys", readers, f"`quant_method` {stated}", f"`{method}`")
        block["quant_method"] = method
    for key, engines in REQUIRED.get(method, {}).items():
        if block.get(key) in (None, {}, []):
            draft.found(CONFIG, "config-keys", engines, f"`{key}` is missing", f"`{key}`: {_short(right[key])}")
            block[key] = right[key]


def check_dtype(draft: Draft) -> None:
    """Without a dtype, engines load the 16-bit tensors as another type."""
    if text_value(draft.config, "dtype") or text_value(draft.config, "torch_dtype"):
        return
    plain = [spec.dtype for spec in draft.specs.values() if len(spec.shape) == 2 and spec.dtype.is_floating_point]
    wide = [str(dtype).removeprefix("torch.") for dtype in plain if dtype.itemsize > 1]
    if wide:
        dtype = max(set(wide), key=wide.count)
        problem = "neither `dtype` nor `torch_dtype` says what type the unquantized tensors have"
        draft.found(CONFIG, "dtype", EVERY_ENGINE, problem, f"`torch_dtype`: {dtype}")
        draft.config["torch_dtype"] = dtype


def check_tied_head(draft: Draft, method: str) -> None:
    """A head that is the embedding is in the model and in no file: the list has to name it, or it becomes a Linear."""
    if LIST_KEY.get(method, "ignore") != "ignore" or is_tied(draft.config) is not True or has_head(draft.specs):
        return
    listed = draft.block.get("ignore") or []
    if HEAD not in listed:
        problem = f"the head is the embedding, and `ignore` does not name `{HEAD}`: engines expect it quantized"
        draft.found(CONFIG, "tied-head", _readers(method), problem, f"`{HEAD}` is listed")
        draft.block["ignore"] = [*listed, HEAD]


def check_exclusions(draft: Draft, method: str) -> None:
    """Every engine takes those modules for unquantized that are so in the files."""
    wrong = _disagreeing(draft)
    if not wrong:
        return
    before = [key for key in LIST_KEYS if draft.block.get(key)]
    key = LIST_KEY.get(method, "ignore")
    for stale in before:
        del draft.block[stale]
    tied = [HEAD] if is_tied(draft.config) and not has_head(draft.specs) and key == "ignore" else []
    draft.block[key] = [*unquantized_paths(draft.specs, draft.config), *tied]
    left = {view for view, _ in _disagreeing(draft)}
    for engine, problem in wrong:
        repair = None if engine in left else f"`{key}` holds the full path of each of them"
        draft.found(CONFIG, "exclusion-list", (engine,), problem, repair)


def _disagreeing(draft: Draft) -> list[tuple[str, str]]:
    """Engines that take the files for something else, and what they would do."""
    found = []
    for view in engine_views(draft.specs, draft.config):
        problems = []
        if view.missing:
            problems.append(f"takes {len(view.missing)} modules for quantized that are not: {listing([*view.missing])}")
        if view.surplus:
            problems.append(f"takes {len(view.surplus)} modules for 16-bit that are not: {listing([*view.surplus])}")
        if view.reads and view.engine in draft.engines and problems:
            found.append((view.engine, "; ".join(problems)))
    return found


def _readers(method: str) -> tuple[str, ...]:
    return tuple(engine for engine, readings in ENGINES.items() if method in readings)


def _with(config: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    return {**config, "quantization_config": block}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
