"""Scales of quantized keys and values in the cache, in the spellings of the tools that write them."""

from __future__ import annotations

import re

ATTENTION = ("attn", "attention", "mixer")  # how the path of an attention ends
_SCALE = re.compile(
    r"^(?P<path>.+?)\.(?:(?P<of>[qkv])_proj\.(?:[qkv]_scale|output_scale)|(?:qkv_proj\.)?(?P<kind>[qkv]|kv)_scale)$"
)


def cache_scales(name: str) -> tuple[str, ...]:
    """What a scale of cached keys or values is called where every engine looks for it; empty for any other tensor.

    Tools write `self_attn.k_scale`, `self_attn.attn.k_scale`, `self_attn.k_proj.k_scale` (ModelOpt),
    `self_attn.k_proj.output_scale` (llm-compressor) and one `self_attn.kv_scale` for both (AutoFP8). The first is read
    by vLLM, SGLang and compressed-tensors; a scale for both becomes two.
    """
    found = _SCALE.match(name)
    path = found["path"] if found else ""
    inner = path.removesuffix(".attn")
    path = inner if inner.endswith(ATTENTION) else path
    if not found or not path.endswith(ATTENTION):
        return ()
    kind = found["of"] or found["kind"]
    return tuple(f"{path}.{one}_scale" for one in (("k", "v") if kind == "kv" else (kind,)))
