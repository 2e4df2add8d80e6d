"""Losses of labelled answers and of rewards, compared with their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax import losses


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_loss_of_labelled_answers_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    logs, before = rng.normal(size=(2, 7)).astype(np.float32)
    good, mask = rng.random((2, 7)) < 0.6
    gained = (logs - before).astype(np.float64)
    each = np.where(
        good, 2.0 * (1 - sigmoid(0.3 * (gained - 0.4))), 0.5 * (1 - sigmoid(0.3 * (0.4 - gained)))
    )
    options = {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    given = jnp.asarray(logs), before, good, 0.4
    np.testing.assert_allclose(losses.kto(*given, **options), each.mean(), rtol=1e-6)
    found = losses.kto(*given, **options, mask=mask, count=3)
    np.testing.assert_allclose(found, each[mask].sum() / 3, rtol=1e-6)


def test_no_gradient_flows_through_the_baseline():
    rng = np.random.default_rng(1)
    logs, before = jnp.asarray(rng.normal(size=(2, 5)), jnp.float32)
    good = jnp.arange(5) < 2

    def loss(own, mismatched):
        baseline = losses.kto_baseline(mismatched, mismatched - 1.0)
        return losses.kto(own, before, good, baseline)

    def through(baseline):
        return losses.kto(logs, before, good, baseline)

    assert losses.kto_baseline(logs + 1, logs) == pytest.approx(1)
    assert losses.kto_baseline(logs - 1, logs) == 0
    by_own, by_mismatched = jax.grad(loss, (0, 1))(logs, before)
    assert np.abs(by_own).min() > 0 and not by_mismatched.any()
    assert not jax.grad(through)(jnp.float32(0.5))
    assert not jax.grad(lambda x: losses.kto_baseline(x, before))(before + 1).any()


def test_the_loss_of_rewards_is_that_of_its_formula_with_margins():
    rng = np.random.default_rng(2)
    good, bad, margins = rng.normal(size=(3, 6)).astype(np.float32)
    each = np.log1p(np.exp(-(good - bad - margins).astype(np.float64)))
    given = jnp.asarray(good), bad
    np.testing.assert_allclose(losses.reward(*given, margins), each.mean(), rtol=1e-6)
    centred = losses.reward(*given, margins, center_rewards_coefficient=0.1)
    np.testing.assert_allclose(
        centred, (each + 0.1 * (good + bad).astype(np.float64) ** 2).mean(), rtol=1e-6
    )
    plain = np.log1p(np.exp(-(good - bad).astype(np.float64))).mean()
    np.testing.assert_allclose(losses.reward(*given), plain, rtol=1e-6)


def test_mistakes_are_named():
    ones = jnp.ones(3)
    with pytest.raises(ValueError, match="`desirable` has shape"):
        losses.kto(ones, ones, jnp.ones(2, bool), 0.0)
    with pytest.raises(ValueError, match="`desirable_weight` must be"):
        losses.kto(ones, ones, ones > 0, 0.0, desirable_weight=-1.0)
    with pytest.raises(ValueError, match="`margins` has shape"):
        losses.reward(ones, ones, jnp.ones(2))
    with pytest.raises(TypeError, match="`logs` must be an array of floating-point numbers"):
        losses.kto_baseline(jnp.arange(3), ones)
    for name in ("ipo", "simpo", "orpo"):
        columns = [ones, ones, *([ones, ones] if name == "ipo" else []), ones, jnp.ones(2)]
        with pytest.raises(ValueError, match="`rejected_tokens` has shape"):
            getattr(losses, name)(*columns, *([] if name == "ipo" else [1.0]))
    with pytest.raises(ValueError, match="`simpo_gamma` must be"):
        losses.simpo(ones, ones, ones, ones, 1.0, simpo_gamma=-1)
