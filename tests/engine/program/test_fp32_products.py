"""Products that give fp32 for fp32 sums: more exact, and with no further array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.engine.program.rewriting import with_fp32_products

BF16, FP32 = jnp.bfloat16, jnp.float32


def matrix(seed, shape=(8, 8)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), BF16)


X, W, DY = matrix(0), matrix(1), matrix(2)


def gradients(function):
    """The pullback of a function of a weight and an input; the weight's gradient comes first."""
    return lambda w, x, dy: jax.vjp(function, w, x)[1](dy)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: jax.checkpoint(f, prevent_cse=False)],
    ids=["plain", "jit", "checkpoint"],
)
def test_a_gradient_is_not_rounded_before_it_is_added(wrap):
    pulled = gradients(wrap(lambda w, x: x @ w))
    narrow, plain = jax.jit(pulled)(W, X, DY)
    wide, back = jax.jit(with_fp32_products(pulled, [True]))(W, X, DY)
    assert (wide.dtype, back.dtype) == (FP32, BF16)
    np.testing.assert_array_equal(back, plain)
    cast = jax.jit(with_fp32_products(pulled, [True], casts_operands=True))(W, X, DY)
    np.testing.assert_allclose(cast[0], wide, rtol=1e-6, atol=1e-6)
    # Oracle: the same operands, with a product in fp32.
    exact = X.astype(FP32).T @ DY.astype(FP32)
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-6)
    assert np.abs(narrow.astype(FP32) - exact).max() > 100 * np.abs(wide - exact).max()


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ w + x @ (2 * w),  # a sum of two products
        lambda w, x: x * w,
        lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),  # as the user separated it
    ],
    ids=["two readers", "no product", "separate"],
)
def test_other_gradients_stay_as_they_are(function):
    pulled = gradients(function)
    found = with_fp32_products(pulled, [True])(W, X, DY)
    jax.tree.map(np.testing.assert_array_equal, found, pulled(W, X, DY))
    assert all(x.dtype == BF16 for x in found)


def test_a_result_that_others_read_keeps_its_dtype():
    def function(x, y):
        z = (x @ y).T
        return z, jnp.sin(z)

    found = with_fp32_products(function, [True])(X, W)
    assert [x.dtype for x in found] == [BF16, BF16]
    jax.tree.map(np.testing.assert_array_equal, found, function(X, W))
