"""Writes a decoder's adapters in PEFT's format."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.common.hf_folder import GENERATION_CONFIG, existing_folder, own_file
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.export import (
    check_chat_template,
    companions,
    copy_companions,
    decoder_of,
    write_chat_template,
    write_end_tokens,
)
from megatrain_jax._src.lm.models.folders import atomic_folder, new_folder
from megatrain_jax._src.lm.models.low_rank import ModulePath, adapted_modules, name_of
from megatrain_jax._src.lm.models.names import (
    ParameterTensors,
    family_of,
    leaves,
    parameter_tensors,
)
from megatrain_jax._src.lm.models.tensors import DTYPES

_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}


def save_lora(
    trainer: Trainer | Decoder,
    folder: str | PathLike[str],
    *,
    dtype: str = "float32",
    source: str | PathLike[str] | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a folder that `peft.PeftModel.from_pretrained(base, folder)` loads.

    It contains `adapter_config.json` and `adapter_model.safetensors`: only the adapters made by
    `models.lora` and its `modules_to_save`, without further parameters that were trained. If the
    trainer has learned ends of turns (`Trainer.end_tokens`) that the base lacks, a
    `generation_config.json` lists them beside the base's, for `chat` and for merging. Adapters
    of experts have the names of single experts; PEFT joins them as the base model in the installed
    Transformers requires.

    Args:
        trainer: A trainer of a `Decoder` with adapters, or the decoder itself.
        folder: Folder to write; it must not exist, or be empty.
        dtype: "float32", "float16" or "bfloat16".
        source: Folder of a tokenizer to copy beside the adapters, such as one with new tokens; None
            for none.
        chat_template: A Jinja template to write beside the adapters, such as the `chat_template` of
            the dataset that they were trained on, for `chat` and for merging; None for none, or
            that of `source`.
        overwrite: Whether to replace an earlier export in `folder`; see `save_pretrained`.

    Returns:
        The folder.

    Raises:
        TypeError: If an argument has a wrong type, or the trainer trains a different model.
        FileNotFoundError: If there is no folder `source`.
        ValueError: If the decoder has no adapters, is part of a multimodal model, the dtype is
            unknown, or `chat_template` is no Jinja template.
        FileExistsError: If `folder` is not empty; with `overwrite`, if it contains anything that
            this function or `save_pretrained` has not written.
    """
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(checks.refused("dtype", f"one of {', '.join(_DTYPES)}", dtype))
    check_chat_template(chat_template)
    folder = new_folder(folder, overwrite=overwrite)
    if source is not None:
        source = existing_folder("source", source, "a tokenizer")
    model = decoder_of(trainer)
    modules = dict(adapted_modules(model))
    if not modules:
        raise ValueError("`trainer` has no adapters to save; save_pretrained writes whole models")
    if family_of(model.config).multimodal:
        raise ValueError(
            f"`trainer` trains the decoder of a {model.config.family}: PEFT's names for its "
            "modules differ from those in its files; save_pretrained writes the model with its "
            "adapters merged"
        )
    # Names of the configuration's own decoder, without adapters, as in the base model.
    parameters = parameter_tensors(model.config)
    named = {p.path[:-1]: p for p in parameters if p.path[-1] == "weight"}
    tensors = {
        f"base_model.model.{name}.{factor}.weight": array
        for path, module in modules.items()
        for factor in ("lora_A", "lora_B")
        for name, array in _arrays(named[path], getattr(module, factor)[...], _DTYPES[dtype])
    }
    settings = next(iter(modules.values())).lora_settings
    saved = settings.saved
    if settings.dora:
        tensors |= {
            f"base_model.model.{name}.lora_magnitude_vector": array
            for path, module in modules.items()
            for name, array in _arrays(named[path], module.lora_magnitude[...], _DTYPES[dtype])
        }
    whole = [p for p in parameters if p.trained and name_of(p.path[:-1]) in saved]
    values = dict(leaves(model))
    tensors |= {
        f"base_model.model.{p.names[0]}": np.asarray(values[p.path]).astype(_DTYPES[dtype])
        for p in whole
    }
    config = _config(model, modules, named)
    if whole:
        config["modules_to_save"] = sorted({p.names[0].rpartition(".")[0] for p in whole})
    # Imported here, as in `load_pretrained`, because it is an optional dependency.
    from safetensors.numpy import save_file

    copied = companions(source)
    settings_file, base = copied.get(GENERATION_CONFIG), model.config.source
    if settings_file is None and base is not None and Path(base).is_dir():
        settings_file = own_file(Path(base), GENERATION_CONFIG)
    learned = trainer.end_tokens if isinstance(trainer, Trainer) else ()
    with atomic_folder(folder, overwrite=overwrite) as at:
        save_file(tensors, at / "adapter_model.safetensors", metadata={"format": "pt"})
        (at / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(at, copied)
        write_chat_template(at, chat_template)
        write_end_tokens(at, settings_file, model.config, (*model.config.end_tokens, *learned))
    return folder


def _arrays(
    parameter: ParameterTensors, value: Any, dtype: np.dtype
) -> list[tuple[str, np.ndarray]]:
    """The arrays of one factor with their modules' names in PyTorch, one for each expert."""
    array = np.ascontiguousarray(np.asarray(value).astype(dtype))
    names = _module_names(parameter)
    return list(zip(names, array if parameter.stacked else [array], strict=True))


def _module_names(parameter: ParameterTensors) -> list[str]:
    return [name.removesuffix(".weight") for name in parameter.names]


def _config(
    model: Decoder,
    modules: dict[ModulePath, Any],
    named: dict[ModulePath, ParameterTensors],
) -> dict[str, Any]:
    """The contents of adapter_config.json.

    PEFT finds modules by the ends of their names. `q_proj` stands for all modules with this name if
    all have adapters; otherwise each is listed by its full name.
    """
    settings = next(iter(modules.values())).lora_settings

    def last(path: ModulePath) -> str:
        return _module_names(named[path])[0].rpartition(".")[2]

    # On loading, a name shared with a module without adapters would give that module some.
    without = {last(path) for path in named if path not in modules}
    targets = {
        name
        for path in modules
        for name in ([last(path)] if last(path) not in without else _module_names(named[path]))
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.source,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
