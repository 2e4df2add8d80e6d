"""The objectives that learn from pairs of answers: DPO, IPO, SimPO and ORPO.

The metrics have TRL's names. `rewards/accuracies`, and `accuracy` for short, is the fraction of
pairs whose chosen answer has the larger reward.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from megatrain_jax import losses, models
from megatrain_jax._src.lm.cli.answers import (
    Batch,
    Loss,
    LossContext,
    answer_sizes,
    answer_sums,
    answers,
    mean_where,
    num_tokens,
    sides,
    token_log_probs,
)

_Metrics = dict[str, Array]


def dpo(context: LossContext, *, beta: float) -> Loss:
    """Direct preference optimisation; see `losses.dpo`."""

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, _Metrics]:
        reference = context.reference(model, batch)
        ours = answers(model, batch)
        loss = losses.dpo(*sides(ours), *sides(reference), beta=beta, **_counted(batch))
        return loss, _metrics(context, batch, beta * (ours - reference))

    return loss_fn


def ipo(context: LossContext, *, beta: float) -> Loss:
    """Identity preference optimisation; see `losses.ipo`."""

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, _Metrics]:
        reference = context.reference(model, batch)
        ours, sizes = answers(model, batch), answer_sizes(batch)
        loss = losses.ipo(
            *sides(ours), *sides(reference), *sides(sizes), beta=beta, **_counted(batch)
        )
        return loss, _metrics(context, batch, beta * (ours - reference))

    return loss_fn


def simpo(context: LossContext, *, beta: float, simpo_gamma: float, cpo_alpha: float) -> Loss:
    """SimPO, with the cross-entropy of the chosen answers; see `losses.simpo`."""

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, _Metrics]:
        ours, sizes = answers(model, batch), answer_sizes(batch)
        there = batch["pairs"]
        nll = -mean_where(sides(ours)[0], there, batch["chosen_learned_per_row"].sum())
        loss = losses.simpo(
            *sides(ours),
            *sides(sizes),
            nll,
            beta=beta,
            simpo_gamma=simpo_gamma,
            cpo_alpha=cpo_alpha,
            **_counted(batch),
        )
        rewards = beta * ours / jnp.maximum(sizes, 1)
        return loss, _metrics(context, batch, rewards) | {"nll_loss": nll}

    return loss_fn


def orpo(context: LossContext, *, beta: float) -> Loss:
    """ORPO, with the cross-entropy of the chosen conversations; see `losses.orpo`."""

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, _Metrics]:
        logs, segments = token_log_probs(model, batch), batch["segments"]
        ours, sizes = answer_sums(logs * batch["mask"], batch), answer_sizes(batch)
        # The last token of a conversation has no label.
        follows = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
        of_chosen = follows & (segments % 2 == 1)
        nll = -mean_where(logs, of_chosen, batch["chosen_tokens_per_row"].sum())
        loss = losses.orpo(*sides(ours), *sides(sizes), nll, beta=beta, **_counted(batch))
        rewards = beta * ours / jnp.maximum(sizes, 1)
        return loss, _metrics(context, batch, rewards) | {"nll_loss": nll}

    return loss_fn


def _counted(batch: Batch) -> dict[str, Array]:
    return {"mask": batch["pairs"], "count": batch["pairs_per_row"].sum()}


def _metrics(context: LossContext, batch: Batch, rewards: Array) -> _Metrics:
    """The metrics of all pairs, from the reward of each answer."""
    chosen, rejected = sides(jax.lax.stop_gradient(rewards))
    pairs, count = batch["pairs"], batch["pairs_per_row"].sum()
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen > rejected,
    }
    found = {name: mean_where(values, pairs, count) for name, values in means.items()}
    return found | {
        "weight": count,
        "accuracy": found["rewards/accuracies"],
        "tokens": num_tokens(batch, context.microbatches),
    }
