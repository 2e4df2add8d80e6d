"""Checkpoints of families with dense layers alone."""

from typing import Any

from family_options import GEMMA, GEMMA4, LATENT, LLAMA3, SWA, VOCAB, YARN

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
_MINISTRAL = YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
# Name: class of Transformers, options beside the sizes, number of kinds of layers.
DENSE: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}, 1),
    "llama-bias-tied": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        },
        1,
    ),
    "llama-dynamic": ("Llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}, 1),
    "mistral": ("Mistral", {"sliding_window": 5}, 1),
    "qwen2": ("Qwen2", SWA | {"rope_parameters": YARN, "tie_word_embeddings": True}, 2),
    "qwen3": ("Qwen3", SWA | {"head_dim": 16}, 2),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        2,
    ),
    "gemma3": (
        "Gemma3Text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
        2,
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 16, "sliding_window": 9},
        1,
    ),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-3}, 1),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        2,
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}, 2),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
            "mlp_bias": True,
        },
        1,
    ),
    "glm4": ("Glm4", {"head_dim": 16, "rms_norm_eps": 1e-3}, 1),
    "phi": ("Phi", {"layer_norm_eps": 1e-3}, 1),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": _MINISTRAL}, 1),
    "deepseek-v3-plain": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "attention_bias": True,
        },
        1,
    ),
    "gemma4-shared": (
        "Gemma4Text",
        GEMMA4
        | {
            "attention_bias": True,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB + 1,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        4,
    ),
    "gemma": ("Gemma", {"head_dim": 16, "hidden_act": "gelu", "tie_word_embeddings": True}, 1),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_norm_eps": 1e-3,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "seed-oss": (
        "SeedOss",
        {
            "head_dim": 16,
            "attention_out_bias": True,
            "mlp_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
        1,
    ),
    "exaone4": (
        "Exaone4",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": LLAMA3,
            "rms_norm_eps": 1e-3,
        },
        2,
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}, 1),
    "hunyuan-dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": _DYNAMIC | {"alpha": 50.0},
        },
        1,
    ),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3, "attention_bias": True}, 1),
    "nemotron": ("Nemotron", {"norm_eps": 1e-3, "mlp_bias": True}, 1),
    "arcee": ("Arcee", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}, 1),
    "starcoder2": (
        "Starcoder2",
        {"sliding_window": 7, "norm_epsilon": 1e-3, "tie_word_embeddings": True},
        1,
    ),
    "cwm": (
        "Cwm",
        {
            "bos_token_id": 1,
            "head_dim": 16,
            "mlp_bias": True,
            "sliding_window": 7,
            "rope_parameters": LLAMA3,
        },
        2,
    ),
    "glm": ("Glm", {"head_dim": 16, "rms_norm_eps": 1e-3}, 1),
    "cohere": (
        "Cohere",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "layer_norm_eps": 1e-3,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
        1,
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": [48, 40, 48, 48],
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 80,
            "altup_num_inputs": 3,
            "laurel_rank": 5,
            "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.4],
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
        4,
    ),
}
