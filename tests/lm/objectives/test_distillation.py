"""Distillation from stored top-k logits, compared with full logits and with TRL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax import losses
from messages import refuses
from small_logits import VOCAB, WIDTH, arrays, full, teacher


@pytest.mark.by_default("7-5.0-1.0-True-0.3", "64-5.0-2.0-False-1.0")
@pytest.mark.parametrize(
    ("chunk", "softcap", "temperature", "tail", "alpha"),
    [(7, 5.0, 1.0, True, 0.3), (64, 5.0, 2.0, False, 1.0), (1, None, 1.0, True, 0.5)],
)
def test_losses_and_gradients_equal_those_of_full_logits(chunk, softcap, temperature, tail, alpha):
    hidden, head, labels, weights = arrays((3, 37), seed=chunk)
    ids, logs = teacher(labels)

    def ours(hidden, head):
        return losses.distillation(
            hidden,
            head,
            labels,
            ids,
            logs,
            alpha=alpha,
            temperature=temperature,
            tail=tail,
            mask=weights,
            softcap=softcap,
            chunk=chunk,
        )

    def theirs(hidden, head):
        return full(hidden, head, labels, ids, logs, alpha, temperature, tail, weights, softcap)

    found, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, head)
    expected, wanted = jax.jit(jax.value_and_grad(theirs, (0, 1)))(hidden, head)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=4e-6 * np.abs(other).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tail", [True, False])
def test_the_divergence_is_that_of_trl(tail):
    needs = 'compared with TRL: pip install -e ".[torch]"'
    torch = pytest.importorskip("torch", reason=needs)
    pytest.importorskip("trl", reason=needs)
    from trl.experimental.server_distillation import server_distillation_trainer as theirs

    hidden, head, labels, _ = arrays((4, 11))
    ids, logs = teacher(labels, seed=1)

    class Trainer:
        loss_add_tail = tail
        _reduce_divergence_loss = staticmethod(
            theirs.ServerDistillationTrainer._reduce_divergence_loss
        )

    own = torch.tensor(np.asarray(jax.nn.log_softmax(hidden @ head.T)), requires_grad=True)
    expected = theirs.ServerDistillationTrainer._compute_server_forward_kl_loss(
        Trainer(),  # type: ignore[arg-type]
        {
            "topk_logprobs": torch.tensor(np.asarray(logs)),
            "topk_token_ids": torch.tensor(np.asarray(ids)).long(),
        },
        own,
        torch.tensor(np.where(labels < 0, -100, labels)),
    )
    found = losses.distillation(hidden, head, labels, ids, logs, alpha=1.0, tail=tail)
    np.testing.assert_allclose(found, expected.item(), rtol=5e-6)


def test_mistakes_are_named():
    hidden, head, labels, _ = arrays((3, 5))
    ids, logs = teacher(labels)
    with refuses(ValueError, "`temperature`=2.0", "`tail`=False"):
        losses.distillation(hidden, head, labels, ids, logs, temperature=2.0)
    with refuses(ValueError, "`topk_logprobs`", "shape"):
        losses.distillation(hidden, head, labels, ids, logs[..., :2])
    with refuses(ValueError, "`alpha`", 1.5):
        losses.distillation(hidden, head, labels, ids, logs, alpha=1.5)


@pytest.mark.by_default("300.0-False")
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("scale", [3.0, 300.0])
def test_certain_and_impossible_tokens_have_the_gradients_of_float64(tail, scale):
    """All three losses that compute chunks of logits; probabilities are 0 and 1 in float32."""
    rng = np.random.default_rng(0)
    hidden = np.float32(scale) * np.eye(6, WIDTH, dtype=np.float32)
    head = rng.choice(np.array([-1, 0, 1], np.float32), (VOCAB, WIDTH), p=[0.6, 0.38, 0.02])
    # The likeliest tokens, and impossible ones, as labels and as the teacher's.
    by_row = np.argsort(-hidden @ head.T, axis=1)
    labels = by_row[np.arange(6), [0, -1, 0, -1, 1, 0]].astype(np.int32)
    ids = by_row[:, [0, 1, -1]]
    p = np.array([[0.9, 0.05, 0], [0.1, 0.2, 0.3], [1, 0, 0]] * 2, np.float32)
    logs = np.where(p > 0, np.log(np.where(p > 0, p, 1)), -np.inf).astype(np.float32)

    def ours(hidden, head):
        near = losses.next_token(hidden, head, labels, chunk=4)
        each = losses.log_probabilities(hidden, head, labels, chunk=4)
        far = losses.distillation(hidden, head, labels, ids, logs, alpha=1.0, tail=tail, chunk=4)
        return near + each.mean() * 0.5 + far

    def formula(hidden, head):
        q = jax.nn.log_softmax(hidden @ head.T)
        own = jnp.take_along_axis(q, labels[:, None], 1).mean()
        found, wanted = jnp.take_along_axis(q, ids, 1), p.astype(np.float64)
        if tail:
            is_rest = np.ones(q.shape, bool)
            np.put_along_axis(is_rest, ids, p == 0, 1)
            of_rest = jax.nn.logsumexp(q, axis=1, where=is_rest, keepdims=True)
            found = jnp.concatenate([found, jnp.maximum(of_rest, np.log(1e-7))], 1)
            rest = np.maximum(1 - wanted.sum(1, keepdims=True), 1e-7)
            wanted = np.concatenate([wanted, rest], 1)
        else:
            found = jax.nn.log_softmax(found, where=p > 0)
            wanted /= wanted.sum(1, keepdims=True)
        found = jnp.where(wanted > 0, found, 0)
        ratios = np.log(np.where(wanted > 0, wanted, 1)) - found
        return -0.5 * own + (wanted * ratios).sum(1).mean()

    found, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    with jax.enable_x64(True):
        wide = hidden.astype(np.float64), head.astype(np.float64)
        expected, wanted = jax.value_and_grad(formula, (0, 1))(*wide)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.by_default("False")
@pytest.mark.parametrize("tail", [True, False])
def test_ids_below_the_vocabulary_are_nan_if_they_count_and_change_nothing_otherwise(tail):
    hidden, head, labels, _ = arrays((3, 5))
    place = (2, 4)
    labels = labels.at[place].set(1)
    ids, logs = teacher(labels)
    mask = jnp.ones(labels.shape).at[place].set(0)

    def loss(hidden, ids, logs, mask):
        return losses.distillation(hidden, head, labels, ids, logs, mask=mask, tail=tail)

    one = jax.jit(jax.value_and_grad(loss))
    wrong = ids.at[(*place, 0)].set(-1)
    assert np.isnan(one(hidden, wrong, logs, None)[0])
    expected = one(hidden, ids, logs, mask)
    for spoiled in (logs, logs.at[(*place, 1)].set(jnp.nan)):
        found = one(hidden, wrong, spoiled, mask)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
