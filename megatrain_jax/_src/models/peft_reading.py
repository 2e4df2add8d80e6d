"""Reads adapters in PEFT's format, to go on training them."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.adapter_layers import different_layers
from megatrain_jax._src.common.hf_folder import (
    GENERATION_CONFIG,
    read_json,
    regular_file,
    required_file,
)
from megatrain_jax._src.common.hub import folder_or_download
from megatrain_jax._src.models.lora import Lora, lora
from megatrain_jax._src.models.low_rank import name_of
from megatrain_jax._src.models.names import ParameterTensors, family_of, parameter_tensors
from megatrain_jax._src.models.pretrained import Pretrained, with_config, with_end_tokens
from megatrain_jax._src.models.tensors import DTYPES, LazyArray, Tensor, open_file, some

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# The ends of tensors' names for each parameter of an adapted module.
ENDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
DORA_ENDS = ENDS | {"lora_magnitude": "lora_magnitude_vector"}
# Fields of adapter_config.json that are read here, and fields that don't change the computation.
# The modules with adapters are known from the tensors in the file.
_READ = frozenset(
    "peft_type r lora_alpha lora_dropout use_rslora use_dora bias init_lora_weights target_modules "
    "modules_to_save".split()
)
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config task_type".split()
)
# Initial values that leave the base model as it is; "pissa", for example, changes it.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


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
    values = _config(folder)
    parameters = _parameters(pretrained, folder)
    found = _found(parameters, _tensors(folder), values, pretrained, folder)
    chosen = {name_of(p.path) for p, arrays in found if "lora_A" in arrays}
    whole = {name_of(p.path[:-1]) for p, arrays in found if "lora_A" not in arrays}
    adapted = lora(
        pretrained.model,
        targets=lambda path: path in chosen,
        rank=values["r"],
        alpha=values["lora_alpha"],
        dropout=values.get("lora_dropout", 0.0),
        rslora=values.get("use_rslora", False),
        modules_to_save=sorted(whole),
        dora=values.get("use_dora", False),
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


def _config(folder: Path) -> dict[str, Any]:
    """The contents of adapter_config.json.

    Raises:
        ValueError: If they describe adapters of another kind, or with further options.
    """
    path = required_file(folder, CONFIG)
    values = read_json(path)
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(values.get(name), kind):
            raise ValueError(f"{path} has no number `{name}`")
    further = set(values) - _READ - _WITHOUT_EFFECT
    wrong = {name: values[name] for name in sorted(further) if values[name]}
    wrong |= {
        name: values[name]
        for name, allowed in (
            ("peft_type", ("LORA",)),
            ("bias", (None, "none")),
            ("init_lora_weights", _INITIAL),
        )
        if values.get(name) not in allowed
    }
    if wrong:
        options = ", ".join(f"{name}={value!r}"[:100] for name, value in wrong.items())
        raise ValueError(
            f"{path} has options that models.lora doesn't have: {options}. PEFT's "
            "`merge_and_unload` can make these adapters part of their model"
        )
    return values


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder, by their names in the base model."""
    path = regular_file(folder, WEIGHTS)
    if path is None:
        raise FileNotFoundError(
            f"there is no {WEIGHTS} in {folder}; PEFT writes it with `safe_serialization=True`"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in open_file(path).items()}


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
    values: Mapping[str, Any],
    pretrained: Pretrained,
    folder: Path,
) -> list[tuple[ParameterTensors, dict[str, LazyArray]]]:
    """The matrices with adapters, and their adapters.

    Raises:
        ValueError: If tensors are missing, unknown, or of another shape or dtype than expected.
    """
    left, ends = dict(tensors), DORA_ENDS if values.get("use_dora") else ENDS
    found, missing, misshapen = [], [], []
    for parameter in parameters:
        modules = [name.removesuffix(".weight") for name in parameter.names]
        names = {f: [f"{module}.{end}" for module in modules] for f, end in ends.items()}
        every = [name for part in names.values() for name in part]
        if not any(name in left for name in every):
            if values.get("modules_to_save") and parameter.names[0] in left:
                tensor = left.pop(parameter.names[0])
                if tensor.shape != parameter.shape or tensor.dtype not in DTYPES:
                    misshapen.append(f"{tensor.name} {tensor.shape}, not {parameter.shape}")
                else:
                    array = LazyArray((tensor,), stacked=False)
                    found.append((parameter, {str(parameter.path[-1]): array}))
            continue
        if lacking := [name for name in every if name not in left]:
            missing += lacking
            left = {name: tensor for name, tensor in left.items() if name not in every}
            continue
        out, *inside = parameter.tensor_shape
        shapes = {"lora_A": (values["r"], *inside), "lora_B": (out, values["r"])}
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
        arrays = {f: LazyArray(parts[f], stacked=parameter.stacked) for f in ends}
        found.append((parameter, arrays))
    adapted = [parameter for parameter, arrays in found if "lora_A" in arrays]
    faults = {
        "not part of it": list(left),
        "without adapters": different_layers(_modules(adapted), _modules(parameters), values),
        "missing": missing,
        "of another shape": misshapen,
    }
    if not found or any(faults.values()):
        told = "; ".join(f"{fault}: {some(names)}" for fault, names in faults.items() if names)
        base = values.get("base_model_name_or_path") or "an unnamed model"
        raise ValueError(
            f"the adapters in {folder} are of {base}, and don't fit `pretrained` = "
            f"{pretrained.folder}. {told or 'There are none'}"
        )
    return found
