"""Language models within wrappers that see, run on text."""

from __future__ import annotations

from family import (
    BOTH_ROPES,
    DELTA,
    GLM_IDS,
    HEAD,
    LATENT,
    LOCAL_MOE,
    MOE,
    MROPE,
    PLAIN_VISION,
    QWEN_IDS,
    QWEN_VISION,
    ROPE,
    SLIDING,
    SQUARES,
    TEXT,
    WINDOW,
    Family,
    vision,
)

VISION: tuple[Family, ...] = (
    vision(
        "gemma3",
        {
            "text_config": HEAD | SLIDING | {"query_pre_attn_scalar": 16, "rope_parameters": BOTH_ROPES},
            "vision_config": SQUARES,
            "mm_tokens_per_image": 4,
            "boi_token_index": 90,
            "eoi_token_index": 91,
            "image_token_index": 92,
        },
        "rope",
        "window",
        "norm-offset",
        title="Gemma 3 VL",
        refused={"transformers": "int4: AttributeError"},
    ),
    vision(
        "gemma4",
        {
            "text_config": HEAD
            | SLIDING
            | {
                "rope_parameters": BOTH_ROPES,
                "vocab_size_per_layer_input": 96,
                "hidden_size_per_layer_input": 16,
                "per_layer_config": {},
                "pad_token_id": 0,
            },
            "image_token_id": 90,
            "video_token_id": 91,
            "audio_token_id": 92,
        },
        "rope",
        "window",
        title="Gemma 4 VL",
    ),
    vision(
        "mistral3",
        {
            "text_config": HEAD | {"model_type": "mistral", "sliding_window": None},
            "vision_config": SQUARES | {"model_type": "pixtral"},
            "image_token_index": 90,
        },
        "rope",
        title="Mistral 3 VL",
        refused={"transformers": "int4: ValueError"},
    ),
    vision(
        "qwen2_vl",
        {
            "text_config": TEXT | MROPE,
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
            **QWEN_IDS,
        },
        "rope",
        title="Qwen2-VL",
    ),
    vision(
        "qwen2_5_vl",
        {
            "text_config": TEXT | MROPE,
            "vision_config": QWEN_VISION | {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
            **QWEN_IDS,
        },
        "rope",
        title="Qwen2.5-VL",
        refused={"transformers": "int4: "},
    ),
    vision(
        "qwen3_vl",
        {
            "text_config": HEAD | MROPE,
            "vision_config": QWEN_VISION
            | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **QWEN_IDS,
        },
        "rope",
        title="Qwen3-VL",
    ),
    vision(
        "qwen3_vl_moe",
        {
            "text_config": MOE | MROPE,
            "vision_config": QWEN_VISION
            | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **QWEN_IDS,
        },
        "rope",
        title="Qwen3-VL-MoE",
        routed=True,
        refused={"transformers": "block-fp8: logits are"},
    ),
    vision(
        "qwen3_5",
        {
            "text_config": HEAD
            | DELTA
            | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}},
            "vision_config": QWEN_VISION | {"out_hidden_size": 64, "num_position_embeddings": 16},
            **QWEN_IDS,
        },
        title="Qwen3.5 VL",
    ),
    vision(
        "glm4v",
        {
            "text_config": HEAD
            | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "image_size": 32,
                "patch_size": 16,
            },
            **GLM_IDS,
        },
        "rope",
        title="GLM 4.1V",
    ),
    vision(
        "glm4v_moe",
        {
            "text_config": MOE
            | {
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "image_size": 32,
                "patch_size": 16,
            },
            **GLM_IDS,
        },
        "rope",
        title="GLM 4.5V",
        routed=True,
    ),
    vision(
        "kimi_k25",
        {
            "text_config": LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
            "vision_config": PLAIN_VISION
            | {"patch_size": 16, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
            "projection_hidden_size": 32,
            **QWEN_IDS,
        },
        "rope",
        title="Kimi K2.5",
        routed=True,
        refused={"transformers": "int4: AttributeError"},
    ),
    vision(
        "llama4",
        {
            "text_config": LOCAL_MOE
            | {
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 128,
                "num_hidden_layers": 4,
                "moe_layers": [1, 3],
                "no_rope_layers": [1, 1, 1, 0],
                "attention_chunk_size": WINDOW,
                "floor_scale": WINDOW,
                "attn_scale": 0.5,
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            },
            "vision_config": SQUARES
            | {
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "intermediate_size": 128,
                "pixel_shuffle_ratio": 0.5,
            },
            "boi_token_index": 90,
            "eoi_token_index": 91,
            "image_token_index": 92,
        },
        "rope",
        "chunk",
        title="Llama 4 VL",
        routed=True,
        refused={"model": "image_outputs", "transformers": "block-fp8: logits are"},
    ),
    vision(
        "llava",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SQUARES | {"model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 90,
        },
        "rope",
        title="LLaVA",
    ),
    vision(
        "internvl",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": PLAIN_VISION | {"image_size": [32, 32], "patch_size": [16, 16]},
            "image_token_id": 90,
        },
        "rope",
        title="InternVL",
        refused={"transformers": "int4: AttributeError"},
    ),
)
