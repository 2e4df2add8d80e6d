"""Adapters as settings ask for them, the same in a plan and in a run."""

from typing import Any, NamedTuple

from megatrain_jax import models
from megatrain_jax._src.cli.choices import Frozen


class Adapted(NamedTuple):
    """A model with adapters, and the parameters of it that are trained.

    Attributes:
        model: Function that builds the model.
        params: Parameters to start from, if some were given.
        trainable: Pattern of the adapters, and of what is trained beside them.
    """

    model: Any
    params: Any
    trainable: str


def with_adapters(model: Any, trainable: str | None, **options: Any) -> Adapted:
    """Gives a model adapters.

    Args:
        model: Function that builds the model.
        trainable: Pattern of further parameters to train; None for none.
        **options: Those of `models.lora`.

    Raises:
        ValueError: If they can't be given any.
    """
    adapted = models.lora(model, **options)
    pattern = "|".join([adapted.trainable, *([trainable] if trainable else [])])
    return Adapted(adapted.model, adapted.params, pattern)


def frozen_of(given: Frozen | None, lora_rank: int | None, saved: str | None) -> Frozen | None:
    """The form of frozen parameters: below adapters that of the checkpoint, if it is bfloat16.

    Args:
        given: What the settings say; None for nothing.
        lora_rank: Rank of adapters; None for none.
        saved: dtype of the checkpoint; None if it is unknown.
    """
    return "bfloat16" if given is None and lora_rank and saved == "bfloat16" else given
