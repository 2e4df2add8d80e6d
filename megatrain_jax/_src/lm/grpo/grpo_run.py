"""`grpo`: the loop of generation and training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.grpo.grpo_options import GrpoOptions
from megatrain_jax._src.lm.grpo.policy_batch import batch_shapes, grpo_loss
from megatrain_jax._src.lm.grpo.rewards import RewardFunction, Rewards
from megatrain_jax._src.lm.grpo.rollouts import Prompts, RolloutMetrics, Rollouts
from megatrain_jax._src.lm.models.decoder import Decoder, with_reference
from megatrain_jax._src.lm.models.lora import adapted_modules


def train_grpo(
    model: Decoder | Callable[[], Decoder],
    rows: Sequence[Mapping[str, Any]],
    rewards: RewardFunction | Sequence[RewardFunction],
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    tokenizer: Any,
    options: GrpoOptions | None = None,
    params: Any = None,
    trainable: Any = None,
    precision: Any = "auto",
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = True,
    callbacks: Sequence[Callable[..., None]] = (),
    progress: bool = True,
    **settings: Any,
) -> mt.FitResult:
    """Trains a decoder by the rewards of its own completions: group relative policy optimisation.

    Each step, the model writes several completions of some prompts, functions reward them, and one
    update follows; with `num_iterations`, several. Its names are those of TRL's `GRPOTrainer`.

    A record has, beside the metrics of the step: `reward` and `reward_std`, the mean and the mean
    standard deviation within groups; `frac_reward_zero_std`, the fraction of groups with equal
    rewards, without groups of fewer than two rewards, where functions returned None;
    `rewards/NAME/mean` and `/std` of each function; `completions/mean_length` and
    `completions/clipped_ratio`, the fraction that reached the maximum length; `tokens`, of
    completions and their prompts; `padding`, the fraction of the trained rows without tokens; `kl`;
    `clip_ratio/region_mean`; `sampling/sampling_logp_difference/mean`; and the seconds and tokens
    of completions per second of generation (`generation/`) and of training (`training/`).

    Args:
        model: The decoder, or a function that builds one.
        rows: A mapping per prompt: `prompt`, a text, messages or token ids, and columns for
            rewards.
        rewards: One or several functions, called with `prompts`, `completions`, `completion_ids`
            and all columns of `rows`, as far as their signatures have them; each argument has one
            entry per completion. The completion of messages is a list of one message. A function
            returns one number per completion, or None where it does not apply.
        optimizer: See `fit`.
        steps: Number of updates.
        tokenizer: See `models.generate`; None if prompts are ids.
        options: The options; None for the defaults.
        params: See `fit`.
        trainable: See `fit`.
        precision: See `fit`. A stored reference has the dtype `frozen`; None for "int8".
        checkpoint_dir: See `fit`.
        checkpoint_every: See `fit`.
        keep: See `fit`.
        resume: See `fit`. A run that was killed continues bitwise as if it had not been.
        callbacks: See `fit`.
        progress: See `fit`.
        **settings: Further options of `Trainer`, such as `microbatches` and `device_budget`.

    Returns:
        The trainer and its history. With a stored reference, the trainer's model is a pair; its
        attribute `policy` is the decoder.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: See `fit`; or if rows differ in their columns, or a reward function returns a
            wrong number of rewards, or one that is not finite.
        CheckpointError: See `fit`.
        FloatingPointError: See `fit`.
    """
    options = options or GrpoOptions()
    if not isinstance(options, GrpoOptions):
        raise TypeError(checks.refused("options", "a models.GrpoOptions", options))
    rewarding = Rewards(rewards, options.reward_weights)
    prompts = Prompts(rows, tokenizer, options)
    rewarding.check_columns(prompts.columns)
    trained: Any = model
    if options.beta and not has_adapters(model):
        trained, params, trainable = with_reference(model, params, trainable)
        precision = mt.Precision.of(precision)
        if precision.frozen is None:
            precision = replace(precision, frozen="int8")
    mesh, microbatches = settings.get("mesh"), settings.get("microbatches", 1)
    unit = None
    if isinstance(microbatches, int):
        unit = max(microbatches, 1) * (1 if mesh is None else mesh.size)
    rollouts = Rollouts(prompts, rewarding, options, tokenizer=tokenizer, unit=unit)
    resume = resume and checkpoint_dir is not None
    trainer = mt.Trainer(
        trained,
        grpo_loss(options),
        optimizer,
        batch_shapes(rollouts.num_rows, rollouts.length),
        params=params,
        trainable=trainable,
        precision=precision,
        continues=checkpoint_dir if resume else None,
        progress=progress,
        **settings,
    )
    rollouts.use(trainer, progress=progress and trainer.processes.is_first)
    # Freed for the run, because they may hold all parameters as arrays.
    del model, trained, params
    return mt.train(
        trainer,
        rollouts,
        steps=steps,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        callbacks=[RolloutMetrics(rollouts), *callbacks],
        progress=progress,
    )


def has_adapters(model: Decoder | Callable[[], Decoder]) -> bool:
    """Whether a decoder has adapters; shapes are enough to tell."""
    built = model if isinstance(model, nnx.Module) else nnx.eval_shape(model)
    return any(True for _ in adapted_modules(built))
