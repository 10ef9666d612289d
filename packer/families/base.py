"""What a family of models says about its tensor names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "linear",
    "expert",
    "router",
    "shared-gate",
    "embedding",
    "head",
    "norm",
    "mtp-projection",
    "vision",
    "conv",
    "small",
    "other",
]

# Why a role keeps its 16 bits unless --include says otherwise.
KEPT: dict[Role, str] = {
    "router": "router: decides which experts run, engines keep it in 16 bits",
    "shared-gate": "gate of the shared expert: one row, engines keep it in 16 bits",
    "embedding": "embedding",
    "head": "output head",
    "norm": "normalisation",
    "mtp-projection": "projection of the MTP layer: a plain Linear in engines",
    "vision": "vision or audio part",
    "conv": "convolution",
    "small": "engines keep this small matrix in 16 bits",
    "other": "no architecture rule knows this name",
}

ExpertsOrder = Literal["gate-up", "up-gate", "interleaved"]
# A stack of experts: one tensor per projection, the first axis counts experts.
STACK = re.compile(
    r"^(?P<container>(?:.*\.)?experts)\.(?P<projection>gate_up_proj|w13|gate_proj|up_proj|down_proj|w1|w2|w3)$"
)
W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # the other spelling of an expert's projections
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


@dataclass(frozen=True)
class Architecture:
    """The names of one family; the first rule that matches decides.

    Attributes:
        id: Name of the family.
        model_types: `model_type` values in config.json (or in its text_config) that belong to it.
        rules: Rules of this family, asked before those that all families share.
        experts_order: Order of the rows of a stacked gate_up tensor; None where nothing is known.
    """

    id: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    experts_order: ExpertsOrder | None = "gate-up"

    def role(self, module: str) -> Role:
        """The role of a module (a tensor name without its last part, or the name of a bare parameter)."""
        path = unwrapped(module)
        for rule in (*self.rules, *COMMON):
            if re.search(rule.pattern, path):
                return rule.role
        return "other"


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
    Rule(tail("lm_head", r"shared_head\.head", "output_head"), "head"),
    Rule(tail("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_tokens_per_layer"), "embedding"),
    Rule(tail(r"\w*norm\w*", r"ln_\w+", r"shared_head\.norm"), "norm"),
    Rule(tail("shared_expert_gate"), "shared-gate"),
    Rule(tail(r"(?:mlp|block_sparse_moe|feed_forward|moe|ffn)\.gate(?:\.wg)?", r"router(?:\.\w+)?"), "router"),
    Rule(r"(?:^|\.)experts\.\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)$", "expert"),
    Rule(tail("conv1d", "conv", r"\w*_conv", "patch_embed", "patch_embedding"), "conv"),
    Rule(tail("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "linear"),
    Rule(tail(r"(?:q|k|v|o|qkv|out)_proj", r"(?:gate|up|down|gate_up)_proj"), "linear"),
)
