"""The loss of a `Decoder` on the batches of `megatrain_jax.data`."""

from collections.abc import Mapping
from typing import Any

import jax

from megatrain_jax import losses
from megatrain_jax.models.decoder import Decoder


def next_token_loss(
    model: Decoder, batch: Mapping[str, Any], *, z_loss: float = 0.0, chunk: int = 4096
) -> jax.Array:
    """Mean cross-entropy of the next tokens, with the balancing loss of experts if there are any.

    A `loss_fn` for `megatrain_jax.fit`; `functools.partial` sets the options.

    Args:
        model: The decoder.
        batch: `tokens` and `labels`, integers (rows, length), and where there are any `mask`,
            `positions` and `segments` of the same shape, as `megatrain_jax.data` gives them.
        z_loss: See `losses.next_token`.
        chunk: See `losses.next_token`.

    Returns:
        The loss, a scalar in fp32.
    """
    hidden, balance = model.hidden(batch["tokens"], batch.get("positions"), batch.get("segments"))
    loss = losses.next_token(
        hidden,
        model.head_weight(),
        batch["labels"],
        mask=batch.get("mask"),
        z_loss=z_loss,
        softcap=model.config.final_softcap,
        chunk=chunk,
    )
    experts = model.config.experts
    return loss if experts is None else loss + experts.balance_weight * balance
