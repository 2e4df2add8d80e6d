"""Gradients that are added to fp32 sums within float8 products: not rounded before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.kernels.code_passes import with_code_passes
from megatrain_jax._src.kernels.scaled_sums import with_scaled_sums
from megatrain_jax._src.program import float8
from megatrain_jax._src.program import jaxpr as jx

ROWS, WIDTH, OUT = (2, 64), 128, 192


def added(weight, x, cotangent, total):
    """The gradient of `x @ weight` by both, that of the weight added to a flat sum."""
    (eqn,) = jax.make_jaxpr(jnp.matmul)(x, weight).eqns
    form = float8.Form.of(eqn, (True, True))
    _, pull = jax.vjp(lambda x, w: float8.product(form, x, w), x, weight)
    of_x, of_weight = pull(cotangent)
    return of_x, total + of_weight.reshape(-1).astype(jnp.float32)


def arguments():
    rng = np.random.default_rng(0)
    shapes = (WIDTH, OUT), (*ROWS, WIDTH), (*ROWS, OUT)
    given = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    return [*given, jnp.asarray(rng.normal(size=WIDTH * OUT), jnp.float32)]


def codes_of(x):
    codes, scale = float8.coded(x)
    return np.asarray(codes, np.float64) * float(scale)


@pytest.mark.parametrize("in_passes", [False, True])
def test_a_gradient_is_not_rounded_before_it_is_added(in_passes):
    args = arguments()
    function = with_code_passes(added, interpret=True) if in_passes else added
    of_x, total = jax.jit(with_scaled_sums(function))(*args)
    weight, x, cotangent, before = args
    exact = np.einsum("abi,abo->io", codes_of(x), codes_of(cotangent)).reshape(-1)
    expected = np.asarray(before, np.float64) + exact
    np.testing.assert_allclose(total, expected, rtol=0, atol=2**-20 * np.abs(expected).max())
    # The gradient of x is not added to anything.
    np.testing.assert_array_equal(*(np.float64(y) for y in (of_x, jax.jit(added)(*args)[0])))
    rounded = jax.jit(added)(*args)[1]
    assert np.abs(rounded - expected).max() > 2**-12 * np.abs(expected).max()


def test_other_products_stay_products_of_codes():
    args = arguments()

    def read_twice(weight, x, cotangent, total):
        of_x, added_to = added(weight, x, cotangent, total)
        return of_x, added_to, added(weight, x, cotangent, total * 0)[1]

    def products(function):
        eqns = jx.trace(function, *args).jaxpr.eqns
        return [float8.is_float8_product(e) for e in eqns if e.primitive.name == "dot_general"]

    assert sum(products(added)) - sum(products(with_scaled_sums(added))) == 1
    wide = [jnp.float32(1) * x for x in args]
    one, other = (jax.jit(f)(*wide) for f in (added, with_scaled_sums(added)))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert sum(products(read_twice)) - sum(products(with_scaled_sums(read_twice))) == 2
