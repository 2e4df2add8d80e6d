"""Writes a trained decoder as a Hugging Face checkpoint, one tensor at a time."""

import json
import shutil
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.common.hf_folder import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    companion_names,
    end_tokens_of,
    existing_folder,
    own_file,
    read_json,
)
from megatrain_jax._src.lm.common.prompts import check_template
from megatrain_jax._src.lm.models.config import DecoderConfig, config_end_tokens
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.expert_tensors import stack_experts
from megatrain_jax._src.lm.models.folders import atomic_folder, new_folder
from megatrain_jax._src.lm.models.low_rank import MergedMatrix, adapted_modules
from megatrain_jax._src.lm.models.names import (
    ParameterPath,
    ParameterTensors,
    family_of,
    leaves,
    others,
    parameter_tensors,
)
from megatrain_jax._src.lm.models.quantised import check_decoded, open_weights
from megatrain_jax._src.lm.models.tensor_files import NamedTensor, write_tensors
from megatrain_jax._src.lm.models.tensors import DTYPES, ITEM_BYTES, some
from megatrain_jax._src.lm.models.with_reference import policy_of

_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
# What Transformers reads of a config.json that has no generation_config.json beside it.
_GENERATION_FIELDS = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "do_sample", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_length", "min_length", "max_new_tokens", "num_beams", "suppress_tokens", "use_cache"),
)


