"""Hugging Face checkpoints: a decoder to build, with parameters left in their files.

Each of the model's parameters is mapped to tensors in the files. Names differ by a prefix and by a
family's renames; experts are separate tensors in the files and one stack in the model.

A checkpoint may get a larger vocabulary before it is trained, or a score head: a reward model has a
score of each token in place of logits, and a conversation's score is that of its last token, as in
the classes for sequence classification of Transformers, which load an exported reward model.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.computed_array import ComputedArray
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
from megatrain_jax._src.lm.models.config import FAMILIES, DecoderConfig, as_scorer
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.decoder_options import VisionConfig
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.gguf_files import by_our_names, gguf_file, open_gguf
from megatrain_jax._src.lm.models.hf_common import as_ignored
from megatrain_jax._src.lm.models.layers import Buffer
from megatrain_jax._src.lm.models.quantised import open_weights, scales_of
from megatrain_jax._src.lm.models.tensors import (
    DTYPES,
    Tensor,
    lazy_array,
    listed,
    same,
    some,
    split_experts,
)

ParameterPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterTensors:
    """One parameter of a decoder, and the tensors of a checkpoint's files that hold it.

    Attributes:
        path: The parameter's path in the model.
        shape: The parameter's shape.
        names: The tensors in the files: one, or one for each expert.
        stacked: Whether the tensors are stacked along a new first axis.
        trained: Whether it is a parameter rather than a buffer.
    """

    path: ParameterPath
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    trained: bool = True

    @property
    def modules(self) -> list[str]:
        """The names of the tensors' modules, if it is a matrix."""
        return [name.removesuffix(".weight") for name in self.names]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.shape[1:] if self.stacked else self.shape


def parameter_tensors(config: DecoderConfig) -> tuple[ParameterTensors, ...]:
    """Returns the parameters and buffers of a decoder with their tensors, without any array."""
    # Only shapes, because the model itself may not fit this machine.
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    family, buffers = family_of(config), dict(_flat(model, Buffer))
    found = [_tensors_of(path, value.shape, family, config.vision) for path, value in leaves(model)]
    return tuple(replace(entry, trained=entry.path not in buffers) for entry in found)


def family_of(config: DecoderConfig) -> Family:
    """Returns the family that a configuration was read as; Llama for a hand-made one."""
    return FAMILIES[config.family or "llama"]


def leaves(model: Decoder) -> list[tuple[ParameterPath, jax.Array]]:
    """Returns paths and values of a decoder's parameters and buffers; values may be just shapes."""
    return [*_flat(model, nnx.Param), *_flat(model, Buffer)]


def _flat(model: Decoder, kind: type[nnx.Variable]) -> list[tuple[ParameterPath, jax.Array]]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return [(tuple(path), variable.get_value()) for path, variable in flat]  # type: ignore[misc]


def others(model: Decoder) -> list[ParameterPath]:
    """Returns the paths of variables that are no parameters, buffers or random keys."""
    kept = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, Buffer, nnx.RngState, nnx.Intermediate)))
    return [tuple(path) for path, _ in nnx.to_flat_state(kept)]  # type: ignore[misc]


def _tensors_of(
    path: ParameterPath, shape: tuple[int, ...], family: Family, vision: VisionConfig | None
) -> ParameterTensors:
    if vision is not None and path[0] == "vision":
        name = vision.tensor_name(tuple(map(str, path[1:])))
        return ParameterTensors(path=path, shape=shape, names=(name,), stacked=False)
    whole = f".{'.'.join(map(str, path))}."
    for ours, files in family.renames.items():
        whole = whole.replace(f".{ours}.", f".{files}." if files else ".")
    parts = whole.strip(".").split(".")
    if parts[0] == "lm_head":
        parts = [family.head, *parts[1:]]
    elif parts[0] != "score":
        parts = [family.body, *parts]
    if "experts" not in parts or family.stacked:
        return ParameterTensors(path=path, shape=shape, names=(".".join(parts),), stacked=False)
    at = parts.index("experts") + 1
    names = [".".join([*parts[:at], str(i), *parts[at:]]) for i in range(shape[0])]
    return ParameterTensors(path=path, shape=shape, names=tuple(names), stacked=True)


