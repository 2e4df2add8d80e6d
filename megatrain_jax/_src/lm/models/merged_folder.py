"""Merges the adapters in a PEFT folder into a checkpoint, one matrix at a time.

This works on names and matrices alone, so the base may be of any architecture, as long as the
tensors in its files have the names that its modules have in Transformers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.lm.common.adapter_layers import EMBEDDINGS, HEADS, different_layers
from megatrain_jax._src.lm.common.hf_folder import read_json, required_file
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download
from megatrain_jax._src.lm.models.expert_tensors import split_experts, stack_experts
from megatrain_jax._src.lm.models.export import companions, copy_companions, write_config
from megatrain_jax._src.lm.models.families.registry import FAMILIES
from megatrain_jax._src.lm.models.folders import atomic_folder, new_folder
from megatrain_jax._src.lm.models.peft_reading import (
    CONFIG,
    WEIGHTS,
    AdapterSettings,
    read_settings,
    read_tensors,
)
from megatrain_jax._src.lm.models.quantised import check_decoded, check_quantisation, open_weights
from megatrain_jax._src.lm.models.tensor_files import NamedTensor, write_tensors
from megatrain_jax._src.lm.models.tensors import (
    DTYPES,
    ITEM_BYTES,
    LazyArray,
    Tensor,
    finite_numbers,
    some,
)

_ADAPTER_FILES = ("adapter_*", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_PER_TOKEN = re.compile(f"{EMBEDDINGS.pattern}|{HEADS.pattern}")
_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")


@dataclass(frozen=True, kw_only=True)
class MergedTensor:
    """A changed tensor of the base, computed when it is converted to an array.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        numbers: Function that returns its numbers before they are rounded.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    numbers: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Computes the numbers; nothing is kept here."""
        if copy is False:
            raise ValueError("a merged matrix can't be had without computing it")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            array = self.numbers().astype(self.dtype, copy=False)
        if not np.isfinite(array).all():
            raise ValueError(
                f"{self.name} with its adapters has numbers that are not finite in {self.dtype}: "
                "the adapters, or their `lora_alpha`, are damaged or too large"
            )
        return array if dtype is None else array.astype(dtype, copy=False)


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
    folder = new_folder(folder, overwrite=overwrite)
    holds = f"adapters ({CONFIG} and {WEIGHTS})"
    source = folder_or_download("adapter", adapter, holds, _ADAPTER_FILES)
    settings = read_settings(source, merging=True)
    factors, whole = _read_adapter(source)
    at_base = _open_base(source, settings, base)
    config = required_file(at_base, "config.json")
    values = read_json(config)
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
        name: tensor if name in tensors else LazyArray((tensor,), stacked=False)
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
    if unknown := [name for name in arrays if codes[name] not in ITEM_BYTES]:
        raise ValueError(f"tensors in {at_base} have a dtype that isn't known: {some(unknown)}")
    named = [NamedTensor(name=n, array=a, code=codes[n]) for n, a in arrays.items()]
    # A tokenizer beside the adapters has the tokens and the template that they were trained with.
    copied = companions(at_base) | companions(source)
    most = Counter(code for name, code in codes.items() if code in DTYPES).most_common(1)[0][0]
    with atomic_folder(folder, overwrite=overwrite) as at:
        write_tensors(at, named, max_shard_bytes)
        write_config(at, values, DTYPES[most].name)
        copy_companions(at, copied)
    return folder


def _open_base(source: Path, settings: AdapterSettings, base: Any) -> Path:
    named = settings.values.get("base_model_name_or_path")
    if base is None and (not isinstance(named, str) or not named):
        raise ValueError(f"{source / CONFIG} names no base model: pass its folder as `base`")
    holds = "the checkpoint that the adapters belong to"
    return folder_or_download("base", named if base is None else base, holds, CHECKPOINT_FILES)


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
) -> dict[str, MergedTensor]:
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
) -> MergedTensor:
    return MergedTensor(name=name, dtype=DTYPES[base.dtype], shape=shape, numbers=numbers)


def _replaced(
    tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], fault: str
) -> dict[str, MergedTensor]:
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
