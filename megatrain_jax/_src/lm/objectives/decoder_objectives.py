"""Losses of a decoder and a packed batch: preferences, labels, rewards and distillation.

A step reports the mean of a metric over its microbatches. A mean over pairs is divided by a number
of pairs that comes from the whole batch's counts, so each microbatch has the same divisor.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax import losses, models
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.decoder import check_arguments, token_log_probs
from megatrain_jax._src.lm.objectives.example_losses import DpoLoss

Batch = Mapping[str, Any]
Metrics = dict[str, Float[Array, ""]]
Objective = Callable[[models.Decoder, Batch], tuple[Float[Array, ""], Metrics]]
Reference = Literal["adapters", "stored"]

_PACKED = ("tokens", "labels", "positions", "segments", "mask")
_PAIRED = (*_PACKED, "pairs", "pairs_per_row")


def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DpoLoss = "sigmoid",
    reference: Reference = "adapters",
) -> Objective:
    """Direct preference optimisation of pairs of answers; see `losses.dpo`.

    Args:
        beta: How strongly the model is kept close to the reference; above 0.
        label_smoothing: Fraction of pairs whose answers are thought to be exchanged, below 0.5; for
            "sigmoid" and "robust".
        loss_type: The loss of a pair: one of those of `losses.dpo`, named as in TRL.
        reference: The model before training. "adapters" is the model without its adapters, so each
            layer is computed twice. "stored" reads each batch's column `reference`: what
            `answer_log_probabilities` returned before training, fp32 (rows, answers).

    Returns:
        A loss of a decoder and a batch of `data.preferences`: the mean over the whole step's pairs,
            in fp32. Its metrics are `weight`, the pairs in the mean; `rewards/chosen`,
            `rewards/rejected` and their difference, `rewards/margins`; `rewards/accuracies` and
            `accuracy`, the fraction of pairs whose chosen answer has the larger reward. It raises
            `ValueError` if an option is out of range, the batch lacks a column, or the model has no
            adapters to leave out.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        before = _reference(reference, model, batch)
        ours = answer_log_probabilities(model, batch)
        columns = *_sides(ours), *_sides(before)
        options: dict[str, Any] = {"beta": beta, "label_smoothing": label_smoothing}
        loss = losses.dpo(*columns, loss_type=loss_type, **options, **_counted(batch))
        return loss, _metrics(batch, beta * (ours - before))

    return loss_fn


def ipo(*, beta: float = 0.1, reference: Reference = "adapters") -> Objective:
    """Identity preference optimisation of pairs of answers; see `losses.ipo`.

    Args:
        beta: The margin to reach is 1 / (2 * beta); above 0.
        reference: See `dpo`.

    Returns:
        See `dpo`.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        before = _reference(reference, model, batch)
        ours, sizes = answer_log_probabilities(model, batch), _answer_sizes(batch)
        columns = *_sides(ours), *_sides(before), *_sides(sizes)
        loss = losses.ipo(*columns, beta=beta, **_counted(batch))
        return loss, _metrics(batch, beta * (ours - before))

    return loss_fn


def simpo(*, beta: float = 0.1, simpo_gamma: float = 0.5, cpo_alpha: float = 1.0) -> Objective:
    """SimPO with the cross-entropy of the chosen answers; see `losses.simpo`.

    Args:
        beta: Factor of the mean log-probabilities; above 0. The paper uses 2 to 10.
        simpo_gamma: Margin that the chosen answer has to reach; at least 0.
        cpo_alpha: Weight of the cross-entropy; at least 0. The paper has none: 0.

    Returns:
        See `dpo`. A further metric is `nll_loss`, the cross-entropy.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        check_arguments(model, batch, (*_PAIRED, "chosen_learned_per_row"))
        ours, sizes = answer_log_probabilities(model, batch), _answer_sizes(batch)
        count = batch["chosen_learned_per_row"].sum()
        nll = -_mean_where(_sides(ours)[0], batch["pairs"], count)
        options = {"beta": beta, "simpo_gamma": simpo_gamma, "cpo_alpha": cpo_alpha}
        loss = losses.simpo(*_sides(ours), *_sides(sizes), nll, **options, **_counted(batch))
        rewards = beta * ours / jnp.maximum(sizes, 1)
        return loss, _metrics(batch, rewards) | {"nll_loss": nll}

    return loss_fn


