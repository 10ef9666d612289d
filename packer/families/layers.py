"""Paths of layers, heads and embeddings: which layer a tensor belongs to, and whether it predicts further tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tilewright.kernels.model_names import HEAD

from .config import LAYERS, text_config
from .roles import unwrapped

EMBEDDING = "model.embed_tokens"
HEADS = (HEAD, "embed_out", "output_head", "proj_out")
FIRST_LAYER = "model.layers.0."
LAYER = re.compile(r"^((?:.*\.)?layers\.\d+)\.(.+)$")  # path of a decoder layer, and what is inside
_NUMBERED = re.compile(r"^model\.layers\.(\d+)\.")
_MTP = re.compile(r"^(?:model\.)?(?:mtp|nextn)(?:\.|$)")


def mtp_tensors(names: Iterable[str], config: Mapping[str, Any]) -> set[str]:
    """The tensors of MTP layers: those after the last regular layer, and everything under `mtp.`."""
    layers = text_config(config).get(LAYERS)
    known: dict[str, bool] = {}  # by the path up to the number of the layer, which decides
    found = set()
    for name in names:
        at = name.find("layers.")
        head = name if at < 0 else name[: name.find(".", at + len("layers.")) + 1] or name
        if head not in known:
            path = unwrapped(name)
            layer = _NUMBERED.match(path)
            known[head] = bool(_MTP.match(path) or (layer and isinstance(layers, int) and int(layer[1]) >= layers))
        if known[head]:
            found.add(name)
    return found


def draft_layer(mtp: Iterable[str]) -> str:
    """Prefix of the one layer that a draft model can be made of, such as `model.layers.61.`; empty if there is none."""
    prefixes = {found[1] for name in mtp if (found := re.match(r"((?:[\w.]+\.)?layers\.\d+\.)", name))}
    return prefixes.pop() if len(prefixes) == 1 and not any(_MTP.match(unwrapped(name)) for name in mtp) else ""


def has_head(names: Iterable[str]) -> bool:
    """Whether tensors of an output head are among these."""
    ends = tuple(f"{head}.{suffix}" for head in HEADS for suffix in ("weight", "weight_packed"))
    return any(unwrapped(name).endswith(ends) for name in names)


def has_embedding(names: Iterable[str]) -> bool:
    """Whether a table of embeddings is among these."""
    return any(unwrapped(name).endswith(f"{EMBEDDING.rpartition('.')[2]}.weight") for name in names)
