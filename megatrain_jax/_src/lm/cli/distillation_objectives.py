"""The objective that learns a teacher's stored predictions."""

from jaxtyping import Array

from megatrain_jax import losses, models
from megatrain_jax._src.lm.cli.answers import Batch, Loss, LossContext, num_tokens


def distill(
    context: LossContext, *, distill_alpha: float, temperature: float, tail: bool, topk: int
) -> Loss:
    """Distillation mixed with the next token's loss; see `losses.distillation`."""
    del topk  # the reader has cut or filled the entries

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
        count = batch["learned_per_row"].sum()
        loss = losses.distillation(
            hidden,
            model.head_weight(),
            batch["labels"],
            batch["topk_token_ids"],
            batch["topk_logprobs"],
            alpha=distill_alpha,
            temperature=temperature,
            tail=tail,
            mask=batch["mask"],
            count=count,
            softcap=model.config.final_softcap,
        )
        return loss, {"weight": count, "tokens": num_tokens(batch, context.microbatches)}

    return loss_fn