def save_pretrained(
    trainer: Trainer | Decoder,
    folder: str | PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    source: str | PathLike[str] | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a folder that Transformers' Auto classes load, and so does the family's own class.

    If matrices have adapters (`models.lora`), their products are added one matrix at a time in fp32
    and rounded once; `save_lora` writes only the adapters.

    The ends of turns that the trainer has learned (`Trainer.end_tokens`) join those in the copied
    generation_config.json, so that Transformers stops at them.

    Args:
        trainer: A trainer of a `Decoder`, or the decoder itself.
        folder: Folder to write; it must not exist, or be empty.
        dtype: "float32", "float16" or "bfloat16"; None for each tensor's dtype in the checkpoint
            that training started from, or else the parameters' dtype.
        max_shard_bytes: Maximum bytes of a file, unless one tensor is larger.
        source: Folder of the tokenizer and the generation settings to copy; None for the checkpoint
            that training started from. Towers of a multimodal checkpoint always come from that
            checkpoint, or from `source` if it is gone.
        chat_template: A Jinja template to write in place of the tokenizer's own, such as the
            `chat_template` of the dataset that the model was trained on; None copies the
            tokenizer's own.
        overwrite: Whether to replace an earlier export in `folder`. It stays until the new one is
            complete. A folder that contains anything else is refused.

    Returns:
        The folder.

    Raises:
        TypeError: If an argument has a wrong type, or the trainer trains a different model.
        ValueError: If the decoder's configuration didn't come from Hugging Face, it has parameters
            that its family lacks or lacks some of them, a file to copy is damaged, not regular or a
            link out of `source`, or the dtype is unknown.
        FileExistsError: If `folder` is not empty; with `overwrite`, if it contains anything that
            this function or `save_lora` has not written.
        FileNotFoundError: If there is no folder `source`.
    """
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _CODES):
        raise ValueError(checks.refused("dtype", f"None or one of {', '.join(_CODES)}", dtype))
    max_shard_bytes = checks.integer("max_shard_bytes", max_shard_bytes)
    check_chat_template(chat_template)
    folder = new_folder(folder, overwrite=overwrite)
    if source is not None:
        source = existing_folder("source", source, "a tokenizer")
    model = decoder_of(trainer)
    config = model.config
    if config.original is None:
        raise ValueError(
            "the decoder's configuration has no Hugging Face form; make it with "
            "DecoderConfig.from_hf or load_pretrained"
        )
    arrays = _arrays(model)
    apart = config.saved_apart if dtype is None else {}
    dtype = dtype or config.saved_dtype or np.dtype(next(iter(arrays.values())).dtype).name
    if dtype not in _CODES:
        raise ValueError(f"pass `dtype`, one of {', '.join(_CODES)}: parameters have {dtype}")
    codes = {n: _CODES[of] for n, of in apart.items()}
    codes |= {n: _CODES[arrays[n].dtype.name] for n in _buffers(config)}
    if config.saved_stacked if config.source else family_of(config).joined_experts:
        arrays = stack_experts(arrays)
    tensors = [
        NamedTensor(name=n, array=a, code=codes.get(n, _CODES[dtype])) for n, a in arrays.items()
    ]
    tensors += _kept(config, source)
    copied = companions(source or config.source)
    learned = trainer.end_tokens if isinstance(trainer, Trainer) else ()
    if source is None:
        learned = (*config.end_tokens, *learned)  # adapters may have brought some
    with atomic_folder(folder, overwrite=overwrite) as at:
        write_tensors(at, tensors, max_shard_bytes)
        write_config(at, json.loads(config.original), dtype)
        copy_companions(at, copied)
        write_end_tokens(at, copied.get(GENERATION_CONFIG), config, learned)
        write_chat_template(at, chat_template)
    return folder


def check_chat_template(given: Any) -> None:
    """Checks the argument `chat_template`.

    Raises:
        TypeError: If it is neither a text nor None.
        ValueError: If it is no Jinja template.
    """
    if not isinstance(given, str | None):
        raise TypeError(checks.refused("chat_template", "a Jinja template, as a str", given))
    if given is not None:
        check_template("`chat_template`", given)


def write_chat_template(folder: Path, template: str | None) -> None:
    """Writes a template, if there is one; it has precedence over one in tokenizer_config.json."""
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def decoder_of(trainer: Trainer | Decoder) -> Decoder:
    """Returns a trainer's decoder, or the given decoder.

    Raises:
        TypeError: If it is neither, or the trainer trains a different model.
    """
    if isinstance(trainer, Decoder):
        return trainer
    if not isinstance(trainer, Trainer):
        hint = "pass the result's `.trainer`" if hasattr(trainer, "trainer") else ""
        raise TypeError(checks.refused("trainer", "a Trainer or a models.Decoder", trainer, hint))
    model = policy_of(trainer.model)
    if not isinstance(model, Decoder):
        raise TypeError(f"`trainer` trains a {type(model).__qualname__}, not a models.Decoder")
    return model


def _arrays(model: Decoder) -> dict[str, np.ndarray | MergedMatrix]:
    """Returns the tensors of the decoder by name, as views of the parameters.

    Raises:
        ValueError: If the model's parameters aren't those of its family.
    """
    adapted: dict[ParameterPath, Any] = {
        (*path, "weight"): module for path, module in adapted_modules(model)
    }
    names = ("lora_A", "lora_B", "lora_magnitude")
    added = {(*path[:-1], name) for path in adapted for name in names}
    arrays = {path: np.asarray(value) for path, value in leaves(model) if path not in added}
    wanted = parameter_tensors(model.config)
    _check_family(model, arrays, wanted)
    tensors = {}
    for parameter in wanted:
        module = adapted.get(parameter.path)
        array = arrays[parameter.path] if module is None else MergedMatrix(module)
        parts = list(array) if parameter.stacked else [array]
        tensors |= dict(zip(parameter.names, parts, strict=True))
    return tensors


def _buffers(config: DecoderConfig) -> list[str]:
    return [n for e in parameter_tensors(config) if not e.trained for n in e.names]


def _kept(config: DecoderConfig, source: Path | None) -> list[NamedTensor]:
    """Returns the tensors that the family keeps beside the decoder, still in their files.

    Raises:
        FileNotFoundError: If the checkpoint that contains them is gone.
        ValueError: If the family needs some and the decoder wasn't read from a checkpoint.
    """
    family = family_of(config)
    if not family.kept and not config.unread:
        return []
    if config.source is None:
        if family.multimodal and config.vision is None:
            raise ValueError(
                f"a {family.model_type} has parts beside the decoder, which only a checkpoint can "
                "give: read one with load_pretrained, or make a decoder alone with "
                "DecoderConfig.from_hf of the object in `text_config`"
            )
        return []
    folder = Path(config.source) if Path(config.source).is_dir() else source
    if folder is None:
        raise FileNotFoundError(
            f"there is no folder {config.source} to take the parts beside the decoder from; name "
            "the checkpoint as `source`"
        )
    tensors = open_weights(folder, config.original)

    own = {name for entry in parameter_tensors(config) for name in entry.names}

    def keeps(name: str) -> bool:
        return name not in own and family.keeps(name, config.num_layers, config.unread)

    kept = [tensor for name, tensor in tensors.items() if keeps(name)]
    unknown = [
        f"{tensor.name} ({tensor.dtype})" for tensor in kept if tensor.dtype not in ITEM_BYTES
    ]
    if unknown:
        raise ValueError(f"tensors in {folder} have a dtype that isn't known: {some(unknown)}")
    check_decoded(folder, kept, config.original)
    return [NamedTensor(name=tensor.name, array=tensor, code=tensor.dtype) for tensor in kept]


def _check_family(
    model: Decoder, arrays: Mapping[ParameterPath, np.ndarray], wanted: Sequence[ParameterTensors]
) -> None:
    """Checks that a model has exactly its family's parameters: files have no place for more."""
    shapes = {parameter.path: parameter.shape for parameter in wanted}
    state = others(model)
    wrong = {
        "not part of the family": [path for path in (*arrays, *state) if path not in shapes],
        "missing": [path for path in shapes if path not in arrays],
        "of another shape": [
            path for path, a in arrays.items() if path in shapes and a.shape != shapes[path]
        ],
        "no floating numbers": [
            path for path, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.floating)
        ],
    }
    found = [
        f"{what}: {some(['/'.join(map(str, path)) for path in paths])}"
        for what, paths in wrong.items()
        if paths
    ]
    if found:
        raise ValueError(
            f"the decoder can't be saved as a {model.config.family}: its parameters differ: "
            f"{'; '.join(found)}. Merge additions to a weight into it first, unless models.lora "
            "made them; `trainer.save` saves any model"
        )