def orpo(*, beta: float = 0.1) -> Objective:
    """ORPO with the cross-entropy of the chosen conversations; see `losses.orpo`.

    Args:
        beta: Weight of the odds; above 0. The paper calls it lambda.

    Returns:
        See `dpo`. A further metric is `nll_loss`, the cross-entropy; prompts count, as in TRL.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        check_arguments(model, batch, (*_PAIRED, "chosen_tokens_per_row"))
        logs, segments = token_log_probs(model, batch), batch["segments"]
        ours, sizes = _answer_sums(logs * batch["mask"], batch), _answer_sizes(batch)
        # The last token of a conversation has no label.
        follows = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
        of_chosen = follows & (segments % 2 == 1)
        nll = -_mean_where(logs, of_chosen, batch["chosen_tokens_per_row"].sum())
        loss = losses.orpo(*_sides(ours), *_sides(sizes), nll, beta=beta, **_counted(batch))
        rewards = beta * ours / jnp.maximum(sizes, 1)
        return loss, _metrics(batch, rewards) | {"nll_loss": nll}

    return loss_fn


def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference: Reference = "adapters",
) -> Objective:
    """Kahneman-Tversky optimisation of labelled answers; see `losses.kto`.

    The baseline is the mean over the mismatched answers of a microbatch: the loss of a microbatch
    is computed before the next one's answers are known.

    Args:
        beta: How strongly the model is kept close to the reference; above 0.
        desirable_weight: Weight of desirable answers; at least 0.
        undesirable_weight: Weight of undesirable answers; at least 0.
        reference: See `dpo`.

    Returns:
        A loss of a decoder and a batch of `data.unpaired`; see `dpo`. Its metrics are `weight`, the
            answers in the mean; `rewards/chosen` of desirable answers, `rewards/rejected` of
            undesirable ones and their difference, `rewards/margins`; `kl`, the baseline.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        check_arguments(model, batch, (*_PAIRED, "desirable", "desirable_per_row"))
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        before, mismatched_before = _sides(_reference(reference, model, batch))
        logs, mismatched = _sides(answer_log_probabilities(model, batch))
        there, good, count = batch["pairs"], batch["desirable"], batch["pairs_per_row"].sum()
        baseline = losses.kto_baseline(mismatched, mismatched_before, mask=there)
        options = {"beta": beta, **weights, "mask": there, "count": count}
        loss = losses.kto(logs, before, good, baseline, **options)
        rewards = jax.lax.stop_gradient(beta * (logs - before))
        num_good = batch["desirable_per_row"].sum()
        chosen = _mean_where(rewards, there & good, num_good)
        rejected = _mean_where(rewards, there & ~good, count - num_good)
        return loss, {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "kl": baseline,
            "weight": count,
        }

    return loss_fn


