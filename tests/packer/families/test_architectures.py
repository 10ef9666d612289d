"""What each family's names are taken for."""

import pytest

from tilewright.packer.families import FAMILIES, UNKNOWN, family_of
from tilewright.packer.families.roles import unwrapped

NAMES = {
    "llama": {
        "model.layers.0.self_attn.q_proj": "linear",
        "model.layers.0.self_attn.o_proj": "linear",
        "model.layers.0.mlp.gate_proj": "linear",
        "model.layers.0.mlp.down_proj": "linear",
        "model.layers.0.input_layernorm": "norm",
        "model.norm": "norm",
        "model.embed_tokens": "embedding",
        "lm_head": "head",
    },
    "gemma3": {
        "language_model.model.layers.0.pre_feedforward_layernorm": "norm",
        "language_model.model.layers.0.self_attn.q_norm": "norm",
        "language_model.model.layers.0.mlp.up_proj": "linear",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj": "vision",
        "multi_modal_projector.linear": "vision",
    },
    "falcon": {
        "transformer.h.0.self_attention.query_key_value": "linear",
        "transformer.h.0.mlp.dense_4h_to_h": "linear",
        "transformer.word_embeddings": "embedding",
        "transformer.h.0.ln_attn": "norm",
    },
    "mixtral": {
        "model.layers.0.block_sparse_moe.gate": "router",
        "model.layers.0.block_sparse_moe.experts.7.w1": "expert",
        "model.layers.0.block_sparse_moe.experts.7.w2": "expert",
    },
    "qwen2_moe": {
        "model.layers.0.mlp.gate": "router",
        "model.layers.0.mlp.shared_expert_gate": "shared-gate",
        "model.layers.0.mlp.shared_expert.gate_proj": "linear",
        "model.layers.0.mlp.experts.3.gate_proj": "expert",
    },
    "qwen3_next": {
        "model.layers.0.linear_attn.in_proj_qkvz": "linear",
        "model.layers.0.linear_attn.in_proj_ba": "small",
        "model.layers.0.linear_attn.out_proj": "linear",
        "model.layers.0.linear_attn.conv1d": "conv",
        "mtp.fc": "mtp-projection",
        "mtp.layers.0.mlp.experts.0.up_proj": "expert",
        "mtp.layers.0.self_attn.q_proj": "linear",
    },
    "deepseek_v3": {
        "model.layers.3.self_attn.kv_a_proj_with_mqa": "linear",
        "model.layers.3.self_attn.kv_b_proj": "linear",
        "model.layers.3.self_attn.q_a_layernorm": "norm",
        "model.layers.3.mlp.gate": "router",
        "model.layers.3.mlp.shared_experts.up_proj": "linear",
        "model.layers.61.eh_proj": "mtp-projection",
        "model.layers.61.enorm": "norm",
        "model.layers.61.shared_head.head": "head",
        "model.layers.61.shared_head.norm": "norm",
        "model.layers.61.embed_tokens": "embedding",
    },
    "deepseek_v32": {
        "model.layers.0.self_attn.indexer.wq_b": "linear",
        "model.layers.0.self_attn.indexer.wk": "linear",
        "model.layers.0.self_attn.indexer.weights_proj": "small",
        "model.layers.0.self_attn.indexer.k_norm": "small",
    },
    "kimi_k2": {"language_model.model.layers.1.mlp.experts.383.down_proj": "expert"},
    "glm4_moe": {"model.layers.46.eh_proj": "mtp-projection", "model.layers.1.mlp.experts.0.up_proj": "expert"},
    "gpt_oss": {
        "model.layers.0.mlp.router": "router",
        "model.layers.0.mlp.experts.0.gate_proj": "expert",
        "model.layers.0.self_attn.sinks": "other",
    },
    "llama4": {
        "language_model.model.layers.0.feed_forward.router": "router",
        "language_model.model.layers.0.feed_forward.shared_expert.up_proj": "linear",
        "language_model.model.layers.0.feed_forward.experts.0.up_proj": "expert",
        "vision_model.model.layers.0.mlp.fc1": "vision",
    },
    "gemma4": {
        "model.language_model.layers.0.per_layer_input_gate": "small",
        "model.language_model.layers.0.self_attn.q_proj": "linear",
        "model.language_model.layers.0.router.proj": "router",
    },
    "gpt2": {
        "transformer.h.0.attn.c_attn": "linear",
        "h.0.mlp.c_proj": "linear",
        "transformer.wpe": "table",
        "transformer.wte": "embedding",
        "transformer.h.0.ln_1": "norm",
    },
    "phi": {"model.layers.0.self_attn.dense": "linear", "model.layers.0.mlp.fc1": "linear"},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.query_key_value": "linear",
        "gpt_neox.layers.0.attention.dense": "linear",
        "gpt_neox.embed_in": "embedding",
        "embed_out": "head",
    },
    "mamba": {
        "backbone.layers.0.mixer.in_proj": "linear",
        "backbone.layers.0.mixer.x_proj": "small",
        "backbone.layers.0.mixer.conv1d": "conv",
        "backbone.embeddings": "embedding",
    },
    "nemotron_h": {
        "backbone.layers.0.mixer.experts.3.up_proj": "expert",
        "backbone.layers.0.mixer.gate": "router",
        "backbone.layers.0.mixer.shared_experts.down_proj": "linear",
    },
    "recurrent_gemma": {
        "model.layers.0.temporal_block.linear_x": "linear",
        "model.layers.0.temporal_block.rg_lru.input_gate_weight": "small",
        "model.layers.0.temporal_block.conv_1d": "conv",
    },
    "granitemoehybrid": {
        "model.layers.0.block_sparse_moe.router.layer": "router",
        "model.layers.0.block_sparse_moe.experts.3.w1": "expert",
        "model.layers.0.shared_mlp.input_linear": "linear",
        "model.layers.0.mamba.out_proj": "linear",
    },
    "jetmoe": {
        "model.layers.0.mlp.experts.0.w2": "expert",
        "model.layers.0.self_attention.experts.input_linear": "attention-experts",
    },
    "step3_text": {"model.layers.4.moe.gate": "router", "model.layers.4.moe.experts.1.up_proj": "expert"},
    "bert": {
        "bert.encoder.layer.0.attention.self.query": "linear",
        "bert.encoder.layer.0.attention.output.dense": "linear",
        "bert.encoder.layer.0.output.dense": "linear",
        "bert.embeddings.token_type_embeddings": "table",
        "cls.predictions.transform.dense": "head",
    },
    "t5": {
        "decoder.block.0.layer.1.EncDecAttention.k": "linear",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "table",
        "encoder.block.0.layer.1.DenseReluDense.wi_0": "linear",
        "encoder.block.0.layer.1.DenseReluDense.wo": "precise",
        "shared": "embedding",
    },
    "bart": {"model.decoder.layers.0.fc1": "linear", "model.shared": "embedding"},
    "whisper": {"model.encoder.conv1": "conv", "model.decoder.layers.0.encoder_attn.k_proj": "linear"},
    "qwen3_vl_moe": {
        "model.visual.blocks.0.attn.qkv": "vision",
        "model.visual.merger.linear_fc1": "vision",
        "model.language_model.layers.0.mlp.gate": "router",
        "model.language_model.layers.0.self_attn.k_proj": "linear",
    },
}


