"""Calls opened by renaming: the equations that tracing again gives, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.inline import Inliner, with_open_calls
from megatrain_jax._src.engine.program.layers.sliced_values import Value, constant
from megatrain_jax._src.engine.program.structural_key import structural_key

X = jax.ShapeDtypeStruct((4,), jnp.float32)
TABLE = np.arange(4, dtype=np.float32)


@jax.jit
def scaled(x, factor):
    return x * (factor.astype(jnp.int32) + 1)


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x) + TABLE[1]


ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))


def called_twice(x, y):
    return scaled(scaled(x, y), y), ruled(x), y


def of_known_numbers(x, y):
    # Of a known factor no equation is left but the product, by 3.
    return scaled(x, np.float32(2)) + jax.jit(lambda n: jnp.full(4, n))(np.float32(1.5)) * y


def conditional(x, y):
    return jax.lax.cond(x.sum() > 0, lambda: x, lambda: y)


def traced_again(traced):
    def flat(*args):
        values = [*map(constant, traced.consts), *map(Value, args)]
        return [v.array for v in Inliner(primal=True).run(traced.jaxpr, (), values)]

    return jx.trace(flat, *(jx.shape_of(v.aval) for v in traced.jaxpr.invars[len(traced.consts) :]))


@pytest.mark.parametrize("function", [called_twice, of_known_numbers])
def test_equations_are_those_that_tracing_again_gives(function):
    traced = jx.trace(function, X, X)
    opened = with_open_calls(traced)
    assert opened is not None
    again = traced_again(traced)
    key = structural_key(jx.without_dead_code(opened).jaxpr, opened.consts)
    assert key is structural_key(jx.without_dead_code(again).jaxpr, again.consts)
    assert all(e.primitive.name not in ("jit", "custom_jvp_call") for e in opened.jaxpr.eqns)


def test_conditionals_have_to_be_traced_again():
    assert with_open_calls(jx.trace(conditional, X, X)) is None
