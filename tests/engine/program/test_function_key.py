"""Functions and kernels that a model makes anew for each layer: when they share a template."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.structural_key import function_key, structural_key, value_key
from repeated_blocks import (
    Forward,
    assert_computes_the_loss,
    assert_one_template,
    block_keys,
    cut_forward,
    mlp,
)

Apply = Callable[[dict[str, Any], jax.Array, int], jax.Array]


def decoder(apply: Apply) -> Forward:
    """A decoder whose layers are applied by a function, which is told their numbers."""

    def forward(p, t, key):
        x = p["embed"][t]
        for i, block in enumerate(p["blocks"]):
            x = x + apply(block, x, i)
        return x @ p["head"]

    return forward


def scaled_by_kernel(x: jax.Array, factor: float, reverse: bool = False) -> jax.Array:
    """A kernel with its grid and a rule of its own, all made anew at each call."""
    count = x.shape[0]
    row = pl.BlockSpec((1, *x.shape[1:]), lambda i: (count - 1 - i if reverse else i, 0, 0))
    same = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))

    def kernel(x_ref, out_ref):
        out_ref[...] = factor * x_ref[...]

    def scale(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out, grid=(count,), in_specs=[row], out_specs=same, interpret=True
        )(x)

    rule = jax.custom_vjp(scale)
    # The rows that are read in reverse get their cotangents in reverse.
    turned = (lambda g: g[::-1]) if reverse else (lambda g: g)
    rule.defvjp(lambda x: (scale(x), None), lambda _, g: (factor * turned(g),))
    return rule(x)


def with_policy(layer: Any, x: jax.Array, name: str) -> jax.Array:
    policy = lambda primitive, *_, **params: primitive.name == name  # noqa: E731
    return jax.checkpoint(lambda b, x: mlp(b, x), policy=policy)(layer, x)


def with_callback(layer: Any, x: jax.Array, call: Callable[..., Any]) -> jax.Array:
    y = mlp(layer, x)
    jax.debug.callback(call, y.sum())
    return y


def logged(where: str) -> Callable[..., None]:
    return lambda value: print(where, value)


def answered(layer: Any, x: jax.Array, i: int) -> jax.Array:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    noise = jax.pure_callback(lambda: np.float32(0.5), shape)
    return mlp(layer, x) * lax.stop_gradient(noise)


def written(layer: Any, x: jax.Array, i: int) -> jax.Array:
    y = mlp(layer, x)
    io_callback(lambda value: None, None, y.sum())
    return y


NAMES = jax.checkpoint_policies.save_only_these_names
EQUAL: dict[str, Apply] = {
    "kernel": lambda b, x, i: scaled_by_kernel(mlp(b, x), 2.0),
    "policy": lambda b, x, i: with_policy(b, x, "dot_general"),
    "policy of names": lambda b, x, i: jax.checkpoint(mlp, policy=NAMES("a", "b"))(b, x),
    "callback": lambda b, x, i: with_callback(b, x, lambda value: None),
    "callback with a text": lambda b, x, i: with_callback(b, x, logged("layer")),
    "callback, partial": lambda b, x, i: with_callback(b, x, functools.partial(print, "layer")),
    "pure callback": answered,
    "io callback": written,
}
DIFFERENT: dict[str, Apply] = {
    "kernel": lambda b, x, i: scaled_by_kernel(mlp(b, x), 1.0 + i % 2),
    "grid": lambda b, x, i: scaled_by_kernel(mlp(b, x), 2.0, reverse=bool(i % 2)),
    "policy": lambda b, x, i: with_policy(b, x, ("dot_general", "tanh")[i % 2]),
    "policy of names": lambda b, x, i: jax.checkpoint(mlp, policy=NAMES("ab"[i % 2]))(b, x),
    "callback": lambda b, x, i: with_callback(b, x, logged(f"layer {i % 2}")),
    "default": lambda b, x, i: with_callback(b, x, lambda value, i=i % 2: None),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_are_one_template(name):
    assert_one_template(cut_forward(decoder(EQUAL[name]))[1])


@pytest.mark.parametrize("name", DIFFERENT)
def test_functions_that_differ_are_two_templates(name):
    keys = block_keys(cut_forward(decoder(DIFFERENT[name]))[1])
    assert keys[0] is keys[2] and keys[1] is keys[3] and keys[0] is not keys[1]


def test_kernels_compute_the_loss():
    assert_computes_the_loss(*cut_forward(decoder(DIFFERENT["grid"])))


def test_kernels_with_two_kinds_of_memory_differ():
    def key_of(space: Any) -> Any:
        def kernel(x_ref, out_ref):
            def body(scratch):
                scratch[...] = x_ref[...]
                out_ref[...] = scratch[...]

            pl.run_scoped(body, pl.MemoryRef(ShapedArray((4,), jnp.dtype("float32")), space))

        out = jax.ShapeDtypeStruct((4,), jnp.float32)
        traced = jx.trace(pl.pallas_call(kernel, out), out)
        return structural_key(traced.jaxpr, traced.consts)

    assert key_of(pl.ANY) is not key_of(pl.HOST)


def appends() -> Callable[..., Any]:
    rows = []
    return lambda value: rows.append(value)


def counts() -> Callable[..., Any]:
    number = 0

    def count(value):
        nonlocal number
        number += 1

    return count


def counts_within() -> Callable[..., Any]:
    number = 0

    def count(value):
        def add():
            nonlocal number
            number += 1

        add()

    return count


KEPT: list[Any] = []


def shows_what_another_counts() -> Callable[..., Any]:
    number = 0

    def count():
        nonlocal number
        number += 1

    KEPT.append(count)
    return lambda value: print(number)


def with_an_attribute() -> Callable[..., Any]:
    def call(value):
        return call

    call.seen = []  # pyright: ignore[reportFunctionMemberAccess]
    return call


class Log:
    def write(self, value):
        return self


@pytest.mark.parametrize(
    "make",
    [
        appends,
        counts,
        counts_within,
        shows_what_another_counts,
        with_an_attribute,
        lambda: Log().write,
        lambda: functools.partial(print, []),
        lambda: lambda value, rows=[]: rows,
    ],
)
def test_functions_with_something_of_their_own_differ(make):
    one, other = make(), make()
    assert function_key(one) != function_key(other)
    assert function_key(one) == function_key(one)


def test_functions_with_the_same_objects_are_equal():
    log, rows = Log(), []

    def make(text: str = "layer") -> list[Callable[..., Any]]:
        return [
            log.write,
            lambda value: rows.append(value),
            lambda value: print(text, value),
            functools.partial(lambda rows, text: None, rows, text=text),
        ]

    assert list(map(function_key, make())) == list(map(function_key, make()))
    assert function_key(make("a")[2]) != function_key(make("b")[2])
    assert function_key(make("a")[3]) != function_key(make("b")[3])
    # The one variable of the loop, whatever its value is when they are called.
    looped = [lambda value: print(i, value) for i in range(2)]  # noqa: B023
    assert function_key(looped[0]) == function_key(looped[1])


def test_zeros_of_both_signs_differ():
    def make(number: float) -> Callable[..., Any]:
        return lambda value: value * number

    assert function_key(make(0.0)) == function_key(make(0.0))
    assert function_key(make(0.0)) != function_key(make(-0.0))


def test_constants_that_differ_in_one_number_differ():
    one, other = np.zeros(100, np.float32), np.zeros(100, np.float32)
    assert value_key(one) == value_key(other)
    other[-1] = 1
    assert value_key(one) != value_key(other)