@pytest.mark.parametrize(
    ("model_type", "module", "role"),
    [(kind, module, role) for kind, names in NAMES.items() for module, role in names.items()],
)
def test_roles(model_type: str, module: str, role: str) -> None:
    family = family_of({"model_type": model_type})
    assert family is not UNKNOWN
    assert family.role(module) == role


def test_every_family_is_tested() -> None:
    assert {family_of({"model_type": kind}).id for kind in NAMES} == set(FAMILIES)


def test_model_types_belong_to_one_family() -> None:
    kinds = [kind for family in FAMILIES.values() for kind in family.model_types]
    assert len(kinds) == len(set(kinds))


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    assert family_of({"model_type": "my_vl", "text_config": {"model_type": "qwen3_moe"}}).id == "qwen-moe"
    assert family_of({}) is UNKNOWN


@pytest.mark.parametrize(
    ("path", "bare"),
    [
        ("model.language_model.layers.0.mlp", "model.layers.0.mlp"),
        ("language_model.model.layers.0.mlp", "model.layers.0.mlp"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("language_model.lm_head", "lm_head"),
        ("model.visual.blocks.0", "model.visual.blocks.0"),
    ],
)
def test_unwrapped(path: str, bare: str) -> None:
    assert unwrapped(path) == bare


def test_a_model_type_that_is_no_name() -> None:
    assert family_of({"model_type": {"a": 1}, "text_config": {"model_type": ["llama"]}}) is UNKNOWN
