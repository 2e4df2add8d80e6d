"""The loss of a `Decoder` on the batches of `megatrain_jax.data`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from megatrain_jax import losses
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.decoder import Decoder


def next_token_loss(
    model: Decoder, batch: Mapping[str, Any], *, z_loss: float = 0.0, chunk: int = 4096
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Mean cross-entropy of the next tokens, plus the experts' balancing loss if it has a weight.

    A `loss_fn` for `megatrain_jax.fit`; set options with `functools.partial`.

    Args:
        model: The decoder.
        batch: `tokens` and `labels`, integers (rows, length); optionally `mask`, `positions` and
            `segments` of the same shape and `learned_per_row` (rows,), as made by
            `megatrain_jax.data`. The last has the same number in all rows: the batch's counted
            labels divided by its number of rows. With it, microbatches are weighted by their
            counted labels; without it, each microbatch's loss is the mean over its own labels.
            `pixel_values`: the images of each row; see `Decoder.hidden`.
        z_loss: See `losses.next_token`.
        chunk: See `losses.next_token`.

    Returns:
        The loss in fp32, and the metric `weight`: the number of labels in its mean. An evaluation
            weighs batches by it, so its loss is the mean over all labels.

    Raises:
        TypeError: If `model` is not a decoder, `batch` not a mapping or an option not a number.
        ValueError: If `batch` lacks `tokens` or `labels`, shapes don't match, or the model has a
            score head.
    """
    check_arguments(model, batch, ("tokens", "labels"))
    checks.number("z_loss", z_loss, least=0)
    checks.integer("chunk", chunk)
    images = {} if "pixel_values" not in batch else {"pixel_values": batch["pixel_values"]}
    hidden, balance = model.hidden(
        batch["tokens"], batch.get("positions"), batch.get("segments"), **images
    )
    labels, mask, per_row = batch["labels"], batch.get("mask"), batch.get("learned_per_row")
    # Summed over a microbatch's rows, `learned_per_row` is that part's fraction of the whole
    # batch's labels, so parts with few labels don't count for more.
    count = losses.num_labels(labels, mask) if per_row is None else per_row.sum()
    loss = losses.next_token(
        hidden,
        model.head_weight(),
        labels,
        mask=mask,
        count=count,
        z_loss=z_loss,
        softcap=model.config.final_softcap,
        chunk=chunk,
    )
    experts = model.config.experts
    loss = loss if experts is None else loss + experts.balance_weight * balance
    return loss, {"weight": count}


def check_arguments(
    model: Decoder, batch: Mapping[str, Any], names: tuple[str, ...], *, scores: bool = False
) -> None:
    """Checks the arguments of a loss: a decoder, and a batch that has the columns `names`.

    Raises:
        TypeError: If `model` is not a decoder, or `batch` not a mapping.
        ValueError: If `batch` lacks one of them, or the model has a score head, unless `scores`.
    """
    if not (hasattr(model, "hidden") and hasattr(model, "head_weight")):
        raise TypeError(checks.refused("model", "a models.Decoder", model))
    if not scores and getattr(getattr(model, "config", None), "scores", False):
        raise ValueError("`model` is a reward model, whose head has no logits of next tokens")
    if not isinstance(batch, Mapping):
        raise TypeError(checks.refused("batch", "a mapping of names to arrays", batch))
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"`batch` has no {' and no '.join(map(repr, missing))}, but {list(batch)}")
