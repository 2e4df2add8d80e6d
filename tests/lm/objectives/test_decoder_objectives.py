"""Losses and metrics of batches that are cut into microbatches, and mistakes in calls."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models, objectives
from megatrain_jax._src.lm.cli.recipe import counted
from megatrain_jax._src.lm.data.batches import with_counts
from messages import refuses
from tiny_sizes import tiny_decoder

SIZES = tiny_decoder()


def two_pairs_in_four_rows():
    """A batch whose reference makes one of its two pairs right, and the other one wrong."""
    has_pair = np.array([True, False, True, False])
    answers = np.repeat([1, 2], 3) * has_pair[:, None]
    tokens = np.arange(24).reshape(4, 6) % 16
    right, wrong = [-1e4, 1e4], [1e4, -1e4]
    return {
        "tokens": tokens,
        "labels": (tokens + 1) % 16,
        "positions": np.tile(np.arange(3), (4, 2)),
        "segments": answers,
        "mask": answers > 0,
        "pairs": has_pair[:, None],
        "pairs_per_row": np.full(4, 2 / 4, np.float32),
        "reference": np.array([right, [0, 0], wrong, [0, 0]], np.float32),
    }


@pytest.mark.by_default("4")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_accuracy_and_tokens_are_those_of_the_whole_batch(microbatches):
    batch = two_pairs_in_four_rows()
    compute, params = compiled(EXACT["dpo"], SIZES, len(batch["tokens"]))
    cut = {name: np.split(array, microbatches) for name, array in batch.items()}
    parts = [{name: part[i] for name, part in cut.items()} for i in range(microbatches)]
    metrics = [compute(params, part)[0][1] for part in parts]
    found = {name: np.array([part[name] for part in metrics]) for name in metrics[0]}
    assert found["accuracy"].mean() == 0.5  # as steps have it
    assert np.average(found["accuracy"], weights=found["weight"]) == 0.5  # as evaluations have it
    assert found["tokens"].mean() == 12


def test_accuracy_of_a_batch_without_pairs_is_0():
    batch = two_pairs_in_four_rows()
    without = {name: jnp.zeros_like(batch[name]) for name in ("pairs", "pairs_per_row")}
    model = models.Decoder(SIZES, rngs=nnx.Rngs(0))
    _, metrics = objectives.dpo(reference="stored")(
        model, {name: jnp.asarray(array) for name, array in {**batch, **without}.items()}
    )
    assert metrics["accuracy"] == 0


def uneven_pairs():
    """Pairs of uneven lengths in four rows: two, none, one and one."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 0]] + [[0] * 12] * 3)
    segments[2] = [1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    segments[3] = [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    tokens = rng.integers(1, 16, (4, 12)) * (segments > 0)
    follows = np.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1))) & (segments > 0)
    positions = np.array(
        [[list(row[:i]).count(one) for i, one in enumerate(row)] for row in segments]
    )
    batch = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=1) * follows,
        "positions": positions,
        "segments": segments,
        "mask": follows & (positions % 3 < 2),
        "pairs": np.array([[True, True], [False, False], [True, False], [True, False]]),
        "reference": rng.normal(-9, 1, (4, 4)).astype(np.float32),
        "margins": rng.random((4, 2)).astype(np.float32),
    }
    return with_counts(batch)


EXACT: dict[str, Any] = {
    "dpo": objectives.dpo(beta=0.3, reference="stored"),
    "ipo": objectives.ipo(beta=0.3, reference="stored"),
    "simpo": objectives.simpo(beta=2.0, cpo_alpha=0.7),
    "orpo": objectives.orpo(beta=0.3),
    "reward": objectives.reward(center_rewards_coefficient=0.1),
}


@functools.lru_cache(maxsize=2)  # batches of one shape follow each other
def compiled(objective: Any, config: Any, rows: int) -> tuple[Any, Any]:
    """A loss with its gradients as a function of parameters and a batch; and the parameters."""
    graph, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    loss = counted(objective, rows)

    def plain(params, batch):
        return loss(nnx.merge(graph, params), batch)

    return jax.jit(jax.value_and_grad(plain, has_aux=True)), params


