"""Losses of labelled answers and of rewards, compared with their formulas in NumPy."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax import losses, objectives
from megatrain_jax._src.lm.objectives.example_losses import SMOOTHED
from megatrain_jax._src.lm.objectives.policy_losses import policy_tokens
from messages import refuses


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


def test_the_cross_entropy_of_chosen_answers_has_its_weight():
    given = *-jnp.arange(1.0, 7).reshape(2, 3), *jnp.arange(2.0, 8).reshape(2, 3)
    plain = losses.simpo(*given, 0.0), losses.orpo(*given, 0.0)  # type: ignore
    assert losses.simpo(*given, 2.0, cpo_alpha=0.25) == pytest.approx(plain[0] + 0.5)  # type: ignore
    assert losses.orpo(*given, 2.0) == pytest.approx(plain[1] + 2)  # type: ignore


def test_mistakes_are_named():
    ones = jnp.ones(3)
    with refuses(ValueError, "`desirable`", (2,)):
        losses.kto(ones, ones, jnp.ones(2, bool), 0.0)
    with refuses(ValueError, "`desirable_weight`", -1.0):
        losses.kto(ones, ones, ones > 0, 0.0, desirable_weight=-1.0)
    with refuses(ValueError, "`margins`", (2,)):
        losses.reward(ones, ones, jnp.ones(2))
    with refuses(TypeError, "`logs`", "int32"):
        losses.kto_baseline(jnp.arange(3), ones)
    for name in ("ipo", "simpo", "orpo"):
        columns = [ones, ones, *([ones, ones] if name == "ipo" else []), ones, jnp.ones(2)]
        with refuses(ValueError, "`rejected_tokens`", (2,)):
            getattr(losses, name)(*columns, *([] if name == "ipo" else [1.0]))
    pair = ones, ones, ones, ones
    with refuses(ValueError, "`label_smoothing`", 0.1, "`loss_type`", "sigmoid", "robust"):
        losses.dpo(*pair, label_smoothing=0.1, loss_type="hinge")
    with refuses(ValueError, "`label_smoothing`", 0.5):
        losses.dpo(*pair, label_smoothing=0.5)
    with refuses(ValueError, "`loss_type`", "'ipo'", "apo_zero"):
        losses.dpo(*pair, loss_type="ipo")  # type: ignore[arg-type]
    with refuses(ValueError, "`simpo_gamma`", -1):
        losses.simpo(ones, ones, ones, ones, 1.0, simpo_gamma=-1)


# Log-probabilities from certain to impossible; float32 can't tell 0 and -1e-9 apart.
LOGS = np.array([0, -1e-9, -1e-6, -1e-3, -0.7, -5, -120, -200], np.float32)
FIRST, SECOND = (x.reshape(-1) for x in np.meshgrid(LOGS, LOGS))


def log_odds(logs):
    return logs - jnp.log(-jnp.expm1(logs))


def softplus(x):
    return jnp.logaddexp(x, 0)


def one(function, **options):
    """A loss of one example, of its first two arguments."""
    return lambda x, y, *rest: function(x[None], y[None], *rest, **options)


ONE = np.ones(1, np.float32)
# Losses of DPO by the rewards of both answers; that of "apo_down" cancels in float32.
DPO = {
    "sigmoid": lambda good, bad: 0.9 * softplus(bad - good) + 0.1 * softplus(good - bad),
    "robust": lambda good, bad: (0.9 * softplus(bad - good) - 0.1 * softplus(good - bad)) / 0.8,
    "hinge": lambda good, bad: jnp.maximum(0, 1 - good + bad),
    "apo_zero": lambda good, bad: 1 - jax.nn.sigmoid(good) + jax.nn.sigmoid(bad),
    "bco_pair": lambda good, bad: softplus(-good) + softplus(bad),
    "nca_pair": lambda good, bad: softplus(-good) + (softplus(good) + softplus(bad)) / 2,
    "sppo_hard": lambda good, bad: (2 * good - 1) ** 2 + (2 * bad + 1) ** 2,
}


def dpo_at_edges(kind):
    options: dict[str, Any] = {"loss_type": kind} | (
        {"label_smoothing": 0.1} if kind in SMOOTHED else {}
    )
    return (
        one(lambda x, y: losses.dpo(x, y, -5 * ONE, -0.7 * ONE, beta=0.5, **options)),
        lambda x, y: DPO[kind](0.5 * (x + 5), 0.5 * (y + 0.7)),
    )


AT_EDGES = {
    "dpo": (
        one(lambda x, y: losses.dpo(x, y, -5 * ONE, -0.7 * ONE, beta=0.5)),
        lambda x, y: softplus(-0.5 * (x + 5 - y - 0.7)),
    ),
    **{kind: dpo_at_edges(kind) for kind in DPO},
    "ipo": (
        one(lambda x, y: losses.ipo(x, y, -5 * ONE, -0.7 * ONE, ONE, ONE, beta=0.5)),
        lambda x, y: (x + 5 - y - 0.7 - 1) ** 2,
    ),
    "simpo": (
        one(lambda x, y: losses.simpo(x, y, ONE, ONE, 0.0, beta=2.0)),
        lambda x, y: softplus(0.5 - 2 * (x - y)),
    ),
    "orpo": (
        one(lambda x, y: losses.orpo(x, y, ONE, ONE, 0.0, beta=0.5)),
        lambda x, y: 0.5 * softplus(log_odds(y) - log_odds(x)),
    ),
    "kto": (
        one(lambda x, y: losses.kto(x, y, ONE > 0, 0.5, beta=0.5)),
        lambda x, y: jax.nn.sigmoid(-0.5 * (x - jax.lax.stop_gradient(y) - 0.5)),
    ),
    "undesirable": (
        one(lambda x, y: losses.kto(x, y, ONE < 0, 0.5, beta=0.5)),
        lambda x, y: jax.nn.sigmoid(0.5 * (x - jax.lax.stop_gradient(y) - 0.5)),
    ),
    "reward": (
        one(lambda x, y: losses.reward(x, y, center_rewards_coefficient=0.1)),
        lambda x, y: softplus(y - x) + 0.1 * (x + y) ** 2,
    ),
}


@pytest.mark.by_default(*DPO, "simpo", "orpo", "undesirable", "reward")
@pytest.mark.parametrize("name", AT_EDGES)
def test_losses_of_probabilities_from_0_to_1_are_those_in_float64(name):
    ours, formula = AT_EDGES[name]
    found, gradients = jax.vmap(jax.value_and_grad(ours, (0, 1)))(FIRST, SECOND)
    # The odds of ORPO are those of a probability of 1 - 1e-7 at most.
    least = 1e-7 if name == "orpo" else 0.0
    with jax.enable_x64(True):
        wide = [np.minimum(x.astype(np.float64), -least) for x in (FIRST, SECOND)]
        expected, wanted = jax.vmap(jax.value_and_grad(formula, (0, 1)))(*wide)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-9)


def test_a_certain_answer_has_the_limit_of_gradients_and_what_is_no_probability_is_not_hidden():
    def loss(chosen, rejected):
        return losses.orpo(chosen[None], rejected[None], ONE, ONE, 0.0, beta=1.0)

    by_chosen = jax.grad(loss)(jnp.float32(0), jnp.float32(-0.7))
    odds = np.exp(-0.7) / (1 - np.exp(-0.7))
    np.testing.assert_allclose(by_chosen, -odds, rtol=1e-5)
    assert np.isnan(loss(jnp.float32(0.7), jnp.float32(-0.7)))


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_policies_that_find_tokens_certain_or_impossible_have_exact_gradients(beta, corrected):
    """The gradient is written out, because float64 overflows, too."""
    old, logs = FIRST, SECOND
    options = {"beta": beta, "use_bias_correction_kl": corrected, "count": 1.0}
    for advantage in (-2.0, 0.0, 2.0):

        def ours(x, before, advantage=advantage):
            one = x[None, None], before[None, None], jnp.full((1, 1), advantage)
            return losses.grpo(*one, reference=before[None, None] - 0.5, **options)

        found, gradient = jax.vmap(jax.value_and_grad(ours))(logs, old)
        gap = logs.astype(np.float64) - old
        with np.errstate(over="ignore", invalid="ignore"):
            ratio, beyond = np.exp(gap), -gap - 0.5
            clipped = (ratio > 1.2) & (advantage > 0) | (ratio < 0.8) & (advantage < 0)
            wanted = np.where(clipped, 0, -advantage * ratio) if advantage else np.zeros(len(gap))
            value = -advantage * np.where(clipped, np.clip(ratio, 0.8, 1.2), ratio)
            value = value if advantage else np.zeros(len(gap))
            if beta and corrected:
                wanted += -beta * ratio * beyond
                value += beta * (np.exp(-0.5) - ratio * (beyond + 1))
            elif beta:
                wanted += beta * (1 - np.exp(beyond))
                value += beta * (np.exp(beyond) - beyond - 1)
        finite = np.abs(value) < 3e38
        assert finite.sum() > 20
        np.testing.assert_allclose(found[finite], value[finite], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gradient[finite], wanted[finite], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_terms_of_a_policy_s_tokens_are_those_of_their_formulas(seed):
    rng = np.random.default_rng(seed)
    low, high, beta = 0.2, (None, 0.4)[seed % 2], (0.0, 0.3)[seed // 2 % 2]
    corrected = bool(seed // 4)
    old, reference, gap = rng.normal(size=(3, 4, 9)).astype(np.float32)
    gap, gains = 0.5 * gap, rng.choice([-2.0, 0.0, 3.0], size=(4, 9)).astype(np.float32)
    found = policy_tokens(
        jnp.asarray(old + gap), old, gains, reference=reference, epsilon=low, epsilon_high=high,
        beta=beta, use_bias_correction_kl=corrected, mask=None,
    )  # fmt: skip
    ratio, beyond = np.exp(gap), reference - (old + gap)
    most = 1 + (low if high is None else high)
    values = -np.minimum(ratio * gains, np.clip(ratio, 1 - low, most) * gains)
    divergences = (np.exp(beyond) - beyond - 1) * (ratio if corrected else 1) if beta else 0 * ratio
    np.testing.assert_allclose(found.losses, values + beta * divergences, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.divergences, divergences, rtol=1e-4, atol=1e-5)
    # Where a larger ratio changes nothing.
    clipped = np.where(gains > 0, ratio > most, (ratio < 1 - low) & (gains < 0))
    np.testing.assert_array_equal(found.clipped, clipped)
    assert 0 < clipped.sum() < (gains != 0).sum()


THERE = np.arange(4) < 2
TOKENS = np.arange(1, 5, dtype=np.float32)
MASKED = {
    "dpo": lambda a, b, c, d: losses.dpo(a, b, c, d, mask=THERE),
    "ipo": lambda a, b, c, d: losses.ipo(a, b, c, d, TOKENS, TOKENS, mask=THERE),
    "simpo": lambda a, b, c, d: losses.simpo(a, b, c + 4, d + 4, 0.5, mask=THERE),
    "orpo": lambda a, b, c, d: losses.orpo(a, b, TOKENS, TOKENS, 0.5, mask=THERE),
    "kto": lambda a, b, c, d: losses.kto(a, b, c, 0.1, mask=THERE),
    "kto_baseline": lambda a, b, c, d: losses.kto_baseline(a, b - 3, mask=THERE),
    "reward": lambda a, b, c, d: losses.reward(a, b, c, center_rewards_coefficient=0.1, mask=THERE),
    "grpo": lambda a, b, c, d: losses.grpo(
        a[None], b[None], c[None], reference=d[None], beta=0.1, mask=THERE[None]
    ),
    "dr_grpo": lambda a, b, c, d: losses.grpo(
        *(a[None], b[None], c[None]),
        loss_type="dr_grpo",
        max_completion_length=4,
        mask=THERE[None],
    ),
}


# Arguments into which no gradient flows.
GIVEN = {"dpo": (2, 3), "ipo": (2, 3), "kto": (1,), "kto_baseline": (0, 1), "grpo": (1, 2, 3)}


@pytest.mark.parametrize("name", MASKED)
def test_numbers_without_weight_change_neither_the_loss_nor_gradients(name):
    given = -np.random.default_rng(0).uniform(1, 2, (4, 4)).astype(np.float32)
    function = jax.jit(jax.value_and_grad(MASKED[name], (0, 1, 2, 3)))
    expected, wanted = function(*given)
    assert np.isfinite(expected)
    for argument in range(4):
        assert not (argument in GIVEN.get(name, ()) and wanted[argument].any())
    for bad in (np.nan, np.inf, -np.inf):
        for argument in range(4):
            rows = given.copy()
            rows[argument, ~THERE] = bad
            found, gradients = function(*rows)
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.stack(gradients)[:, THERE], np.stack(wanted)[:, THERE])
            np.testing.assert_array_equal(np.stack(gradients[:2])[:, ~THERE], 0)


def test_objectives_of_a_decoder_have_the_defaults_of_their_losses():
    names = {name: name for name in ("dpo", "ipo", "kto", "orpo", "reward", "simpo")}
    for objective, loss in (names | {"distill": "distillation"}).items():
        own = inspect.signature(getattr(objectives, objective)).parameters
        expected = inspect.signature(getattr(losses, loss)).parameters
        defaults = {name: p.default for name, p in expected.items() if p.default is not p.empty}
        shared = own.keys() & defaults.keys()
        assert shared
        for option in shared:
            assert own[option].default == defaults[option], (objective, option)
