"""Log-probabilities in chunks against full logits, and preferences learned from them."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import losses, models
from messages import refuses
from small_decoders import SMALL
from small_logits import VOCAB, WIDTH, arrays, sizes


def full(hidden, head, labels, softcap=None):
    """The same logarithms as everybody computes them."""
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logs = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels < 0, 0, found)


@pytest.mark.by_default("64-5.0", "4096-None")
@pytest.mark.parametrize(("chunk", "softcap"), [(1, None), (7, 5.0), (64, 5.0), (4096, None)])
def test_logarithms_and_gradients_equal_those_of_full_logits(chunk, softcap):
    hidden, head, labels, weights = arrays((3, 37), seed=chunk)
    weights = weights - 0.5  # of both signs, as in preferences

    def weighed(function):
        return lambda h, w: jnp.sum(jnp.sin(function(h, w, labels, softcap=softcap)) * weights)

    ours = weighed(lambda *a, **k: losses.log_probabilities(*a, chunk=chunk, **k))
    found = losses.log_probabilities(hidden, head, labels, chunk=chunk, softcap=softcap)
    np.testing.assert_allclose(found, full(hidden, head, labels, softcap), rtol=2e-6, atol=2e-6)
    gradients = jax.jit(jax.grad(ours, (0, 1)))(hidden, head)
    wanted = jax.grad(weighed(full), (0, 1))(hidden, head)
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=4e-6 * np.abs(other).max())


@pytest.mark.by_default("5.0")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_temperature_divides_logits(softcap):
    hidden, head, labels, weights = arrays((37,))

    def ours(hidden, head):
        options = {"softcap": softcap, "temperature": 0.5, "chunk": 16}
        return jnp.sum(losses.log_probabilities(hidden, head, labels, **options) * weights)

    def theirs(hidden, head):
        logits = hidden @ head.T
        capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        logs = jax.nn.log_softmax(capped / 0.5)
        found = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        return jnp.sum(jnp.where(labels < 0, 0, found) * weights)

    value, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    expected, wanted = jax.value_and_grad(theirs, (0, 1))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5 * np.abs(other).max())


def test_their_sum_is_the_loss_of_next_tokens():
    hidden, head, labels, _ = arrays((64,), jnp.bfloat16)

    def ours(hidden, head):
        logs = losses.log_probabilities(hidden, head, labels, chunk=16)
        return -logs.sum() / losses.num_labels(labels)

    def theirs(hidden, head):
        return losses.next_token(hidden, head, labels, chunk=16)

    loss, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    expected, wanted = jax.value_and_grad(theirs, (0, 1))(hidden, head)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == jnp.bfloat16
        error = np.abs(np.asarray(gradient, np.float32) - np.asarray(other, np.float32))
        assert error.max() <= 0.01 * np.abs(np.asarray(other, np.float32)).max()


def test_nothing_as_large_as_the_logits_exists():
    hidden, head, labels, _ = arrays((512,))
    gradient = jax.grad(lambda h, w: losses.log_probabilities(h, w, labels, chunk=32).sum(), (0, 1))
    traced = jax.make_jaxpr(gradient)(hidden, head)
    assert max(sizes(traced.jaxpr)) <= 32 * VOCAB + 512 * WIDTH


def test_a_label_beyond_the_vocabulary_makes_its_logarithm_and_gradients_nan():
    hidden, head, labels, _ = arrays((11,))
    labels = labels.at[4].set(VOCAB)

    def total(head, keep):
        logs = losses.log_probabilities(hidden, head, labels, chunk=3)
        return jnp.where(keep, logs, 0).sum()

    logs = losses.log_probabilities(hidden, head, labels)
    assert np.flatnonzero(np.isnan(logs)).tolist() == [4]
    assert np.isnan(jax.grad(total)(head, jnp.ones(11, bool))).any()
    assert np.isfinite(jax.grad(total)(head, jnp.arange(11) != 4)).all()


def test_mistakes_are_named():
    hidden, head, labels, _ = arrays((3, 5))
    with refuses(ValueError, "`head`", "shape"):
        losses.log_probabilities(hidden, head.T, labels)
    with refuses(TypeError, "`labels`", "integers"):
        losses.log_probabilities(hidden, head, labels.astype(jnp.float32))
    with refuses(ValueError, "`rejected`", (2,)):
        losses.dpo(jnp.ones(3), jnp.ones(2), jnp.ones(3), jnp.ones(3))
    with refuses(ValueError, "`beta`", 0):
        losses.dpo(*[jnp.ones(3)] * 4, beta=0)


def test_pairs_that_are_not_there_change_nothing():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    there = jnp.arange(6) < 4
    missing = jnp.where(there, rows, jnp.nan)

    def loss(rows):
        return losses.dpo(*rows, mask=there, beta=0.3)

    value, gradient = jax.value_and_grad(loss)(jnp.where(there, rows, 99.0))
    np.testing.assert_allclose(value, losses.dpo(*rows[:, :4], beta=0.3), rtol=1e-6)
    np.testing.assert_allclose(loss(missing), value, rtol=1e-6)
    assert not np.any(gradient[:, 4:]) and not np.any(gradient[2:])


def test_the_loss_of_preferences_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(4, 6)).astype(np.float32), rng.random(6).astype(np.float32)
    ours, wrong, before, before_wrong = rows.astype(np.float64)
    each = np.log1p(np.exp(-0.3 * ((ours - wrong) - (before - before_wrong))))
    given = [jnp.asarray(row) for row in rows]
    for options, expected in (
        ({}, each.mean()),
        ({"mask": weights}, each @ weights / weights.sum()),
        ({"mask": weights, "count": 4.0}, each @ weights / 4),
    ):
        np.testing.assert_allclose(losses.dpo(*given, beta=0.3, **options), expected, rtol=1e-6)


PAIRS, LENGTH = 3, 9


def pairs(seed):
    """Chosen answers, then rejected ones, of questions of three tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, (2 * PAIRS, LENGTH + 1)).astype(np.int32)
    tokens[PAIRS:, :3] = tokens[:PAIRS, :3]
    mask = np.tile(np.arange(LENGTH) >= 2, (2 * PAIRS, 1))
    mask[0, -3:] = False
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}


