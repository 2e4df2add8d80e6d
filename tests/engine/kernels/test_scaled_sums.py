"""Gradients that are added to fp32 sums within float8 products: not rounded before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.engine.kernels import cache
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.code_passes import with_code_passes
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.rewrites import with_scaled_sums
from megatrain_jax._src.engine.program import float8
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.state.placement import PART

ROWS, WIDTH, OUT = (2, 64), 128, 192


def gradients(weight, x, cotangent):
    """The gradients of `x @ weight` by x and by the weight."""
    (eqn,) = jax.make_jaxpr(jnp.matmul)(x, weight).eqns
    form = float8.ProductSpec.of(eqn, (True, True))
    return jax.vjp(lambda x, w: float8.product(form, x, w), x, weight)[1](cotangent)


def added(weight, x, cotangent, total):
    """The gradients, that of the weight added to a flat sum."""
    of_x, of_weight = gradients(weight, x, cotangent)
    return of_x, total + of_weight.reshape(-1).astype(jnp.float32)


def arguments():
    """A weight, x, the result's cotangent and a sum; the first three have different scales."""
    rng = np.random.default_rng(0)
    shapes = {(WIDTH, OUT): 2**-4, (*ROWS, WIDTH): 1.0, (*ROWS, OUT): 2**-9}
    given = [jnp.asarray(rng.normal(0, s, shape), jnp.bfloat16) for shape, s in shapes.items()]
    assert len({float(float8.coded(x)[1]) for x in given}) == 3
    return [*given, jnp.asarray(rng.normal(0, 2**-9, WIDTH * OUT), jnp.float32)]


def codes_of(x):
    codes, scale = float8.coded(x)
    return np.asarray(codes, np.float64) * float(scale)


@pytest.mark.by_default("False")
@pytest.mark.parametrize("in_passes", [False, True])
def test_a_gradient_is_not_rounded_before_it_is_added(in_passes):
    args = arguments()
    function = with_code_passes(added, interpret=True) if in_passes else added
    function = with_scaled_sums(function)
    assert ("pallas_call" in str(jax.make_jaxpr(function)(*args))) == in_passes
    of_x, total = jax.jit(function)(*args)
    weight, x, cotangent, before = args
    exact = np.einsum("abi,abo->io", codes_of(x), codes_of(cotangent)).reshape(-1)
    expected = np.asarray(before, np.float64) + exact
    np.testing.assert_allclose(total, expected, rtol=0, atol=2**-20 * np.abs(expected).max())
    # The gradient of x is not added to anything.
    as_before, rounded = jax.jit(added)(*args)
    np.testing.assert_array_equal(of_x, as_before)
    assert np.abs(rounded - expected).max() > 2**-12 * np.abs(expected).max()


def num_float8(function, args):
    eqns = jx.trace(function, *args).jaxpr.eqns
    return sum(map(float8.is_float8_product, eqns))


def multiplied(weight, x, cotangent, total):
    """The weight's gradient in fp32, but not in a sum."""
    of_x, of_weight = gradients(weight, x, cotangent)
    return of_x, total * of_weight.reshape(-1).astype(jnp.float32)


def also_returned(weight, x, cotangent, total):
    """The weight's gradient in a sum, and as it is."""
    of_x, of_weight = gradients(weight, x, cotangent)
    return of_x, of_weight, total + of_weight.reshape(-1).astype(jnp.float32)


def twice(weight, x, cotangent, total):
    return added(weight, x, cotangent, total), added(weight, x, 2 * cotangent, total)


@pytest.mark.parametrize(
    ("function", "num"), [(added, 1), (twice, 2), (multiplied, 0), (also_returned, 0)]
)
def test_only_products_that_enter_sums_are_scaled_before(function, num):
    args = arguments()
    assert num_float8(function, args) - num_float8(with_scaled_sums(function), args) == num


def test_backwards_of_float8_runs_are_compiled_with_sums_in_products():
    takes = tuple(map(jx.shape_of, arguments()))
    # Of the results only the gradient of x is left as it is; the forward's result is not needed.
    for name, num in (("backward", 1), ("backward of kept", 1), ("forward", 3)):
        kernel = Kernel(name=name, build=lambda: added, takes=takes)
        traced = KernelCache(code_passes=True).get(kernel).trace(*takes)
        assert sum(map(float8.is_float8_product, traced.jaxpr.eqns)) == num


def test_sums_stay_apart_where_triton_may_compute_other_products(monkeypatch):
    """Its functions would expand the codes in fp32."""
    monkeypatch.setattr(cache, "compiles_float8_by_cublas", lambda device: True)
    takes = tuple(map(jx.shape_of, arguments()))

    def beside_attention(*args):
        return added(*args), jnp.einsum("bij,bjk->bik", args[1], args[1].swapaxes(1, 2))

    kernel = Kernel(name="backward", build=lambda: beside_attention, takes=takes)
    traced = KernelCache({PART: "1"}, "gpu", code_passes=True).get(kernel).trace(*takes)
    assert sum(map(float8.is_float8_product, traced.jaxpr.eqns)) == 2
