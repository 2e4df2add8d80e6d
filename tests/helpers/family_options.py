"""Options that the checkpoints of several families share."""

VOCAB = 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
# With it, Transformers adds the balancing loss of experts.
BALANCED = {"output_router_logits": True}
MOE = BALANCED | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE |= {"head_dim": 8}
SWA = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
LLAMA4 = {
    "head_dim": 8,
    "intermediate_size": 16,
    "intermediate_size_mlp": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.3,
    "no_rope_layers": [1, 0],
}
LINEAR = {
    "rms_norm_eps": 1e-3,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
SHARED = {"shared_expert_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-3,
}
# So many heads of an indexer that no two scores are equal, as zeros of a few heads are.
SPARSE = LATENT | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "index_topk": 5,
    "index_n_heads": 16,
    "index_head_dim": 8,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 100.0,
            "factor": 2.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}