def gradients_of(objective: Any, config: Any, batch: Any, microbatches: int) -> Any:
    """Loss, metrics and gradients of a step, as means over microbatches."""
    compute, params = compiled(objective, config, len(batch["tokens"]))
    cut = {name: np.split(array, microbatches) for name, array in batch.items()}
    parts = [{name: part[i] for name, part in cut.items()} for i in range(microbatches)]
    found = [compute(params, part) for part in parts]
    means = jax.tree.map(lambda *each: np.mean(each, axis=0), *found)
    del means[0][1]["weight"]  # steps have its sum
    return means


@pytest.mark.by_default("orpo")
@pytest.mark.parametrize("name", EXACT)
def test_microbatches_have_the_gradients_of_the_whole_batch(name):
    config = dataclasses.replace(SIZES, scores=1 if name == "reward" else None, init_std=0.3)
    whole, cut = (gradients_of(EXACT[name], config, uneven_pairs(), n) for n in (1, 4))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        # A row without a pair has log-probabilities of 0.
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_the_baseline_of_labelled_answers_is_that_of_a_microbatch():
    """Everything besides the baseline is a mean over the whole step."""
    loss = objectives.kto(beta=0.3, undesirable_weight=0.5, reference="stored")
    batch = uneven_pairs()
    batch["desirable"] = np.array([[True, False], [False, False], [True, False], [True, False]])
    config = dataclasses.replace(SIZES, init_std=0.3)
    del batch["chosen_learned_per_row"], batch["chosen_tokens_per_row"]
    # References as likely as can be: all baselines are 0.
    certain = with_counts(batch | {"reference": np.zeros((4, 4), np.float32)})
    whole, cut = (gradients_of(loss, config, certain, n) for n in (1, 4))
    assert whole[0][1]["kl"] == 0
    # Each kind of answer has the mean reward of its own number of answers.
    graph, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    ours = jax.jit(
        lambda params: objectives.answer_log_probabilities(nnx.merge(graph, params), certain)
    )(params)[:, 0::2]
    good = batch["desirable"]
    for name, here in (("chosen", good), ("rejected", batch["pairs"] & ~good)):
        mean = 0.3 * np.asarray(ours)[here].mean()
        assert whole[0][1][f"rewards/{name}"] == pytest.approx(mean, rel=1e-5)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)
    unlikely = with_counts(batch | {"reference": np.full((4, 4), -30, np.float32)})
    whole, cut = (gradients_of(loss, config, unlikely, n) for n in (1, 4))
    assert whole[0][1]["kl"] > 1 and whole[0][1]["kl"] != pytest.approx(cut[0][1]["kl"], rel=0.01)


def test_mistakes_are_named():
    wrong: Any = "model"
    model, batch = models.Decoder(SIZES, rngs=nnx.Rngs(0)), two_pairs_in_four_rows()
    with refuses(ValueError, "`reference`", "'model'", '"adapters"', '"stored"'):
        objectives.ipo(reference=wrong)(model, batch)
    with refuses(ValueError, "`model`", "no adapters", "models.lora", "`reference`", "stored"):
        objectives.dpo()(model, batch)
    del batch["reference"]
    with refuses(ValueError, "`batch`", "no 'reference'"):
        objectives.dpo(reference="stored")(model, batch)
    with refuses(ValueError, "`beta`", -1):
        objectives.dpo(beta=-1, reference="stored")(model, two_pairs_in_four_rows())
    del batch["pairs"]
    for loss in (objectives.orpo(), objectives.answer_log_probabilities):
        with refuses(ValueError, "`batch`", "no 'pairs'"):
            loss(model, batch)
    with refuses(ValueError, "`model`", "models.reward_model"):
        objectives.reward()(model, two_pairs_in_four_rows())
