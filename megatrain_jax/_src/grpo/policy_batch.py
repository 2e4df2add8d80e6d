"""Batches of completions, one per row, and the loss of a model on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from megatrain_jax import losses
from megatrain_jax._src.grpo.grpo_options import GrpoOptions
from megatrain_jax._src.models.decoder import Decoder
from megatrain_jax._src.models.generation.generate import Completion
from megatrain_jax._src.models.lora import without_lora
from megatrain_jax._src.models.with_reference import WithReference, policy_of
from megatrain_jax._src.objectives.policy_losses import policy_mean, policy_tokens

Batch = Mapping[str, Any]
Loss = Callable[[nnx.Module, Batch], tuple[Array, dict[str, Array]]]


def batch_shapes(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch."""
    batch = policy_batch([], np.zeros(0), length=length)
    return {
        name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def policy_batch(
    completions: Sequence[Completion],
    advantages: np.ndarray,
    *,
    length: int,
    mask_truncated: bool = False,
) -> dict[str, np.ndarray]:
    """A batch of completions with their prompts.

    Args:
        completions: The completions, a row each.
        advantages: The advantage of each.
        length: Number of tokens of a row.
        mask_truncated: Whether completions that reached their maximum length don't count.

    Returns:
        `tokens`, `labels`, `positions` and `segments`, int32 (rows, length), as the batches of
        `megatrain_jax.data` have them; `mask`, which labels are part of a completion; `old_logs`,
        their log-probabilities when they were sampled, at the temperature and among all tokens, as
        the loss computes them; `advantages` (rows,); and
        `tokens_per_row` (rows,), the number of labels that count divided by the number of rows.
    """
    shape = len(completions), length
    found: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "positions", "segments")
    }
    found["mask"], found["old_logs"] = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, one in enumerate(completions):
        ids = np.concatenate([one.prompt_ids, one.ids])
        size, start = len(ids), len(one.prompt_ids) - 1
        found["tokens"][row, :size] = ids
        found["labels"][row, : size - 1] = ids[1:]
        found["positions"][row, :size] = np.arange(size)
        found["segments"][row, :size] = 1
        here = slice(start, size - 1)
        found["mask"][row, here] = not (mask_truncated and one.finish == "length")
        found["old_logs"][row, here] = one.tempered_log_probs
    found["advantages"] = np.asarray(advantages, np.float32)
    share = found["mask"].sum() / max(len(completions), 1)
    found["tokens_per_row"] = np.full(len(completions), share, np.float32)
    return found


def grpo_loss(options: GrpoOptions) -> Loss:
    """The loss of a decoder on such batches, and its metrics.

    The metrics are `weight`, the tokens of completions; `kl`, if there is a reference;
    `clip_ratio/region_mean`, the share of tokens without a gradient; and
    `sampling/sampling_logp_difference/mean`, the mean absolute difference of log-probabilities from
    the ones of sampling. In the first update on completions it measures the difference between
    generation and training.

    Args:
        options: The options.
    """

    def loss_fn(model: nnx.Module, batch: Batch) -> tuple[Array, dict[str, Array]]:
        policy = policy_of(model)
        assert isinstance(policy, Decoder)
        mask, reference = batch["mask"], None
        count = batch["tokens_per_row"].sum()
        logs = _logs(policy, batch, options.temperature)
        if options.beta:
            before = model.reference if isinstance(model, WithReference) else without_lora(model)
            assert isinstance(before, Decoder)
            reference = jax.lax.stop_gradient(_logs(before, batch, options.temperature))
        terms = policy_tokens(
            logs,
            batch["old_logs"],
            batch["advantages"],
            reference=reference,
            epsilon=options.epsilon,
            epsilon_high=options.epsilon_high,
            beta=options.beta,
            use_bias_correction_kl=options.use_bias_correction_kl,
            mask=mask,
        )
        loss = policy_mean(
            terms.losses,
            loss_type=options.loss_type,
            max_completion_length=options.max_completion_length,
            mask=mask,
            count=count if options.loss_type in ("bnpo", "dapo") else None,
        )

        def mean(values: Array) -> Array:
            return jnp.where(mask, values, 0).sum() / jnp.where(count > 0, count, 1)

        metrics = {
            "weight": count,
            "clip_ratio/region_mean": mean(terms.clipped),
            "sampling/sampling_logp_difference/mean": mean(jnp.abs(logs - batch["old_logs"])),
        }
        return loss, metrics | ({"kl": mean(terms.divergences)} if options.beta else {})

    return loss_fn


def _logs(model: Decoder, batch: Batch, temperature: float) -> Array:
    """The log-probability (rows, length) of each position's label, at a temperature."""
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
    return losses.log_probabilities(
        hidden,
        model.head_weight(),
        batch["labels"],
        softcap=model.config.final_softcap,
        temperature=temperature,
    )
