"""What a module is to a model, and the names that all families share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "linear",
    "expert",
    "attention-experts",
    "router",
    "shared-gate",
    "embedding",
    "table",
    "head",
    "norm",
    "mtp-projection",
    "vision",
    "conv",
    "small",
    "precise",
    "other",
]

# Why a role keeps its 16 bits unless --include says otherwise.
KEPT: dict[Role, str] = {
    "attention-experts": "projections of experts of attention: no operator runs them quantized",
    "router": "router: decides which experts run, engines keep it in 16 bits",
    "shared-gate": "gate of the shared expert: one row, engines keep it in 16 bits",
    "embedding": "embedding",
    "table": "table of positions, token types or layers, of which rows are looked up",
    "head": "output head",
    "norm": "normalisation",
    "mtp-projection": "projection of the MTP layer: a plain Linear in engines",
    "vision": "vision or audio part",
    "conv": "convolution",
    "small": "engines keep this small matrix in 16 bits",
    "precise": "transformers computes its product in 32 bits",
    "other": "no architecture rule knows this name",
}


WRAPPER = re.compile(
    r"^(?:model\.language_model\.model|model\.language_model|language_model\.model|model\.text_model)\."
)


def unwrapped(module: str) -> str:
    """The path that the module has in the text-only model: `model.language_model.layers.0` -> `model.layers.0`."""
    module = WRAPPER.sub("model.", module)
    return module.removeprefix("language_model.")


@dataclass(frozen=True)
class Rule:
    """A name that `pattern` finds (a regex searched in the unwrapped module path) has this role."""

    pattern: str
    role: Role


_TAIL = r"(?:^|\.)(?:{})$"


def tail(*names: str) -> str:
    """A regex for paths whose last part is one of `names` (themselves regexes)."""
    return _TAIL.format("|".join(names))


COMMON: tuple[Rule, ...] = (
    Rule(
        r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|vision_embed\w*|vit|image_newline)(?:\.|$)",
        "vision",
    ),
    Rule(
        r"(?:^|\.)(?:multi_modal_projector|mm_projector|mlp1|audio_tower|audio_encoder|embed_vision|embed_audio)(?:\.|$)",
        "vision",
    ),
    Rule(tail("eh_proj", r"mtp\.fc"), "mtp-projection"),
    Rule(tail("lm_head", r"shared_head\.head", "output_head", "embed_out"), "head"),
    Rule(tail("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"), "embedding"),
    Rule(
        tail("embed_tokens_per_layer", "wpe", r"embed_positions", r"(?:position|token_type|rel)_embeddings?"), "table"
    ),
    Rule(tail("relative_attention_bias"), "table"),
    Rule(tail(r"(?i:\w*norm\w*)", r"ln_\w+", r"shared_head\.norm"), "norm"),
    Rule(tail("shared_expert_gate"), "shared-gate"),
    Rule(tail(r"(?:mlp|block_sparse_moe|feed_forward|moe|ffn|mixer)\.gate(?:\.wg)?", r"router(?:\.\w+)?"), "router"),
    Rule(tail("conv1d", "conv", r"\w*_conv", "patch_embed", "patch_embedding"), "conv"),
    Rule(tail("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "linear"),
    Rule(tail(r"(?:q|k|v|o|qkv|out)_proj", r"(?:gate|up|down|gate_up)_proj"), "linear"),
    Rule(tail(r"fc[12]", "fc_in", "fc_out", "query_key_value", "dense_h_to_4h", "dense_4h_to_h"), "linear"),
)
