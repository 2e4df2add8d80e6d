"""The bytes that a function's kernels move in a GPU's memory, besides its products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine.kernels.gpu_traffic import Traffic, count_traffic
from megatrain_jax._src.engine.report.plan_table import BOUNDS

ROWS, TOKENS, HEADS, WIDTH = 4, 1024, 8, 64
SCORES = ROWS * HEADS * TOKENS * TOKENS * 2
X = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
SIZE = 4096 * 1024 * 2


def traffic_of(function: Callable[..., Any], *args: Any) -> Traffic:
    return count_traffic(jax.make_jaxpr(function)(*args))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)


def test_softmax_of_scores_moves_them_several_times():
    q = jax.ShapeDtypeStruct((ROWS, HEADS, TOKENS, WIDTH), jnp.bfloat16)
    moved = traffic_of(attention, q, q, q).outside
    # Read for the maximum and for the sum, read and written for the weights. The products write
    # the scores and read the weights, which takes longer than their operations.
    operations = 2 * 2 * ROWS * HEADS * TOKENS**2 * WIDTH
    expected = 4 * SCORES + 2 * SCORES - operations / 200
    assert expected < moved < 1.05 * expected


def test_products_of_heads_behind_the_tokens_copy_their_operands():
    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    def of_heads(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bhqd,bhkd->bhqk", q, k)

    apart = jax.ShapeDtypeStruct((ROWS, TOKENS, HEADS, WIDTH), jnp.bfloat16)
    ready = jax.ShapeDtypeStruct((ROWS, HEADS, TOKENS, WIDTH), jnp.bfloat16)
    more = traffic_of(scores, apart, apart).outside - traffic_of(of_heads, ready, ready).outside
    assert more == 2 * 2 * ROWS * TOKENS * HEADS * WIDTH * 2


def test_products_of_what_was_brought_in_order_copy_nothing():
    def turned(q: jax.Array, k: jax.Array) -> jax.Array:
        q, k = (x.transpose(0, 2, 1, 3) for x in (q, k))
        return jax.lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))

    def plain(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))))

    heads_first = jax.ShapeDtypeStruct((ROWS, HEADS, TOKENS, WIDTH), jnp.bfloat16)
    found = traffic_of(turned, heads_first, heads_first).outside
    assert found == traffic_of(plain, heads_first, heads_first).outside


def test_products_without_matrices_are_elementwise_operations():
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, HEADS, WIDTH), jnp.float32)
    scale = jax.ShapeDtypeStruct((ROWS, HEADS, TOKENS), jnp.float32)

    def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sin(jnp.einsum("bthd,bht->bthd", x, scale))

    def multiplied(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sin(x * scale.transpose(0, 2, 1)[..., None])

    def of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bthd,bthd->bth", jnp.sin(x), jnp.cos(y))

    def summed(x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.sin(x) * jnp.cos(y)).sum(-1)

    assert traffic_of(scaled, x, scale) == traffic_of(multiplied, x, scale)
    assert traffic_of(of_rows, x, x) == traffic_of(summed, x, x)
    # Rows of one operand with a vector each are a product, which reads arrays.
    row = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)
    product = traffic_of(lambda x, y: jnp.einsum("bthd,btd->bth", jnp.sin(x), y), x, row)
    assert product.outside > 2.5 * ROWS * TOKENS * HEADS * WIDTH * 4


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.tanh(jnp.sin(x) * 2), 2 * SIZE),  # one kernel
        (lambda x: (jnp.sin(x), jnp.cos(x)), 4 * SIZE),
        (lambda x: x[:1024] + 1, SIZE // 2),  # a part is read, and written
        # Two parts are read: the new one, and the one that it replaces.
        (lambda x: jax.lax.dynamic_update_slice(x, jnp.ones_like(x[:1024]), (3, 0)), 3 * SIZE // 4),
        (lambda x: jnp.take(x, jnp.arange(4), axis=0), 0),
    ],
)
def test_each_kernel_reads_its_operands_and_writes_its_results(function, expected):
    assert expected <= traffic_of(function, X).outside <= expected + SIZE / 50


def test_operations_hide_the_bytes_of_a_large_product():
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    assert traffic_of(lambda x, w: x @ w, X, w) == Traffic()
    row = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16)
    assert traffic_of(lambda x, w: x @ w, row, w).outside > 0.95 * 1024 * 1024 * 2


@pytest.mark.parametrize(
    ("examples", "channels", "dtype", "is_slow"),
    [
        (32, 3, jnp.bfloat16, True),
        (32, 4, jnp.bfloat16, True),
        (32, 8, jnp.bfloat16, False),
        (3, 8, jnp.bfloat16, False),  # examples need no alignment
        (32, 4, jnp.float32, False),
        (32, 3, jnp.float32, True),
    ],
)
def test_convolutions_of_few_channels_are_counted_apart(examples, channels, dtype, is_slow):
    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (16, 16), "VALID")

    def of_weights(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(lambda w: convolved(x, w), w)[1](dy)

    x = jax.ShapeDtypeStruct((examples, channels, 64, 64), dtype)
    w = jax.ShapeDtypeStruct((128, channels, 16, 16), dtype)
    dy = jax.eval_shape(convolved, x, w)
    flops = is_slow * 2 * dy.size * channels * 16 * 16
    assert traffic_of(convolved, x, w).unaligned == flops
    assert traffic_of(of_weights, x, w, dy).unaligned == flops  # not computed again

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: convolved(x, w), jnp.stack([x, x]))

    assert traffic_of(looped, x, w).unaligned == 2 * flops


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_depthwise_convolutions_are_counted_apart(groups):
    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        layout = jax.lax.conv_dimension_numbers(x.shape, w.shape, ("NWC", "WIO", "NWC"))
        return jax.lax.conv_general_dilated(
            x, w, (1,), [(3, 0)], dimension_numbers=layout, feature_group_count=groups
        )

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(convolved, x, w)[1](dy)

    x = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)
    w = jax.ShapeDtypeStruct((4, 8 // groups, 8), jnp.float32)
    flops = 2 * x.size * 4 if groups == 8 else 0
    assert traffic_of(convolved, x, w).depthwise == flops
    # The gradient of the inputs is such a convolution, of padded inputs.
    found = traffic_of(gradients, x, w, x).depthwise
    assert 1.3 * flops <= found <= 1.6 * flops


@pytest.mark.parametrize(
    ("rows", "columns", "summands", "times"),
    [
        (256, 128, 64, 1),
        (257, 257, 104, 384 * 384 * 128 / (257 * 257 * 104)),
        (257, 104, 257, 384 * 128 * 320 / (257 * 104 * 257)),
        (128, 64, 64, 1),  # narrow tiles for narrow matrices
        (100, 8, 100, 1),  # no tiles of these shapes
    ],
)
def test_products_of_many_matrices_are_computed_in_whole_tiles(rows, columns, summands, times):
    left = jax.ShapeDtypeStruct((16, rows, summands), jnp.bfloat16)
    right = jax.ShapeDtypeStruct((16, summands, columns), jnp.bfloat16)
    flops = 2 * 16 * rows * columns * summands
    padding = traffic_of(jnp.matmul, left, right).padding
    assert padding == pytest.approx((times - 1) * flops)
    one = jax.ShapeDtypeStruct(left.shape[1:], jnp.bfloat16)
    other = jax.ShapeDtypeStruct(right.shape[1:], jnp.bfloat16)
    assert traffic_of(jnp.matmul, one, other).padding == 0

    def looped(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: jnp.matmul(x, right), jnp.stack([left, left]))

    assert traffic_of(looped, left, right).padding == pytest.approx(2 * padding)


def test_a_product_has_its_stored_weights_cast_first():
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    product = jax.make_jaxpr(lambda x, w: x @ w)(X, w)
    # Read in fp32, or as codes of a byte, and written in bfloat16; products read the copy.
    assert count_traffic(product, (None, "float32")).outside == (4 + 2) * w.size
    assert count_traffic(product, (None, "int8")).outside == (1 + 2) * w.size
    assert count_traffic(product, (None, None)).outside == 0
    # The kernel of another operation casts by itself.
    scaled = jax.make_jaxpr(lambda x, y: x * y)(X, X)
    assert count_traffic(scaled, (None, "float32")).outside == 4 * SIZE


def test_a_loop_moves_its_bytes_in_each_iteration_and_a_branch_once():
    rows = jax.ShapeDtypeStruct((16, *X.shape), X.dtype)

    def looped(xs: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: jnp.sin(x), xs)

    def branched(x: jax.Array, which: jax.Array) -> jax.Array:
        return jax.lax.cond(which, lambda x: jnp.sin(x), lambda x: x, x)

    moved = traffic_of(looped, rows)
    assert moved.outside == 0 and moved.in_loops >= 16 * 2 * SIZE
    thrice = jax.ShapeDtypeStruct((3, *rows.shape), rows.dtype)
    assert traffic_of(lambda x: jax.lax.map(looped, x), thrice).in_loops >= 3 * moved.in_loops
    which = jax.ShapeDtypeStruct((), jnp.bool_)
    assert 2 * SIZE <= traffic_of(branched, X, which).outside <= 2.1 * SIZE


def test_a_step_of_norms_is_bound_by_the_memory_and_one_of_products_by_arithmetic():
    def loss_fn(model: Any, x: jax.Array) -> jax.Array:
        for w in model["layers"]:
            y = x * w[0] if w.shape[0] == 1 else x @ w
            x = x + y / jnp.sqrt(jnp.mean(y**2, axis=1, keepdims=True))
        return jnp.mean(x)

    def planned(rows: int) -> mt.Plan:
        def build() -> Any:
            return {"layers": [jnp.ones((rows, 8192), jnp.bfloat16) for _ in range(4)]}

        x = jax.ShapeDtypeStruct((1 << 16, 8192), jnp.bfloat16)
        return mt.plan(build, loss_fn, optax.sgd(0.1), x, hardware="H100")

    norms, products = planned(1), planned(8192)
    assert norms.bound == "memory" and BOUNDS["memory"] in str(norms)
    # Each layer reads and writes at least its rows, forward and backward.
    assert norms.memory_bytes > 4 * 4 * 2**30
    assert products.bound == "arithmetic"
