"""Opens a Hugging Face checkpoint: a decoder to build, and its parameters still in their files."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from flax import nnx

from megatrain_jax.models.config import DecoderConfig
from megatrain_jax.models.decoder import Decoder
from megatrain_jax.models.names import Entry, entries
from megatrain_jax.models.tensors import DTYPES, LazyArray, Tensor, open_folder, some


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A checkpoint that can be trained on: ``fit(p.model, ..., params=p.params)``.

    Attributes:
        model: Builds the decoder, with fresh parameters.
        params: The checkpoint's parameters as nested dicts that follow the decoder's paths. Each
            leaf has a shape and a dtype, and reads its numbers when it becomes an array.
        config: What the decoder is made of.
        folder: Where the checkpoint lies.
    """

    model: Callable[[], Decoder]
    params: dict[str | int, Any]
    config: DecoderConfig
    folder: Path


def load_pretrained(folder: str | PathLike[str], *, ignore: Sequence[str] = ()) -> Pretrained:
    """Opens a checkpoint in the format of Hugging Face; reads headers only.

    Args:
        folder: Holds `config.json` and `model.safetensors`, or an index and its files.
        ignore: Fields of `config.json` that are known not to matter.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the architecture or an option isn't supported, a file is damaged, or its
            tensors aren't those that the configuration asks for. The message names them.
    """
    folder = Path(folder)
    config = _read_config(folder, ignore)
    tensors = open_folder(folder)
    wanted = entries(config)
    _check(folder, config, wanted, tensors)
    params: dict[str | int, Any] = {}
    for entry in wanted:
        parts = tuple(tensors[name] for name in entry.names)
        at = params
        for key in entry.path[:-1]:
            at = at.setdefault(key, {})
        at[entry.path[-1]] = LazyArray(parts, stacked=entry.stacked)
    saved = Counter(tensors[name].dtype for entry in wanted for name in entry.names)
    dtype = DTYPES[saved.most_common(1)[0][0]].name
    config = replace(config, source=str(folder.resolve()), saved_dtype=dtype)

    def model() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(0))

    return Pretrained(model=model, params=params, config=config, folder=folder)


def _read_config(folder: Path, ignore: Sequence[str]) -> DecoderConfig:
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"there is no config.json in {folder}")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        return DecoderConfig.from_hf(values, ignore=ignore)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check(
    folder: Path, config: DecoderConfig, wanted: Sequence[Entry], tensors: dict[str, Tensor]
) -> None:
    """Compares what the files have with what the model needs; says all that is wrong at once."""
    shapes = {name: entry.tensor_shape for entry in wanted for name in entry.names}
    missing = [name for name in shapes if name not in tensors]
    extra = [name for name in tensors if name not in shapes and not _is_idle(name, config)]
    present = [(tensors[name], shape) for name, shape in shapes.items() if name in tensors]
    misshapen = [
        f"{tensor.name} ({tensor.shape}, not {shape})"
        for tensor, shape in present
        if tensor.shape != shape
    ]
    unknown = [f"{t.name} ({t.dtype})" for t, _ in present if t.dtype not in DTYPES]
    wrong = {
        "missing": missing,
        "not part of the model": extra,
        "of another shape": misshapen,
        f"of another dtype than {', '.join(DTYPES)}": unknown,
    }
    found = [f"{what}: {some(names)}" for what, names in wrong.items() if names]
    if found:
        raise ValueError(f"the tensors in {folder} don't fit its config.json. {'; '.join(found)}")


def _is_idle(name: str, config: DecoderConfig) -> bool:
    # Early checkpoints keep tables that follow from the configuration; tied ones may keep a copy.
    tied = config.tie_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")
