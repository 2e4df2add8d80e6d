"""Passes that make float8 codes and transposed codes: the same bits as without them."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.code_passes import with_code_passes
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program import float8
from megatrain_jax._src.engine.program import jaxpr as jx

ROWS, WIDTH, INNER = (2, 64), 128, 192


def product(x: Any, w: Any) -> Any:
    (eqn,) = jax.make_jaxpr(jnp.matmul)(x, w).eqns
    return float8.product(float8.ProductSpec.of(eqn, (True, True)), x, w)


def gated(params: Any, x: Any) -> Any:
    gate, up = product(x, params["gate"]), product(x, params["up"])
    # A CPU also rounds inside of a logistic function of bfloat16.
    act = jax.lax.logistic if gate.dtype == jnp.float32 else jax.lax.square
    return product(gate * act(gate) * up, params["down"])


def residual(params, x):
    """Operands that are read for a sum, too, and one that is normed."""
    x = x + product(jnp.tanh(x), params["square"])
    normed = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)
    return x + product(normed.astype(x.dtype), params["square"].T)


def positive(params, x):
    """Operands that are computed with an array of zeros."""
    y = product(x, params["square"])
    return product(jax.lax.select(y > 0, y, jnp.zeros_like(y)), params["square"])


def chained(params, x):
    """An operand of one product is computed from the same array as that product's result."""
    y = product(x, params["square"])
    return product(x * y, params["square"])


def three(params, x):
    """An operand that is smaller than the arrays that it is computed from."""
    a, b, c = (product(x, params["square"] * n) for n in (1.0, 2.0, 3.0))
    return jnp.sum(product(a * b * c, params["square"]), -1, keepdims=True)


def gradients(function):
    def run(params, x, cotangent):
        result, pull = jax.vjp(function, params, x)
        return pull(cotangent.astype(result.dtype)[..., : result.shape[-1]])

    return run


def arguments(dtype: Any, rows=ROWS, width=WIDTH, inner=INNER) -> list[Any]:
    rng = np.random.default_rng(0)
    sizes = {
        "gate": (width, inner), "up": (width, inner), "down": (inner, width),
        "square": (width, width),
    }  # fmt: skip
    params = {name: jnp.asarray(rng.normal(size=size) / 8, dtype) for name, size in sizes.items()}
    return [params, *(jnp.asarray(rng.normal(size=(*rows, width)), dtype) for _ in range(2))]


def passes_in(function, args) -> list[int]:
    """For each pass in a function with passes, the number of its results."""
    eqns = jax.make_jaxpr(with_code_passes(function, interpret=True))(*args).eqns
    return [len(eqn.outvars) for eqn in eqns if eqn.primitive.name == "pallas_call"]


def check_same(function, args) -> None:
    # Otherwise XLA keeps bfloat16 results in fp32 where they are fused.
    options = {"xla_allow_excess_precision": False}
    plain, ours = (
        jax.jit(f, compiler_options=options)(*args)
        for f in (function, with_code_passes(function, interpret=True))
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.by_default("nan-float32", "inf-float32", "zero rows-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", ["", "zero rows", "zeros", "nan", "inf"])
def test_passes_give_the_same_bits(dtype, change):
    args = arguments(dtype)
    x = args[1]
    args[1] = {
        "": x,
        "zero rows": x.at[:, 3:9].set(0),
        "zeros": x * 0,
        "nan": x.at[1, 5, 7].set(np.nan),
        "inf": x.at[0, 2, 1].set(-np.inf),
    }[change]
    function = gradients(gated)
    # Codes of x, the cotangent, gate and up are needed in both orders, and of `down` as they are.
    # The gated product is needed transposed only; it and the gradients of gate and up share a pass.
    assert sorted(passes_in(function, args)) == [2, 2, 2, 2, 5]
    check_same(function, args)


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (residual, [2, 2, 2, 2]),
        (positive, [2, 2, 2, 3]),
        (chained, [1, 2, 2, 4]),
        (three, [2, 7, 7]),
    ],
)
def test_passes_follow_the_equations_that_they_read(function, results):
    args = arguments("float32")
    assert sorted(passes_in(gradients(function), args)) == results
    check_same(gradients(function), args)


