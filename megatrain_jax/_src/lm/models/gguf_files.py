"""GGUF files of llama.cpp: their metadata as a configuration, and their tensors by our names.

The package `gguf` reads the files and decodes their tensors. Names, the order of rows in Llama's
queries and keys, the offset of Gemma's norms and the joined experts are changed back to those of
Hugging Face checkpoints.
"""

import importlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import as_value_errors, check_regular, naming, needing
from megatrain_jax._src.lm.common.hf_folder import is_gguf
from megatrain_jax._src.lm.models.config import FAMILIES, DecoderConfig
from megatrain_jax._src.lm.models.rotary import Rope, frequencies
from megatrain_jax._src.lm.models.tensors import DTYPES, Tensor, some

# The families of llama.cpp's architectures. Mistral's files say that they are Llama's.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
# Fields of the metadata, and of a config.json.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_NEEDED = ("embedding_length", "block_count", "attention.head_count")
_WINDOW = {"attention.sliding_window": "sliding_window"}
_MORE = {
    "qwen3moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        **_WINDOW,
    },
    "gemma3": {"rope.freq_base_swa": "rope_local_base_freq", **_WINDOW},
}
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
# Numbers of layers of two models: llama.cpp scales their queries by hidden size / number of heads.
_SCALED_APART = {"gemma2": 46, "gemma3": 62}
_ROPE_TENSOR = "rope_freqs.weight"
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
# Values in the metadata and about tensors, of which each has about ten.
_MOST_VALUES = 2**21


@dataclass(frozen=True, kw_only=True)
class _Stored(Tensor):
    """A tensor that is decoded when it is read; `file` is its stored form, in a mapped file.

    Attributes:
        decode: Function from the stored form, or that of one expert, to the numbers.
    """

    decode: Callable[[np.ndarray], np.ndarray]

    def slice(self, index: Any) -> np.ndarray:
        """Returns a copy of a part of the tensor; see `Tensor.slice`."""
        if isinstance(index, tuple):  # rows of one expert
            expert, rows = index
            return self.decode(self.file[expert])[rows]
        return self.decode(self.file)[index]


def gguf_file(given: str | PathLike[str]) -> Path | None:
    """Returns the GGUF file that is named, or the only one in a folder without a config.json.

    Raises:
        TypeError: If it is not a path.
        ValueError: If a folder has several.
    """
    path = Path(checks.path("folder", given))
    if not path.is_dir():
        return path if is_gguf(path) else None
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.[gG][gG][uU][fF]"))
    if len(files) > 1:
        names = some([file.name for file in files])
        raise ValueError(f"`folder` must name one of the GGUF files in {path}: {names}")
    return files[0] if files else None


