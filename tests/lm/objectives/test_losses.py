"""The loss in chunks against full logits, and that full logits never exist."""

import functools
import json
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import spec_of, store_of
from megatrain_jax import losses
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.liveness import temporary_bytes
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from messages import refuses
from places import ROOT
from runs import check_close
from small_logits import VOCAB, WIDTH, arrays, sizes


def full_logits(hidden, head, labels, mask=None, z_loss=0.0, softcap=None):
    """The same loss as everybody writes it."""
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    weights = (labels >= 0).astype(jnp.float32) * (1 if mask is None else mask)
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    rows += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return (rows * weights).sum() / weights.sum()


def test_a_sum_beyond_float16_whose_mean_is_within_is_no_overflow():
    hidden, head = jnp.full((20_000, WIDTH), 4.0), jnp.zeros((VOCAB, WIDTH))
    labels = jnp.zeros(len(hidden), jnp.int32)

    def gradient(dtype):
        def loss(head):
            return losses.next_token(hidden.astype(dtype), head, labels)

        return jax.grad(loss)(head.astype(dtype)).astype(jnp.float32)

    exact = gradient(jnp.float32)
    assert len(hidden) * np.abs(exact).max() > jnp.finfo(jnp.float16).max
    np.testing.assert_allclose(gradient(jnp.float16), exact, rtol=2**-8)


@pytest.mark.by_default(
    "True-0.0-None-7",
    "True-0.0-None-64",
    "True-0.0-None-4096",
    "False-0.1-None-4096",
    "True-0.01-5.0-4096",
)
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize(
    ("masked", "z_loss", "softcap"),
    [(False, 0.0, None), (True, 0.0, None), (False, 0.1, None), (True, 0.01, 5.0)],
)
def test_loss_and_gradients_equal_those_of_full_logits(chunk, masked, z_loss, softcap):
    hidden, head, labels, mask = arrays((3, 37))
    options = {"mask": mask if masked else None, "z_loss": z_loss, "softcap": softcap}

    def ours(hidden, head):
        return losses.next_token(hidden, head, labels, chunk=chunk, **options)

    def theirs(hidden, head):
        return full_logits(hidden, head, labels, **options)

    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, head)
    expected, wanted = jax.value_and_grad(theirs, (0, 1))(hidden, head)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(ours(hidden, head), loss, rtol=1e-6)  # without gradients
    for gradient, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=2e-6 * np.abs(other).max())


@pytest.mark.by_default("float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_loses_no_more_than_its_own_rounding(dtype):
    hidden, head, labels, _ = arrays((4096,), dtype)
    wide = hidden.astype(jnp.float32), head.astype(jnp.float32)
    loss, gradients = jax.value_and_grad(losses.next_token, (0, 1))(
        hidden, head, labels, chunk=1000
    )
    expected, wanted = jax.value_and_grad(full_logits, (0, 1))(*wide, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == dtype
        rounding = float(jnp.finfo(dtype).eps)
        error = np.abs(np.asarray(gradient, np.float32) - other)
        assert error.max() <= 2 * rounding * np.abs(other).max()


def test_nothing_as_large_as_the_logits_exists():
    hidden, head, labels, _ = arrays((512,))
    gradient = jax.grad(lambda h, w: losses.next_token(h, w, labels, chunk=32), (0, 1))
    traced = jax.make_jaxpr(gradient)(hidden, head)
    assert max(sizes(traced.jaxpr)) <= 32 * VOCAB + 512 * WIDTH


def test_tokens_that_do_not_count_change_nothing():
    hidden, head, labels, _ = arrays((64,))
    counted = labels >= 0
    loss = losses.next_token(hidden, head, labels, chunk=8)
    np.testing.assert_allclose(
        loss, losses.next_token(hidden[counted], head, labels[counted]), rtol=1e-6
    )
    nothing, gradients = jax.value_and_grad(losses.next_token, (0, 1))(
        hidden, head, jnp.full_like(labels, -1)
    )
    assert nothing == 0 and not any(np.any(g) for g in gradients)


@pytest.mark.by_default("1", "3", "4", "5", "6", "7")
@pytest.mark.parametrize("seed", range(8))
def test_a_label_beyond_the_vocabulary_makes_loss_and_gradients_nan_if_it_counts(seed):
    hidden, head, labels, mask = arrays((3, 11), seed=seed)
    rng = np.random.default_rng(seed)
    place = tuple(rng.integers(0, s) for s in labels.shape)
    labels = labels.at[place].set(VOCAB + int(rng.integers(0, 3)))
    masked = None if seed % 2 else (mask > 0.5).at[place].set(seed % 4 == 0)
    count = None if seed < 4 else 20.0

    def ours(hidden, head):
        return losses.next_token(hidden, head, labels, mask=masked, count=count, chunk=7)

    loss, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    if masked is None or masked[place]:
        # Each is seen by itself, as the engine may look at the gradient only.
        assert np.isnan(loss) and all(np.isnan(g).any() for g in gradients)
        assert np.isnan(gradients[1]).all()
    else:
        without = labels.at[place].set(-100)
        expected = losses.next_token(hidden, head, without, mask=masked, count=count)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_of_few_bits_are_those_of_many(dtype):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 100, (40,))
    hidden = jnp.asarray(rng.normal(size=(40, WIDTH)), jnp.float32)
    # More ids than the dtype has.
    size = 2**16 + 100 if "16" in dtype else 2**8 + 100
    head = jnp.asarray(rng.normal(size=(size, WIDTH)), jnp.float32)
    loss = losses.next_token(hidden, head, labels.astype(dtype))
    np.testing.assert_array_equal(loss, losses.next_token(hidden, head, labels.astype("int32")))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))

    def hidden(self, tokens):
        x = self.embedding[...][tokens]
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


