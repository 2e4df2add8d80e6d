"""Counts of floating-point operations: by hand, by formula and by the compiler."""

import jax
import jax.numpy as jnp
import pytest

from megatrain_jax._src.engine.program.flops import count_flops

X = jnp.ones((4, 6))
W = jnp.ones((6, 6))
MATMUL = 2 * 4 * 6 * 6


def relu_layer(x, w):
    return jax.nn.relu(x @ w)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x, w: x @ w, (X, W), MATMUL),
        (lambda a, b: a @ b, (jnp.ones((5, 2, 3)), jnp.ones((5, 3, 7))), 2 * 5 * 2 * 3 * 7),
        (lambda x: x.T[None].reshape(-1)[::2], (X,), 0),
        (lambda x: jnp.exp(x) + 1.0, (X,), 24 + 24),
        (lambda x: x + x, (jnp.ones((3,), jnp.int32),), 0),
        (lambda x: x.sum(0), (X,), 24),
        (lambda x: jnp.argmax(x), (X,), 24),
        (lambda x: x > 0, (X,), 0),
        (jax.jit(relu_layer), (X, W), MATMUL + 24),
        (jax.checkpoint(relu_layer), (X, W), MATMUL + 24),
        (
            lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5),
            (X, W),
            5 * MATMUL,
        ),
        (
            lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x * 2.0),
            (X, W),
            MATMUL,
        ),
        (
            lambda x, w: jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ w, x),
            (X, W),
            MATMUL,
        ),
        (
            lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([1, 3])),
            (X, jnp.ones((2, 6, 6))),
            MATMUL,
        ),
        (lambda x: jnp.zeros(9).at[jnp.array([1, 2])].add(x), (jnp.ones(2),), 2),
        (lambda x: jnp.fft.rfft(x), (jnp.ones(64),), 5 * 64 * 6 // 2),
    ],
)
def test_hand_counts(function, arguments, expected):
    # Indices that JAX makes non-negative are integers, so they count nothing.
    jaxpr = jax.make_jaxpr(function)(*arguments)
    assert count_flops(jaxpr) == expected
    assert count_flops(getattr(jaxpr, "jaxpr", jaxpr)) == expected


def test_custom_derivatives_count_their_calls():
    @jax.custom_vjp
    def double(x):
        return x @ W

    double.defvjp(lambda x: (x @ W, None), lambda _, g: (g @ W.T,))
    assert count_flops(jax.make_jaxpr(double)(X)) == MATMUL
    assert count_flops(jax.make_jaxpr(jax.nn.relu)(X)) == 24
    gradient = jax.make_jaxpr(lambda x: jax.vjp(double, x)[1](X))(X)
    assert count_flops(gradient) == 2 * MATMUL


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 1), (1, 2)])
def test_convolutions(groups, stride):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4 // groups, 6))
    forward = 2 * (2 * (8 // stride) ** 2 * 6) * 9 * (4 // groups)
    assert count_flops(jax.make_jaxpr(convolve)(x, kernel)) == forward

    def gradients(x, kernel, out):
        return jax.vjp(convolve, x, kernel)[1](out)

    out = jnp.ones((2, 8 // stride, 8 // stride, 6))
    # Two products as large as the forward's, whose own result is not needed but still traced.
    counted = count_flops(jax.make_jaxpr(gradients)(x, kernel, out))
    assert counted == pytest.approx(3 * forward, rel=0.2)


def attention_block(x, w):
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    heads = [part.reshape(2, 64, 4, 32) for part in (q, k, v)]
    y = jax.nn.dot_product_attention(*heads, is_causal=False).reshape(2, 64, 128)
    return x + jax.nn.gelu((y @ w["out"]) @ w["up"]) @ w["down"]


@pytest.mark.parametrize("differentiate", [False, True])
def test_agrees_with_the_compiler(differentiate):
    w = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in {
            "qkv": (128, 384),
            "out": (128, 128),
            "up": (128, 512),
            "down": (512, 128),
        }.items()
    }
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)

    def loss(x, w):
        return jnp.sum(attention_block(x, w) ** 2)

    function = jax.grad(loss, argnums=(0, 1)) if differentiate else loss
    analysis = jax.jit(function).lower(x, w).compile().cost_analysis()
    assert analysis is not None
    counted = count_flops(jax.make_jaxpr(function)(x, w))
    assert counted == pytest.approx(analysis["flops"], rel=0.02)