def open_gguf(path: Path, ignore: Iterable[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the configuration of a GGUF file, as of a config.json, and its tensors by name.

    Args:
        path: The file.
        ignore: Fields of its metadata to ignore.

    Raises:
        FileNotFoundError: If there is no such file.
        ModuleNotFoundError: If `gguf` is not installed.
        ValueError: If the file is damaged or not regular, or an architecture, a field or a kind of
            tensors isn't supported.
    """
    check_regular(path)
    gguf = _package()
    with as_value_errors(f"{path} is no GGUF file that can be read"):
        reader = _metadata_reader(gguf)(path)
        names = {name for name in reader.fields if not name.startswith("tokenizer.")}
        names |= _TOKENS.keys() & reader.fields.keys()
        fields = {name: _shortest(reader.fields[name].contents()) for name in names}
        tensors = _tensors(path, gguf, reader.tensors)
    with naming(path):
        return _values(fields, tensors, frozenset(ignore)), tensors


def _shortest(value: Any) -> Any:
    """Returns a number in fp32 as it was written: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _package() -> Any:
    needed = 'reading GGUF files needs gguf: pip install "megatrain-jax[gguf]"'
    with needing(needed, ModuleNotFoundError):
        return importlib.import_module("gguf")


def _metadata_reader(gguf: Any) -> type[Any]:
    """The class of gguf's reader, which ends at the end of a file and passes over arrays.

    Otherwise, it goes on with empty values, and the tokens of a large vocabulary take seconds.
    """
    kinds = gguf.GGUFValueType

    class Reader(gguf.GGUFReader):
        num_values = 0

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            at = orig_offs + struct.calcsize("<IQ")
            if kind == kinds.STRING:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", self.data, at)[0]
            else:
                at += count * np.dtype(self.gguf_scalar_to_np[kinds(kind)]).itemsize
            return at - orig_offs, [], [], [kinds.ARRAY]

        def _get(self, offset: int, dtype: Any, count: Any = 1, *args: Any, **named: Any) -> Any:
            self.num_values += 1
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data) or self.num_values > _MOST_VALUES:
                raise ValueError("it is cut off, or has too many values")
            return super()._get(offset, dtype, count, *args, **named)

    return Reader


def _tensors(path: Path, gguf: Any, found: Iterable[Any]) -> dict[str, Tensor]:
    """The tensors of a file by name; each expert's is one, named by its number at the end."""
    tensors: dict[str, Tensor] = {}
    for one in found:
        kind, shape = one.tensor_type, tuple(map(int, reversed(one.shape)))
        code = kind.name if kind.name in DTYPES else "F32"
        gguf.dequantize(np.asarray(one.data).reshape(-1, one.data.shape[-1])[:1], kind)  # refuses
        tensor = _Stored(
            path=path,
            file=one.data,
            name=one.name,
            shape=shape,
            dtype=code,
            start=one.data_offset,
            whole=shape,
            decode=partial(_decoded, dequantize=gguf.dequantize, kind=kind, dtype=DTYPES[code]),
        )
        if not one.name.endswith("_exps.weight"):
            tensors[one.name] = tensor
            continue
        for i in range(shape[0]):
            part = replace(tensor, shape=shape[1:], part=(i, slice(None)))
            tensors[f"{one.name}.{i}"] = part
    return tensors


def _decoded(
    stored: np.ndarray,
    *,
    dequantize: Callable[..., np.ndarray],
    kind: Any,
    dtype: np.dtype,
    heads: int = 0,
    offset: float = 0.0,
) -> np.ndarray:
    """Decodes a tensor, restores the order of its rows, and takes an offset off."""
    array = dequantize(np.asarray(stored), kind)
    if offset:
        array = array - np.float32(offset)
    # In fp32, it may be the file's own memory.
    array = array.astype(dtype, copy=np.may_share_memory(array, stored))
    if heads:  # their neighbours are pairs of a rotation, which are halves of a head here
        split = array.reshape(heads, -1, 2, *array.shape[1:])
        array = split.swapaxes(1, 2).reshape(array.shape)
    return array


def _values(
    fields: Mapping[str, Any], tensors: dict[str, Tensor], ignore: frozenset[str]
) -> dict[str, Any]:
    """Returns the configuration that a file's metadata describe."""
    if (kind := fields.get("general.type", "model")) != "model":
        raise ValueError(checks.refused("general.type", "'model'", kind))
    name = fields.get("general.architecture")
    if name not in _FAMILIES:
        raise ValueError(
            checks.refused("general.architecture", f"one of {some([*_FAMILIES])}", name)
        )
    if fields.get("split.count", 0) > 1:
        raise ValueError("it is one of several files: join them by `llama-gguf-split --merge`")
    start = f"{name}."
    own = {field.removeprefix(start): x for field, x in fields.items() if field.startswith(start)}
    known = _SIZES | _MORE.get(name, {})
    if lists := [f"{start}{field}" for field in known if isinstance(own.get(field), list)]:
        raise ValueError(
            f"its metadata have an array as {some(lists)}: a number for each layer isn't supported"
        )
    if missing := [f"{start}{field}" for field in _NEEDED if field not in own]:
        raise ValueError(f"its metadata lack {some(missing)}")
    values = {ours: own.pop(field) for field, ours in known.items() if field in own}
    family = FAMILIES[_FAMILIES[name]]
    values |= {"model_type": family.model_type, "architectures": [family.architecture]}
    values |= {ours: fields[field] for field, ours in _TOKENS.items() if field in fields}
    values["tie_word_embeddings"] = "output.weight" not in tensors
    if (embedding := tensors.get("token_embd.weight")) is not None:
        values["vocab_size"] = embedding.shape[0]
    if "attention_bias" in family.flags and "blk.0.attn_q.bias" in tensors:
        values["attention_bias"] = True
    plain = values["hidden_size"] // values["num_attention_heads"]
    # Heads are rotated as a whole.
    head_dim = own.pop("attention.key_length", own.get("rope.dimension_count", plain))
    values["head_dim"] = head_dim
    if name == "qwen3moe":
        values["norm_topk_prob"] = True  # as llama.cpp computes
    if name in ("gemma2", "gemma3"):
        is_apart = values["num_hidden_layers"] == _SCALED_APART[name]
        values["query_pre_attn_scalar"] = plain if is_apart else head_dim
    if (scaling := _scaling(own)) is not None:
        values["rope_scaling"] = scaling
    if (factors := tensors.pop(_ROPE_TENSOR, None)) is not None:
        values["rope_scaling"] = _llama3(factors.read(), values)
    own.pop("vocab_size", None)
    for field in ("attention.value_length", "rope.dimension_count"):
        if own.pop(field, head_dim) != head_dim:
            own[field] = None
    if unread := [f"{start}{field}" for field in own if f"{start}{field}" not in ignore]:
        raise ValueError(
            f"its metadata have {some(unread)}, which isn't supported; `ignore` leaves out what is "
            "known not to matter"
        )
    return values


def _scaling(own: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the scaling of rotary embeddings from the metadata, and returns it."""
    kinds = {"linear": ("factor",), "yarn": ("factor", "original_context_length")}
    start = "rope.scaling."
    kind = own.get(f"{start}type", "linear" if f"{start}factor" in own else "none")
    own.pop(f"{start}finetuned", None)
    if kind != "none" and kind not in kinds:
        return None
    own.pop(f"{start}type", None)
    found = {name: own.pop(f"{start}{name}") for name in kinds.get(kind, ())}
    if "original_context_length" in found:
        found["original_max_position_embeddings"] = found.pop("original_context_length")
    return {"rope_type": kind, **found} if found else None


def _llama3(factors: np.ndarray, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of Llama 3.1 to 3.3; the file has only its factors.

    Raises:
        ValueError: If they are another model's.
    """
    base, factor, length = float(values.get("rope_theta", 1e4)), float(factors.max()), 8192
    rope = Rope(dim=2 * len(factors), base=base)
    scaled = replace(rope, kind="llama3", factor=factor, original_length=length)
    first = np.zeros((1, 1), np.int32)
    if not np.allclose(frequencies(rope, first) / frequencies(scaled, first), factors, rtol=1e-4):
        raise ValueError(f"{_ROPE_TENSOR} isn't the scaling of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_max_position_embeddings": length,
    }


def by_our_names(
    tensors: Mapping[str, Tensor], config: DecoderConfig, names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns a GGUF file's tensors by the names that they have in Hugging Face checkpoints.

    Args:
        tensors: Those of `open_gguf`; one that has no such name keeps its own.
        config: The configuration.
        names: The names of all tensors of such a checkpoint.
    """
    gguf, found = _package(), dict(tensors)
    ours = next(name for name, family in _FAMILIES.items() if family == config.family)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ours)
    known = gguf.get_tensor_name_map(kind, config.num_layers)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if ours == "llama" else {}
    for name in names:
        module, _, end = name.rpartition(".")
        stored = str(known.get_name(_EXPERT.sub("", module)))
        number = _EXPERT.search(module)
        tensor: Any = found.pop(f"{stored}.{end}" + (f".{number[1]}" if number else ""), None)
        if tensor is None:
            continue
        of_heads = heads.get(stored.rpartition(".")[2], 0)
        offset = config.norm_offset if stored.endswith("norm") else 0.0
        decode = partial(tensor.decode, heads=of_heads, offset=offset)
        found[name] = replace(tensor, name=name, decode=decode)
    return found
