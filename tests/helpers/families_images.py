"""Checkpoints of families with a vision tower."""

from typing import Any

from family_options import GEMMA, GEMMA4, LINEAR, LLAMA4, MOE, SHARED, SWA, VOCAB

_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_VISION_GEMMA4 = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_VISION_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
# Name: class of Transformers, options beside the sizes, number of kinds of layers.
IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma3-multimodal": (
        "Gemma3",
        {
            "text_config": GEMMA | {"sliding_window_pattern": 2},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
        1,
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": SWA | {"model_type": "qwen2"},
            "vision_config": _VISION,
            "image_seq_length": 1,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "qwen3.5-multimodal": (
        "Qwen3_5",
        {
            "text_config": LINEAR
            | {"rope_parameters": LINEAR["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
            "vision_config": _VISION_QWEN,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "qwen3.5-moe-multimodal": (
        "Qwen3_5Moe",
        {
            "text_config": MOE | LINEAR | SHARED,
            "vision_config": _VISION_QWEN,
            "tie_word_embeddings": False,
        },
        2,
    ),
    "gemma4-multimodal": (
        "Gemma4",
        {
            "text_config": GEMMA4
            | {
                "attention_k_eq_v": False,
                "hidden_size_per_layer_input": 6,
                "vocab_size_per_layer_input": VOCAB + 1,
                "use_bidirectional_attention": "vision",
                # Which the class wants, and has no gradient of.
                "vocab_size": VOCAB + 1,
                "pad_token_id": VOCAB,
            },
            "vision_config": _VISION_GEMMA4,
        },
        2,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": SWA | {"rms_norm_eps": 1e-3, "rope_parameters": _MROPE},
            "vision_config": _VISION_QWEN | {"fullatt_block_indexes": [0]},
            "tie_word_embeddings": True,
        },
        2,
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": {"head_dim": 8, "attention_bias": True, "rope_parameters": _MROPE},
            "vision_config": _VISION_QWEN | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
        1,
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            # Files of a square matrix wouldn't tell its axes apart.
            "text_config": MOE
            | {"attention_bias": True, "rope_parameters": _MROPE, "moe_intermediate_size": 12},
            "vision_config": _VISION_QWEN | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
        1,
    ),
    "llama4-multimodal": (
        "Llama4",
        {
            "text_config": LLAMA4
            | {
                "use_qk_norm": False,
                "interleave_moe_layer_step": 2,
                "attn_temperature_tuning": False,
            },
            "vision_config": _VISION | {"vision_output_dim": 16},
        },
        2,
    ),
}
