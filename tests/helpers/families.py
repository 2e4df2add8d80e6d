"""Small random checkpoints of every family, made by Transformers with the options that matter.

The options are in `families_dense.py`, `families_experts.py`, `families_mixers.py` and
`families_images.py`.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from families_dense import DENSE
from families_experts import EXPERTS
from families_images import IMAGES
from families_mixers import MIXERS
from family_options import VOCAB

# Skips the modules of tests that import this one, too.
torch: Any = pytest.importorskip(
    "torch", reason='makes checkpoints with PyTorch: pip install -e ".[torch]"'
)
safetensors_torch: Any = pytest.importorskip("safetensors.torch")

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

FAMILIES = DENSE | EXPERTS | MIXERS | IMAGES
# Families with the layers of another one and other options; `long` compares their gradients.
ALIKE = (
    "seed-oss",
    "ernie4.5",
    "glm4-moe-lite",
    "internvl",
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
    "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration",
    "Llama4Text": "Llama4ForCausalLM",
    "Llama4": "Llama4ForConditionalGeneration",
    "Mistral3": "Mistral3ForConditionalGeneration",
    "InternVL": "InternVLForConditionalGeneration",
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
            if parameter.ndim == 1 or name.endswith(("_bias", "router.gate.weight")):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    if family == "Llama4":
        # Transformers' own function needs the results of the vision tower, even for text.
        model.forward = model.language_model.forward
    return model.eval()


def file_name(name: str, model: Any) -> str:
    """Returns the name in the files of a parameter, a buffer or a module."""
    if model.config.model_type == "nemotron_h":
        return name.replace("model.", "backbone.", 1)
    if model.config.model_type == "olmo_hybrid" and (at := re.match(r"model\.layers\.(\d+)", name)):
        if model.config.layer_types[int(at[1])] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
    if model.config.model_type == "kimi_linear":
        name = re.sub(r"\.mlp\.(?=gate\b|experts|shared_experts)", ".block_sparse_moe.", name)
        name = name.replace(".forget_gate.", ".")
    return name


def named(arrays: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Returns a model's arrays by the names of the files; Transformers fuses experts."""
    found = {}
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    stacked = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe")
    numbered = mixtral or model.config.model_type in ("lfm2_moe", "kimi_linear")
    gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
    for name, array in arrays.items():
        if model.config.model_type in ("gemma3", "mistral3", "internvl"):
            name = name.replace("model.language_model.", "language_model.model.")
            name = name.replace("lm_head.", "language_model.lm_head.")
        if model.config.model_type == "qwen2_5_vl":
            name = name.replace("model.language_model.", "model.").replace(
                "model.visual.", "visual."
            )
        if model.config.model_type in ("olmo_hybrid", "kimi_linear"):
            if name.endswith("conv1d.weight"):
                for part, rows in zip("qkv", np.split(array, 3), strict=True):
                    found[name.replace("conv1d", f"{part}_conv1d")] = rows
                continue
        name = file_name(name, model)
        if model.config.model_type == "qwen3_vl_moe" and ".experts." in name:
            array = array.swapaxes(1, 2)
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if model.config.model_type == "exaone_moe":
            name = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
        name = name.replace(".gate.moe_statics.", ".moe_statics.")
        base, _, last = name.rpartition(".")
        if model.config.model_type == "granitemoehybrid":
            for ours, files in _GRANITE.items():
                name = name.replace(f"block_sparse_moe.{ours}", f"block_sparse_moe.{files}")
            found[name] = array
            continue
        if (
            last not in ("gate_up_proj", "up_proj", "down_proj")
            or model.config.model_type in stacked
        ):
            found[name] = array
            continue
        for e, matrix in enumerate(array):
            if last != "gate_up_proj":
                found[f"{base}.{e}.{down if last == 'down_proj' else up}.weight"] = matrix
            else:
                halves = np.split(matrix, 2)
                found[f"{base}.{e}.{gate}.weight"] = halves[0]
                found[f"{base}.{e}.{up}.weight"] = halves[1]
    return found


def save(model: Any, folder: Path, dtype: Any = None, **options: Any) -> Path:
    """Writes a checkpoint as Transformers does."""
    (model if dtype is None else model.to(dtype)).save_pretrained(folder, **options)
    if model.config.model_type == "qwen3_vl_moe":
        # Released experts are (in, out). Transformers reads them, and writes (out, in).
        path = folder / "model.safetensors"
        tensors = safetensors_torch.load_file(path)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        safetensors_torch.save_file(tensors, path, {"format": "pt"})
    if model.config.model_type == "olmo_hybrid":
        # Transformers reads the names of released checkpoints, but writes one of a linear layer.
        path, wrong = folder / "model.safetensors", "feedforward_layer_norm"
        tensors = safetensors_torch.load_file(path)
        linear = {name.partition(".linear_attn.")[0] for name in tensors}
        for name in [n for n in tensors if n.partition(f".{wrong}")[0] not in linear]:
            tensors[name.replace(wrong, "post_attention_layernorm")] = tensors.pop(name)
        safetensors_torch.save_file(tensors, path, {"format": "pt"})
    if model.config.model_type == "kimi_linear":
        # The same: it writes the MLPs of layers without experts by the name of experts.
        path = folder / "model.safetensors"
        tensors = safetensors_torch.load_file(path)
        wrong = r"\.block_sparse_moe\.(?=\w+_proj)"
        tensors = {re.sub(wrong, ".mlp.", name): tensor for name, tensor in tensors.items()}
        safetensors_torch.save_file(tensors, path, {"format": "pt"})
    return folder


def random_tokens(rows: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """Returns random tokens (rows, length)."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)
