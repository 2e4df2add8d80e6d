"""Estimates of the memory of functions on a GPU: what is an array, and when."""

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.gpu_memory import gpu_temporary_bytes
from megatrain_jax._src.engine.kernels.liveness import temporary_bytes


def traced(function, *shapes, dtype=jnp.float32):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))


def own_bytes(jaxpr):
    """The estimate without the allowance for the workspace of products."""
    return gpu_temporary_bytes(jaxpr) * 2 // 3


def test_an_elementwise_value_with_several_readers_is_computed_in_each():
    def function(x, w):
        a = x @ w
        b = jnp.sin(a) * 2
        return b + 1, (b * b).sum(), jnp.cos(b)

    jaxpr, one = traced(function, (512, 512), (512, 512)), 4 * 512 * 512
    assert own_bytes(jaxpr) == one < temporary_bytes(jaxpr)


def test_what_a_product_reads_is_an_array():
    def function(x, w):
        return jnp.sin(x @ w) @ w

    assert own_bytes(traced(function, (512, 512), (512, 512))) == 2 * 4 * 512 * 512


def test_a_cast_before_a_gather_makes_no_array():
    def function(table, ids):
        return table.astype(jnp.bfloat16)[ids.astype(jnp.int32)]

    assert own_bytes(traced(function, (1024, 512), (8,))) < 1024


def test_a_weight_is_cut_out_of_its_slab_when_it_is_needed():
    def function(slab, x):
        for w in jnp.split(slab, 8):
            x = x @ w.reshape(512, 512)
        return x

    weight, rows = 4 * 512 * 512, 4 * 16 * 512
    found = own_bytes(traced(function, (8 * 512 * 512,), (16, 512)))
    # The next weight may be cut out before the last product has run.
    assert weight <= found <= 2 * weight + 2 * rows


def test_a_loop_of_one_round_is_no_loop():
    def function(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w) @ w, None), x, ws)[0]

    def unrolled(x, ws):
        return jnp.sin(x @ ws[0]) @ ws[0]

    shapes = (512, 512), (1, 512, 512)
    assert own_bytes(traced(function, *shapes)) == own_bytes(traced(unrolled, *shapes))


def test_a_carry_that_a_product_replaces_lies_beside_the_old_one():
    def repeated(x, w):
        return jax.lax.fori_loop(0, 9, lambda _, x: x @ w, x)

    def added(x, w):
        return jax.lax.fori_loop(0, 9, lambda _, x: x + w @ w, x)

    one = 4 * 512 * 512
    shapes = (512, 512), (512, 512)
    assert own_bytes(traced(repeated, *shapes)) == own_bytes(traced(added, *shapes)) + one


def test_a_carry_stays_in_its_place_also_in_a_loop_of_unknown_length():
    def function(x, n):
        return jax.lax.fori_loop(0, n.astype(jnp.int32), lambda _, y: y + 1, x @ x) @ x

    jaxpr, one = traced(function, (512, 512), ()), 4 * 512 * 512
    for estimate in (own_bytes, temporary_bytes):
        assert one <= estimate(jaxpr) < 1.1 * one
