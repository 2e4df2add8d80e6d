"""Checkpoints of families with experts."""

from typing import Any

from family_options import BALANCED, GEMMA4, LATENT, LLAMA3, LLAMA4, MOE, SPARSE, YARN

# Name: class of Transformers, options beside the sizes, number of kinds of layers.
EXPERTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True, "use_qk_norm": True}, 1),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        MOE | {"norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True},
        2,
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 1),
    "qwen2-moe": (
        "Qwen2Moe",
        BALANCED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        2,
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        2,
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        2,
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        SPARSE
        | {
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        2,
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        SPARSE
        | {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared"],
            "attention_bias": True,
        },
        3,
    ),
    "gemma4": (
        "Gemma4Text",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 3.0,
        },
        2,
    ),
    "gpt-oss": (
        "GptOss",
        BALANCED
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": YARN | {"truncate": False},
        },
        2,
    ),
    "olmoe": (
        "Olmoe",
        BALANCED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
        1,
    ),
    "minimax-m2": (
        "MiniMaxM2",
        BALANCED
        | {
            "head_dim": 16,
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-3,
            "rotary_dim": 8,
        },
        1,
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        BALANCED
        | {
            "use_bias": True,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_norm_min": 0.5,
        },
        2,
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "mlp_bias": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        2,
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT
        | {
            "num_hidden_layers": 2,
            "mlp_layer_types": ["sparse", "dense"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
        },
        2,
    ),
    "dots1": (
        "Dots1",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "attention_bias": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
        2,
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense"],
            "rms_norm_eps": 1e-3,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        2,
    ),
    "afmoe": (
        "Afmoe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 1,
            "route_scale": 1.5,
            "rms_norm_eps": 1e-3,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
            "mup_enabled": True,
            "attention_bias": True,
        },
        2,
    ),
    "llama4": (
        "Llama4Text",
        LLAMA4
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 1],
            "rms_norm_eps": 1e-3,
            "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
        },
        3,
    ),
}