@pytest.mark.exhaustive
def test_a_tied_model_trains_alike_with_both_losses():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def train(loss):
        def loss_fn(model, batch):
            hidden = model.hidden(batch["tokens"])
            return loss(hidden, model.embedding[...], batch["labels"])

        trainer = mt.Trainer(
            lambda: Model(nnx.Rngs(0)),
            loss_fn,
            optax.adamw(1e-2),
            batch,
            microbatches=2,
            precision=mt.Precision(compute=jnp.float32),
        )
        assert trainer.plan.num_stages == 5
        return [trainer.read(trainer.step(batch))["loss"] for _ in range(4)]

    ours = train(lambda h, w, y: losses.next_token(h, w, y, chunk=5))
    np.testing.assert_allclose(ours, train(full_logits), rtol=1e-5)
    assert ours[-1] < ours[0]


def test_arguments_that_do_not_fit_are_named():
    hidden, head, labels, mask = arrays((3, 5))
    for arguments, options, message in [
        ((hidden, head, labels[:2]), {}, "`hidden` .*shape"),
        ((hidden, head.T, labels), {}, "`head` .*shape"),
        ((hidden, head, labels), {"mask": mask[0]}, "`mask` .*shape"),
        ((hidden, head, labels), {"chunk": 0}, "`chunk` .*0"),
    ]:
        with pytest.raises(ValueError, match=message):
            losses.next_token(*arguments, **options)
    with refuses(TypeError, "`labels`", "integers"):
        losses.next_token(hidden, head, labels.astype(jnp.float32))


def test_a_loss_in_chunks_is_computed_where_its_tokens_are():
    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(24, 6)), "head": rng.normal(size=(24, 6))}
    params = {k: x.astype(np.float32) for k, x in params.items()}
    tokens = rng.integers(0, 24, (8, 11))
    batch = {"inputs": tokens[:, :-1], "labels": np.where(tokens[:, 1:] % 5, tokens[:, 1:], -100)}

    def loss_fn(params, batch):
        hidden = jnp.tanh(params["embedding"][batch["inputs"]])
        return losses.next_token(hidden, params["head"], batch["labels"], chunk=4)

    precision = mt.Precision(compute=jnp.float32)
    options: dict[str, Any] = {"precision": precision, "mesh": Mesh(jax.devices()[:4], "data")}
    trainer = mt.Trainer(params, loss_fn, optax.sgd(1.0), batch, **options)
    value = trainer.read(trainer.step(batch))["loss"]
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    expected = jax.tree.map(lambda p, g: np.asarray(p - g), params, grads)
    check_close(trainer.params, expected, 2e-6, "parameter")
    spec, store, cache = spec_of(trainer), store_of(trainer), KernelCache()
    loops = 0
    for kernel in step_kernels(spec.first, spec.layouts, spec.optimizer, store.placement):
        takes: Any = kernel.takes
        text = cache.get(kernel).lower(*takes).compile().as_text()
        if kernel.name == "backward" and " while(" in text:
            loops += 1
            gathers, sums = (text.count(f" {op}(") for op in ("all-gather", "all-reduce"))
            assert gathers == sums == 1, "devices exchange chunks"
    assert loops == 1


def test_the_estimate_of_a_loss_is_near_what_a_gpu_s_compiler_said():
    measured = json.loads(
        (ROOT / "experiments" / "results" / "h200" / "loss" / "loss.json").read_text()
    )
    vocabulary, width = measured["vocabulary"], measured["width"]
    rows = [row for row in measured["rows"] if row["name"].startswith("chunks of ")]
    assert len(rows) > 3
    for row in rows:
        chunk = int(row["name"].removeprefix("chunks of "))
        loss = functools.partial(losses.next_token, chunk=chunk)
        shapes = (
            jax.ShapeDtypeStruct((row["tokens"], width), jnp.bfloat16),
            jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((row["tokens"],), jnp.int32),
        )
        estimated = temporary_bytes(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*shapes))
        assert 1.0 <= estimated / 2**30 / row["temporary_gib"] <= 2.0, row["name"]
