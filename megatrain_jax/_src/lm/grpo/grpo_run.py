"""`train_grpo`: the loop of generation and training.

A batch is generated right after the previous step has been dispatched, so completions always come
from the newest parameters.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import Trainer, distributed, losses
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tell_phase
from megatrain_jax._src.common.suggestions import lets_go, take
from megatrain_jax._src.lm.common.prompts import is_messages, prompt_ids, shown_prompt
from megatrain_jax._src.lm.grpo import policy_batch
from megatrain_jax._src.lm.grpo.rewards import RewardFunction, Rewards
from megatrain_jax._src.lm.grpo.tools import ToolUse
from megatrain_jax._src.lm.models.decoder import Decoder, with_reference
from megatrain_jax._src.lm.models.generation.generate import Completion, generate
from megatrain_jax._src.lm.models.lora import adapted_modules

# Rows have lengths that are multiples of this.
_LENGTH_UNIT = 16
# Number of steps whose notes are kept: records are read one step late.
_NOTES_KEPT = 4


class Prompts:
    """Rows with a prompt each, in a random order for each epoch.

    Attributes:
        ids: Token ids of each row's prompt.
        length: Number of tokens of the longest.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        options: policy_batch.GrpoOptions,
        tools: Sequence[Any] = (),
    ):
        """Encodes all prompts.

        Args:
            rows: The rows: `prompt`, a text, messages or token ids, and columns for rewards.
            tokenizer: The tokenizer.
            options: The options of the order.
            tools: Schemas of tools, which messages are rendered with.

        Raises:
            TypeError: If the rows are no list, a row is no mapping, or its prompt has a wrong type.
            ValueError: If there is no row, a row lacks `prompt`, or rows have different columns.
        """
        is_indexed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        if not is_indexed or isinstance(rows, str | Mapping):
            hint = "make a list of an iterator" if isinstance(rows, Iterator) else ""
            raise TypeError(checks.refused("rows", "a list of mappings", rows, hint))
        if not len(rows):
            raise ValueError(checks.refused("rows", "one row at least", rows))
        for i, row in enumerate(rows):
            checks.instance("rows", row, Mapping, "mappings with a `prompt` each")
            if "prompt" not in row:
                raise ValueError(f"row {i} (counted from 0) has no `prompt`, but {list(row)}")
            if tools and not is_messages(row["prompt"]):
                raise ValueError(f"`tools` need prompts of messages, unlike that of row {i}")
            if row.keys() != rows[0].keys():
                raise ValueError(
                    f"row {i} (counted from 0) has the columns {list(row)}, but row 0 has "
                    f"{list(rows[0])}: reward functions need the same columns of all rows"
                )
        if taken := {"prompts", "completions", "completion_ids"} & rows[0].keys():
            raise ValueError(
                f"rows have the column `{min(taken)}`, which is the name of another argument of "
                "reward functions: rename it"
            )
        self._rows, self._options = rows, options
        self.ids = [prompt_ids(row["prompt"], tokenizer, tools) for row in rows]
        self.length = max(map(len, self.ids))
        self.columns = [name for name in rows[0] if name != "prompt"]

    def of_generation(self, number: int) -> list[int]:
        """The indices of the rows of a generation; generations are counted from 0."""
        size = self._options.prompts_per_step
        return [self._at(i) for i in range(number * size, (number + 1) * size)]

    def _at(self, place: int) -> int:
        epoch, place = divmod(place, len(self._rows))
        if not self._options.shuffle:
            return place
        order = np.random.default_rng([self._options.seed, epoch]).permutation(len(self._rows))
        return int(order[place])

    def row(self, number: int) -> Mapping[str, Any]:
        """A row."""
        return self._rows[number]


