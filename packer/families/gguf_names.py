"""What GGUF files call models: architectures, and the keys and modules of Hugging Face that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EXPERTS = "mlp.experts"  # below it, a stack for each projection, as the file has them
ATTENTION = (
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
)
DENSE = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
ROUTED = ("mlp.gate", *(f"{EXPERTS}.{name}_proj" for name in ("gate", "up", "down")))
SHARED = ("mlp.shared_expert_gate", *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")))
OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
SIZES = {  # key below the name of the architecture -> key of config.json
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
NEEDED = ("block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon")
# Keys of a file that change what the model computes and that nothing here translates.
UNTRANSLATED = ("rope.scaling", "sliding_window", "logit_scale", "attention.scale", "expert_weights", "rope.factor")


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture of GGUF files.

    Attributes:
        model_type: `model_type` of config.json.
        model: Class in transformers.
        modules: Modules of a layer.
        paired: Modules whose rows the file has in pairs, (0, half), (1, half + 1), … of each head, and the key of
            config.json that counts their heads.
        fixed: What every model of it has in config.json.
        dense_without: Keys that say that a file of it is another model (with experts, whose names are others).
    """

    model_type: str
    model: str
    modules: tuple[str, ...]
    paired: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    dense_without: tuple[str, ...] = ()

    def hugging_face_modules(self, layers: int) -> Iterator[str]:
        """Path of every module that a model may have."""
        yield from OUTSIDE
        for layer in range(layers):
            yield from (f"model.layers.{layer}.{module}" for module in self.modules)

    def heads(self, module: str, config: Mapping[str, Any]) -> int:
        """Number of heads that the rows of a module are paired in; 0 where they lie as transformers has them."""
        key = next((key for name, key in self.paired.items() if module.endswith(f".{name}")), "")
        found = config.get(key) if key else 0
        return found if isinstance(found, int) else 0

    def config(self, name: str, metadata: Mapping[str, Any], tied: bool, vocabulary: int) -> dict[str, Any] | str:
        """config.json from a file's metadata, or what keeps it from being made.

        Args:
            name: Name of the architecture, before the keys that belong to it.
            metadata: Key -> value.
            tied: The file has no output head.
            vocabulary: Rows of the embedding.
        """
        if missing := [key for key in NEEDED if f"{name}.{key}" not in metadata]:
            return f"`{name}.{missing[0]}` is missing"
        for key in metadata:
            if key.startswith(tuple(f"{name}.{end}" for end in UNTRANSLATED)) and metadata[key] not in {"none", 0}:
                return f"`{key}` is set, which is not translated"
        sizes = {said: metadata[f"{name}.{key}"] for key, said in SIZES.items() if f"{name}.{key}" in metadata}
        heads = sizes["num_attention_heads"]
        if not isinstance(heads, int):
            return f"`{name}.attention.head_count` is {heads}, one number is expected"
        sizes.setdefault("num_key_value_heads", heads)
        sizes.setdefault("head_dim", sizes["hidden_size"] // heads)
        tokens = {"bos_token_id": "bos", "eos_token_id": "eos"}
        marks = {said: metadata.get(f"tokenizer.ggml.{key}_token_id") for said, key in tokens.items()}
        return {
            "architectures": [self.model],
            "model_type": self.model_type,
            **self.fixed,
            **sizes,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "dtype": "bfloat16",
            **{said: mark for said, mark in marks.items() if mark is not None},
        }


PAIRED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
ACTIVATION = {"hidden_act": "silu"}
GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", DENSE, PAIRED, ACTIVATION, ("expert_count",)),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", DENSE, fixed=ACTIVATION),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", (*DENSE, *HEAD_NORMS), fixed=ACTIVATION),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", (*ATTENTION, *ROUTED, *SHARED), fixed=ACTIVATION | {"norm_topk_prob": False}
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*ATTENTION, *HEAD_NORMS, *ROUTED),
        fixed=ACTIVATION | {"norm_topk_prob": True},
    ),
}
DROPPED = ("rope_freqs",)  # follows from the config's rope scaling, which config.json has to state
SINGLE_ROW = ("shared_expert_gate",)  # a matrix of one row in transformers, a vector in the file
