"""Models that mix attention with recurrent layers, or have none."""

from __future__ import annotations

from family import DELTA, GRANITE, HEAD, LATENT, LOCAL_MOE, MAMBA2, MOE, ROPE, TEXT, Family, hybrid

HYBRIDS: tuple[Family, ...] = (
    hybrid(
        "qwen3_next",
        MOE | DELTA | {"shared_expert_intermediate_size": 64, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        "rope",
        title="Qwen3-Next",
        routed=True,
    ),
    hybrid(
        "qwen3_5_text",
        HEAD | DELTA | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}},
        "rope",
        title="Qwen3.5",
    ),
    hybrid(
        "qwen3_5_moe_text",
        MOE
        | DELTA
        | {
            "shared_expert_intermediate_size": 64,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]},
        },
        "rope",
        title="Qwen3.5-MoE",
        routed=True,
    ),
    hybrid(
        "kimi_linear",
        LATENT
        | {
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "model_max_length": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
        title="Kimi Linear",
        routed=True,
        refused={"transformers": "int4: RuntimeError"},
    ),
    hybrid(
        "minimax",
        LOCAL_MOE | {"hidden_size": 128, "block_size": 16, "layer_types": ["full_attention", "linear_attention"]},
        "rope",
        title="MiniMax M1",
        routed=True,
        refused={"transformers": "block-fp8: logits are"},
    ),
    hybrid(
        "granitemoehybrid",
        LOCAL_MOE
        | GRANITE
        | MAMBA2
        | {"shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"]},
        "multipliers",
        title="Granite 4",
        routed=True,
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
    hybrid(
        "nemotron_h",
        {k: v for k, v in HEAD.items() if k != "num_hidden_layers"}
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "num_experts_per_tok": 2,
        },
        title="Nemotron-H",
        routed=True,
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
    hybrid(
        "falcon_h1",
        HEAD
        | MAMBA2
        | {
            "mamba_d_ssm": 128,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.5,
            "ssm_in_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.7, 1.5, 0.8, 0.9],
        },
        "rope",
        "multipliers",
        title="Falcon-H1",
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
    hybrid(
        "bamba",
        HEAD | MAMBA2 | {"attn_layer_indices": [1], "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        "rope",
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
    hybrid(
        "jamba",
        TEXT
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        routed=True,
    ),
    hybrid(
        "lfm2",
        TEXT
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", *2 * ["full_attention"]],
            "block_auto_adjust_ff_dim": False,
        },
        "rope",
        refused={"transformers": "block-fp8: logits are"},
    ),
    hybrid(
        "lfm2_moe",
        MOE
        | {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", *2 * ["full_attention"]],
        },
        "rope",
        title="LFM2-MoE",
        routed=True,
    ),
    hybrid(
        "mamba2",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        title="Mamba 2",
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
    hybrid(
        "mamba",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "time_step_rank": 8,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        refused={"transformers": "int4: AttributeError"},
    ),
    hybrid(
        "zamba2",
        TEXT
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_key_value_heads": 4,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "adapter_rank": 8,
            "use_mem_rope": True,
        },
        refused={"transformers": "block-fp8: RuntimeError"},
    ),
)
