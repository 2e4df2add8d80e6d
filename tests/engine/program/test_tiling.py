"""A jaxpr computed tile by tile gives what it gives whole, and most of its values never exist."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.engine.program.tiling.flow import flow_of, peak_bytes
from megatrain_jax._src.engine.program.tiling.tiled import tiled
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from optimizers import OPTIMIZERS
from runs import check_close, make_spec
from tilings import TOLERANCE, check_same, flat_jaxpr, loops_of, tile_counts
from zoo import CASES

# A sample of the zoo; the others are long.
SAMPLE = ("moe", "batchnorm_nnx")


def stage_kernels(case, **options):
    """The jaxpr of each forward and backward of a case's stages, with its name."""
    spec = make_spec(case, OPTIMIZERS["adam"], **options)
    kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device())
    for kernel in dict.fromkeys(k for k in kernels if k.name in ("forward", "backward")):
        yield kernel.name, flat_jaxpr(kernel.build(), *(kernel.takes or ()))


def arguments(jaxpr, seed=0):
    """Random arguments of a jaxpr: small numbers, which are tokens and positions, too."""
    rng = np.random.default_rng(seed)

    def argument(aval):
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.asarray(0.3 * rng.normal(size=aval.shape), aval.dtype)
        return jnp.asarray(rng.integers(0, 2 if aval.dtype == bool else 8, aval.shape), aval.dtype)

    return [argument(aval) for aval in jaxpr.in_avals]


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: jnp.tanh(jnp.exp(x)).sum(), 0),  # fused into its only reader
        (lambda x: jnp.exp(x) @ x, 1),  # which a product is not
        (lambda x: jnp.exp(x) @ jnp.tanh(x), 2),
        (lambda x: (jnp.exp(x).sum(), jnp.exp(x).max()), 0),
        (lambda x: (lambda y: (y.sum(), jnp.tanh(y).max()))(jnp.exp(x)), 1),
        (lambda x: (x @ x) @ x, 1),
        (lambda x: ((x @ x) @ x) @ x, 2),  # operand and result
    ],
)
def test_what_its_only_reader_takes_in_is_not_kept(function, kept):
    flow = flow_of(jax.make_jaxpr(function)(jnp.ones((8, 8))))
    assert peak_bytes(flow, flow.ops, 1) == kept * 8 * 8 * 4


@pytest.mark.by_default("batchnorm_nnx-counts1")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((name, (4,)) for name in SAMPLE),
        *(pytest.param(name, (2, 4), marks=pytest.mark.long) for name in CASES),
    ],
)
def test_stages_of_the_zoo_in_tiles_give_what_they_give_whole(name, counts):
    seen = 0
    for _, jaxpr in stage_kernels(CASES[name]):
        args = arguments(jaxpr)
        whole = jax.jit(jaxpr_as_fun(jaxpr))(*args)
        seen += sum(check_same(jaxpr, k, args, whole) for k in counts)
    assert seen > 0


def test_all_tiles_of_a_float8_product_have_one_scale():
    precision = mt.Precision(compute=jnp.float32, products={"*": "float8"})
    for name, jaxpr in stage_kernels(CASES["equinox"], precision=precision):
        if name == "forward" and "f8_e4m3fn" in str(jaxpr):
            assert check_same(jaxpr, 4, arguments(jaxpr))
            return
    raise AssertionError("no forward has products in float8")


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


TOKENS, WIDTH, HEADS, HIDDEN, VOCAB = 256, 64, 4, 512, 384


def block(params, x, attend):
    """A decoder's block with a wide MLP."""
    h = rms_norm(x, params["norm1"])
    q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(h @ params["qkv"], 3, -1))
    x = x + attend(q, k, v).reshape(x.shape) @ params["out"]
    h = rms_norm(x, params["norm2"])
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]


