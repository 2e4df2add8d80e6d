"""Reads adapters in PEFT's format: for both ways, merging and further training, and to train them.

An adapter is right only if each of its options is known. So there is one list of known options, and
all others are refused by name.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.common.adapter_layers import different_layers
from megatrain_jax._src.lm.common.hf_folder import (
    GENERATION_CONFIG,
    read_json,
    regular_file,
    required_file,
)
from megatrain_jax._src.lm.common.hub import folder_or_download
from megatrain_jax._src.lm.models.hf_fields import shown
from megatrain_jax._src.lm.models.lora import Lora, lora
from megatrain_jax._src.lm.models.low_rank import name_of
from megatrain_jax._src.lm.models.names import ParameterTensors, family_of, parameter_tensors
from megatrain_jax._src.lm.models.pretrained import Pretrained, with_config, with_end_tokens
from megatrain_jax._src.lm.models.tensors import DTYPES, LazyArray, Tensor, open_file, some

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
    "target_modules task_type".split()
)
_CHECKED = frozenset("r lora_alpha lora_dropout use_rslora use_dora".split())
# Numbers by module, which `models.lora` doesn't have.
_PATTERNS = frozenset(("rank_pattern", "alpha_pattern"))
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # Initial values that leave the base model as it is; "pissa", for example, changes it.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
# It leaves the base as it is, too, but only `lora_A` is trained.
_MERGED_ONLY = {"init_lora_weights": ("mica",)}
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
    """

    values: Mapping[str, Any]
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's adapter, as PEFT chooses it."""
        return self._of(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's adapter, as PEFT chooses it."""
        rank = self.rank_of(module)
        return self._of(self.alphas, module, self.alpha) / (
            math.sqrt(rank) if self.rslora else rank
        )

    @staticmethod
    def _of(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
        matches = (value for key, value in pattern.items() if _module_pattern(key).match(module))
        return next(matches, default)


def load_lora(pretrained: Pretrained, folder: str | PathLike[str], *, seed: int = 0) -> Lora:
    """Adds the adapters in a folder to a checkpoint, to go on training them.

    The folder, written by `save_lora` or PEFT, determines rank, scale, dropout and the adapted
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
    if not isinstance(pretrained, Pretrained):
        raise TypeError(checks.refused("pretrained", "from models.load_pretrained", pretrained))
    holds = f"adapters ({CONFIG} and {WEIGHTS})"
    folder = folder_or_download("folder", folder, holds, (CONFIG, WEIGHTS, GENERATION_CONFIG))
    config = with_end_tokens(pretrained.config, folder, add=True)
    pretrained = with_config(pretrained, config)
    settings = read_settings(folder, merging=False)
    parameters = _parameters(pretrained, folder)
    found = _found(parameters, read_tensors(folder), settings, pretrained, folder)
    chosen = {name_of(p.path) for p, arrays in found if "lora_A" in arrays}
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
        rank=settings.rank,
        alpha=settings.alpha,
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
    path = required_file(folder, CONFIG)
    values = read_json(path)
    given = {"peft_type": None, **values}
    wrong = [
        f"{name[:60]}={shown(value)}"
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
    known = name in _WITHOUT_EFFECT or name in _CHECKED or (merging and name in _PATTERNS)
    # An unknown option that is empty or off has no effect. Zero may have one.
    return known or value is None or value is False or value in ("", [], {})


def _checked_settings(values: Mapping[str, Any], merging: bool) -> AdapterSettings:
    def alpha(name: str, value: Any) -> float:
        number = checks.number(name, value, above=None if merging else 0)
        if abs(number) > _LARGEST:
            raise ValueError(checks.refused(name, "within the range of float32", value))
        return number

    targets = values.get("target_modules")
    if isinstance(targets, str):
        _check_pattern("target_modules", targets, re.compile)
    elif targets is not None and not (
        isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    ):
        raise TypeError(checks.refused("target_modules", "names or a regular expression", targets))
    dropout = checks.number("lora_dropout", values.get("lora_dropout", 0.0), least=0)
    if dropout >= 1:
        raise ValueError(checks.refused("lora_dropout", "below 1", dropout))
    return AdapterSettings(
        values=values,
        rank=checks.integer("r", values.get("r", 8)),
        alpha=alpha("lora_alpha", values.get("lora_alpha", 8)),
        dropout=dropout,
        rslora=_flag(values, "use_rslora"),
        dora=_flag(values, "use_dora"),
        ranks=_pattern(values, "rank_pattern", checks.integer),
        alphas=_pattern(values, "alpha_pattern", alpha),
    )


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    return False if value is None else checks.boolean(name, value)


def _pattern(
    values: Mapping[str, Any], name: str, check: Callable[[str, Any], Any]
) -> dict[str, Any]:
    given = values.get(name)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(checks.refused(name, "an object", given))
    for key in given:
        _check_pattern(name, key, _module_pattern)
    return {key: check(f"{name}.{key}", value) for key, value in given.items()}


def _module_pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def _check_pattern(name: str, key: str, compiles: Callable[[str], Any]) -> None:
    try:
        compiles(key)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{name}` has {key[:100]!r}, no regular expression: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapters' folder, by their names in the base model.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, has no tensors, or LoRA of embeddings.
    """
    path = regular_file(folder, WEIGHTS)
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


def _parameters(pretrained: Pretrained, folder: Path) -> list[ParameterTensors]:
    """The parameters of the checkpoint, with their names in PEFT."""
    if family_of(pretrained.config).multimodal:
        raise ValueError(
            f"`pretrained` is the decoder of a {pretrained.config.family}: PEFT's names for its "
            f"modules differ from those in its files, so the adapters in {folder} can't be read"
        )
    return [entry for entry in parameter_tensors(pretrained.config) if entry.trained]


def _modules(parameters: list[ParameterTensors]) -> list[str]:
    return [name.removesuffix(".weight") for p in parameters for name in p.names]


def _found(
    parameters: list[ParameterTensors],
    tensors: Mapping[str, Tensor],
    settings: AdapterSettings,
    pretrained: Pretrained,
    folder: Path,
) -> list[tuple[ParameterTensors, dict[str, LazyArray]]]:
    """The matrices with adapters, and their adapters.

    Raises:
        ValueError: If tensors are missing, unknown, or of another shape or dtype than expected.
    """
    left, ends = dict(tensors), DORA_ENDS if settings.dora else ENDS
    found, missing, misshapen = [], [], []
    for parameter in parameters:
        modules = [name.removesuffix(".weight") for name in parameter.names]
        names = {f: [f"{module}.{end}" for module in modules] for f, end in ends.items()}
        every = [name for part in names.values() for name in part]
        if not any(name in left for name in every):
            if settings.values.get("modules_to_save") and parameter.names[0] in left:
                tensor = left.pop(parameter.names[0])
                if tensor.shape != parameter.shape or tensor.dtype not in DTYPES:
                    misshapen.append(f"{tensor.name} {tensor.shape}, not {parameter.shape}")
                else:
                    array = LazyArray((tensor,), stacked=False, finite=True)
                    found.append((parameter, {str(parameter.path[-1]): array}))
            continue
        if lacking := [name for name in every if name not in left]:
            missing += lacking
            left = {name: tensor for name, tensor in left.items() if name not in every}
            continue
        out, *inside = parameter.tensor_shape
        shapes = {"lora_A": (settings.rank, *inside), "lora_B": (out, settings.rank)}
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
        arrays = {f: LazyArray(parts[f], stacked=parameter.stacked, finite=True) for f in ends}
        found.append((parameter, arrays))
    adapted = [parameter for parameter, arrays in found if "lora_A" in arrays]
    faults = {
        "not part of it": list(left),
        "without adapters": different_layers(
            _modules(adapted), _modules(parameters), settings.values
        ),
        "missing": missing,
        "of another shape": misshapen,
    }
    if not found or any(faults.values()):
        told = "; ".join(f"{fault}: {some(names)}" for fault, names in faults.items() if names)
        base = settings.values.get("base_model_name_or_path") or "an unnamed model"
        raise ValueError(
            f"the adapters in {folder} are of {base}, and don't fit `pretrained` = "
            f"{pretrained.folder}. {told or 'There are none'}"
        )
    return found