def test_passes_are_found_in_a_backward_that_recomputes():
    params, x, cotangent = arguments("float32")

    def backward_of(prevent_cse):
        policy = jax.checkpoint_policies.dots_saveable
        function = jax.checkpoint(gated, policy=policy, prevent_cse=prevent_cse)
        residuals, pull = jax.tree.flatten(jax.vjp(function, params, x)[1])
        return lambda *args: jax.tree.unflatten(pull, args[:-1])(args[-1]), [*residuals, cotangent]

    # Codes of x transposed, of the cotangent in both orders, and of the gated product and of the
    # gradients of gate and up together.
    assert sorted(passes_in(*backward_of(False))) == [1, 2, 5]
    check_same(*backward_of(False))
    assert not passes_in(*backward_of(True))


def test_an_operand_of_many_arrays_is_made_once():
    args = arguments("float32")
    made = jax.make_jaxpr(with_code_passes(gradients(three), interpret=True))(*args)
    assert "pallas_call" in str(made)
    for eqn in made.eqns:
        if eqn.primitive.name == "pallas_call":
            assert sum(v.aval.ndim > 1 for v in eqn.invars) <= 2 * len(eqn.outvars)


@pytest.mark.parametrize(
    ("dtype", "num_arrays", "pays"),
    [("float32", 2, True), ("float32", 3, False), ("bfloat16", 1, True), ("bfloat16", 2, False)],
)
def test_a_pass_reads_at_most_twice_the_bytes_of_its_operands(dtype, num_arrays, pays):
    """An operand is computed from some arrays in float32."""

    def of_arrays(params, x):
        arrays = [x @ (n * params["square"]) for n in range(1, 1 + num_arrays)]
        y = product(
            functools.reduce(operator.mul, arrays).astype(dtype), params["square"].astype(dtype)
        )
        return jnp.sum(y.astype(x.dtype), -1, keepdims=True)

    assert passes_in(gradients(of_arrays), arguments("float32")) == [1] * pays


@pytest.mark.parametrize(
    ("sizes", "results"),
    [(((2, 63), 128, 192), [2, 2]), (((2, 64), 96, 100), []), (((3, 3), 8, 8), [])],
)
def test_odd_sizes_stay_as_they_are(sizes, results):
    """Of the first ones, the weights have whole tiles."""
    args = arguments("float32", *sizes)
    function = gradients(gated)
    assert passes_in(function, args) == results
    check_same(function, args)


def test_callbacks_run_in_order():
    seen = []

    def function(params, x, cotangent):
        jax.debug.callback(lambda n: seen.append(float(n)), x[0, 0, 0], ordered=True)
        out = gradients(gated)(params, x, cotangent)
        jax.debug.callback(lambda n: seen.append(float(n)), x[0, 0, 1], ordered=True)
        return out

    args = arguments("float32")
    jax.block_until_ready(jax.jit(with_code_passes(function, interpret=True))(*args))
    jax.effects_barrier()
    assert seen == [float(args[1][0, 0, 0]), float(args[1][0, 0, 1])]


def test_backwards_alone_are_compiled_with_passes():
    args = arguments("float32")
    takes = tuple(jx.shape_of(x) if hasattr(x, "shape") else x for x in args[1:])
    takes = (jax.tree.map(jx.shape_of, args[0]), *takes)
    for name, has in (("backward", True), ("backward of kept", True), ("forward", False)):
        kernel = Kernel(name=name, build=lambda: gradients(gated), takes=takes)
        for code_passes_on in (True, False):
            cache = KernelCache(code_passes=code_passes_on)
            text = str(cache.get(kernel).trace(*takes).jaxpr)
            assert ("pallas_call" in text) == (has and code_passes_on)