def block_arguments(dtype=jnp.float32, examples=1):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype)

    params = {
        "norm1": jnp.ones(WIDTH, dtype), "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH), "norm2": jnp.ones(WIDTH, dtype),
        "gate": normal(WIDTH, HIDDEN), "up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH),
    }  # fmt: skip
    shape = examples, TOKENS, WIDTH
    return params, *(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def running(q, k, v):
    """Linear attention: what mixes tokens is a running sum, which no tile can compute alone."""
    return q * jnp.cumsum(k * v, axis=1) / TOKENS


def backward_of(function):
    def backward(params, x, cotangent):
        return jax.vjp(function, params, x)[1](cotangent)

    return backward


def values_outside_loops(jaxpr):
    """Shapes of the values that a jaxpr makes, but for those within its loops' rounds."""
    return {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}


def temporary_bytes(function, args):
    analysis = jax.jit(function).lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.by_default("running")
@pytest.mark.parametrize("attend", [causal, running])
def test_no_value_of_a_wide_mlp_is_whole(attend):
    args = block_arguments()
    jaxpr = flat_jaxpr(backward_of(functools.partial(block, attend=attend)), *args)
    division = tiled(jaxpr, 8)
    assert division is not None
    assert (division.num_rows, division.rows_per_tile) == (TOKENS, TOKENS // 8)
    # Before, between and after attention and its backward, or with them in the second one.
    assert len(loops_of(division)) == 3
    flat = jax.tree.leaves(args)
    traced = jax.make_jaxpr(division)(*flat)
    assert (1, TOKENS, HIDDEN) in values_outside_loops(jaxpr)
    assert (1, TOKENS, HIDDEN) not in values_outside_loops(traced)
    whole = jaxpr_as_fun(jaxpr)
    check_close(jax.jit(division)(*flat), list(jax.jit(whole)(*flat)), TOLERANCE, "result")
    assert 2 * temporary_bytes(division, flat) < temporary_bytes(whole, flat)


def test_scores_are_divided_along_queries():
    args = block_arguments()
    jaxpr = flat_jaxpr(backward_of(functools.partial(block, attend=causal)), *args)
    division = tiled(jaxpr, 8)
    assert division is not None
    traced = jax.make_jaxpr(division)(*jax.tree.leaves(args))
    assert not any(shape.count(TOKENS) > 1 for shape in values_outside_loops(traced))


def mean_loss(params, x, labels):
    logits = rms_norm(x, params["norm"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * (labels > 3)) / jnp.sum(labels > 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_never_exist_whole(dtype):
    rng = np.random.default_rng(0)
    params = {
        "norm": jnp.ones(WIDTH, dtype), "head": jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), dtype),
    }  # fmt: skip
    x = jnp.asarray(rng.normal(size=(1, TOKENS, WIDTH)), dtype)
    labels = jnp.asarray(rng.integers(0, VOCAB, (1, TOKENS)))
    args = params, x, labels
    jaxpr = flat_jaxpr(jax.value_and_grad(mean_loss, argnums=(0, 1)), *args)
    division = tiled(jaxpr, 8)
    assert division is not None and division.num_rows == TOKENS
    assert len(loops_of(division)) == 1  # the sum of the mask is no loop
    flat = jax.tree.leaves(args)
    shapes = values_outside_loops(jax.make_jaxpr(division)(*flat))
    assert (1, TOKENS, VOCAB) not in shapes and (1, TOKENS) in shapes
    if dtype == jnp.float32:
        assert check_same(jaxpr, 8, flat)


def test_sums_over_tiles_are_in_fp32():
    """The gradient of a matrix in bf16 is as near to the exact one as if it were summed at once."""
    rng = np.random.default_rng(0)
    x, w, y = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in [(512, 8), (8, 64), (512, 8)])

    def gradient(x, w, y):
        h = jnp.tanh(x @ w)
        return jnp.exp(h).T @ y, h.sum(0), jnp.exp(h) @ w.T

    jaxpr = flat_jaxpr(gradient, x, w, y)
    division = tiled(jaxpr, 64)
    assert division is not None and division.num_rows == 512
    (scan,) = (e for e in jax.make_jaxpr(division)(x, w, y).eqns if e.primitive.name == "scan")
    summed = [v.aval for v in scan.outvars if v.aval.shape in ((64, 8), (64,))]
    assert [a.dtype for a in summed] == [jnp.float32] * 2
    # Each tile's values are those of the whole; only their sum differs.
    h = np.asarray(jnp.tanh(x @ w))
    exact = np.asarray(jnp.exp(h), np.float64).T @ np.asarray(y, np.float64)
    tiles = np.asarray(jax.jit(division)(x, w, y)[0], np.float64)
    assert np.abs(tiles - exact).max() <= 2**-8 * np.abs(exact).max()


def contrastive(params, x, y):
    """Each example against all: what mixes them is a product of examples by examples."""
    a, b = (jnp.tanh(v @ params["up"]) @ params["down"] for v in (x, y))
    scores = a.mean(1) @ b.mean(1).T
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(x))).mean()


def packed(params, x, segments):
    """Attention within documents, in a window."""
    h = (x @ params["up"])[:, :, None]  # one head
    near = jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)) < 9
    mask = (segments[:, :, None] == segments[:, None, :]) & near
    mixed = jax.nn.dot_product_attention(h, h, h, mask=mask[:, None])
    return jnp.mean((jnp.tanh(mixed[:, :, 0]) @ params["down"]) ** 2)


def translating(params, x, y):
    """A decoder of y that attends to all of x."""
    memory, h = jnp.tanh(x @ params["up"])[:, :, None], jnp.tanh(y @ params["up"])[:, :, None]
    mixed = jax.nn.dot_product_attention(h, memory, memory)
    return jnp.mean((mixed[:, :, 0] @ params["down"]) ** 2)


