"""GGUF files of Hugging Face checkpoints, written as llama.cpp's convert_hf_to_gguf.py does."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_jax import models
from megatrain_jax._src.lm.models.pretrained import parameter_tensors

gguf: Any = pytest.importorskip("gguf", reason='pip install "megatrain-jax[gguf]"')

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "vocab_size": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of Llama's queries or keys in the order of llama.cpp."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    sizes: Mapping[str, Any],
    kind: str = "F32",
) -> Path:
    """Writes a file with an architecture, a checkpoint's tensors, and fields of the metadata.

    Args:
        path: The file.
        arch: The architecture.
        tensors: The tensors of the checkpoint, in fp32.
        sizes: Fields of the metadata, without the architecture's name.
        kind: The kind of the matrices' numbers.
    """
    writer = gguf.GGUFWriter(path, arch)
    for name, value in sizes.items():
        key = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, sizes["block_count"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        base, _, end = name.rpartition(".")
        expert = re.search(r"\.experts\.\d+", base)
        stored = names.get_name(re.sub(r"(?<=\.experts)\.\d+", "", base)) or base
        if arch == "llama" and stored.endswith(("attn_q", "attn_k")):
            heads = "head_count" if stored.endswith("q") else "head_count_kv"
            array = permuted(array, sizes.get(f"attention.{heads}", 4))
        if arch.startswith("gemma") and stored.endswith("norm"):
            array = array + np.float32(1)
        stacks.setdefault(f"{stored}.{end}", []).append(array)
        assert expert or len(stacks[f"{stored}.{end}"]) == 1, name
    for name, arrays in stacks.items():
        array = np.stack(arrays) if "_exps." in name else arrays[0]
        own = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        data = gguf.quantize(np.ascontiguousarray(array, np.float32), own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(config: models.DecoderConfig) -> dict[str, np.ndarray]:
    """Random tensors of a checkpoint."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(scale=0.1, size=entry.tensor_shape).astype(np.float32)
        for entry in parameter_tensors(config)
        for name in entry.names
    }


def write_llama(path: Path) -> None:
    """Writes a small Llama with random weights."""
    config = models.DecoderConfig.from_hf(SIZES | {"model_type": "llama"})
    path.parent.mkdir()
    write_gguf(path, "llama", tensors_of(config), METADATA, "Q8_0")
