"""A run's model and batch as its settings describe them, for plans and for runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax import models
from megatrain_jax._src.lm.cli.run_settings import Frozen, listed
from megatrain_jax._src.lm.common.hf_folder import existing_folder
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download, is_hub_model

# Options of `models.lora`, named in its errors.
_OF_ADAPTERS = re.compile("`(alpha|dora|dropout|modules_to_save|rank|rslora|targets)`")


def checkpoint_folder(given: str) -> str:
    """The folder of a checkpoint, which is downloaded if it has a name on the Hub.

    Args:
        given: The setting `model`.

    Raises:
        FileNotFoundError: If there is no such folder, or the download fails.
    """
    if is_hub_model(given):
        return str(folder_or_download("model", given, "a checkpoint", CHECKPOINT_FILES))
    existing_folder("model", given, "a checkpoint")
    return given


def lora_options(settings: Any) -> dict[str, Any]:
    """The options of `models.lora` in a dataclass of settings: their names begin with `lora_`."""
    names = [field.name for field in fields(settings) if field.name.startswith("lora_")]
    found = {name.removeprefix("lora_"): getattr(settings, name) for name in names}
    if "modules_to_save" in found:
        found["modules_to_save"] = listed(found["modules_to_save"])
    return found


def with_adapters(
    model: Any, trainable: Sequence[str] | str | None, options: Mapping[str, Any], **more: Any
) -> tuple[Any, Any, list[str] | str]:
    """Adds adapters to a model; see `trained_with`.

    Args:
        model: Function that builds the model.
        trainable: Patterns of further parameters to train; None for none.
        options: Options of `models.lora`, from settings.
        **more: Further options of it.

    Raises:
        ValueError: If the model can't have such adapters.
    """
    try:
        adapted = models.lora(model, **options, **more)
    except (ValueError, TypeError) as error:
        raise ValueError(re.sub(_OF_ADAPTERS, r"`lora_\1`", str(error))) from error
    return trained_with(adapted, trainable)


def trained_with(
    adapted: "models.Lora", trainable: Sequence[str] | str | None
) -> tuple[Any, Any, list[str] | str]:
    """A model with adapters, its parameters, and the patterns of all that are trained.

    Args:
        adapted: The model with adapters.
        trainable: Patterns of further parameters to train; None for none.
    """
    further = [*filter(None, listed(trainable))]
    patterns = [adapted.trainable, *further] if further else adapted.trainable
    return adapted.model, adapted.params, patterns


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
