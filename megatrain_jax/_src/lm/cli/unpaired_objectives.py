"""The objective that learns from labelled answers: KTO. The metrics have TRL's names."""

import jax
from jaxtyping import Array

from megatrain_jax import losses, models
from megatrain_jax._src.lm.cli.answers import (
    Batch,
    Loss,
    LossContext,
    answers,
    mean_where,
    num_tokens,
    sides,
)


def kto(
    context: LossContext, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Loss:
    """Kahneman-Tversky optimisation; see `losses.kto`.

    The baseline is the mean over the mismatched answers of a microbatch: the loss of a microbatch
    is computed before the next one's answers are known.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, dict[str, Array]]:
        reference = context.reference(model, batch)
        ours, there, count = answers(model, batch), batch["pairs"], batch["pairs_per_row"].sum()
        logs, mismatched = sides(ours)
        before, mismatched_before = sides(reference)
        baseline = losses.kto_baseline(mismatched, mismatched_before, mask=there)
        loss = losses.kto(
            logs,
            before,
            batch["desirable"],
            baseline,
            beta=beta,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            mask=there,
            count=count,
        )
        rewards, good = jax.lax.stop_gradient(beta * (logs - before)), batch["desirable"]
        num_good = batch["desirable_per_row"].sum()
        chosen = mean_where(rewards, there & good, num_good)
        rejected = mean_where(rewards, there & ~good, count - num_good)
        return loss, {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "kl": baseline,
            "weight": count,
            "tokens": num_tokens(batch, context.microbatches),
        }

    return loss_fn
