"""The losses of the commands by objective."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from megatrain_jax import models, objectives
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.objective_kinds import OBJECTIVE_KINDS

_Loss = Callable[[models.Decoder, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


def counted(loss_fn: _Loss, microbatches: int) -> _Loss:
    """A loss with the metric `tokens`: the step's tokens without padding.

    A step reports the mean of a metric over its microbatches, so this sum is multiplied by their
    number.
    """

    def with_tokens(model: models.Decoder, batch: Mapping[str, Any]) -> Any:
        loss, metrics = loss_fn(model, batch)
        tokens = microbatches * (batch["segments"] > 0).sum(dtype=jnp.float32)
        return loss, {**metrics, "tokens": tokens}

    return with_tokens


def loss_of(settings: FinetuneSettings, microbatches: int) -> _Loss:
    """The loss of a run's objective.

    Args:
        settings: The settings.
        microbatches: Parts that a batch is cut into.
    """
    if settings.objective == "sft":
        return counted(models.next_token_loss, microbatches)
    # The reader has cut or filled the entries of `topk`.
    names = [name for name in OBJECTIVE_KINDS[settings.objective].options if name != "topk"]
    options = {name.removeprefix("distill_"): getattr(settings, name) for name in names}
    if settings.stores_reference:
        options["reference"] = "stored"
    return counted(getattr(objectives, settings.objective)(**options), microbatches)
