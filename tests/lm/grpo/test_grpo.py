"""The loop of generation and training: rewards, batches, records, and runs that continue."""

import dataclasses
import inspect
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import log_softmax

import megatrain_jax as mt
from megatrain_jax import losses, models
from megatrain_jax._src.lm.grpo import grpo_run
from megatrain_jax._src.lm.grpo.policy_batch import (
    documents_per_row,
    grpo_loss,
    packed_rows,
    policy_batch,
)
from megatrain_jax._src.lm.grpo.rewards import Rewards
from megatrain_jax._src.lm.models.decoder import with_reference
from messages import refuses, tells, warns
from places import HELPERS, ROOT
from word_tokenizer import word_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "rope": models.Rope(dim=8, base=100.0),
    "init_std": 0.1,
    "final_softcap": 3.0,
}
ROWS = [
    {"prompt": [5, 7, 1], "wanted": 3},
    {"prompt": [4], "wanted": 9},
    {"prompt": [2, 2]} | {"wanted": 3},
]
OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 6,
    "temperature": 0.9,
    "stop": [0],
}


def decoder() -> models.Decoder:
    return models.Decoder(models.DecoderConfig(**SIZES), rngs=nnx.Rngs(3))


def share_of_wanted(completion_ids: list[list[int]], wanted: list[int]) -> list[float]:
    return [ids.count(token) / len(ids) for ids, token in zip(completion_ids, wanted, strict=True)]


def run(
    steps: int,
    *,
    model: Any = decoder,
    options: Any = (),
    rewards: Any = share_of_wanted,
    **settings: Any,
) -> mt.FitResult:
    given = {"precision": "float32", "progress": False, "resume": True, "tokenizer": None}
    given |= settings
    return models.train_grpo(
        model,
        ROWS,
        rewards,
        optax.adam(3e-2),
        steps=steps,
        options=models.GrpoOptions(**(OPTIONS | dict(options))),
        **given,
    )


