"""The data of `finetune`: each objective's rows, read by a function of `megatrain_jax.data`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax import data
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.images import image_options
from megatrain_jax._src.lm.cli.model_and_batch import batch_shapes
from megatrain_jax._src.lm.cli.new_tokens import readable_tokenizer
from megatrain_jax._src.lm.cli.objective_kinds import OBJECTIVE_KINDS
from megatrain_jax._src.lm.cli.run_data import common_options, summarised

# Pairs of answers per row assumed in a plan, before the data is read. No large array depends on it.
_PAIRS = 8

Shapes = dict[str, jax.ShapeDtypeStruct]


def dataset(
    settings: FinetuneSettings,
    files: Sequence[str] | str,
    epochs: int | None,
    *,
    images: bool = False,
) -> data.Dataset:
    """The batches of some files; `images` is whether the data has images.

    Raises:
        ValueError: If they can't be used.
    """
    kind = "text" if settings.format == "text" else OBJECTIVE_KINDS[settings.objective].rows
    kind = "images" if images else kind
    common = common_options(settings, epochs, "split" if kind == "text" else "error")
    return summarised(_READERS[kind](settings, files, common))


def shapes(settings: FinetuneSettings) -> Shapes:
    """The shapes of a batch, for a plan."""
    rows, length = settings.batch, settings.length
    kind = OBJECTIVE_KINDS[settings.objective].rows
    more = dict(_ARRAYS[kind])
    if settings.stores_reference:
        more["reference"] = (2 * _PAIRS, jnp.float32)
    found = batch_shapes(rows, length) | {
        name: jax.ShapeDtypeStruct((rows, *([width] * (width > 0))), dtype)
        for name, (width, dtype) in more.items()
    }
    for name, dtype in _ENTRIES.items() if kind == "distilled" else ():
        found[name] = jax.ShapeDtypeStruct((rows, length, settings.topk), dtype)
    return found


def chat_template(given: str | None) -> str | None:
    """A chat template: the given text, or the contents of the file with this path."""
    if given is None or "{" in given or not (path := Path(given).expanduser()).is_file():
        return given
    with naming(path):
        return path.read_text(encoding="utf-8")


def _conversation_options(settings: FinetuneSettings) -> dict[str, Any]:
    """The options of readers that render conversations."""
    return {
        "chat_template": chat_template(settings.chat_template),
        "template_variables": settings.template_variables,
        "merge": settings.merge,
        "leading": settings.leading,
    }


def _text(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    return data.text(files, readable_tokenizer(settings), **common)


def _chat(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    options = {**common, **_conversation_options(settings), "train_on": settings.train_on}
    return data.chat(files, readable_tokenizer(settings), **options)


def _images(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    options = {
        **image_options(common),
        **_conversation_options(settings),
        "train_on": settings.train_on,
    }
    return data.image_chat(files, settings.model, **options)


def _preferences(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    return data.preferences(
        files, readable_tokenizer(settings), **common, **_conversation_options(settings)
    )


def _margins(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    options = {**common, **_conversation_options(settings), "margins": True}
    return data.preferences(files, readable_tokenizer(settings), **options)


def _unpaired(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    return data.unpaired(
        files, readable_tokenizer(settings), **common, **_conversation_options(settings)
    )


def _distilled(settings: FinetuneSettings, files: Any, common: Mapping[str, Any]) -> data.Dataset:
    options = {**common, "topk": settings.topk, "tail": settings.tail}
    return data.distillation(files, readable_tokenizer(settings), **options)


_READERS: dict[str, Callable[..., data.Dataset]] = {
    "text": _text,
    "chat": _chat,
    "images": _images,
    "preferences": _preferences,
    "margins": _margins,
    "unpaired": _unpaired,
    "distilled": _distilled,
}
# Arrays of `topk` entries per token.
_ENTRIES = {"topk_token_ids": jnp.int32, "topk_logprobs": jnp.float32}
# Arrays besides the common ones: size of the second axis (0 for none) and dtype.
_PER_ROW = (0, jnp.float32)
_PAIRED: dict[str, tuple[int, Any]] = {"pairs": (_PAIRS, jnp.bool_), "pairs_per_row": _PER_ROW}
_CHOSEN = {"chosen_learned_per_row": _PER_ROW, "chosen_tokens_per_row": _PER_ROW}
_ARRAYS: dict[str, dict[str, tuple[int, Any]]] = {
    "chat": {},
    "preferences": _PAIRED | _CHOSEN,
    "margins": _PAIRED | _CHOSEN | {"margins": (_PAIRS, jnp.float32)},
    "unpaired": _PAIRED | {"desirable": (_PAIRS, jnp.bool_), "desirable_per_row": _PER_ROW},
    "distilled": {},
}
