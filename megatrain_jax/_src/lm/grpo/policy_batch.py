"""The options of GRPO, batches of completions in packed rows, and a model's loss on them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.common.grpo_fields import BOUNDS, GrpoFields, LossType, ScaleRewards
from megatrain_jax._src.lm.data.batches import pack, spread
from megatrain_jax._src.lm.models.decoder import Decoder, WithReference, policy_of, token_log_probs
from megatrain_jax._src.lm.models.generation.decoding import check_sampling
from megatrain_jax._src.lm.models.generation.generate import Completion
from megatrain_jax._src.lm.models.lora import without_lora
from megatrain_jax._src.lm.objectives.policy_losses import policy_tokens


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(GrpoFields):
    """The options of GRPO, with the names and, except for a step's size, the defaults of TRL.

    The size is `prompts_per_step` times `num_generations`.

    Attributes:
        num_generations: Number of completions of each prompt, which are compared with each other;
            at least 2.
        prompts_per_step: Number of prompts of a step. A batch has this number times
            `num_generations` rows.
        max_completion_length: Maximum number of tokens of a completion.
        temperature: Divisor of the logits, in sampling and in the loss; above 0.
        top_p: See `models.generate`. As in TRL, this and the next three options change only the
            sampling: the loss has log-probabilities among all tokens.
        top_k: See `models.generate`.
        min_p: See `models.generate`.
        repetition_penalty: See `models.generate`.
        stop: See `models.generate`.
        loss_type: See `losses.grpo`.
        epsilon: See `losses.grpo`.
        epsilon_high: See `losses.grpo`.
        beta: See `losses.grpo`. The reference is the model without its adapters or, if it has none,
            a stored copy of the initial model.
        use_bias_correction_kl: See `losses.grpo`.
        scale_rewards: See `losses.group_advantages`.
        reward_weights: Weight of each reward function; None for 1 each.
        num_iterations: Number of updates on the same completions.
        mask_truncated_completions: Whether completions that reached `max_completion_length` don't
            count in the loss, as DAPO proposes.
        max_tool_calling_iterations: Maximum number of a completion's turns whose calls of tools are
            made; None for all.
        log_completions: Number of steps between records with a table of the first prompt's
            completions, `completions`; 0 for none. With several updates on the same completions,
            the first update's record has it.
        shuffle: Whether prompts are shuffled, anew in each epoch.
        seed: Seed of the order and of sampling.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If one is out of range.
    """

    stop: Collection[int | str] | None = None
    reward_weights: Sequence[float] | None = None
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the options."""
        checks.numbers(self, GrpoOptions, **BOUNDS, seed={"least": 0, "most": 2**32 - 1})
        check_sampling(self.top_p, self.top_k, self.min_p, self.repetition_penalty)
        for name, kinds in (("loss_type", LossType), ("scale_rewards", ScaleRewards)):
            checks.word(name, getattr(self, name), get_args(kinds))
        for weight in () if self.reward_weights is None else self.reward_weights:
            checks.number("reward_weights", weight)


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
            found["weights"][row, written] = weights[i] * (1 if one.own is None else one.own)
    share = counts.sum() / max(len(rows), 1)
    found["tokens_per_row"] = np.full(len(rows), share, np.float32)
    return found


def _length(one: Completion) -> int:
    """The tokens that a completion takes in a row: all but the last, which is a label only."""
    return len(one.prompt_ids) + len(one.ids) - 1


def num_own(one: Completion) -> int:
    """Returns the number of tokens that the model wrote."""
    return len(one.ids) if one.own is None else int(one.own.sum())


def _counted(completions: Sequence[Completion], options: GrpoOptions) -> np.ndarray:
    """The number of each completion's tokens that count in the loss."""
    masked = options.mask_truncated_completions
    own = list(map(num_own, completions))
    left_out = [masked and one.finish == "length" for one in completions]
    return np.where(left_out, 0, own).astype(np.int64)


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
        logs = token_log_probs(policy, batch, options.temperature)
        if options.beta:
            before = model.reference if isinstance(model, WithReference) else without_lora(model)
            assert isinstance(before, Decoder)
            reference = jax.lax.stop_gradient(token_log_probs(before, batch, options.temperature))
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
