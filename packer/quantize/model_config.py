"""config.json of the output, and what it says about heads and MTP layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from tilewright.kernels.model_names import HEAD, TIED
from tilewright.kernels.tensors import Reject

from ..checkpoint.declared import MLX_KEY, quantization_config
from ..families.cache_scales import cache_scales
from ..families.config import LAYERS, MTP_COUNTS, announced_mtp, is_tied
from ..families.family import ModelFamily
from ..families.layers import has_embedding, has_head
from ..families.roles import unwrapped
from .options import QuantizeOptions

STALE = ("quantization_config", "compression_config")


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The model classes that config.json names; what is no list of names says nothing."""
    stated = config.get("architectures")
    return [kind for kind in stated if isinstance(kind, str)] if isinstance(stated, list) else []


def check_head(config: Mapping[str, Any], names: Iterable[str], options: QuantizeOptions) -> list[Reject]:
    """A model with an embedding and neither an output head nor tied weights cannot produce logits."""
    names = list(names)
    kinds = architectures(config) or ["ForCausalLM"]
    has_logits = any(kind.endswith(("ForCausalLM", "ForConditionalGeneration")) for kind in kinds)
    if is_tied(config) is not False or has_head(names) or not has_embedding(names) or not has_logits:
        return []
    if options.tied_head:
        return []
    return [
        Reject(
            f"{HEAD}.weight",
            "is absent, and config.json says tie_word_embeddings = false",
            "--tied-head tie if the head is the embedding, --tied-head as-source to leave both as they are",
        )
    ]


def output_config(
    source: Mapping[str, Any], block: dict[str, Any], options: QuantizeOptions, has_mtp: bool
) -> tuple[dict[str, Any], list[str]]:
    """The output's config.json: all of the source's, one quantization block at the top, and what was done to MTP.

    Returns:
        The config, and notes about it.
    """
    config: dict[str, Any] = _without(copy.deepcopy(dict(source)), STALE)
    if quantization_config(source).get("quant_method") == "mlx":
        config.pop(MLX_KEY, None)
    notes = []
    if announced_mtp(source) and not has_mtp:
        notes.append(
            f"config.json announces {announced_mtp(source)} MTP layer(s) that the files do not hold; nothing to convert"
        )
    holders = [config, *(value for value in config.values() if isinstance(value, dict))]
    if options.mtp == "drop":
        for holder in holders:
            for key in (key for key in MTP_COUNTS if key in holder):
                holder[key] = 0
    if options.mtp == "draft":  # what SGLang's own export writes
        config["architectures"] = [f"{kind}NextN" for kind in architectures(source)]
        for holder in (holder for holder in holders if LAYERS in holder):
            holder[LAYERS] = 1
    if options.tied_head == "tie":
        for holder in (holder for holder in holders if TIED in holder):
            holder[TIED] = True
    config["quantization_config"] = block
    return config, notes


def tied_heads(names: Iterable[str], config: Mapping[str, Any], family: ModelFamily) -> tuple[str, ...]:
    """Paths of the modules that use the embedding's matrix, of a source that holds no matrix of an output head."""
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    heads = {path for path in (family.head, *family.tied) if path}
    tables = [module for module in modules if family.role(module) == "embedding"]
    if is_tied(config) is False or not tables or any(unwrapped(module) in heads for module in modules):
        return ()
    wrapped = ("language_model.",) if any(table.startswith("language_model.") for table in tables) else ()
    return tuple(f"{prefix}{head}" for head in sorted(heads) for prefix in ("", *wrapped))


def cache_scheme(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """How keys and values are quantized in the cache, as compressed-tensors says it; empty without scales for them."""
    if not any(cache_scales(name) for name in names):
        return {}
    stated = quantization_config(config).get("kv_cache_scheme")
    plain = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return dict(stated) if isinstance(stated, Mapping) else plain


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    """`value` without the entries of these names, at any depth."""
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value
