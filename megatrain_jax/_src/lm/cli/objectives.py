"""The losses of the commands by objective."""

from collections.abc import Callable, Mapping
from typing import Any

from megatrain_jax import models
from megatrain_jax._src.lm.cli import (
    distillation_objectives,
    pair_objectives,
    reward_objectives,
    unpaired_objectives,
)
from megatrain_jax._src.lm.cli.answers import Loss, LossContext, num_tokens
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.objective_kinds import OBJECTIVE_KINDS


def next_token(context: LossContext) -> Loss:
    """`models.next_token_loss` for packed batches, with the number of tokens as a metric."""

    def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> Any:
        loss, metrics = models.next_token_loss(model, batch)
        return loss, {**metrics, "tokens": num_tokens(batch, context.microbatches)}

    return loss_fn


# Functions of a run's context and of the settings that `OBJECTIVE_KINDS` names.
LOSSES: dict[str, Callable[..., Loss]] = {
    "sft": next_token,
    "dpo": pair_objectives.dpo,
    "ipo": pair_objectives.ipo,
    "simpo": pair_objectives.simpo,
    "orpo": pair_objectives.orpo,
    "kto": unpaired_objectives.kto,
    "reward": reward_objectives.reward,
    "distill": distillation_objectives.distill,
}


def loss_of(settings: FinetuneSettings, microbatches: int) -> Loss:
    """The loss of a run's objective.

    Args:
        settings: The settings.
        microbatches: Parts that a batch is cut into.
    """
    kind = OBJECTIVE_KINDS[settings.objective]
    context = LossContext(microbatches=microbatches, is_stored=settings.stores_reference)
    options = {name: getattr(settings, name) for name in kind.options}
    return LOSSES[settings.objective](context, **options)