def state_space(params, x, y):
    """A recurrence over tokens between two products."""
    x = jnp.tanh(x @ params["up"]) @ params["down"]
    _, h = jax.lax.scan(lambda s, row: (0.9 * s + row, s * row), 0 * x[:, 0], x.swapaxes(0, 1))
    h = jnp.tanh(h.swapaxes(0, 1) @ params["up"])
    return jnp.mean((h @ params["down"] - y) ** 2)


def normalised(params, x, y):
    """Statistics of the whole batch between two products."""
    h = x @ params["up"]
    mean, var = h.mean((0, 1)), h.var((0, 1))
    return jnp.mean((jnp.tanh((h - mean) / jnp.sqrt(var + 1e-3)) @ params["down"] - y) ** 2)


LOSSES = [contrastive, packed, translating, state_space, normalised]


@pytest.mark.by_default("4-translating", "4-normalised")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_tiles", [4])
def test_losses_that_mix_tokens_or_examples(loss, num_tiles):
    rng = np.random.default_rng(0)
    params = {
        "up": jnp.asarray(rng.normal(size=(8, 96)) / 3, jnp.float32),
        "down": jnp.asarray(rng.normal(size=(96, 8)) / 9, jnp.float32),
    }  # fmt: skip
    x, y = (jnp.asarray(rng.normal(size=(2, TOKENS, 8)), jnp.float32) for _ in range(2))
    if loss is packed:
        y = jnp.asarray(np.sort(rng.integers(0, 5, (2, TOKENS))))
    args = params, x, y
    jaxpr = flat_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)), *args)
    assert check_same(jaxpr, num_tiles, jax.tree.leaves(args))
    assert num_tiles in tile_counts(jaxpr)


def test_an_axis_without_entries_is_none_to_divide():
    def function(x):
        return jnp.concatenate([jnp.zeros((len(x), 0)), jnp.tanh(x)], axis=1).sum()

    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((64, 8), jnp.float32))
    assert tile_counts(traced) == (2, 4, 8, 16, 32, 64)


def test_counts_of_tiles_are_divisors():
    def function(x, w):
        return jnp.sort(jnp.tanh(x @ w)) @ w.T

    def counts(tokens):
        jaxpr = flat_jaxpr(function, jnp.ones((1, tokens, 4)), jnp.ones((4, 37)))
        assert all(tiled(jaxpr, k) is not None for k in tile_counts(jaxpr))
        return tile_counts(jaxpr)

    assert counts(64) == (2, 4, 8, 16, 32, 64)
    assert counts(24) == (2, 4, 6, 8, 12, 24)
    assert counts(45) == (3, 9, 15, 45)
    assert counts(37) == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.cumsum(x, 1), lambda x: 2 * jnp.sin(x), lambda x: x, lambda x: jnp.float32(1),
        lambda x: jax.lax.while_loop(lambda s: s.sum() < 9, lambda s: s + 1, x),
    ],
)  # fmt: skip
def test_nothing_is_divided_where_nothing_is_gained(function):
    jaxpr = flat_jaxpr(function, jnp.ones((1, 64)))
    assert tiled(jaxpr, 2) is None and tile_counts(jaxpr) == ()


def test_effects_come_once_and_in_order():
    seen = []

    def function(x, w):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum(), ordered=True)
        h = jnp.sort(jnp.tanh(x @ w))
        jax.debug.callback(lambda v: seen.append(float(v)), h.max(), ordered=True)
        return h @ w.T

    args = jnp.ones((64, 4)), jnp.ones((4, 50))
    jaxpr = flat_jaxpr(function, *args)
    division = tiled(jaxpr, 4)
    assert division is not None
    jax.block_until_ready(jax.jit(division)(*args))
    jax.effects_barrier()
    assert seen == [256.0, pytest.approx(np.tanh(4))]


@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_that_divide_examples_compute_tiles_of_their_own(num_devices):
    """Each tile has as many examples of every device, so that none sends its examples away."""

    def function(x, up, down):
        return jnp.tanh(x @ up) @ down

    x, up, down = jnp.ones((256, 4)), jnp.ones((4, 64)), jnp.ones((64, 4))
    jaxpr = flat_jaxpr(function, x, up, down)
    division = tiled(jaxpr, 4, num_devices=num_devices)
    assert division is not None
    assert tile_counts(jaxpr, num_devices=num_devices)[-1] == 256 // num_devices
    mesh = Mesh(jax.devices()[:num_devices], "data")
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    compiled = jax.jit(division).lower(placed, up, down).compile()
    for word in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert word not in str(compiled.as_text())
    np.testing.assert_allclose(compiled(placed, up, down)[0], function(x, up, down), rtol=1e-6)
