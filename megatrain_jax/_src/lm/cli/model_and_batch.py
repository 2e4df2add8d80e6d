"""A run's model and batch as its settings describe them, for plans and for runs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax import models
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.cli.setting_rules import Frozen
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download, is_hub_model

# Options of `models.lora`, named in its errors.
_OF_ADAPTERS = re.compile("`(alpha|dora|dropout|modules_to_save|rank|rslora|targets)`")


def checkpoint_folder(given: str) -> str:
    """The folder of a checkpoint, which is downloaded if it has a name on the Hub.

    Args:
        given: The setting `model`.

    Raises:
        FileNotFoundError: If the download fails.
        ValueError: If there is no such folder.
    """
    if is_hub_model(given):
        return str(folder_or_download("model", given, "a checkpoint", CHECKPOINT_FILES))
    if not Path(given).expanduser().is_dir():
        raise ValueError(f"`model` = {given} must be the folder of a checkpoint")
    return given


class Adapted(NamedTuple):
    """A model with adapters, and its trained parameters.

    Attributes:
        model: Function that builds the model.
        params: Parameters to start from, if any.
        trainable: Pattern of the adapters and of further trained parameters.
    """

    model: Any
    params: Any
    trainable: str


def with_adapters(model: Any, trainable: Sequence[str] | str | None, **options: Any) -> Adapted:
    """Adds adapters to a model.

    Args:
        model: Function that builds the model.
        trainable: Patterns of further parameters to train; None for none.
        **options: Options of `models.lora`.

    Raises:
        ValueError: If the model can't have such adapters.
    """
    try:
        adapted = models.lora(model, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(re.sub(_OF_ADAPTERS, r"`lora_\1`", str(error))) from error
    return trained_with(adapted, trainable)


def trained_with(adapted: models.Lora, trainable: Sequence[str] | str | None) -> Adapted:
    """A model with adapters, with patterns of further parameters to train; None for none."""
    pattern = "|".join([adapted.trainable, *filter(None, listed(trainable))])
    return Adapted(adapted.model, adapted.params, pattern)


def frozen_of(given: Frozen | None, has_adapters: bool, saved: str | None) -> Frozen | None:
    """The form of frozen parameters: with adapters, the checkpoint's dtype if it is bfloat16.

    Args:
        given: The setting; None if it is not set.
        has_adapters: Whether adapters are trained.
        saved: dtype of the checkpoint; None if unknown.
    """
    return "bfloat16" if given is None and has_adapters and saved == "bfloat16" else given


def batch_shapes(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a packed batch of `megatrain_jax.data`.

    Args:
        rows: Number of rows.
        length: Tokens of a row.
    """
    kinds = dict.fromkeys(("tokens", "labels", "segments", "positions"), jnp.int32)
    shapes: dict[str, jax.ShapeDtypeStruct] = {
        name: jax.ShapeDtypeStruct((rows, length), dtype)
        for name, dtype in (kinds | {"mask": jnp.bool_}).items()
    }
    return shapes | {"learned_per_row": jax.ShapeDtypeStruct((rows,), jnp.float32)}