def reward(*, center_rewards_coefficient: float | None = None) -> Objective:
    """Scores of conversations, learned from pairs; see `losses.reward`.

    Args:
        center_rewards_coefficient: Weight of the term that keeps scores around 0, at least 0; None
            leaves it out.

    Returns:
        A loss of a decoder of `models.reward_model` and a batch of `data.preferences`, with or
            without `margins`; see `dpo`. Its metrics are `weight`, the pairs in the mean;
            `mean_reward`, the mean score; `margin`, the mean difference of both scores; `accuracy`,
            the fraction of pairs whose chosen conversation has the larger score.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        check_arguments(model, batch, _PAIRED, scores=True)
        scores = models.conversation_scores(model, batch, segments=2 * batch["pairs"].shape[1])
        if scores.ndim != 2:
            raise ValueError("`model` scores several labels; models.reward_model has one score")
        loss = losses.reward(
            *_sides(scores),
            batch.get("margins"),
            center_rewards_coefficient=center_rewards_coefficient,
            **_counted(batch),
        )
        good, bad = _sides(jax.lax.stop_gradient(scores))
        means = {"mean_reward": (good + bad) / 2, "margin": good - bad, "accuracy": good > bad}
        return loss, _means(batch, means)

    return loss_fn


def distill(*, alpha: float = 0.5, temperature: float = 1.0, tail: bool = True) -> Objective:
    """A teacher's stored predictions, mixed with the next tokens; see `losses.distillation`.

    Args:
        alpha: Weight of the divergence from the teacher; that of the next token is `1 - alpha`.
        temperature: Divisor of both models' logits; above 0. Only 1 goes with `tail`.
        tail: Whether all tokens beyond the stored ones count as one more token.

    Returns:
        A loss of a decoder and a batch of `data.distillation`; see `dpo`. Its metric is `weight`,
            the tokens in the mean.
    """

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, Metrics]:
        stored = "topk_token_ids", "topk_logprobs"
        check_arguments(model, batch, (*_PACKED, *stored, "learned_per_row"))
        hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
        count = batch["learned_per_row"].sum()
        loss = losses.distillation(
            hidden,
            model.head_weight(),
            batch["labels"],
            *(batch[name] for name in stored),
            alpha=alpha,
            temperature=temperature,
            tail=tail,
            mask=batch["mask"],
            count=count,
            softcap=model.config.final_softcap,
        )
        return loss, {"weight": count}

    return loss_fn


def answer_log_probabilities(model: models.Decoder, batch: Batch) -> Float[Array, "rows answers"]:
    """The log-probability of each answer of a packed batch: the sum of its tokens'.

    `trainer.predict([batch], answer_log_probabilities)` before training is a stored reference.

    Args:
        model: The decoder.
        batch: A batch of `data.preferences` or `data.unpaired`.

    Returns:
        The log-probabilities in fp32, of each row's segments 1, 2, ...: chosen, rejected, chosen,
            ...; 0 where a row has no such segment.

    Raises:
        TypeError: If `model` is not a decoder, or `batch` not a mapping.
        ValueError: If `batch` lacks a column, or the model has a score head.
    """
    check_arguments(model, batch, _PAIRED)
    return _answer_sums(token_log_probs(model, batch) * batch["mask"], batch)


def _reference(kind: Reference, model: models.Decoder, batch: Batch) -> Array:
    """The log-probability of each answer under the reference."""
    checks.word("reference", kind, get_args(Reference))
    if kind == "stored":
        check_arguments(model, batch, ("reference",))
        return batch["reference"]
    try:
        before = models.without_lora(model)
    except ValueError as error:
        hint = 'or `reference`="stored" reads the answers\' log-probabilities from the batch'
        raise ValueError(f"{error}, {hint}") from error
    assert isinstance(before, models.Decoder)
    return answer_log_probabilities(before, batch)


def _answer_sums(values: Array, batch: Batch) -> Array:
    """Sums of the tokens' values in each segment, of shape (rows, twice the pairs)."""
    numbers = 1 + jnp.arange(2 * batch["pairs"].shape[1])
    belongs = batch["segments"][:, :, None] == numbers
    return jnp.einsum("rl,rla->ra", values, belongs.astype(jnp.float32))


def _answer_sizes(batch: Batch) -> Array:
    """The number of tokens of each answer, of shape (rows, twice the pairs)."""
    return _answer_sums(batch["mask"].astype(jnp.float32), batch)


def _sides(columns: Array) -> tuple[Array, Array]:
    """The columns of the first and of the second answer of each pair, of shape (rows, pairs)."""
    return columns[:, 0::2], columns[:, 1::2]


def _counted(batch: Batch) -> dict[str, Any]:
    return {"mask": batch["pairs"], "count": batch["pairs_per_row"].sum()}


def _metrics(batch: Batch, rewards: Array) -> Metrics:
    """The metrics of all pairs, from the reward of each answer."""
    chosen, rejected = _sides(jax.lax.stop_gradient(rewards))
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen > rejected,
    }
    found = _means(batch, means)
    return found | {"accuracy": found["rewards/accuracies"]}


def _means(batch: Batch, values: dict[str, Array]) -> Metrics:
    """Means over the pairs, and their number as `weight`."""
    pairs, count = batch["pairs"], batch["pairs_per_row"].sum()
    return {name: _mean_where(each, pairs, count) for name, each in values.items()} | {
        "weight": count
    }


def _mean_where(values: Array, counts: Array, count: Array) -> Array:
    """The sum of the values under a mask, divided by a count; not divided if the count is 0.

    Args:
        values: The values; masked ones may be anything, even NaN.
        counts: The mask: whether each value counts.
        count: The divisor; in a microbatch it may be below 1.
    """
    return jnp.where(counts, values, 0).sum() / jnp.where(count > 0, count, 1)
