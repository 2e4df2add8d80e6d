"""Opens a Hugging Face checkpoint: a decoder to build, with parameters left in their files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.common.suggestions import ExplainedAttributes
from megatrain_jax._src.lm.common.hf_folder import (
    GENERATION_CONFIG,
    end_tokens_of,
    read_json,
    regular_file,
    required_file,
)
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download
from megatrain_jax._src.lm.models.config import DecoderConfig
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.expert_tensors import split_experts
from megatrain_jax._src.lm.models.hf_fields import as_ignored
from megatrain_jax._src.lm.models.names import (
    ParameterPath,
    ParameterTensors,
    family_of,
    parameter_tensors,
)
from megatrain_jax._src.lm.models.quantised import open_weights, scales_of
from megatrain_jax._src.lm.models.tensors import DTYPES, LazyArray, Tensor, same, some

# Two norms, attention's two matrices, and at least a router or an MLP.
_LEAST_IN_A_LAYER = 5


@dataclass(frozen=True, kw_only=True)
class Pretrained(ExplainedAttributes):
    """A checkpoint that can be trained on: ``fit(p.model, ..., params=p.params)``.

    Attributes:
        model: Function that builds the decoder, with fresh parameters and the checkpoint's buffers.
        params: The checkpoint's parameters as nested dicts that follow the decoder's paths. Each
            leaf has a shape and a dtype, and reads its numbers when it is converted to an array.
        config: The decoder's sizes and options.
        folder: Path of the checkpoint's folder.
    """

    model: Callable[[], Decoder]
    params: dict[str | int, Any]
    config: DecoderConfig
    folder: Path


def load_pretrained(
    folder: str | PathLike[str], *, ignore: Sequence[str] = (), images: bool = False
) -> Pretrained:
    """Opens a checkpoint in Hugging Face format; reads headers only.

    Args:
        folder: Contains `config.json` and `model.safetensors`, or an index and its files. A name
            such as "Qwen/Qwen3-0.6B", if there is no such folder, is downloaded from the Hugging
            Face Hub by `huggingface_hub`, into its cache.
        ignore: Fields of `config.json` to ignore, because they are known not to matter.
        images: Whether the decoder is trained with images: the checkpoint's vision part is then
            its module `vision`. Without it, the tensors of that part are only written again.

    Raises:
        FileNotFoundError: If the folder or a file is missing, and can't be downloaded.
        TypeError: If an argument or a field of `config.json` has a wrong type.
        ValueError: If the architecture or an option isn't supported, a file is damaged, not regular
            or outside the folder, or the tensors don't match the configuration. The message names
            them.
    """
    as_ignored(ignore)
    checks.boolean("images", images)
    holds = "a checkpoint (config.json and *.safetensors)"
    folder = folder_or_download("folder", folder, holds, CHECKPOINT_FILES)
    config = with_end_tokens(_read_config(folder, ignore, images), folder)
    tensors = open_weights(folder, config.original)
    family, stacked = family_of(config), False
    if not family.stacked:
        tensors, stacked = split_experts(
            tensors, lambda name: family.keeps(name, config.num_layers, config.unread)
        )
    config = _with_own_head(config, tensors)
    if config.vision is not None:
        config = replace(config, vision=config.vision.as_in(frozenset(tensors)))
    _check_count(folder, config, tensors)
    wanted = parameter_tensors(config)
    _check(folder, config, wanted, tensors)
    params: dict[str | int, Any] = {}
    buffers: dict[ParameterPath, LazyArray] = {}
    for parameter in wanted:
        parts = tuple(tensors[name] for name in parameter.names)
        array = LazyArray(parts, stacked=parameter.stacked)
        if not parameter.trained:
            buffers[parameter.path] = array
            continue
        at = params
        for key in parameter.path[:-1]:
            at = at.setdefault(key, {})
        at[parameter.path[-1]] = array
    # A checkpoint may have several dtypes, such as norms in fp32; the export keeps each tensor's.
    saved = Counter(tensors[name].dtype for parameter in wanted for name in parameter.names)
    most = saved.most_common(1)[0][0]
    read = [tensors[name] for parameter in wanted for name in parameter.names]
    config = replace(
        config,
        source=str(folder.resolve()),
        saved_dtype=DTYPES[most].name,
        saved_apart={t.name: DTYPES[t.dtype].name for t in read if t.dtype != most},
        saved_stacked=stacked,
    )

    return Pretrained(
        model=partial(_built, config, buffers),
        params=params,
        config=config,
        folder=folder,
    )


def with_config(pretrained: Pretrained, config: DecoderConfig) -> Pretrained:
    """Returns a checkpoint whose decoder has another configuration, and the same buffers."""
    assert isinstance(pretrained.model, partial)
    _, buffers = pretrained.model.args
    return replace(pretrained, model=partial(_built, config, buffers), config=config)


def _built(config: DecoderConfig, buffers: Mapping[ParameterPath, LazyArray]) -> Decoder:
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    for path, array in buffers.items():
        _variable(decoder, path).set_value(jnp.asarray(np.asarray(array)))
    return decoder


def _variable(model: Decoder, path: ParameterPath) -> nnx.Variable:
    at: Any = model
    for key in path:
        at = at[key] if isinstance(key, int) else getattr(at, key)
    return at


def with_end_tokens(config: DecoderConfig, folder: Path, *, add: bool = False) -> DecoderConfig:
    """Returns a configuration with the end tokens of a folder's generation_config.json, if any.

    Args:
        config: The configuration.
        folder: The folder.
        add: Whether to keep the configuration's own, too.

    Raises:
        ValueError: If the file is damaged or not regular.
    """
    if (path := regular_file(folder, GENERATION_CONFIG)) is None:
        return config
    own = config.end_tokens if add else ()
    return replace(config, end_tokens=tuple(dict.fromkeys((*own, *end_tokens_of(read_json(path))))))


def _read_config(folder: Path, ignore: Sequence[str], images: bool) -> DecoderConfig:
    path = required_file(folder, "config.json")
    values = read_json(path)
    with naming(path):
        return DecoderConfig.from_hf(values, ignore=ignore, images=images)


def _with_own_head(config: DecoderConfig, tensors: dict[str, Tensor]) -> DecoderConfig:
    """Returns a configuration without tied embeddings if the files contain a different head.

    Transformers does the same: if both are there and differ, they are not tied.
    """
    family = family_of(config)
    head = tensors.get(f"{family.head}.weight")
    embedding = tensors.get(f"{family.body}.embed_tokens.weight")
    if not config.tie_embeddings or head is None or embedding is None or same(head, embedding):
        return config
    return replace(config, tie_embeddings=False)


def _check_count(folder: Path, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
    """Compares the numbers of tensors and layers, before any layer is laid out."""
    experts = config.experts
    several = experts is not None and not family_of(config).stacked
    matrices = 3 * experts.num * len(experts.layers) if experts and several else 0
    least = _LEAST_IN_A_LAYER * config.num_layers + matrices
    if least > len(tensors):
        more = f" of which {len(experts.layers):,} have {experts.num:,} experts" if experts else ""
        raise ValueError(
            f"config.json in {folder} asks for {config.num_layers:,} layers{more}, at least "
            f"{least:,} tensors, but its files hold {len(tensors):,}"
        )


def _check(
    folder: Path,
    config: DecoderConfig,
    wanted: Sequence[ParameterTensors],
    tensors: dict[str, Tensor],
) -> None:
    """Compares the files' tensors with the model's needs; reports all problems at once."""
    shapes = {name: parameter.tensor_shape for parameter in wanted for name in parameter.names}
    missing = [name for name in shapes if name not in tensors]
    extra = [name for name in tensors if name not in shapes and not _is_idle(name, config)]
    present = [(tensors[name], shape) for name, shape in shapes.items() if name in tensors]
    misshapen = [
        f"{tensor.name} ({tensor.shape}, not {shape})"
        for tensor, shape in present
        if tensor.shape != shape
    ]
    unread = [tensor for tensor, _ in present if tensor.dtype not in DTYPES]
    # Weights that are still 8-bit codes lack their scales.
    scales = {tensor.name: scales_of(tensor, config.original) for tensor in unread}
    missing += filter(None, scales.values())
    unknown = [f"{t.name} ({t.dtype})" for t in unread if scales[t.name] is None]
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
    # Early checkpoints keep tables derived from the configuration; tied ones may keep a copy.
    family = family_of(config)
    tied = config.tie_embeddings and name == f"{family.head}.weight"
    kept = family.keeps(name, config.num_layers, config.unread)
    return tied or kept or name.endswith("rotary_emb.inv_freq")
