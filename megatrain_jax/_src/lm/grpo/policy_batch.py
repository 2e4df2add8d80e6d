"""Batches of completions, packed into rows, and the loss of a model on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from megatrain_jax import losses
from megatrain_jax._src.lm.data.packing import pack, spread
from megatrain_jax._src.lm.grpo.grpo_options import GrpoOptions
from megatrain_jax._src.lm.models.decoder import Decoder, WithReference, policy_of
from megatrain_jax._src.lm.models.generation.generate import Completion
from megatrain_jax._src.lm.models.lora import without_lora
from megatrain_jax._src.lm.objectives.policy_losses import policy_tokens

Batch = Mapping[str, Any]
Loss = Callable[[nnx.Module, Batch], tuple[Array, dict[str, Array]]]
# Maximum number of different row counts among a run's batches: each is compiled.
_NUMBERS_OF_ROWS = 8
# A row holds several documents of maximum length only if each microbatch keeps at least this number
# of rows, and if the row has at most this number of tokens.
_FEWEST_ROWS, _LONGEST_ROW = 4, 4096


def batch_shapes(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch."""
    batch = policy_batch([], [], np.zeros(0), length=length, options=GrpoOptions())
    return {
        name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def documents_per_row(completions: int, longest: int, unit: int) -> int:
    """The number of documents of maximum length that a row holds.

    With more documents per row there is less padding. But the number of rows must still be able to
    vary between steps, and attention may compute scores for all pairs of a row's tokens.

    Args:
        completions: Number of completions of a batch.
        longest: Maximum number of tokens of a document.
        unit: Number of microbatches times that of devices.
    """
    for number in (4, 2):
        rows, left = divmod(completions, number * unit)
        if not left and rows >= _FEWEST_ROWS and number * longest <= _LONGEST_ROW:
            return number
    return 1


def packed_rows(
    completions: Sequence[Completion], length: int, unit: int, most: int
) -> list[np.ndarray]:
    """The indices of the completions in each row, packed by best fit.

    A step is compiled for each number of rows, so few numbers are used: multiples of `unit`, about
    an eighth of the maximum apart.

    Args:
        completions: The completions.
        length: Number of tokens of a row.
        unit: Number of microbatches times that of devices.
        most: Maximum number of rows, a multiple of `unit`.
    """
    lengths = np.array([_length(one) for one in completions], np.int32)
    packing = pack(lengths, length)
    by_length = np.argsort(-lengths, kind="stable")
    rows = np.split(by_length[packing.ranks], packing.offsets[1:-1])
    step = unit * -(-most // (unit * _NUMBERS_OF_ROWS))
    return spread(rows, min(most, step * -(-len(rows) // step)))


def policy_batch(
    rows: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Completion],
    advantages: np.ndarray,
    *,
    length: int,
    options: GrpoOptions,
) -> dict[str, np.ndarray]:
    """A batch of completions with their prompts; each completion is a document of its own.

    Args:
        rows: The indices of the completions in each row.
        completions: The completions.
        advantages: The advantage of each.
        length: Number of tokens of a row.
        options: The options of the loss.

    Returns:
        `tokens`, `labels`, `positions` and `segments`, int32 (rows, length), as the batches of
        `megatrain_jax.data` have them. Also in fp32 (rows, length): `old_logs`, the
        log-probabilities of completions' labels when they were sampled, at the temperature and
        among all tokens, as the loss computes them; `advantages`; and `weights`, the share of each
        label in the loss, times the number of rows. In fp32 (rows,): `tokens_per_row`, the number
        of labels that count, divided by the number of rows.
    """
    shape = len(rows), length
    found: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "positions", "segments")
    }
    found |= {name: np.zeros(shape, np.float32) for name in ("old_logs", "advantages", "weights")}
    counts = _counted(completions, options)
    weights = len(rows) * _shares(counts, options)
    for row, members in enumerate(rows):
        end = 0
        for document, i in enumerate(members, 1):
            one, begin = completions[i], end
            ids = np.concatenate([one.prompt_ids, one.ids])
            end += _length(one)
            whole, written = slice(begin, end), slice(end - len(one.ids), end)
            found["tokens"][row, whole] = ids[:-1]
            found["labels"][row, whole] = ids[1:]
            found["positions"][row, whole] = np.arange(end - begin)
            found["segments"][row, whole] = document
            found["old_logs"][row, written] = one.tempered_log_probs
            found["advantages"][row, written] = advantages[i]
            found["weights"][row, written] = weights[i]
    share = counts.sum() / max(len(rows), 1)
    found["tokens_per_row"] = np.full(len(rows), share, np.float32)
    return found


def _length(one: Completion) -> int:
    """The tokens that a completion takes in a row: all but the last, which is a label only."""
    return len(one.prompt_ids) + len(one.ids) - 1


def _counted(completions: Sequence[Completion], options: GrpoOptions) -> np.ndarray:
    """The number of each completion's tokens that count in the loss."""
    masked = options.mask_truncated_completions
    return np.array(
        [0 if masked and one.finish == "length" else len(one.ids) for one in completions], np.int64
    )


def _shares(counts: np.ndarray, options: GrpoOptions) -> np.ndarray:
    """The share of each completion's tokens in the loss, 0 if they don't count."""
    if options.loss_type in ("bnpo", "dapo"):
        divisors = np.full(len(counts), counts.sum())
    elif options.loss_type == "grpo":
        divisors = counts * len(counts)
    else:
        divisors = np.full(len(counts), options.max_completion_length * len(counts))
    return np.where(counts > 0, 1 / np.maximum(divisors, 1), 0)


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
        weights, reference = batch["weights"], None
        mask, count = weights != 0, batch["tokens_per_row"].sum()
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

        def total(values: Array) -> Array:
            return jnp.where(mask, values, 0).sum()

        def mean(values: Array) -> Array:
            return total(values) / jnp.where(count > 0, count, 1)

        metrics = {
            "weight": count,
            "clip_ratio/region_mean": mean(terms.clipped),
            "sampling/sampling_logp_difference/mean": mean(jnp.abs(logs - batch["old_logs"])),
        }
        metrics |= {"kl": mean(terms.divergences)} if options.beta else {}
        # The mean over microbatches is the loss, because weights are shares of the whole batch.
        return total(weights * terms.losses) / len(weights), metrics

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