def sums(model, batch):
    hidden, _ = model.hidden(batch["tokens"])
    logs = losses.log_probabilities(hidden, model.head_weight(), batch["labels"], chunk=16)
    return jnp.sum(logs * batch["mask"], axis=1)


def stored(model, batch):
    return losses.dpo(*jnp.split(sums(model, batch), 2), *jnp.split(batch["reference"], 2))


def switched(model, batch):
    reference = jax.lax.stop_gradient(sums(models.without_lora(model), batch))
    return losses.dpo(*jnp.split(sums(model, batch), 2), *jnp.split(reference, 2))


@pytest.mark.exhaustive
def test_a_reference_without_adapters_is_the_one_stored_before_training():
    def build():
        return models.Decoder(SMALL, rngs=nnx.Rngs(0))

    adapted = models.lora(build, targets="layers", rank=2)
    base = build()
    batches = [pairs(seed) for seed in range(3)]
    compute = jax.jit(lambda batch: sums(base, batch))
    with_reference = [batch | {"reference": np.asarray(compute(batch))} for batch in batches]

    def curve(loss, batches):
        trainer = mt.Trainer(
            adapted.model,
            loss,
            optax.adamw(1e-2, eps=1e-3),
            batches[0],
            trainable=adapted.trainable,
            precision=mt.Precision(compute=jnp.float32),
        )
        assert not trainer.plan.warnings
        return [trainer.read(trainer.step(batch))["loss"] for batch in batches]

    expected = curve(stored, with_reference)
    assert expected[0] == pytest.approx(np.log(2), rel=1e-5) and expected[2] != expected[0]
    np.testing.assert_allclose(curve(switched, batches), expected, rtol=2e-5)
