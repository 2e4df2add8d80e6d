"""Checkpoints of families with linear attention, Mamba 2 or convolutions."""

from typing import Any

from family_options import BALANCED, LATENT, LINEAR, MOE, SHARED

_MAMBA = {
    "rms_norm_eps": 1e-3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
    "mamba_proj_bias": True,
}
# Name: class of Transformers, options beside the sizes, number of kinds of layers.
MIXERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3-next": (
        "Qwen3Next",
        MOE
        | LINEAR
        | SHARED
        | {
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
        2,
    ),
    "qwen3.5": ("Qwen3_5Text", LINEAR | {"attention_bias": True}, 2),
    "qwen3.5-moe": ("Qwen3_5MoeText", MOE | LINEAR | SHARED | {"linear_num_key_heads": 4}, 2),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "norm_eps": 1e-3,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
        },
        2,
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": ["full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "norm_eps": 1e-3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
        },
        2,
    ),
    "granite4": (
        "GraniteMoeHybrid",
        _MAMBA
        | BALANCED
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "time_step_limit": (0.3, 2.0),
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        },
        2,
    ),
    "granite4-dense": (
        "GraniteMoeHybrid",
        _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 24,
        },
        2,
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "rms_norm_eps": 1e-3,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            # Equal, because Transformers writes three equal parts of the convolutions.
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        2,
    ),
    "kimi-linear": (
        "KimiLinear",
        LATENT
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_shared_experts": 2,
            "num_expert_group": 3,
            "topk_group": 2,
            "moe_renormalize": False,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        2,
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 16,
            "layer_norm_epsilon": 1e-3,
            "mlp_bias": True,
            "use_bias": True,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 6,
            "conv_kernel": 3,
            "chunk_size": 16,
            "time_step_min": 0.3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": 20,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        4,
    ),
    "falcon-h1": (
        "FalconH1",
        _MAMBA
        | {
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "time_step_limit": (0.3, 2.0),
            "attention_in_multiplier": 0.75,
            "attention_out_multiplier": 1.25,
            "key_multiplier": 0.5,
            "ssm_in_multiplier": 0.625,
            "ssm_out_multiplier": 1.375,
            "mlp_multipliers": [0.875, 1.125],
            "ssm_multipliers": [0.5, 0.75, 1.0, 1.25, 1.5],
            "embedding_multiplier": 6.0,
            "lm_head_multiplier": 0.3,
        },
        1,
    ),
    "falcon-h1-plain": (
        "FalconH1",
        _MAMBA | {"mamba_d_ssm": 64, "mamba_conv_bias": False, "time_step_limit": (0.0, 0.5)},
        1,
    ),
}