def equal(found: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


# Rewards and advantages


def test_advantages_are_deviations_from_the_mean_of_the_group():
    rewards = np.array([1.0, 2, 4, 5, 5, 5, math.nan, 3, 8])
    found = losses.group_advantages(rewards, 3)
    first = (rewards[:3] - rewards[:3].mean()) / (rewards[:3].std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found[:3], first, rtol=1e-6)
    assert not found[3:7].any() and found[7] == -found[8] < 0
    plain = losses.group_advantages(rewards, 3, scale_rewards="none")
    np.testing.assert_allclose(plain[7:], [-2.5, 2.5])
    batch = losses.group_advantages(rewards[:6], 3, scale_rewards="batch")
    np.testing.assert_allclose(batch[:3], (rewards[:3] - 7 / 3) / (rewards[:6].std(ddof=1) + 1e-4))
    with refuses(ValueError, 4, "completions"):
        losses.group_advantages(rewards, 4)


def test_rewards_are_weighted_and_may_not_apply():
    def short(completions):
        return [-len(text) for text in completions]

    def right(prompts, completions, answer, **columns):
        assert set(columns) == {"completion_ids"}
        pairs = zip(completions, answer, strict=True)
        return [None if wanted is None else float(text == wanted) for text, wanted in pairs]

    options = models.GrpoOptions(reward_weights=np.array([0.5, 2, 1]))  # type: ignore[arg-type]
    rewards = Rewards([short, right, right], options.reward_weights)
    assert rewards.names == ["short", "right_1", "right_2"]
    columns: dict[str, Any] = {"prompts": ["p", "p"], "completions": ["ab", "c"]}
    columns |= {"completion_ids": [[1], [2]], "answer": ["ab", None]}
    each = rewards(**columns)
    np.testing.assert_array_equal(each, [[-2, 1, 1], [-1, math.nan, math.nan]])
    np.testing.assert_array_equal(rewards.total(each), [2, -0.5])
    nothing = Rewards(lambda completions: [None, 1.0])
    assert math.isnan(nothing.total(nothing(completions=["a", "b"]))[0])


@pytest.mark.parametrize(
    ("found", "error", "words"),
    [
        ([1.0], ValueError, "bad 1 2"),
        ([1.0, math.nan], ValueError, "bad nan 1 finite"),
        ([1.0, "x"], TypeError, "bad 'x' 1 number"),
        (1.0, TypeError, "bad list 1.0"),
    ],
)
def test_wrong_rewards_are_named(found: Any, error: type[Exception], words: str):
    def bad(**columns):
        return found

    with refuses(error, *words.split()):
        Rewards(bad)(completions=["a", "b"])


def test_a_column_that_a_function_needs_is_named_before_the_run():
    def right(completions, answer, scale=1.0):
        return [0.0 for _ in completions]

    with refuses(TypeError, "right", "answer", "['wanted']"):
        models.train_grpo(decoder, ROWS, right, optax.sgd(1.0), steps=1, tokenizer=None)
    Rewards([right, lambda **columns: []]).check_columns(["answer", "more"])


def test_functions_are_called_by_the_kinds_of_their_arguments():
    columns: dict[str, Any] = {"prompts": ["p", "q"], "completions": ["ab", "c"], "n": [3, 4]}
    given = dict(columns)

    def by_place(completions, n, /, scale=2.0):
        return [scale * len(text) + number for text, number in zip(completions, n, strict=True)]

    def mixed(completions, other=0.5, /, *, n, **more):
        assert more == {"prompts": ["p", "q"]} and other == 0.5
        return n

    async def later(completions):
        return [float(len(text)) for text in completions]

    def with_rest(completions, *rest):
        assert not rest
        return [float(len(text)) for text in completions]

    def with_any(*rest, **more):
        assert not rest and more == columns
        return more["n"]

    rewards = Rewards([by_place, mixed, later, with_rest, with_any])
    rewards.check_columns(["n"])
    np.testing.assert_array_equal(rewards(**columns).T, [[7, 6], [3, 4], [2, 1], [2, 1], [3, 4]])
    assert columns == given
    with refuses(TypeError, "by_place", "n"):
        rewards.check_columns([])
    with refuses(TypeError, "places", "names"):

        def places(*arguments):
            return [0.0 for _ in arguments[1]]

        Rewards(places).check_columns([])


def test_functions_that_tell_nothing_apart_are_named_once():
    nan = math.nan
    rewards = Rewards([share_of_wanted] * 3)
    rewards.names = ["silent", "equal", "useful"]
    step = np.array([[nan, 1, 1], [nan, 1, nan], [nan, 5, 2], [nan, 5, 3]])
    with pytest.warns(UserWarning) as told:
        rewards.warn_of(step, 2)
    silent, equal = (str(one.message) for one in told)
    assert tells(silent, "silent", None, 4) and tells(equal, "equal", "same")
    # Once each; and a function that was useful before may have nothing left to teach.
    rewards.warn_of(np.where(step > 1, 1, step), 2)


def test_mistakes_are_named():
    with refuses(ValueError, "`loss_type`", "'ppo'"):
        models.GrpoOptions(loss_type="ppo")  # type: ignore[arg-type]
    with refuses(ValueError, "`num_generations`", 2, 1):
        models.GrpoOptions(num_generations=1)
    with refuses(ValueError, "`top_p`", 1, 1.5):
        models.GrpoOptions(top_p=1.5)
    wrong: Any = {"num_generation": 4}
    with refuses(TypeError, "'num_generation'", "`num_generations`"):
        models.GrpoOptions(**wrong)
    wrong = {"max_new_tokens": 4}
    with refuses(TypeError, "'max_new_tokens'", "`max_completion_length`"):
        models.GrpoOptions(**wrong)
    # Names of TRL, before Python says that `rewards` is missing.
    call: Any = models.train_grpo
    with refuses(TypeError, "'reward_funcs'", "`rewards`"):
        call(decoder, ROWS, reward_funcs=share_of_wanted, optimizer=optax.sgd(1.0))
    with refuses(TypeError, "'beta'", "models.GrpoOptions(beta=...)"):
        run(1, beta=0.1)
    with refuses(TypeError, "`rewards`", "function", None):
        call(decoder, ROWS, None, optax.sgd(1.0), steps=1, tokenizer=None)
    with refuses(TypeError, "`rows`", "list"):
        call(decoder, iter(ROWS), share_of_wanted, optax.sgd(1.0), steps=1, tokenizer=None)
    logs = jnp.zeros((2, 3))
    with refuses(ValueError, "`beta`=0.1", "`reference`"):
        losses.grpo(logs, logs, logs, beta=0.1)
    with refuses(ValueError, "dr_grpo", "`max_completion_length`"):
        losses.grpo(logs, logs, logs, loss_type="dr_grpo")
    with refuses(ValueError, "`old_logs`", (1, 3)):
        losses.grpo(logs, logs[:1], logs)


def test_the_loss_and_the_runs_have_the_same_defaults():
    of_loss = inspect.signature(losses.grpo).parameters
    fields = {field.name: field.default for field in dataclasses.fields(models.GrpoOptions)}
    shared = fields.keys() & of_loss.keys() - {"max_completion_length"}
    assert {name: of_loss[name].default for name in shared} == {n: fields[n] for n in shared}
    assert len(shared) == 5


# Batches


def test_prompts_come_once_an_epoch_in_another_order():
    rows = [{"prompt": [1] * length} for length in (2, 1, 3, 5, 4)]

    def epochs(**options: Any) -> list[tuple[int, ...]]:
        prompts = grpo_run.Prompts(rows, None, models.GrpoOptions(prompts_per_step=3, **options))
        assert prompts.length == 5
        drawn = [i for number in range(10) for i in prompts.of_generation(number)]
        return [tuple(drawn[at : at + 5]) for at in range(0, 30, 5)]

    assert epochs(shuffle=False) == [(0, 1, 2, 3, 4)] * 6
    found = epochs()
    assert {tuple(sorted(epoch)) for epoch in found} == {(0, 1, 2, 3, 4)} and len({*found}) > 1
    assert epochs() == found != epochs(seed=1)


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """Completions are made up; the list of the options with which they were asked for."""
    asked: list[dict[str, Any]] = []

    def written(trainer: Any, prompts: list[Any], **given: Any) -> list[models.Completion]:
        asked.append(given)
        made = [(i, sample) for i in range(len(prompts)) for sample in range(given["num_samples"])]
        return [
            replace(
                completion(len(prompts[i]), 1),
                prompt=i,
                text=str(prompts[i]),
                prompt_ids=np.array(prompts[i], np.int32),
                finish="stop" if sample else "length",
            )
            for i, sample in made
        ]

    monkeypatch.setattr(grpo_run, "generate", written)
    return asked


def made_of(rewards: Any, num_processes: int = 1, **options: Any) -> grpo_run.Rollouts:
    """The batches of a run of one microbatch on one device."""
    given = models.GrpoOptions(**(OPTIONS | options))
    prompts = grpo_run.Prompts(ROWS, None, given)
    more = {"tokenizer": None, "unit": 4, "num_processes": num_processes}
    return grpo_run.Rollouts(prompts, Rewards(rewards), given, **more)


def among(count: int, index: int, first: list[Any]) -> Any:
    """Processes of which this one has a number; what the first one tells is in a list."""

    def gather(where: str, value: Any) -> list[Any]:
        first.extend([value] * (index == 0))
        return [first[-1]] * count

    return SimpleNamespace(count=count, index=index, is_first=index == 0, gather=gather)


def batches(
    made: grpo_run.Rollouts,
    steps: Any,
    microbatches: int = 1,
    devices: int = 1,
    processes: Any = None,
) -> Any:
    """Takes the batches of some steps, counted from 1."""
    plan = SimpleNamespace(microbatches=microbatches, num_devices=devices, num_copies=1)
    processes = processes or among(1, 0, [])
    trainer: Any = SimpleNamespace(num_steps=0, plan=plan, flush=lambda: None, processes=processes)
    made.use(trainer)
    for step in steps:
        trainer.num_steps = step - 1
        yield next(made)


def by_place(completions: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


def test_each_process_has_its_rows_of_the_batch_and_the_first_ones_rewards(asked):
    def drawn(completions: Any) -> list[float]:
        calls.append(len(completions))
        return [len(calls) + i % 3 for i in range(len(completions))]

    calls: list[int] = []
    (whole,) = batches(made_of(drawn), [1], 2)
    calls.clear()
    told: list[Any] = []
    made = [made_of(drawn, num_processes=2) for _ in range(2)]
    parts = [next(batches(own, [1], 2, 1, among(2, i, told))) for i, own in enumerate(made)]
    assert len(calls) == 1, "other processes call no reward function"
    for own, part in zip(made, parts, strict=True):
        assert own.shapes.keys() == part.keys()
        assert {x.shape[0] for x in own.shapes.values()} == {made_of(drawn).num_rows / 2}
        assert all(part[name].shape[1:] == x.shape[1:] for name, x in own.shapes.items())
    for name, rows in whole.items():
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, rows, err_msg=name)
    with refuses(ValueError, "prompts_per_step", "num_generations", 5):
        made_of(drawn, num_processes=5)


def test_completions_between_two_updates_are_saved_and_used_up_ones_are_not(asked):
    whole = made_of(by_place, num_iterations=2)
    found = []
    for batch in batches(whole, range(1, 5)):
        found.append((batch, whole.get_state()))
    assert len(asked) == 2
    assert equal(found[1][0], found[0][0])
    for step in (1, 2):
        again = made_of(by_place, num_iterations=2)
        again.set_state(found[step - 1][1])
        (batch,) = batches(again, [step + 1])
        assert equal(batch, found[step][0])
        assert len(asked) == 1 + step  # anew after the second update only
        assert asked[-1]["seed"] == asked[1]["seed"]


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 7])
def test_a_table_that_is_due_in_a_later_update_comes_with_its_completions(asked, updates, every):
    made = made_of(by_place, num_iterations=updates, log_completions=every)
    logged = [
        s for s, _ in enumerate(batches(made, range(1, 15)), 1) if "completions" in made.notes[s]
    ]
    due = {(step - 1) // updates for step in range(every, 16, every)}
    assert logged == [1 + updates * number for number in sorted(due) if updates * number < 14]


@pytest.mark.parametrize(("before", "after", "written"), [(3, 1, [1, 3, 4]), (1, 2, [1, 2, 3])])
def test_completions_of_a_run_with_another_number_of_updates_end(asked, before, after, written):
    made = made_of(by_place, num_iterations=before)
    list(batches(made, [1, 2]))
    state, first = made.get_state(), [s for s in (1, 2) if "generation/seconds" in made.notes[s]]
    made = made_of(by_place, num_iterations=after)
    made.set_state(state)
    list(batches(made, [3, 4]))
    assert first + [s for s in (3, 4) if "generation/seconds" in made.notes[s]] == written


def test_numbers_of_rewards_leave_out_those_that_are_not_there(asked):
    """As TRL's `nanstd` and `nanmean` do."""
    given = iter([[None] * 4 + [1.0] * 4, [None] * 3 + [2.0] * 5, [0.0, None, 1.0, None] * 2])
    made = made_of(lambda completions: next(given, [None] * 8))
    with pytest.warns(UserWarning, match="the same reward"):
        list(batches(made, range(1, 5)))
    for name, expected in {
        "frac_reward_zero_std": [0.5, 0.5, 0, 0],
        "reward": [1, 2, 0.5, math.nan],
        "reward_std": [0, 0, math.sqrt(0.5), math.nan],
        "rewards/<lambda>/std": [0, 0, math.sqrt(1 / 3), math.nan],
    }.items():
        np.testing.assert_allclose([made.notes[step][name] for step in range(1, 5)], expected)


def test_each_generation_is_drawn_anew_and_rewarded_with_the_columns_of_its_prompts(asked):
    def rewarded(prompts: Any, completions: Any, wanted: Any) -> list[float]:
        assert completions == [str(prompt) for prompt in prompts]
        assert all({"prompt": p, "wanted": w} in ROWS for p, w in zip(prompts, wanted, strict=True))
        return [float(n % 4) for n in range(len(prompts))]

    given = OPTIONS | {"prompts_per_step": 3, "top_k": 7, "top_p": 0.8}
    given |= {"min_p": 0.1, "repetition_penalty": 1.2}
    made = made_of(rewarded, **given)
    for batch in batches(made, (1, 2, 3), microbatches=2, devices=2):
        # All microbatches of all devices have the same number of rows.
        assert len(batch["tokens"]) == 4
    assert len({one["seed"] for one in asked}) == 3
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"):
        assert asked[0][name] == given[name]
    assert made.notes[1]["completions/clipped_ratio"] == 0.25
    assert made.seconds.keys() == {1, 2}, "of the steps that are trained by then"


def test_rows_have_whole_completions_and_little_padding():
    rng = np.random.default_rng(0)
    numbers = set()
    for _ in range(40):
        lengths = rng.integers(1, rng.integers(3, 40), 48).tolist()
        completions = [completion(3, length) for length in lengths]
        rows = packed_rows(completions, 48, unit=4, most=48)
        numbers.add(len(rows))
        assert sorted(i for row in rows for i in row) == list(range(48))
        totals = [sum(lengths[i] + 2 for i in row) for row in rows]
        # Best fit fills rows, and their number is rounded up by an eighth of all at most.
        assert 0 < min(totals) and max(totals) <= 48
        assert len(rows) - 8 < -(-sum(totals) // 48) * 4 / 3
        batch = policy_batch(
            rows, completions, np.arange(48), length=48, options=models.GrpoOptions()
        )
        np.testing.assert_allclose(batch["weights"].sum(), len(rows), rtol=1e-5)
        assert batch["tokens_per_row"].sum() == pytest.approx(sum(lengths))
        assert (batch["segments"] > 0).sum() == sum(totals)
    assert numbers <= set(range(8, 49, 8)) and len(numbers) > 2
    # (completions, tokens of the longest, microbatches): documents in a row
    for given, number in {(16, 64, 1): 4, (16, 64, 2): 2, (16, 64, 8): 1, (64, 2000, 1): 2}.items():
        assert documents_per_row(*given) == number


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
def test_truncated_completions_count_as_in_the_plain_loss(loss_type: Any):
    """With ratios of 1, a token's loss is minus its advantage."""
    options = models.GrpoOptions(
        loss_type=loss_type, mask_truncated_completions=True, max_completion_length=6
    )
    completions = [completion(2, 3), replace(completion(2, 6), finish="length"), completion(1, 4)]
    advantages, lengths = np.array([1.0, -2.0, 0.5]), np.array([3, 0, 4])
    batch = policy_batch([[0, 1], [2]], completions, advantages, length=24, options=options)
    found = -(batch["weights"] * batch["advantages"]).sum() / len(batch["weights"])
    logs = jnp.zeros((3, 6))
    expected = losses.grpo(
        logs,
        logs,
        advantages,
        loss_type=loss_type,
        max_completion_length=6,
        mask=np.arange(6) < lengths[:, None],
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Table(models.Decoder):
    """A decoder whose last hidden states are those of the token and its position alone."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.config = models.DecoderConfig(**SIZES)
        arrays = (jnp.asarray(rng.normal(size=(24, 16))) for _ in range(3))
        self.states, self.places, self.head = arrays

    def hidden(self, tokens: Any, positions: Any, *_: Any, **__: Any) -> Any:
        return self.states[tokens] + self.places[positions], None

    def head_weight(self) -> Any:
        return self.head


def test_the_loss_of_packed_rows_in_microbatches_is_that_of_completions():
    """With logits that are capped, and old log-probabilities at the temperature, of all tokens."""
    rng, options = (
        np.random.default_rng(1),
        models.GrpoOptions(temperature=0.9),
    )
    completions = []
    for prompt, length in ((2, 3), (1, 6), (2, 1), (3, 4)):
        logs = -rng.uniform(2, 4, (3, length)).astype(np.float32)
        names = ("log_probs", "tempered_log_probs", "drawn_log_probs")
        made = completion(prompt, length)
        completions.append(replace(made, **dict(zip(names, logs, strict=True))))
    advantages, table = rng.normal(size=4), Table()
    logs, old, mask = np.zeros((3, 4, 6))
    states, places, head = map(np.asarray, (table.states, table.places, table.head))
    for i, one in enumerate(completions):
        ids = np.concatenate([one.prompt_ids, one.ids])
        hidden = states[ids[:-1]] + places[: len(ids) - 1]
        log_probs = log_softmax(3.0 * np.tanh(hidden @ head.T / 3.0) / 0.9, axis=-1)
        at = slice(0, len(one.ids))
        logs[i, at] = log_probs[np.arange(len(ids) - 1), ids[1:]][-len(one.ids) :]
        old[i, at], mask[i, at] = one.tempered_log_probs, 1
    expected = jax.jit(losses.grpo)(logs, old, advantages, mask=mask)
    rows = [[0, 1], [2, 3]]
    batch = policy_batch(rows, completions, advantages, length=16, options=options)
    loss = jax.jit(lambda batch: grpo_loss(options)(table, batch)[0])
    parts = [loss({name: x[i : i + 1] for name, x in batch.items()}) for i in (0, 1)]
    for found in (loss(batch), np.mean(parts)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def completion(prompt: int, length: int) -> models.Completion:
    ids, logs = np.arange(1, length + 1, dtype=np.int32), np.full(length, -1, np.float32)
    return models.Completion(
        prompt=0,
        sample=0,
        text="",
        prompt_ids=np.ones(prompt, np.int32),
        ids=ids,
        log_probs=logs,
        tempered_log_probs=logs,
        drawn_log_probs=logs,
        finish="stop",
    )


# Runs


@pytest.mark.exhaustive
def test_the_reward_rises_and_records_have_its_numbers():
    tokenizer, seen = word_tokenizer(SIZES["vocab_size"]), []

    def rewarded(completions, completion_ids, wanted):
        seen.extend(zip(completions, completion_ids, strict=True))
        return share_of_wanted(completion_ids, wanted)

    # The loss knows nothing of the restriction, as in TRL, or else ratios would not begin at 1.
    options = {"log_completions": 10, "top_p": 0.9, "top_k": 20}
    result = run(30, options=options, rewards=rewarded, tokenizer=tokenizer)
    texts, ids = zip(*seen, strict=True)
    # As TRL decodes completions for reward functions.
    assert list(texts) == tokenizer.batch_decode(list(ids), skip_special_tokens=True)
    assert list(texts) != tokenizer.batch_decode(list(ids))
    first, last = (np.mean(result.history["reward"][part]) for part in (slice(5), slice(-5, None)))
    assert last > first + 0.2
    record = result.history[9]
    assert record["rewards/rewarded/mean"] == record["reward"]
    assert 1 <= record["completions/mean_length"] <= 6
    assert record["weight"] == 8 * record["completions/mean_length"] < record["tokens"]
    assert min(result.history["padding"]) < 0.3
    assert record["generation/tokens_per_second"] > 0 < record["training/tokens_per_second"]
    # Generation and training agree, so that a first update's ratios are 1 and none is clipped.
    assert max(result.history["sampling/sampling_logp_difference/mean"]) < 1e-5
    assert not any(result.history["clip_ratio/region_mean"])
    table = record["completions"]
    assert len(table) == 4 and {"prompt", "completion", "advantage"} <= table[0].keys()
    assert "completions" not in result.history[8]


@pytest.mark.exhaustive
def test_rewards_that_are_not_there_are_no_rewards_of_zero(tmp_path: Path):
    """The numbers are those of TRL's `nanstd` and `nanmean`; its log leaves NaN out."""
    given = iter([[None] * 4 + [1.0] * 4, [None] * 3 + [2.0] * 5, [0.0, None, 1.0, None] * 2])

    def some(completions):
        return next(given, [None] * 8)

    with warns(UserWarning, "some", "same"):
        result = run(4, rewards=some, checkpoint_dir=tmp_path, checkpoint_every=1)
    history = result.history
    assert history["frac_reward_zero_std"] == [0.5, 0.5, 0, 0]
    np.testing.assert_allclose(history["reward"], [1, 2, 0.5, math.nan])
    np.testing.assert_allclose(history["reward_std"], [0, 0, math.sqrt(0.5), math.nan])
    np.testing.assert_allclose(history["rewards/some/std"], [0, 0, math.sqrt(1 / 3), math.nan])


@pytest.mark.exhaustive
def test_microbatches_and_a_small_device_change_nothing():
    options = {"num_iterations": 2}
    whole = run(4, options=options)
    parts = run(4, options=options, microbatches=4)
    small = run(4, options=options, device_budget="least")
    for other in (parts, small):
        for found, wanted in zip(other.history["loss"], whole.history["loss"], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
        pairs = zip(jax.tree.leaves(other.params), jax.tree.leaves(whole.params), strict=True)
        for found, wanted in pairs:
            np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.exhaustive
def test_a_run_that_is_cut_off_continues_bitwise(tmp_path: Path):
    options = {"num_iterations": 2, "epsilon": 0.05, "log_completions": 4}
    folder = tmp_path / "whole"
    saving = {"checkpoint_dir": folder, "checkpoint_every": 1, "keep": 9}
    whole = run(6, options=options, microbatches=4, **saving)
    # Drift from the first update shows in the second one on the same completions.
    assert whole.history[1]["sampling/sampling_logp_difference/mean"] > 1e-3
    # Only the first update on some completions waits for them.
    for first, second in zip(whole.history[:-1:2], whole.history[1:-1:2], strict=False):
        assert "generation/seconds" in first and "generation/seconds" not in second
    # Step 4 uses the completions of step 3.
    assert [r["step"] for r in whole.history if "completions" in r] == [3]
    for step in (2, 3):  # after both updates on some completions, and between them
        cut = tmp_path / f"cut {step}"
        cut.mkdir()
        shutil.copytree(folder / str(step), cut / str(step))
        # Here the plan would choose 1.
        again = run(6, options=options, microbatches="auto", checkpoint_dir=cut)
        assert again.trainer.plan.microbatches == 4
        assert equal(again.params, whole.params) and equal(
            again.trainer.opt_state, whole.trainer.opt_state
        )
        for name in ("loss", "reward", "completions/mean_length"):
            assert again.history[name] == whole.history[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after", "written"), [(3, 1, [1, 3, 4]), (1, 2, [1, 2, 3])])
def test_a_run_may_continue_with_another_number_of_updates(
    tmp_path: Path, before: int, after: int, written: list[int]
):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    run(2, options={"num_iterations": before}, **saving)
    found = run(4, options={"num_iterations": after}, **saving)
    assert [r["step"] for r in found.history if "generation/seconds" in r] == written
    assert all("reward" in record for record in found.history)


class Letters:
    """A tokenizer that calls a function when a text is looked at while it is written."""

    def __init__(self, look: Any):
        self._look = look

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids: Any) -> str:
        self._look()
        return "".join(chr(97 + i) for i in ids)


def run_and_die(folder: Path, place: str) -> None:
    """A run in its own process, which kills it "in generation", "in training" or "nowhere"."""

    def die(here: str, is_time: bool) -> None:
        if here == place and is_time:
            os.kill(os.getpid(), signal.SIGKILL)

    def look() -> None:
        die("in generation", (folder / "checkpoints" / "2").exists())

    def record(trainer: Any, record: dict[str, Any]) -> None:
        die("in training", record["step"] == 5)

    result = run(
        8,
        options={"num_iterations": 2, "stop": [0, "zz"], "top_p": 0.9},
        tokenizer=Letters(look),
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=1,
        callbacks=[record],
    )
    arrays = jax.tree.leaves((result.params, result.trainer.opt_state))
    names = ("loss", "reward", "completions/mean_length", "clip_ratio/region_mean")
    found: dict[str, Any] = {f"array{i}": np.asarray(x) for i, x in enumerate(arrays)}
    found |= {name: result.history[name] for name in names}
    np.savez(folder / "end.npz", **found)


@pytest.mark.long
def test_a_killed_run_ends_as_one_that_was_not_killed(tmp_path: Path):
    def ended(folder: Path, place: str) -> int:
        code = "import pathlib, sys, test_grpo as t; "
        code += "t.run_and_die(pathlib.Path(sys.argv[1]), sys.argv[2])"
        folder.mkdir(exist_ok=True)
        paths = f"{ROOT}:{HELPERS}"
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(folder), place],
            env={**os.environ, "PYTHONPATH": paths},
        ).returncode

    assert ended(tmp_path / "whole", "nowhere") == 0
    assert ended(tmp_path / "killed", "in generation") == -signal.SIGKILL
    assert ended(tmp_path / "killed", "in training") == -signal.SIGKILL
    assert ended(tmp_path / "killed", "nowhere") == 0
    whole, killed = (np.load(tmp_path / name / "end.npz") for name in ("whole", "killed"))
    assert whole.files == killed.files
    for name in whole.files:
        np.testing.assert_array_equal(whole[name], killed[name], err_msg=name)


@pytest.mark.parametrize("trainable", [["q_proj", "^norm"], lambda path: path.startswith("norm")])
def test_nothing_of_a_stored_reference_is_trained(trainable: Any):
    _, both, is_trained = with_reference(decoder, None, trainable)
    assert both is None
    chosen = {"norm/weight", "layers/0/self_attn/q_proj/weight"}
    chosen &= {"norm/weight"} if callable(trainable) else chosen
    for path in ("norm/weight", "layers/0/self_attn/q_proj/weight", "layers/0/norm/weight"):
        assert is_trained(f"policy/{path}") == (path in chosen)
        assert not is_trained(f"reference/{path}")


@pytest.mark.exhaustive
def test_a_stored_reference_is_that_of_adapters_that_are_off():
    adapted = models.lora(decoder, targets="_proj", rank=4)
    options = {"beta": 0.5}
    settings = {"params": adapted.params, "trainable": adapted.trainable}
    off = run(3, model=adapted.model, options=options, **settings)
    assert off.history[0]["kl"] == pytest.approx(0, abs=1e-6) and off.history[2]["kl"] > 1e-5
    stored = run(3, options=options, precision=mt.Precision(compute="float32", frozen="float32"))
    assert stored.history[0]["kl"] == pytest.approx(0, abs=1e-6) and stored.history[2]["kl"] > 1e-4
    before, after = decoder(), stored.trainer.model
    assert equal(nnx.state(after.reference), nnx.state(before))
    assert not equal(nnx.state(after.policy), nnx.state(before))
    coded = run(2, options=options)
    assert 0 < coded.history[0]["kl"] < 1e-3