class Rollouts(Iterator[dict[str, np.ndarray]]):
    """An endless iterator over the batches of a run, with a state that `train` saves.

    Attributes:
        notes: Metrics of the completions of the last few steps, by step.
        num_rows: Maximum number of rows of a batch.
        length: Number of tokens of a row.
        shapes: Shapes of this process's part of the largest batch.
    """

    def __init__(
        self,
        prompts: Prompts,
        rewards: Rewards,
        options: policy_batch.GrpoOptions,
        *,
        tokenizer: Any,
        unit: int | None,
        num_processes: int = 1,
        write: Callable[..., list[Completion]] | None = None,
        tools: ToolUse | None = None,
    ):
        """Generates nothing yet; call `use` before the first batch.

        Args:
            prompts: The prompts.
            rewards: The reward functions.
            options: The options.
            tokenizer: The tokenizer.
            unit: Number of microbatches times that of devices; None if the plan chooses it.
            num_processes: Number of processes that share the run.
            write: Function that writes completions; None for `models.generate`.
            tools: The function that does it with tools.

        Raises:
            ValueError: If the processes can't have equally many rows.
        """
        self._prompts, self._rewards, self._options = prompts, rewards, options
        self._write, self._tools = tools or write, tools
        self._tokenizer, self._unit = tokenizer, 1
        completions = options.prompts_per_step * options.num_generations
        longest = prompts.length + options.max_completion_length
        longest = -(-longest // _LENGTH_UNIT) * _LENGTH_UNIT
        number = 1 if unit is None else policy_batch.documents_per_row(completions, longest, unit)
        self.num_rows, self.length = completions // number, number * longest
        if self.num_rows % num_processes:
            raise ValueError(
                f"`prompts_per_step`={options.prompts_per_step} times `num_generations`="
                f"{options.num_generations} must be a multiple of the {num_processes} processes of "
                "the run"
            )
        self.shapes = policy_batch.batch_shapes(self.num_rows // num_processes, self.length)
        self._trainer: Trainer | None = None
        self._progress = False
        self.notes: dict[int, dict[str, Any]] = {}
        # Seconds of training of the last few steps, by step.
        self.seconds: dict[int, float] = {}
        self._num_generations = self._num_updates = 0
        self._batch: dict[str, np.ndarray] | None = None
        self._shared: dict[str, float] = {}
        self._returned: float | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns this process's rows of the next batch: new completions, or the last once more."""
        assert self._trainer is not None
        # The trainer's own count: the options of a resumed run may have changed.
        step = self._trainer.num_steps + 1
        if self._batch is None or self._num_updates >= self._options.num_iterations:
            self._generate(step)
            self._num_updates = 0
        else:
            self.notes[step] = dict(self._shared)
        self._num_updates += 1
        for kept in (self.notes, self.seconds):
            kept.pop(step - _NOTES_KEPT, None)
        self._returned = time.perf_counter()
        assert self._batch is not None
        processes = self._trainer.processes
        size = len(self._batch["tokens"]) // processes.count
        own = slice(processes.index * size, (processes.index + 1) * size)
        return {name: rows[own] for name, rows in self._batch.items()}

    def use(self, trainer: Trainer, *, progress: bool = False) -> None:
        """Sets the trainer that writes the completions, and whether the first ones are told."""
        self._progress = progress
        self._trainer, plan = trainer, trainer.plan
        self._unit = plan.num_copies * plan.num_devices * plan.microbatches

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch; with the completions, if they are used once more."""
        is_used_up = self._num_updates >= self._options.num_iterations
        return {
            "generations": self._num_generations,
            "updates": self._num_updates,
            "batch": None if is_used_up else self._batch,
            "notes": self._shared,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a position."""
        self._num_generations, self._num_updates = state["generations"], state["updates"]
        self._batch, self._shared = state["batch"], dict(state["notes"])

    def _generate(self, step: int) -> None:
        """Writes completions and rewards them."""
        assert self._trainer is not None
        options, number = self._options, self._num_generations
        if self._returned is None:
            tell_phase("the first completions, which compile their functions ...", self._progress)
        # Otherwise the time of generation would include the end of the training step in flight.
        self._trainer.flush()
        began = time.perf_counter()
        if self._returned is not None:
            self.seconds[step - 1] = began - self._returned
        rows = self._prompts.of_generation(number)
        found = (self._write or generate)(
            self._trainer,
            [self._prompts.ids[i] for i in rows],
            max_tokens=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            stop=options.stop,
            seed=int(np.random.SeedSequence([options.seed, number]).generate_state(1)[0]),
            num_samples=options.num_generations,
            tokenizer=self._tokenizer,
        )
        seconds = time.perf_counter() - began
        each = self._rewarded(rows, found)
        size = options.num_generations
        self._rewards.warn_of(each, size)
        total = self._rewards.total(each)
        advantages = losses.group_advantages(total, size, scale_rewards=options.scale_rewards)
        in_rows = policy_batch.packed_rows(found, self.length, self._unit, self.num_rows)
        self._batch = policy_batch.policy_batch(
            in_rows, found, advantages, length=self.length, options=options
        )
        self._num_generations += 1
        padding = float((self._batch["segments"] == 0).mean())
        self._shared = self._numbers(found, each, total) | {"padding": padding}
        tokens = sum(map(policy_batch.num_own, found))
        self.notes[step] = self._shared | {
            "generation/seconds": seconds,
            "generation/tokens_per_second": tokens / seconds,
        }
        every, last = options.log_completions, step + options.num_iterations - 1
        # Whether a table is due in one of the updates on these completions.
        if every and last // every > (step - 1) // every:
            self.notes[step]["completions"] = self._table(rows, found, each, advantages)

    def _rewarded(self, rows: Sequence[int], found: Sequence[Completion]) -> np.ndarray:
        """The rewards of completions (completions, functions), from the first process."""
        of = [self._prompts.row(rows[one.prompt]) for one in found]
        # As TRL passes them: a completion of messages is a message.
        said = [
            (one.messages or [{"role": "assistant", "content": one.text}])
            if is_messages(row["prompt"])
            else one.text
            for row, one in zip(of, found, strict=True)
        ]
        columns = {name: [row[name] for row in of] for name in self._prompts.columns}

        def rewards() -> list[list[float]]:
            return self._rewards(
                **columns,
                prompts=[row["prompt"] for row in of],
                completions=said,
                completion_ids=[one.ids.tolist() for one in found],
            ).tolist()

        # Functions may draw numbers, or cost money: all processes go on with the same rewards.
        return np.array(distributed.in_first(rewards, self._trainer), np.float64)

    def _numbers(
        self, found: Sequence[Completion], each: np.ndarray, total: np.ndarray
    ) -> dict[str, float]:
        """The metrics for the record, with TRL's names."""
        groups = total.reshape(-1, self._options.num_generations)
        spreads = np.array([_sample_std(group) for group in groups])
        lengths = list(map(policy_batch.num_own, found))
        numbers = {
            "tokens": float(sum(len(one.prompt_ids) + len(one.ids) for one in found)),
            "reward": _mean(total),
            "reward_std": _mean(spreads),
            "frac_reward_zero_std": float(np.isclose(spreads, 0).mean()),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/clipped_ratio": float(np.mean([o.finish == "length" for o in found])),
        }
        if self._tools is not None:
            calls = self._tools.num_calls
            numbers["tools/call_frequency"] = calls / len(found)
            numbers["tools/failure_frequency"] = self._tools.num_failures / max(calls, 1)
        for name, column in zip(self._rewards.names, each.T, strict=True):
            numbers[f"rewards/{name}/mean"] = _mean(column)
            numbers[f"rewards/{name}/std"] = _sample_std(column)
        return numbers

    def _table(
        self,
        rows: Sequence[int],
        found: Sequence[Completion],
        each: np.ndarray,
        advantages: np.ndarray,
    ) -> list[dict[str, Any]]:
        """The completions of the first prompt, with their rewards."""
        prompt = shown_prompt(self._prompts.row(rows[0])["prompt"], self._tokenizer)
        return [
            {"prompt": prompt, "completion": found[i].text}
            | {name: float(x) for name, x in zip(self._rewards.names, each[i], strict=True)}
            | {"advantage": float(advantages[i])}
            for i in range(self._options.num_generations)
        ]


class RolloutMetrics:
    """A callback that adds metrics of completions, and training throughput, to records."""

    def __init__(self, rollouts: Rollouts):
        """Reads from the batches of the run."""
        self._rollouts = rollouts

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Adds to a record."""
        step = record["step"]
        record.update(self._rollouts.notes.get(step, {}))
        # The record's seconds include the generation of the next batch.
        seconds = self._rollouts.seconds.get(step, record["seconds"])
        record["training/seconds"] = seconds
        record["training/tokens_per_second"] = record["weight"] / seconds


def _mean(values: np.ndarray) -> float:
    """The mean of those that are there; NaN if none is."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else math.nan


def _sample_std(values: np.ndarray) -> float:
    """The unbiased standard deviation of rewards; NaN, as in TRL, for less than two."""
    there = values[np.isfinite(values)]
    return float(there.std(ddof=1)) if len(there) > 1 else math.nan


@lets_go("model", "params")
def train_grpo(
    model: Decoder | Callable[[], Decoder],
    rows: Sequence[Mapping[str, Any]],
    rewards: RewardFunction | Sequence[RewardFunction],
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    tokenizer: Any,
    options: policy_batch.GrpoOptions | None = None,
    params: Any = None,
    trainable: Any = None,
    precision: Any = "auto",
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = True,
    callbacks: Sequence[Callable[..., None]] = (),
    progress: bool = True,
    generate: Callable[..., list[Completion]] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
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
        generate: The function that writes completions, called as `models.generate` is; None for
            that. `models.InferenceServer` has a server of vLLM write them.
        tools: Functions, also `async` ones, that completions may call, with types of their
            arguments and a docstring in Google style, from which the tokenizer's chat template
            tells the model of them. Prompts are messages then. A call is made when its turn ends;
            its result is appended, and writing goes on. Results count in `max_completion_length`,
            but not in the loss, and a completion ends with its calls if their results don't fit.
            Calls are read by the tokenizer's `response_template`, or as
            ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen3 writes them. The
            completion that reward functions get is a list of all messages. What a function raises
            is its result, for the model to read. Records have `tools/call_frequency`, calls per
            completion, and `tools/failure_frequency`, the fraction of calls that failed.
        **settings: Further options of `Trainer`, such as `microbatches` and `device_budget`.

    Returns:
        The trainer and its history. With a stored reference, the trainer's model is a pair; its
        attribute `policy` is the decoder.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: See `fit`; or if rows differ in their columns, a reward function returns a
            wrong number of rewards, or one that is not finite, or tools can't be described or told.
        CheckpointError: See `fit`.
        FloatingPointError: See `fit`.
    """
    model, params = take(model), take(params)
    options = options or policy_batch.GrpoOptions()
    checks.instance("options", options, policy_batch.GrpoOptions, "a models.GrpoOptions")
    rewarding = Rewards(rewards, options.reward_weights)
    most_turns = options.max_tool_calling_iterations
    if most_turns is not None and not tools:
        raise ValueError("`max_tool_calling_iterations` is for `tools`, and there are none")
    tool_use = ToolUse(tools, tokenizer, generate, most_turns) if tools else None
    prompts = Prompts(rows, tokenizer, options, tool_use.schemas if tool_use else ())
    rewarding.check_columns(prompts.columns)
    trained: Any = model
    if options.beta and not has_adapters(model):
        trained, params, trainable = with_reference(model, params, trainable)
        precision = mt.Precision.of(precision)
        if precision.frozen is None:
            precision = replace(precision, frozen="int8")
    mesh, microbatches = settings.get("mesh"), settings.get("microbatches", 1)
    devices = _devices() if mesh is None else [*mesh.devices.flat]
    num_processes = len({device.process_index for device in devices})
    unit = None
    if isinstance(microbatches, int):
        unit = max(microbatches, 1) * len(devices)
    rollouts = Rollouts(
        prompts,
        rewarding,
        options,
        tokenizer=tokenizer,
        unit=unit,
        num_processes=num_processes,
        write=generate,
        tools=tool_use,
    )
    resume = resume and checkpoint_dir is not None
    trainer = mt.Trainer(
        trained,
        policy_batch.grpo_loss(options),
        optimizer,
        rollouts.shapes,
        params=params,
        trainable=trainable,
        precision=precision,
        continues=checkpoint_dir if resume else None,
        progress=progress,
        **settings,
    )
    del model, params, trained  # now freed, if they were made for this call
    rollouts.use(trainer, progress=progress and trainer.processes.is_first)
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


def _devices() -> list[Any]:
    """The devices of a run without a mesh."""
    first, *others = jax.devices()
    return [first, *others] if first.platform == "gpu" or jax.process_count() > 1 else [first]


def has_adapters(model: Decoder | Callable[[], Decoder]) -> bool:
    """Whether a decoder has adapters; shapes are enough to tell."""
    built = model if isinstance(model, nnx.Module) else nnx.eval_shape(model)
    return any(True for _ in adapted_modules(built))
