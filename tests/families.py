"""Small random checkpoints of every family, made by Transformers with the options that matter."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 96
LENGTH = 24

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 16}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
# With it, Transformers adds the balancing loss of experts.
_BALANCED = {"output_router_logits": True}
_MOE = _BALANCED | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MOE |= {"head_dim": 8}
_SWA = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_GEMMA = {
    "head_dim": 16,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
_MINISTRAL = _YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_LLAMA4 = {
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
_LINEAR = {
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
_SHARED = {"shared_expert_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
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
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4 = {
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

# Name: family, what differs from the sizes, kinds of layers.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}, 1),
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
    "qwen2": ("Qwen2", _SWA | {"rope_parameters": _YARN, "tie_word_embeddings": True}, 2),
    "qwen3": ("Qwen3", _SWA | {"head_dim": 16}, 2),
    "qwen3-moe": ("Qwen3Moe", _MOE | {"norm_topk_prob": True, "use_qk_norm": True}, 1),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        _MOE | {"norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True},
        2,
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 1),
    "gemma2": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        2,
    ),
    "gemma3": (
        "Gemma3Text",
        _GEMMA
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
                "full_attention": _YARN,
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
    "qwen2-moe": (
        "Qwen2Moe",
        _BALANCED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        2,
    ),
    "glm4": ("Glm4", {"head_dim": 16, "rms_norm_eps": 1e-3}, 1),
    "phi": ("Phi", {"layer_norm_eps": 1e-3}, 1),
    "gemma3-multimodal": (
        "Gemma3",
        {
            "text_config": _GEMMA | {"sliding_window_pattern": 2},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": _MINISTRAL}, 1),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
        1,
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
        _LATENT
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        2,
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        _LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
        1,
    ),
    "qwen3-next": (
        "Qwen3Next",
        _MOE
        | _LINEAR
        | _SHARED
        | {
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
        2,
    ),
    "qwen3.5": ("Qwen3_5Text", _LINEAR | {"attention_bias": True}, 2),
    "qwen3.5-moe": ("Qwen3_5MoeText", _MOE | _LINEAR | _SHARED | {"linear_num_key_heads": 4}, 2),
    "qwen3.5-multimodal": (
        "Qwen3_5",
        {
            "text_config": _LINEAR
            | {"rope_parameters": _LINEAR["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
            "vision_config": _VISION_QWEN,
            "tie_word_embeddings": True,
        },
        2,
    ),
    "qwen3.5-moe-multimodal": (
        "Qwen3_5Moe",
        {
            "text_config": _MOE | _LINEAR | _SHARED,
            "vision_config": _VISION_QWEN,
            "tie_word_embeddings": False,
        },
        2,
    ),
    "gemma4": (
        "Gemma4Text",
        _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 3.0,
        },
        2,
    ),
    "gemma4-shared": (
        "Gemma4Text",
        _GEMMA4
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
    "gemma4-multimodal": (
        "Gemma4",
        {
            "text_config": _GEMMA4
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
    "gpt-oss": (
        "GptOss",
        _BALANCED
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": _YARN | {"truncate": False},
        },
        2,
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
            "rope_parameters": _LLAMA3,
            "rms_norm_eps": 1e-3,
        },
        2,
    ),
    "olmoe": (
        "Olmoe",
        _BALANCED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
        1,
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
    "apertus": ("Apertus", {"rope_parameters": _LLAMA3, "attention_bias": True}, 1),
    "nemotron": ("Nemotron", {"norm_eps": 1e-3, "mlp_bias": True}, 1),
    "minimax-m2": (
        "MiniMaxM2",
        _BALANCED
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
        _BALANCED
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
        _LATENT
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
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        2,
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        _LATENT
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
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": _SWA | {"rms_norm_eps": 1e-3, "rope_parameters": _MROPE},
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
    "granite4": (
        "GraniteMoeHybrid",
        _MAMBA
        | _BALANCED
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
    "llama4": (
        "Llama4Text",
        _LLAMA4
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 1],
            "rms_norm_eps": 1e-3,
            "rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0},
        },
        3,
    ),
    "llama4-multimodal": (
        "Llama4",
        {
            "text_config": _LLAMA4
            | {
                "use_qk_norm": False,
                "interleave_moe_layer_step": 2,
                "attn_temperature_tuning": False,
            },
            "vision_config": _VISION | {"vision_output_dim": 16},
        },
        2,
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
# Families whose layers another one has, with other options; their gradients are compared in `long`.
ALIKE = (
    "seed-oss",
    "ernie4.5",
    "glm4-moe-lite",
    "qwen2.5-vl",
    "qwen3-vl",
    "granite4-dense",
    "falcon-h1-plain",
    "llama4-multimodal",
)
# The ends of the names of experts: in Transformers' class, and in its files.
_GRANITE = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}
_CLASSES = {
    "Qwen2_5_VL": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VL": "Qwen3VLForConditionalGeneration",
    "Llama4Text": "Llama4ForCausalLM",
    "Llama4": "Llama4ForConditionalGeneration",
    "Mistral3": "Mistral3ForConditionalGeneration",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3": "Gemma3ForConditionalGeneration",
    "Gemma3nText": "Gemma3nForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Gemma4": "Gemma4ForConditionalGeneration",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
    "Qwen3_5": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5Moe": "Qwen3_5MoeForConditionalGeneration",
}


def make_torch(name: str, **changes: Any) -> Any:
    """Returns a random model in eval mode, the norms' weights and biases random, too."""
    family, options, _ = FAMILIES[name]
    if "text_config" in options:
        values = options | {"text_config": _SIZES | options["text_config"] | changes}
    else:
        values = _SIZES | options | changes
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(0)
    cls = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    if family == "Llama4":
        # Transformers' own function needs the results of the vision tower, even for text.
        model.forward = model.language_model.forward
    return model.eval()


def named(arrays: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Returns a model's arrays by the names of the files; Transformers fuses experts."""
    found = {}
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    stacked = ("gpt_oss", "llama4", "llama4_text")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, array in arrays.items():
        if model.config.model_type in ("gemma3", "mistral3"):
            name = name.replace("model.language_model.", "language_model.model.")
            name = name.replace("lm_head.", "language_model.lm_head.")
        if model.config.model_type == "qwen2_5_vl":
            name = name.replace("model.language_model.", "model.").replace(
                "model.visual.", "visual."
            )
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace(".gate.moe_statics.", ".moe_statics.")
        base, _, last = name.rpartition(".")
        if model.config.model_type == "granitemoehybrid":
            for ours, files in _GRANITE.items():
                name = name.replace(f"block_sparse_moe.{ours}", f"block_sparse_moe.{files}")
            found[name] = array
            continue
        if last not in ("gate_up_proj", "down_proj") or model.config.model_type in stacked:
            found[name] = array
            continue
        for e, matrix in enumerate(array):
            if last == "down_proj":
                found[f"{base}.{e}.{down}.weight"] = matrix
            else:
                halves = np.split(matrix, 2)
                found[f"{base}.{e}.{gate}.weight"] = halves[0]
                found[f"{base}.{e}.{up}.weight"] = halves[1]
    return found


def save(model: Any, folder: Path, dtype: Any = None, **options: Any) -> Path:
    """Writes a checkpoint as Transformers does."""
    (model if dtype is None else model.to(dtype)).save_pretrained(folder, **options)
    return folder


def random_tokens(rows: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """Returns random tokens (rows, length)."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)