# Two norms, attention's two matrices, and at least a router or an MLP.
_LEAST_IN_A_LAYER = 5


@dataclass(frozen=True, kw_only=True)
class Pretrained(ExplainedAttributes):
    """A checkpoint that can be trained on: ``fit(p.model, ..., params=p.params)``.

    Attributes:
        model: Function that builds the decoder, with fresh parameters and the checkpoint's buffers.
        params: The checkpoint's parameters and buffers as nested dicts that follow the decoder's
            paths. Each leaf has a shape and a dtype, and reads its numbers when it is converted to
            an array.
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
    """Opens a checkpoint in Hugging Face format, or a GGUF file; reads headers only.

    Args:
        folder: Contains `config.json` and `model.safetensors`, or an index and its files. A name
            such as "Qwen/Qwen3-0.6B", if there is no such folder, is downloaded from the Hugging
            Face Hub by `huggingface_hub`, into its cache. Or a GGUF file, or a folder with one
            "NAME.gguf", which the package `gguf` reads.
        ignore: Fields of `config.json`, or of the metadata of a GGUF file, to ignore, because they
            are known not to matter.
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
    file = gguf_file(folder)
    if file is None:
        holds = "a checkpoint (config.json and *.safetensors)"
        folder = folder_or_download("folder", folder, holds, CHECKPOINT_FILES)
        path = required_file(folder, "config.json")
        values, tensors = read_json(path), None
        said = f"config.json in {folder}"
    else:
        path, folder = file, file.parent
        values, tensors = open_gguf(file, ignore)
        said = f"the metadata in {file}"
    with naming(path):
        config = DecoderConfig.from_hf(values, ignore=ignore, images=images)
    config = with_end_tokens(config, folder)
    if tensors is None:
        tensors = open_weights(folder, config.original)
    family, stacked = family_of(config), False
    if not family.stacked:
        tensors, stacked = split_experts(
            tensors, lambda name: family.keeps(name, config.num_layers, config.unread)
        )
    config = _with_own_head(config, tensors)
    if config.vision is not None:
        config = replace(config, vision=config.vision.as_in(frozenset(tensors)))
    _check_count(said, config, tensors)
    wanted = parameter_tensors(config)
    if file is not None:
        tensors = by_our_names(tensors, config, [n for entry in wanted for n in entry.names])
    _check(said, config, wanted, tensors)
    params: dict[str | int, Any] = {}
    buffers: dict[ParameterPath, ComputedArray] = {}
    for parameter in wanted:
        parts = tuple(tensors[name] for name in parameter.names)
        array = lazy_array(parts, stacked=parameter.stacked)
        if not parameter.trained:
            buffers[parameter.path] = array
        at = params
        for key in parameter.path[:-1]:
            at = at.setdefault(key, {})
        at[parameter.path[-1]] = array
    # A checkpoint may have several dtypes, such as norms in fp32; the export keeps each tensor's.
    read = [tensors[name] for parameter in wanted for name in parameter.names]
    most = Counter(tensor.dtype for tensor in read).most_common(1)[0][0]
    config = replace(
        config,
        source=str(folder.resolve() / ("" if file is None else file.name)),
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


def _built(config: DecoderConfig, buffers: Mapping[ParameterPath, ComputedArray]) -> Decoder:
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    for path, array in buffers.items():
        at: Any = decoder
        for key in path:
            at = at[key] if isinstance(key, int) else getattr(at, key)
        at.set_value(jnp.asarray(np.asarray(array)))
    return decoder


def without_dropout(model: Decoder) -> Decoder:
    """Returns a copy of a model's modules, in evaluation mode, that shares its arrays."""
    model = nnx.merge(*nnx.split(model))
    model.eval()
    return model


def filled(name: str, model: Any, params: Any, allowed: str = "") -> Decoder:
    """Returns a decoder with the given parameters, which are not read, in evaluation mode.

    Args:
        name: Name of the argument with both.
        model: The decoder, or a function that builds it.
        params: The parameters.
        allowed: What the argument may be.

    Raises:
        TypeError: If the model is no decoder.
        ValueError: If parameters are missing, or have another shape.
    """
    buffers = None
    if not isinstance(model, Decoder):
        if not callable(model):
            raise TypeError(checks.refused(name, allowed, (model, params)))
        build = model
        model = nnx.eval_shape(build)
        if not isinstance(model, Decoder):
            kind = type(model).__qualname__
            raise TypeError(f"the model in `{name}` builds a {kind}, not a models.Decoder")
        # Fresh parameters have no readers, so XLA leaves them out.
        buffers = jax.jit(lambda: nnx.state(build(), nnx.Not(nnx.Param)))()
    model = without_dropout(model)
    if buffers is not None:
        nnx.update(model, buffers)
    missing = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        found = _at(params, path)
        where = "/".join(map(str, path))
        if found is None:
            missing.append(where)
        elif tuple(found.shape) != tuple(variable.shape):
            raise ValueError(
                f"{where} in the parameters of `{name}` has shape {tuple(found.shape)}, but the "
                f"model has {tuple(variable.shape)}"
            )
        else:
            at: Any = model
            for key in path[:-1]:
                at = at[key] if isinstance(key, int) else getattr(at, str(key))
            setattr(at, str(path[-1]), nnx.Param(found))
    if missing:
        raise ValueError(f"the parameters of `{name}` lack {some(missing)}")
    return model


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the leaf of a tree at a path; its keys may be numbers as text. None if missing."""
    for key in path:
        if isinstance(tree, list | tuple) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        elif isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
        elif isinstance(tree, Mapping) and str(key) in tree:
            tree = tree[str(key)]
        else:
            return None
    return tree.get_value() if isinstance(tree, nnx.Variable) else tree


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


def _check_count(said: str, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
    """Compares the numbers of tensors and layers, before any layer is laid out."""
    experts = config.experts
    several = experts is not None and not family_of(config).stacked
    matrices = 3 * experts.num * len(experts.layers) if experts and several else 0
    least = _LEAST_IN_A_LAYER * config.num_layers + matrices
    if least > len(tensors):
        more = f" of which {len(experts.layers):,} have {experts.num:,} experts" if experts else ""
        raise ValueError(
            f"{said} asks for {config.num_layers:,} layers{more}, at least "
            f"{least:,} tensors, but its files hold {len(tensors):,}"
        )


def _check(
    said: str, config: DecoderConfig, wanted: Sequence[ParameterTensors], tensors: dict[str, Tensor]
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
    if found := listed(wrong):
        raise ValueError(f"the tensors don't fit {said}. {found}")


def _is_idle(name: str, config: DecoderConfig) -> bool:
    # Early checkpoints keep tables derived from the configuration; tied ones may keep a copy.
    family = family_of(config)
    tied = config.tie_embeddings and name == f"{family.head}.weight"
    kept = family.keeps(name, config.num_layers, config.unread)
    return tied or kept or name.endswith("rotary_emb.inv_freq")


def reward_model(
    pretrained: Pretrained, *, pad_token_id: int | None = None, seed: int = 0
) -> Pretrained:
    """Returns a checkpoint's decoder with one score in place of its language-model head.

    It is a `classifier` of one label.

    Args:
        pretrained: The checkpoint; a score head that it has already is kept.
        pad_token_id: The padding token, without a score; None for the one in `config.json`.
        seed: Seed of the fresh head.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: See `classifier`.
    """
    return classifier(pretrained, ["LABEL_0"], pad_token_id=pad_token_id, seed=seed)


def classifier(
    pretrained: Pretrained,
    labels: Sequence[str],
    *,
    of_tokens: bool = False,
    pad_token_id: int | None = None,
    seed: int = 0,
) -> Pretrained:
    """Returns a checkpoint's decoder with a score for each label in place of its logits of tokens.

    The head is a fresh matrix (labels, hidden_size), the parameter `score/weight`; see
    `conversation_scores`. `save_pretrained` writes a folder that Transformers'
    `AutoModelForSequenceClassification` loads, and `load_pretrained` reads again, with its head.

    Args:
        pretrained: The checkpoint; a head with as many scores that it has already is kept.
        labels: The labels' names, for `config.json`.
        of_tokens: Whether each token has labels, not a whole text: `model(tokens, None, segments)`
            are the scores (rows, length, labels), the head has a bias, and the export is for
            `AutoModelForTokenClassification`. Transformers trains with dropout of a tenth of the
            head's inputs, and this doesn't.
        pad_token_id: The padding token, without a score; None for the one in `config.json`.
            Transformers needs one for batches of several rows.
        seed: Seed of the fresh head.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If Transformers has no such class for the family, labels repeat or are missing,
            the checkpoint scores another number of labels, or texts instead of tokens or the
            reverse, or the token is out of range.
    """
    checks.instance("pretrained", pretrained, Pretrained, "of load_pretrained")
    config, seed = pretrained.config, checks.integer("seed", seed, least=0)
    names = [labels] if isinstance(labels, str) else list(labels)
    if not names or not all(isinstance(x, str) for x in names) or len({*names}) < len(names):
        raise ValueError(checks.refused("labels", "names, each once", labels))
    of_tokens, family = checks.boolean("of_tokens", of_tokens), family_of(config)
    scorer = family.tagger_class if of_tokens else family.scorer_class
    if scorer is None:
        raise ValueError(
            f"`pretrained` is a {config.family}, for which Transformers has no class for "
            f"{'token' if of_tokens else 'sequence'} classification that would load the result"
        )
    if config.scores and config.head_bias != of_tokens:
        raise ValueError(checks.refused("of_tokens", f"{config.head_bias}, as saved", of_tokens))
    if config.scores not in (None, len(names)):
        raise ValueError(f"`pretrained` scores {config.scores} labels, not the {len(names)} given")
    original = json.loads(config.original or "{}")
    if pad_token_id is not None:
        most = config.vocab_size - 1
        pad_token_id = checks.integer("pad_token_id", pad_token_id, least=0, most=most)
        original["pad_token_id"] = pad_token_id
    original |= {
        "architectures": [scorer],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    params = {name: tree for name, tree in pretrained.params.items() if name != "lm_head"}
    if not config.scores:
        shape = (len(names), config.hidden_size)
        draws = np.random.default_rng(seed).normal(0, config.init_std, shape)
        params["score"] = {"weight": draws.astype(np.float32)}
        if of_tokens:
            params["score"] |= {"bias": np.zeros(len(names), np.float32)}
    changes = as_scorer(len(names), of_tokens=of_tokens)
    config = replace(config, **changes, original=json.dumps(original))
    return with_config(replace(pretrained, params=params), config)


def conversation_scores(
    model: Decoder, batch: Mapping[str, Any], *, segments: int
) -> Float[Array, "rows segments ..."]:
    """The scores of each conversation in a packed batch: those of its last token.

    Padding tokens at a conversation's end are skipped, as in Transformers: if the tokenizer pads
    with the token that ends turns, the last token is the one before.

    Args:
        model: A decoder of `reward_model` or `classifier`.
        batch: `tokens`, `segments` and perhaps `positions`, as made by `megatrain_jax.data`.
        segments: Maximum number of conversations in a row.

    Returns:
        The scores in fp32: one for each conversation (rows, segments) or, of several labels, one
        for each of them (rows, segments, labels). For a segment that a row doesn't have, they are
        scores of another token.

    Raises:
        ValueError: If the model has no score head.
    """
    if not model.config.scores:
        raise ValueError("`model` has no score head; models.reward_model and classifier add one")
    tokens, numbers = jnp.asarray(batch["tokens"]), jnp.asarray(batch["segments"])
    hidden, _ = model.hidden(tokens, batch.get("positions"), numbers)
    pad = json.loads(model.config.original or "{}").get("pad_token_id")
    belongs = numbers[:, :, None] == 1 + jnp.arange(segments)
    scored = belongs if pad is None else belongs & (tokens != pad)[:, :, None]
    places = jnp.arange(tokens.shape[1])[None, :, None]
    # A conversation of nothing but padding tokens has the score of its first.
    first = jnp.min(jnp.where(belongs, places, tokens.shape[1] - 1), axis=1)
    last = jnp.maximum(jnp.max(jnp.where(scored, places, 0), axis=1), first)
    of_last = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
    found = jax.lax.dot_general(
        of_last,
        model.head_weight().astype(of_last.dtype),
        (((2,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return found[:, :, 0] if model.config.scores == 1 else found


# Variance of new rows around the mean, in units of the old rows' covariance, as in Transformers.
_VARIANCE = 1e-9
_ROWS = 4096


def resize_vocabulary(pretrained: Pretrained, vocabulary: Any, *, seed: int = 0) -> Pretrained:
    """Returns a checkpoint with more rows in its embedding and in its head, for new tokens.

    The new rows are drawn around the mean of the old rows, with a billionth of their covariance, as
    by Transformers' `resize_token_embeddings`. A tied head stays tied. `save_pretrained` writes
    the new size into `config.json`; pass it the folder of the new tokenizer as `source`.

    Args:
        pretrained: The checkpoint.
        vocabulary: The number of rows, at least as many as now; or a tokenizer with the new tokens,
            for as many rows as its largest id needs, and never fewer than now.
        seed: Seed of the new rows.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the number is smaller than now, or the family has further embeddings.
    """
    checks.instance("pretrained", pretrained, Pretrained, "from models.load_pretrained")
    old, seed = pretrained.config.vocab_size, checks.integer("seed", seed, least=0)
    if hasattr(vocabulary, "get_vocab"):
        size = max(old, 1 + max(vocabulary.get_vocab().values()))
    else:
        size = checks.integer("vocabulary", vocabulary, least=old, other="or a tokenizer")
    if size == old:
        return pretrained
    if "embed_tokens_per_layer" in pretrained.params:
        raise ValueError(
            f"`pretrained` is a {pretrained.config.family}, which has more embeddings than that of "
            "its inputs: its vocabulary can't grow"
        )
    params = dict(pretrained.params)
    for name in ("embed_tokens", "lm_head"):
        if name in params:
            # The head gets rows of its own, not the embedding's draws.
            draws = np.random.SeedSequence([seed, name == "lm_head"])
            module: Mapping[str, Any] = params[name]
            params[name] = {key: resized_array(array, size, draws) for key, array in module.items()}
    original = pretrained.config.original
    if original is not None:
        values = json.loads(original)
        values.get("text_config", values)["vocab_size"] = size
        original = json.dumps(values)
    config = replace(pretrained.config, vocab_size=size, original=original)
    return with_config(replace(pretrained, params=params), config)


def resized_array(old: Any, size: int, draws: np.random.SeedSequence) -> ComputedArray:
    """Returns a matrix or vector with new rows after the old ones; their dtype is that of the old.

    Args:
        old: The old rows.
        size: The number of all rows.
        draws: The seed of the new rows.
    """

    def numbers(dtype: Any) -> np.ndarray:
        rows = np.asarray(old)
        new = _new_rows(rows, size - len(rows), np.random.default_rng(draws))
        return np.concatenate([rows, new.astype(old.dtype)])

    files = getattr(old, "source_files", ())
    return ComputedArray("a resized array", (size, *old.shape[1:]), old.dtype, numbers, files)


def _new_rows(old: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows around the mean of the old ones, (count, *axes), in fp32."""
    starts = range(0, len(old), _ROWS)
    total = np.zeros(old.shape[1:])
    for at in starts:
        total += old[at : at + _ROWS].astype(np.float32).sum(0, dtype=np.float64)
    mean = total / len(old)
    new = np.zeros((count, *old.shape[1:]))
    for at in starts:
        rows = old[at : at + _ROWS].astype(np.float32) - mean.astype(np.float32)
        # Random combinations of centred rows have the rows' covariance; its matrix is never formed.
        new += np.tensordot(rng.standard_normal((count, len(rows)), np.float32), rows, 1)
    return (mean + (_VARIANCE / len(old)) ** 0.5 * new).astype(np.float32)
