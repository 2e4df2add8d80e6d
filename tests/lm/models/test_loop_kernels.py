"""Loops of short kernels: how many there are, and what a plan makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.engine.program.flops import Loops, count_loops
from megatrain_jax._src.engine.report.plan_table import BOUNDS
from megatrain_jax._src.engine.spec.work import Work
from megatrain_jax._src.lm.models import expert_blocks
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.moe import gated
from quantities import has_row

ROWS, WIDTH = 4, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def counted(f, *args):
    return count_loops(jax.make_jaxpr(f)(*args))


def test_the_blocks_of_a_layer_of_experts_are_counted_as_they_are_computed():
    tokens, num, chosen, width, inner, block = 16 * 2048, 128, 8, 2048, 768, 512
    weights = shape(num, inner, width), shape(num, inner, width), shape(num, width, inner)
    found = counted(
        lambda x, chosen, shares, weights: mix(x, chosen, shares, weights, gated(jax.nn.silu)),
        shape(tokens, width),
        shape(tokens, chosen, dtype=jnp.int32),
        shape(tokens, chosen),
        weights,
    )
    at_once = expert_blocks._blocks_at_once(weights, tokens * chosen // block + num, block)
    turns = -(-(tokens * chosen // block + num) // at_once)
    assert at_once == 54
    products = turns * at_once * 3 * 2 * block * width * inner
    # Which expert a block is of is searched for in a short loop.
    assert turns == 12 and turns * 8 <= found.kernels < turns * 8 + 16
    assert products < found.flops < 1.01 * products
    # A turn gathers the weights of its blocks' experts.
    copied = turns * at_once * 4 * 3 * width * inner
    assert copied <= found.copied < 1.001 * copied


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize("length", [2, 5])
def test_kernels_of_loops_within_loops_calls_and_branches(outer, length):
    x, w = shape(ROWS, WIDTH), shape(WIDTH, WIDTH)

    def repeated(x, w, times, step):
        return jax.lax.scan(lambda x, _: (step(x, w), None), x, length=times)[0]

    def two(x, w):
        return jax.nn.silu(jnp.tanh(x @ w) @ w)

    def either(x, w):
        return jax.lax.cond(x.sum() > 0, two, lambda x, w: x, x, w)

    def within(x, w):
        return repeated(x, w, length, jax.jit(two))

    # Outside of loops nothing counts; elementwise operations are one with what reads them.
    assert counted(two, x, w) == Loops(0, 0, 0)
    assert counted(lambda x, w: repeated(two(x, w), w, length, two), x, w).kernels == 2 * length
    assert counted(lambda x, w: repeated(x, w, length, lambda x, w: x + 1), x, w).kernels == length
    nested = counted(lambda x, w: repeated(x, w, outer, within), x, w)
    assert nested.kernels == outer * length * 2
    assert nested.flops >= outer * length * 2 * PRODUCT
    # The sum that decides is a third kernel.
    assert counted(lambda x, w: repeated(x, w, length, either), x, w).kernels == 3 * length
    # A trip takes its part of what is gone through, and writes a part of the results.
    assert counted(lambda x: jax.lax.map(lambda row: row @ row, x), x).kernels == ROWS * 3
    # How often a `while` goes round isn't known.
    once = counted(
        lambda x, w: jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: within(x, w), x), x, w
    )
    assert once.kernels == 2 * length


def test_loops_take_the_longer_of_their_kernels_and_their_operations():
    machine = mt.card("H200")
    seconds = machine.compute_seconds(10**12, 0)
    few, many = (Work(flops=2e12, attention=0, looped=1e12, kernels=n) for n in (1, 10**6))
    assert few.loop_seconds(machine) == 0 and few.seconds(machine) == 2 * seconds
    assert many.seconds(machine) == pytest.approx(seconds + 6.0)
    # Each of several devices starts all kernels, for its part of the operations.
    assert many.seconds(machine, num_devices=4) == pytest.approx(seconds / 4 + 6.0)
    # Copies are read and written while nothing is computed, unless a device waits for longer.
    copying = few._replace(copied=machine.memory_bytes_per_s)
    assert copying.seconds(machine) == pytest.approx(2 * seconds + 2.0)
    assert many._replace(copied=1.0).seconds(machine) == many.seconds(machine)


def plan_of(num_experts, rows=4, **options):
    experts = num_experts and models.Experts(
        num=num_experts, per_token=2, intermediate_size=64, normalize=True, layers=tuple(range(4))
    )
    config = models.DecoderConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope=models.Rope(dim=32, base=1e4),
        experts=experts or None,
    )
    tokens = shape(rows, 512, dtype=jnp.int32)
    return mt.plan(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.adamw(1e-3),
        {"tokens": tokens, "labels": tokens},
        hardware="H200",
        **options,
    )


@pytest.mark.exhaustive
def test_a_plan_counts_the_kernels_of_experts(monkeypatch):
    # One after the other, as blocks of large experts are computed.
    monkeypatch.setattr(expert_blocks, "_TURN_BYTES", 0)
    dense, some, many = (plan_of(num) for num in (0, 8, 64))
    # The loss goes through its tokens in a short loop.
    assert 20 * dense.seconds_loops < some.seconds_loops < many.seconds_loops
    # Forward, forward again and the way back: each of four layers' blocks four times.
    blocks = [2048 * 2 // size + num for size, num in ((128, 8), (16, 64))]
    kernels = [plan.loop_kernels_per_step / 4 / 4 / 8 for plan in (some, many)]
    assert all(n <= counted < n + 2 for n, counted in zip(blocks, kernels, strict=True))
    assert many.bound == "loops" and (many.seconds_per_step or 0.0) > many.seconds_loops
    assert BOUNDS["loops"] in str(many)
    assert has_row(str(many), [many.loop_kernels_per_step, many.seconds_loops])
    halves = plan_of(64, num_gpus=2)
    assert halves.loop_kernels_per_step == many.loop_kernels_per_step
    assert np.isclose(halves.seconds_loops, many.seconds_loops, rtol=0.05)


def test_loops_of_every_microbatch_count():
    """Of a scan in each layer."""

    def loss_fn(params, x):
        for layer in params:
            x = jax.lax.scan(lambda x, _, w=layer: (jnp.tanh(x @ w), None), x, length=5)[0]
        return (x**2).mean()

    def build():
        return [jnp.ones((WIDTH, WIDTH)) for _ in range(2)]

    def plan(rows, **options):
        given = build, loss_fn, optax.sgd(0.1), shape(rows, WIDTH)
        return mt.plan(*given, hardware="H200", **options)

    one, three = plan(2), plan(6, microbatches=3)
    assert three.loop_kernels_per_step == 3 * one.loop_kernels_per_step > 0
    assert np.isclose(three.seconds_loops, 3 * one.seconds_loops) and one.seconds_loops > 0
