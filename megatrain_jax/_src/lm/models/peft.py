"""Adapters in PEFT's format: read to merge them or to go on training, and written.

An adapter is right only if each of its options is known. So there is one list of known options, and
all others are refused by name.

Merging works on names and matrices alone, so the base may be of any architecture, as long as the
tensors in its files have the names that its modules have in Transformers.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.lm.common import hf_folder
from megatrain_jax._src.lm.common.adapter_layers import EMBEDDINGS, HEADS, different_layers
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download
from megatrain_jax._src.lm.models import export
from megatrain_jax._src.lm.models.config import FAMILIES
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.lora import Lora, ModulePath, adapted_modules, lora, name_of
from megatrain_jax._src.lm.models.pretrained import (
    ParameterTensors,
    Pretrained,
    family_of,
    leaves,
    parameter_tensors,
    with_config,
    with_end_tokens,
)
from megatrain_jax._src.lm.models.quantised import check_decoded, check_quantisation, open_weights
from megatrain_jax._src.lm.models.tensors import (
    CODES,
    DTYPES,
    NamedTensor,
    Tensor,
    check_known,
    finite_numbers,
    lazy_array,
    listed,
    open_file,
    some,
    split_experts,
    stack_experts,
    write_tensors,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# The ends of tensors' names for each parameter of an adapted module.
ENDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
DORA_ENDS = ENDS | {"lora_magnitude": "lora_magnitude_vector"}
# The options of PEFT's LoraConfig that are known, with their right values; all further ones must be
# off. First the ones that don't change the computation of trained adapters: modules with adapters
# are known from the tensors.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_ga_config "
    "megatron_core modules_to_save peft_version qalora_group_size revision runtime_config "
    "target_modules target_parameters task_type".split()
)
_CHECKED = frozenset(
    "r lora_alpha lora_dropout use_rslora use_dora rank_pattern alpha_pattern".split()
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # Initial values that leave the base model as it is; "pissa", for example, changes it.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
# It leaves the base as it is, too, but only `lora_A` is trained.
_MERGED_ONLY = {"init_lora_weights": ("mica",)}
# Modules that PEFT makes parameters of all experts of a layer, where a base has experts.
_FUSED = frozenset(("gate_proj", "up_proj", "down_proj"))
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The settings of adapters in PEFT's format.

    Attributes:
        values: The contents of adapter_config.json.
        rank: Rank of the adapters that `ranks` doesn't name.
        alpha: The same for `alphas`.
        dropout: Fraction of a module's inputs hidden from its adapter.
        rslora: Whether alpha is divided by the square root of the rank.
        dora: Whether the norms of rows are trained, too.
        ranks: Ranks by regular expressions, which match the ends of modules' names.
        alphas: The same for alpha.
        parameters: The ends of the names of tensors that PEFT adapts as such: their patterns match
            the tensor's name instead of the module's.
    """

    values: Mapping[str, Any]
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's adapter, as PEFT chooses it."""
        return self._of(self.ranks, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Returns the alpha of a module's adapter, as PEFT chooses it."""
        return self._of(self.alphas, module, self.alpha)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's adapter."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def _of(self, pattern: Mapping[str, Any], module: str, default: Any) -> Any:
        tensor = f"{module}.weight"
        by_tensor = any(f".{tensor}".endswith(f".{name}") for name in self.parameters)
        name = tensor if by_tensor else module
        matches = (value for key, value in pattern.items() if _module_pattern(key).match(name))
        return next(matches, default)


def load_lora(pretrained: Pretrained, folder: str | PathLike[str], *, seed: int = 0) -> Lora:
    """Adds the adapters in a folder to a checkpoint, to go on training them.

    The folder, written by `save_lora` or PEFT, determines ranks, scales, dropout and the adapted
    matrices: `peft.PeftModel.from_pretrained(base, folder, is_trainable=True)` does the same.

    Args:
        pretrained: The checkpoint that the adapters belong to, from `load_pretrained`.
        folder: Folder with `adapter_config.json` and `adapter_model.safetensors`, or the name of
            one on the Hugging Face Hub.
        seed: Seed of dropout.

    Returns:
        The model with its adapters, and all parameters: the checkpoint's and the folder's.

    Raises:
        TypeError: If an argument has a wrong type.
        FileNotFoundError: If the folder or a file is missing.
        ValueError: If a file is damaged, the adapters are of another base model, or they have an
            option that isn't supported.
    """
    checks.instance("pretrained", pretrained, Pretrained, "from models.load_pretrained")
    holds = f"adapters ({CONFIG} and {WEIGHTS})"
    folder = folder_or_download(
        "folder", folder, holds, (CONFIG, WEIGHTS, hf_folder.GENERATION_CONFIG)
    )
    config = with_end_tokens(pretrained.config, folder, add=True)
    pretrained = with_config(pretrained, config)
    settings = read_settings(folder, merging=False)
    if family_of(pretrained.config).multimodal:
        raise ValueError(
            f"`pretrained` is the decoder of a {pretrained.config.family}: PEFT's names for its "
            f"modules differ from those in its files, so the adapters in {folder} can't be read"
        )
    parameters = [entry for entry in parameter_tensors(pretrained.config) if entry.trained]
    found = _found(parameters, read_tensors(folder), settings, pretrained, folder)
    # All experts of a layer have one rank and alpha; see `_found`.
    chosen = {name_of(p.path): p.modules[0] for p, arrays in found if "lora_A" in arrays}
    if "lm_head/weight" in chosen:
        raise ValueError(
            f"the adapters in {folder} adapt lm_head, which can't have adapters here, because "
            "losses read its matrix as it is: `models.merge_adapter` makes them part of a "
            "checkpoint to go on from"
        )
    if not chosen:
        raise ValueError(
            f"the adapters in {folder} have no LoRA matrices, only whole ones "
            "(`modules_to_save`): `models.merge_adapter` makes them part of a checkpoint"
        )
    whole = {name_of(p.path[:-1]) for p, arrays in found if "lora_A" not in arrays}
    adapted = lora(
        pretrained.model,
        targets=lambda path: path in chosen,
        rank=lambda path: settings.rank_of(chosen[path]),
        alpha=lambda path: settings.alpha_of(chosen[path]),
        dropout=settings.dropout,
        rslora=settings.rslora,
        modules_to_save=sorted(whole),
        dora=settings.dora,
        seed=seed,
        params=pretrained.params,
    )
    assert adapted.params is not None
    for parameter, arrays in found:
        at = adapted.params
        for key in parameter.path[:-1]:
            at = at[str(key)]
        at |= arrays
    return adapted


def read_settings(folder: Path, *, merging: bool) -> AdapterSettings:
    """Reads adapter_config.json; a missing number has PEFT's default.

    Args:
        folder: The adapters' folder.
        merging: Whether the adapters are only merged, instead of trained further.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or describes adapters of another kind, or with an option that
            isn't known.
    """
    path = hf_folder.required_file(folder, CONFIG)
    values = hf_folder.read_json(path)
    given = {"peft_type": None, **values}
    wrong = [
        f"{name[:60]}={checks.shown(value)}"
        for name, value in given.items()
        if not _is_right(name, value, merging)
    ]
    if wrong:
        initial = any(text.startswith("init_lora_weights") for text in wrong)
        why = (
            "; such adapters may belong to a base that their initialisation changed, and PEFT's "
            "`save_pretrained(..., path_initial_model_for_weight_conversion=...)` writes them for "
            "the unchanged one"
        )
        raise ValueError(
            f"{path} has options that can't be {'merged' if merging else 'trained'} here: "
            f"{some(sorted(wrong))}{why if initial else ''}. PEFT's `merge_and_unload` can make "
            "these adapters part of their model"
        )
    try:
        return _checked_settings(values, merging)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _is_right(name: str, value: Any, merging: bool) -> bool:
    if name in _VALUES:
        return value in _VALUES[name] or (merging and value in _MERGED_ONLY.get(name, ()))
    known = name in _WITHOUT_EFFECT or name in _CHECKED
    # An unknown option that is empty or off has no effect. Zero may have one.
    return known or value is None or value is False or value in ("", [], {})


def _checked_settings(values: Mapping[str, Any], merging: bool) -> AdapterSettings:
    def alpha(name: str, value: Any) -> float:
        number = checks.number(name, value, above=-math.inf if merging else 0)
        if abs(number) > _LARGEST:
            raise ValueError(checks.refused(name, "within the range of float32", value))
        return number

    targets = values.get("target_modules")
    if isinstance(targets, str):
        checks.pattern("target_modules", targets)
    elif targets is not None and not (
        isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    ):
        raise TypeError(checks.refused("target_modules", "names or a regular expression", targets))
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise TypeError(checks.refused("target_parameters", "names", parameters))
    return AdapterSettings(
        values=values,
        rank=checks.integer("r", values.get("r", 8)),
        alpha=alpha("lora_alpha", values.get("lora_alpha", 8)),
        dropout=checks.number("lora_dropout", values.get("lora_dropout", 0.0), least=0, below=1),
        rslora=_flag(values, "use_rslora"),
        dora=_flag(values, "use_dora"),
        ranks=_pattern(values, "rank_pattern", checks.integer),
        alphas=_pattern(values, "alpha_pattern", alpha),
        parameters=tuple(parameters),
    )


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    return False if value is None else checks.boolean(name, value)


def _pattern(
    values: Mapping[str, Any], name: str, check: Callable[[str, Any], Any]
) -> dict[str, Any]:
    given = values.get(name)
    given = {} if given is None else given
    checks.instance(name, given, Mapping, "an object")
    for key in given:
        checks.pattern(name, key, _module_pattern)
    return {key: check(f"{name}.{key}", value) for key, value in given.items()}


def _module_pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapters' folder, by their names in the base model.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, has no tensors, or LoRA of embeddings.
    """
    path = hf_folder.regular_file(folder, WEIGHTS)
    if path is None:
        raise FileNotFoundError(
            f"there is no {WEIGHTS} in {folder}; PEFT writes it with `safe_serialization=True`"
        )
    tensors = {}
    known: dict[str, str] = {}
    for name, tensor in open_file(path).items():
        own = name.removeprefix(PREFIX)
        first = known.setdefault(own.removesuffix(".weight"), name)
        if first != name:
            raise ValueError(f"{path} has two tensors for one: {some([first, name])}")
        tensors[own] = tensor
    if not tensors:
        raise ValueError(f"{path} holds no tensors, so there are no adapters")
    if embeddings := [name for name in tensors if ".lora_embedding_" in name]:
        raise ValueError(
            f"{path} has LoRA of embeddings ({some(embeddings)}), whose rows are looked up, so it "
            "can be neither trained nor merged here. PEFT's `merge_and_unload` can merge it; train "
            "embeddings whole, by `modules_to_save`"
        )
    if copies := [name for name in tensors if name.endswith(".base_layer.weight")]:
        raise ValueError(
            f"{path} has matrices of the base beside their LoRA ({some(copies)}), because PEFT "
            "saves the ones of embeddings and head: save it with `save_embedding_layers=False`, or "
            "merge it by PEFT's `merge_and_unload`"
        )
    return tensors


def _found(
    parameters: list[ParameterTensors],
    tensors: Mapping[str, Tensor],
    settings: AdapterSettings,
    pretrained: Pretrained,
    folder: Path,
) -> list[tuple[ParameterTensors, dict[str, ComputedArray]]]:
    """The matrices with adapters, and their adapters.

    Raises:
        ValueError: If tensors are missing, unknown, or of another shape or dtype than expected.
    """
    left, ends = dict(tensors), DORA_ENDS if settings.dora else ENDS
    found, missing, misshapen = [], [], []
    for parameter in parameters:
        names = {f: [f"{module}.{end}" for module in parameter.modules] for f, end in ends.items()}
        every = [name for part in names.values() for name in part]
        if not any(name in left for name in every):
            if settings.values.get("modules_to_save") and parameter.names[0] in left:
                tensor = left.pop(parameter.names[0])
                if tensor.shape != parameter.shape or tensor.dtype not in DTYPES:
                    misshapen.append(f"{tensor.name} {tensor.shape}, not {parameter.shape}")
                else:
                    array = lazy_array((tensor,), stacked=False, finite=True)
                    found.append((parameter, {str(parameter.path[-1]): array}))
            continue
        if lacking := [name for name in every if name not in left]:
            missing += lacking
            left = {name: tensor for name, tensor in left.items() if name not in every}
            continue
        numbers = {(settings.rank_of(m), settings.alpha_of(m)) for m in parameter.modules}
        if len(numbers) > 1:
            misshapen.append(f"experts {parameter.modules[0]} … with several ranks or alphas")
        [(rank, _), *_] = numbers
        out, *inside = parameter.tensor_shape
        shapes = {"lora_A": (rank, *inside), "lora_B": (out, rank)}
        shapes["lora_magnitude"] = (out,)
        parts = {f: tuple(left.pop(name) for name in names[f]) for f in ends}
        wrong = [
            f"{t.name} {t.shape} {t.dtype}, not {shapes[f]}"
            for f, factors in parts.items()
            for t in factors
            if t.shape != shapes[f] or t.dtype not in DTYPES
        ]
        if wrong:
            misshapen += wrong
            continue
        arrays = {f: lazy_array(parts[f], stacked=parameter.stacked, finite=True) for f in ends}
        found.append((parameter, arrays))
    adapted = [parameter for parameter, arrays in found if "lora_A" in arrays]
    faults = {
        "not part of it": list(left),
        "without adapters": different_layers(
            (name for p in adapted for name in p.modules),
            (name for p in parameters for name in p.modules),
            settings.values,
        ),
        "missing": missing,
        "of another shape": misshapen,
    }
    if not found or any(faults.values()):
        base = settings.values.get("base_model_name_or_path") or "an unnamed model"
        raise ValueError(
            f"the adapters in {folder} are of {base}, and don't fit `pretrained` = "
            f"{pretrained.folder}. {listed(faults) or 'There are none'}"
        )
    return found


def save_lora(
    trainer: Trainer | Decoder,
    folder: str | PathLike[str],
    *,
    dtype: str = "float32",
    source: str | PathLike[str] | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    params: Literal["trained", "ema"] = "trained",
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
        params: "ema" for the averages that a run with `ema_decay` keeps of its parameters.

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
    checks.word("dtype", dtype, CODES)
    export.check_chat_template(chat_template)
    folder = export.new_folder(folder, overwrite=overwrite)
    if source is not None:
        source = hf_folder.existing_folder("source", source, "a tokenizer")
    model = export.decoder_of(trainer, params)
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
    settings = next(iter(modules.values())).lora_settings
    saved, numbers = settings.saved, DTYPES[CODES[dtype]]
    ends = DORA_ENDS if settings.dora else ENDS
    tensors = {
        f"{PREFIX}{name}.{end}": array
        for path, module in modules.items()
        for factor, end in ends.items()
        for name, array in _arrays(named[path], getattr(module, factor).get_value(), numbers)
    }
    whole = [p for p in parameters if p.trained and name_of(p.path[:-1]) in saved]
    values = dict(leaves(model))
    tensors |= {f"{PREFIX}{p.names[0]}": np.asarray(values[p.path]).astype(numbers) for p in whole}
    config = _config(model, modules, named)
    if whole:
        config["modules_to_save"] = sorted({p.names[0].rpartition(".")[0] for p in whole})
    # Imported here, as in `load_pretrained`, because it is an optional dependency.
    from safetensors.numpy import save_file

    copied = export.companions(source)
    settings_file, base = (
        copied.get(hf_folder.GENERATION_CONFIG),
        export.source_folder(model.config),
    )
    if settings_file is None and base is not None and base.is_dir():
        settings_file = hf_folder.own_file(base, hf_folder.GENERATION_CONFIG)
    learned = trainer.end_tokens if isinstance(trainer, Trainer) else ()

    def write() -> None:
        with export.atomic_folder(folder, overwrite=overwrite) as at:
            save_file(tensors, at / "adapter_model.safetensors", metadata={"format": "pt"})
            (at / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
            export.copy_companions(at, copied)
            export.write_chat_template(at, chat_template)
            export.write_end_tokens(
                at, settings_file, model.config, (*model.config.end_tokens, *learned)
            )

    export.written_once(trainer, write)
    return folder


def _arrays(
    parameter: ParameterTensors, value: Any, dtype: np.dtype
) -> list[tuple[str, np.ndarray]]:
    """The arrays of one factor with their modules' names in PyTorch, one for each expert."""
    array = np.ascontiguousarray(np.asarray(value).astype(dtype))
    return list(zip(parameter.modules, array if parameter.stacked else [array], strict=True))


def _config(
    model: Decoder, modules: dict[ModulePath, Any], named: dict[ModulePath, ParameterTensors]
) -> dict[str, Any]:
    """The contents of adapter_config.json.

    PEFT finds modules by the ends of their names. `q_proj` stands for all modules with this name if
    all have adapters; otherwise each is listed by its full name.

    Beside experts, PEFT takes all modules with the names of their matrices for experts, and would
    drop the adapters of dense layers and shared experts. So these are listed as parameters.
    """
    # PEFT joins experts' matrices by the numbers that all modules have, so these are the experts'.
    settings = modules[min(modules, key=lambda path: not named[path].stacked)].lora_settings

    def last(path: ModulePath) -> str:
        return named[path].modules[0].rpartition(".")[2]

    of_experts = _FUSED.intersection(last(path) for path in named if named[path].stacked)
    parameters = {p for p in modules if last(p) in of_experts and not named[p].stacked}

    def names(path: ModulePath) -> Iterable[str]:
        return named[path].names if path in parameters else named[path].modules

    def pattern(number: str) -> dict[str, Any]:
        own = {path: getattr(module.lora_settings, number) for path, module in modules.items()}
        common = getattr(settings, number)
        return {name: n for path, n in own.items() if n != common for name in names(path)}

    alphas = pattern("alpha")
    if settings.rslora and any(named[path].stacked for path in modules):
        # PEFT joins two experts' matrices with twice their rank and alpha, which changes the scale
        # by the square root of 2. The first pattern counts.
        alphas = {"gate_up_proj": settings.alpha * math.sqrt(2)} | alphas
    # On loading, a name shared with a module without adapters would give that module some.
    without = {last(path) for path in named if path not in modules}
    targets = {
        name
        for path in modules
        if path not in parameters
        for name in ([last(path)] if last(path) not in without else named[path].modules)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.source,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "rank_pattern": pattern("rank"),
        "alpha_pattern": alphas,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "target_modules": sorted(targets),
        "target_parameters": sorted(named[path].names[0] for path in parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


_ADAPTER_FILES = ("adapter_*", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_PER_TOKEN = re.compile(f"{EMBEDDINGS.pattern}|{HEADS.pattern}")
_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")


def _with_adapter(
    base: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None
) -> np.ndarray:
    """A matrix and its adapter's product, in fp32.

    Args:
        base: The matrix, of shape (out, in).
        a: The factor of shape (rank, in).
        b: The factor of shape (out, rank).
        scale: The factor of their product.
        magnitude: The norm of each row of the merged matrix, for DoRA; None without.
    """
    factors = (finite_numbers(factor).astype(np.float32) for factor in (b, a))
    total = np.matmul(*factors) * np.float32(scale)
    total += finite_numbers(base)
    if magnitude is not None:
        norms = np.linalg.norm(total, axis=1)
        norms += norms == 0  # a row of zeros stays one
        own = finite_numbers(magnitude).astype(np.float32).reshape(-1)
        total *= (own / norms)[:, None]
    return total


def merge_adapter(
    adapter: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Writes a checkpoint with the adapters of a PEFT folder merged into their base.

    Each matrix is computed in fp32 and rounded once, to its dtype in the base. A quantised base is
    written with decoded weights. Host memory holds one matrix at a time.

    Args:
        adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`, as `save_lora`
            and PEFT write them, or its name on the Hugging Face Hub. It has LoRA (also rsLoRA, and
            ranks and scales by pattern), DoRA, or whole matrices (`modules_to_save`).
        folder: Folder to write; it must not exist, or be empty.
        base: Folder or name of the base; None for the base that the adapter names.
        max_shard_bytes: Maximum bytes of a file, unless one tensor is larger.
        overwrite: Whether to replace an earlier export in `folder`; see `save_pretrained`.

    Returns:
        The folder.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the adapters don't fit the base, are not LoRA or DoRA, or a file is damaged.
        FileNotFoundError: If a folder or a file is missing, and can't be downloaded.
        FileExistsError: If `folder` is not empty; with `overwrite`, if it contains anything that
            no export has written.
    """
    max_shard_bytes = checks.integer("max_shard_bytes", max_shard_bytes)
    folder = export.new_folder(folder, overwrite=overwrite)
    holds = f"adapters ({CONFIG} and {WEIGHTS})"
    source = folder_or_download("adapter", adapter, holds, _ADAPTER_FILES)
    settings = read_settings(source, merging=True)
    factors, whole = _read_adapter(source)
    named: Any = settings.values.get("base_model_name_or_path")
    if base is None and (not isinstance(named, str) or not named):
        raise ValueError(f"{source / CONFIG} names no base model: pass its folder as `base`")
    holds = "the checkpoint that the adapters belong to"
    at_base = folder_or_download("base", named if base is None else base, holds, CHECKPOINT_FILES)
    config = hf_folder.required_file(at_base, "config.json")
    values = hf_folder.read_json(config)
    with naming(config):
        for part in (values, values.get("text_config")):
            if isinstance(part, Mapping):
                check_quantisation(part)
    text = config.read_text(encoding="utf-8")
    tensors = open_weights(at_base, text)
    check_decoded(at_base, tensors.values(), text)
    single, was_stacked = _split_like(factors, tensors, values)
    fault = f"the adapters in {source} don't fit the base {at_base}: "
    _check_tied(values, single, (*factors, *whole), fault)
    # A single expert's tensor is a part of a stacked one, and they are stacked again below.
    arrays: dict[str, Any] = {
        name: tensor if name in tensors else lazy_array((tensor,), stacked=False)
        for name, tensor in single.items()
    }
    arrays |= _adapted(single, factors, settings, fault)
    modules = [name.removesuffix(".weight") for name in single]
    if different := different_layers(factors, modules, settings.values):
        raise ValueError(f"{fault}it has layers without adapters: {some(different)}")
    if both := [name for name in whole if name.removesuffix(".weight") in factors]:
        raise ValueError(f"{fault}it has both adapters and a whole matrix of {some(both)}")
    arrays |= _replaced(single, whole, fault)
    if (rows := _more_rows(single, whole, fault)) is not None:
        values.get("text_config", values)["vocab_size"] = rows
    arrays = stack_experts(arrays) if was_stacked else arrays
    codes = {name: tensors[name].dtype for name in arrays}
    check_known(at_base, codes)
    written = [NamedTensor(name=n, array=a, code=codes[n]) for n, a in arrays.items()]
    # A tokenizer beside the adapters has the tokens and the template that they were trained with.
    copied = export.companions(at_base) | export.companions(source)
    most = Counter(code for name, code in codes.items() if code in DTYPES).most_common(1)[0][0]
    with export.atomic_folder(folder, overwrite=overwrite) as at:
        write_tensors(at, written, max_shard_bytes)
        export.write_config(at, values, DTYPES[most].name)
        export.copy_companions(at, copied)
    return folder


def _read_adapter(source: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The factors of each module, and the whole tensors, by names as in the base.

    Raises:
        FileNotFoundError: See `read_tensors`.
        ValueError: See `read_tensors`; or tensors are of a kind that can't be merged.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    whole, strange = {}, []
    for name, tensor in read_tensors(source).items():
        match = _FACTOR.fullmatch(name)
        known = match is not None or ("lora_" not in name and "token_adapter" not in name)
        if tensor.dtype not in DTYPES or not known:
            strange.append(f"{tensor.name} ({tensor.dtype})")
        elif match is None:
            whole[name] = tensor
        else:
            factors.setdefault(match[1], {})[match[2]] = tensor
    if strange:
        raise ValueError(f"{source / WEIGHTS} has tensors that can't be merged: {some(strange)}")
    return factors, whole


def _split_like(
    factors: Mapping[str, Any], tensors: dict[str, Tensor], values: Mapping[str, Any]
) -> tuple[dict[str, Tensor], bool]:
    """The base's tensors, and whether experts were split because the adapters name single ones."""
    family = FAMILIES.get(str(values.get("model_type")))
    single = any(re.search(r"\.experts\.\d+\.", name) for name in factors)
    if not single or family is None or family.stacked:
        return tensors, False
    return split_experts(tensors, lambda name: False)


def _check_tied(
    values: Mapping[str, Any], tensors: Mapping[str, Any], names: Iterable[str], fault: str
) -> None:
    """Refuses changes of one matrix that serves as embeddings and as head."""
    changed = [name for name in names if _PER_TOKEN.search(name)]
    has_head = any(HEADS.search(name) and name.endswith(".weight") for name in tensors)
    if changed and (values.get("tie_word_embeddings") or not has_head):
        raise ValueError(
            f"{fault}{some(changed)} can't be merged, because the base has one matrix for its "
            "embeddings and its head (`tie_word_embeddings`)"
        )


def _adapted(
    tensors: Mapping[str, Tensor],
    factors: Mapping[str, Mapping[str, Tensor]],
    settings: AdapterSettings,
    fault: str,
) -> dict[str, ComputedArray]:
    """The merged matrices by name.

    Raises:
        ValueError: If the base lacks a matrix, or it has another shape; or a factor is missing.
    """
    wanted = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if settings.dora else set())
    found, absent, misshapen, beside = {}, [], [], []
    for module, parts in factors.items():
        name = f"{module}.weight"
        if name not in tensors:
            absent.append(name)
        absent += [f"{module}.{part}" for part in sorted(wanted - parts.keys())]
        beside += [f"{module}.{part}" for part in sorted(parts.keys() - wanted)]
        if name not in tensors or parts.keys() != wanted:
            continue
        base, a, b = tensors[name], parts["lora_A"], parts["lora_B"]
        rank, magnitude = settings.rank_of(module), parts.get("lora_magnitude_vector")
        fits = len(base.shape) == 2 and (b.shape, a.shape) == (
            (base.shape[0], rank),
            (rank, base.shape[1]),
        )
        fits = fits and (magnitude is None or math.prod(magnitude.shape) == base.shape[0])
        if not fits or base.dtype not in DTYPES:
            misshapen.append(
                f"{name} (adapters {b.shape} and {a.shape} of rank {rank}, matrix {base.shape})"
            )
            continue
        numbers = partial(_with_adapter, base, a, b, settings.scale_of(module), magnitude)
        found[name] = _merged(name, base, base.shape, numbers)
    if absent:
        raise ValueError(f"{fault}there is no {some(absent)}")
    if beside:
        raise ValueError(f"{fault}`use_dora` is off, but there is {some(beside)}")
    if misshapen:
        raise ValueError(f"{fault}other shapes or dtypes: {some(misshapen)}")
    return found


def _merged(
    name: str, base: Tensor, shape: tuple[int, ...], numbers: Callable[[], np.ndarray]
) -> ComputedArray:
    """A changed tensor of the base; `numbers` returns its numbers before they are rounded."""
    dtype = DTYPES[base.dtype]

    def rounded(_: Any) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            array = numbers().astype(dtype, copy=False)
        if not np.isfinite(array).all():
            raise ValueError(
                f"{name} with its adapters has numbers that are not finite in {dtype}: "
                "the adapters, or their `lora_alpha`, are damaged or too large"
            )
        return array

    return ComputedArray("a merged matrix", shape, dtype, rounded)


def _replaced(
    tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], fault: str
) -> dict[str, ComputedArray]:
    """The whole tensors that the adapters' folder has in place of the base's.

    Embeddings and head may have more rows than the base's, for new tokens.

    Raises:
        ValueError: If the base has no such tensor, or one of another shape.
    """
    wrong = [
        name
        for name, tensor in whole.items()
        if name not in tensors
        or not _fits(name, tensor.shape, tensors[name].shape)
        or tensors[name].dtype not in DTYPES
    ]
    if wrong:
        raise ValueError(f"{fault}the base has no tensor of that shape for {some(wrong)}")
    return {
        name: _merged(name, tensors[name], tensor.shape, partial(finite_numbers, tensor))
        for name, tensor in whole.items()
    }


def _fits(name: str, shape: tuple[int, ...], old: tuple[int, ...]) -> bool:
    if _PER_TOKEN.search(name) is None or not shape or not old:
        return shape == old
    return shape[1:] == old[1:] and shape[0] >= old[0]


def _more_rows(
    tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], fault: str
) -> int | None:
    """The number of rows of embeddings and head if there are new tokens; None otherwise.

    Raises:
        ValueError: If only one of both has rows for them.
    """
    before = {n: t.shape[0] for n, t in tensors.items() if _PER_TOKEN.search(n) and t.shape}
    after = before | {name: whole[name].shape[0] for name in before if name in whole}
    grown = {name for name in before if after[name] != before[name]}
    if not grown:
        return None
    rows = {n: after[n] for n in before if before[n] in {before[other] for other in grown}}
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{name} has {count:,}" for name, count in rows.items())
        raise ValueError(f"{fault}embeddings and head differ in their number of rows: {told}")
    return next(iter(rows.values()))