def write_config(folder: Path, values: dict[str, Any], dtype: str) -> None:
    """Writes the config.json of decoded weights; `values` are the original file's."""
    names = [name for name in ("torch_dtype", "dtype") if name in values]
    values |= dict.fromkeys(names or ["dtype"], dtype)
    values.pop("auto_map", None)  # names code, which isn't copied
    for part in (values, values.get("text_config") or {}):
        part.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def companions(source: str | PathLike[str] | None) -> dict[str, Path]:
    """The names of the files beside a checkpoint's weights that are copied, and their real paths.

    Raises:
        FileNotFoundError: If there is no such folder, or a file is a dangling link.
        ValueError: If a file is not a regular one, is a link out of the folder, or is damaged.
    """
    if source is None:
        return {}
    folder = Path(source)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {source} to copy the tokenizer from; name another as `source`"
        )
    found = {name: own_file(folder, name) for name in companion_names(folder)}
    return {name: path for name, path in found.items() if path is not None}


def copy_companions(folder: Path, found: Mapping[str, Path]) -> None:
    """Copies files to a folder, under their names from `companions`."""
    for name, path in found.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def write_end_tokens(
    folder: Path, path: Path | None, config: DecoderConfig, learned: Sequence[int]
) -> None:
    """Writes a generation_config.json whose list of end tokens has further ones, if any are new.

    Args:
        folder: The folder to write to.
        path: The file to go on from. Without one, the new file has what Transformers would have
            read in config.json instead.
        config: The model's configuration.
        learned: The tokens.
    """
    if config.scores:  # nothing is written with scores
        return
    if path is not None:
        values = read_json(path)
        known = end_tokens_of(values)
    else:
        original = json.loads(config.original or "{}")
        both = (original.get("text_config") or {}) | original
        values = {name: both[name] for name in _GENERATION_FIELDS if both.get(name) is not None}
        known = config_end_tokens(original)
    if not set(learned) <= set(known):
        values["eos_token_id"] = list(dict.fromkeys((*known, *learned)))
        text = json.dumps(values, indent=2) + "\n"
        (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")
