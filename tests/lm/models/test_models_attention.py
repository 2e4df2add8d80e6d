"""Attention and experts against their definitions, written without any economy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core as jex

from attention_by_definition import defined
from megatrain_jax._src.lm.models import causal_attention, expert_blocks
from megatrain_jax._src.lm.models.causal_attention import (
    ImageRows,
    attend_to_chosen,
    choose_keys,
    full_attention,
    mark,
)
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, ParameterMaker
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.deepseek import BiasedMixture, GroupedRouting
from megatrain_jax._src.lm.models.layers import MixtureOfExperts
from megatrain_jax._src.lm.models.moe import balancing_loss, gated, route, tally
from megatrain_jax.models import Experts, attention
from small_decoders import SMALL


def arrays(length: int = 21, rows: int = 2, heads: int = 4, kv_heads: int = 2):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(rows, length, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]


SEGMENTS: Any = np.array([[1] * 5 + [2] * 12 + [0] * 4, [1] * 21], np.int32)


OPTIONS = {
    "causal": {},
    "window": {"window": 6, "scale": 0.5},
    "documents": {"segments": SEGMENTS},
    "chunks": {"segments": SEGMENTS, "chunk": 4},
    "everything": {"segments": SEGMENTS, "window": 3, "softcap": 1.5},
}


@pytest.mark.by_default("chunks-8", "everything-None")
@pytest.mark.parametrize(
    ("name", "piece"),
    [(name, 8) for name in OPTIONS] + [("everything", None), ("everything", 2)],
)
def test_pieces_give_what_the_definition_gives(name, piece):
    q, k, v = arrays()
    options = OPTIONS[name]

    def both(function, **more):
        def total(q, k, v):
            out = function(q, k, v, **options, **more)
            return jnp.sum(out * jnp.cos(out)), out

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)

    for ours, theirs in zip(
        jax.tree.leaves(both(attention, piece=piece)), jax.tree.leaves(both(defined)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_chosen_keys_have_the_highest_scores_whatever_the_pieces(monkeypatch):
    monkeypatch.setattr(causal_attention, "_PIECE_BYTES", 1)
    rows, length, most = 2, 150, 7
    keys = jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.normal(key, (rows, length, 9, 6)) for key in keys[:2])
    weights, k = jax.random.normal(keys[2], (rows, length, 9)), k[:, :, 0]
    segments: Any = np.repeat([[1] * 20 + [2] * 4 + [3] * 6, [1] * 29 + [0]], 5, axis=1)
    assert choose_keys(q, weights, k, segments, length) is None
    bits: Any = choose_keys(q, weights, k, segments, most)
    found = np.unpackbits(bits, axis=-1, count=length)
    scores = np.einsum("bmhd,bnd->bmhn", *map(np.float64, (q, k)))
    scores = np.einsum("bmhn,bmh->bmn", np.maximum(scores, 0), weights)
    here, there = np.mgrid[:length, :length]
    seen = (there <= here) & (segments[:, :, None] == segments[:, None])
    order = np.argsort(np.argsort(np.where(seen, -scores, np.inf), axis=-1), axis=-1)
    np.testing.assert_array_equal(found, seen & (order < most))


CHOSEN: Any = np.packbits(np.tril(np.arange(441).reshape(1, 21, 21) % 3 != 1), axis=-1)
CHOSEN = np.repeat(CHOSEN, 2, axis=0)
IMAGES: Any = np.array([[0] * 3 + [1] * 6 + [0] * 5 + [2] * 6 + [0], [1] * 6 + [0] * 15], np.int32)


def in_rows_of_images(q, k, v, segments=SEGMENTS, **options):
    return attention(q, k, v, segments=ImageRows(segments, IMAGES, 6), **options)


@pytest.mark.parametrize("masked", [4, 100])  # the longest rows with a mask
@pytest.mark.parametrize(
    "function",
    [
        attention,
        functools.partial(attention, window=6, scale=0.5),
        functools.partial(attention, segments=SEGMENTS),
        functools.partial(attention, segments=SEGMENTS, window=6),
        functools.partial(attention, segments=SEGMENTS, window=16),
        functools.partial(attention, segments=SEGMENTS, chunk=4),
        functools.partial(attention, segments=SEGMENTS, softcap=1.5),
        functools.partial(full_attention, segments=SEGMENTS),
        full_attention,
        functools.partial(attend_to_chosen, chosen=CHOSEN, scale=0.5),
        in_rows_of_images,
        functools.partial(in_rows_of_images, segments=None, window=9, scale=0.5),
        functools.partial(in_rows_of_images, softcap=1.5),
    ],
)
def test_a_kernel_is_told_what_the_pieces_compute(function, masked, monkeypatch):
    monkeypatch.setattr(causal_attention, "_MASKED", masked)
    calls = calls_of_kernel(function, monkeypatch)
    assert len(calls) == ("softcap" not in getattr(function, "keywords", ()))


def test_a_kernel_is_told_the_chosen_keys_of_some_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(causal_attention, "_LONGEST_MASKED", 8)
    function = functools.partial(attend_to_chosen, chosen=CHOSEN, scale=0.5)
    calls = calls_of_kernel(function, monkeypatch)
    assert {q[1] for q, _ in calls} == {2, 1}
    assert [k[1] for _, k in calls] == [4, 8, 12, 16, 20, 21]


def calls_of_kernel(function, monkeypatch) -> list[Any]:
    """Compares a function with and without a kernel, and returns the shapes that this gets."""
    calls = []

    def kernel(q, k, v, *, mask, scale, is_causal, local_window_size, implementation):
        assert implementation == "cudnn"
        calls.append((q.shape, k.shape))
        here, there = np.mgrid[: q.shape[1], : k.shape[1]]
        seen = np.full(here.shape, True) if mask is None else mask
        if is_causal:
            seen &= there <= here
        if local_window_size is not None:
            assert mask is None and local_window_size[1] == 0
            seen &= here - there <= local_window_size[0]
        scores = jnp.where(seen, jnp.einsum("bmhd,bnhd->bhmn", q, k) * scale, -1e30)
        return jnp.einsum("bhmn,bnhd->bmhd", jax.nn.softmax(scores, axis=-1), v)

    def both():
        def total(q, k, v):
            out = function(q, k, v)
            return jnp.sum(out * jnp.cos(out)), out

        with jax.enable_x64(True):  # marks need more digits than fp32 has
            x = arrays(kv_heads=4)
            return jax.tree.leaves(jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*x))

    expected = both()
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    monkeypatch.setattr(causal_attention, "_widest_heads", lambda: 128)
    monkeypatch.setattr(causal_attention, "fits_cudnn", lambda q, packed: True)
    for a, b in zip(both(), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    return calls


@pytest.mark.by_default("1.0")
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_marked_documents_need_no_mask(scale):
    # Numbers that differ in their sign or in one bit alone, and documents in several pieces.
    numbers = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
    segments = numbers[np.random.default_rng(0).integers(0, len(numbers), (2, 21))]

    def marked(q, k, v):
        return defined(*mark(q, k, v, segments, scale), scale=scale)[..., : q.shape[-1]]

    def both(function):
        def total(q, k, v):
            out = function(q, k, v)
            return jnp.sum(out * jnp.cos(out)), out

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays())

    exact = functools.partial(defined, segments=segments, scale=scale)
    with jax.enable_x64(True):
        ours, theirs = (jax.tree.leaves(both(function)) for function in (marked, exact))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


def largest_value(jaxpr: Any) -> int:
    """Returns the elements of the largest array that any equation makes, at any depth."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    return max([*sizes, *(largest_value(sub) for sub in jex.subjaxprs(jaxpr))], default=0)


def test_chosen_keys_of_a_long_row_are_bits():
    length, heads = 32_768, 64
    shapes = (1, length, heads, 64), (1, length, heads), (1, length, 64), (1, length, 2, 64)
    q, weights, index, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, weights, index, k, segments):
        chosen: Any = choose_keys(q, weights, index, segments, 2048)
        return jnp.sum(attend_to_chosen(q, k, k, chosen, None).astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(total, (0, 3)))(q, weights, index, k, segments)
    # A GiB of scores, where those of all heads have 256.
    assert length**2 // 8 <= largest_value(traced.jaxpr) <= 2**28


@pytest.mark.by_default("1024")
@pytest.mark.parametrize("window", [None, 1024])
def test_scores_of_all_pairs_are_never_there_at_once(window):
    length, heads = 16_384, 8
    q = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, segments):
        out = attention(q, k, v, segments=segments, window=window)
        return jnp.sum(out.astype(jnp.float32))

    for function in (total, jax.grad(total, (0, 1, 2))):
        jaxpr = jax.make_jaxpr(function)(q, k, k, segments)
        assert largest_value(jaxpr.jaxpr) <= 2**26 < heads * length * length // 16


def test_scores_are_kept_for_the_backward_only_of_all_pairs_at_once():
    q, k, v = arrays(64)

    def largest_kept(piece):
        def pull(*x):
            return jax.vjp(functools.partial(attention, piece=piece), *x)[1]

        return max(x.size for x in jax.tree.leaves(jax.eval_shape(pull, q, k, v)))

    assert largest_kept(64) == 64 * q.size // q.shape[-1]
    assert max(largest_kept(16), largest_kept(4)) <= q.size


def test_half_precision_attends_in_full():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    out = jax.jit(lambda *args: attention(*args, piece=8))(q, k, v)
    assert out.dtype == jnp.bfloat16
    exact = defined(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


def expert_weights(num: int, width: int = 6, inside: int = 5):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = [(num, inside, width), (num, inside, width), (num, width, inside)]
    return tuple(jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))


def mixed_densely(x, chosen, shares, weights):
    gate, up, down = weights
    inside = jax.nn.silu(jnp.einsum("tw,eiw->tei", x, gate)) * jnp.einsum("tw,eiw->tei", x, up)
    all_experts = jnp.einsum("tei,ewi->tew", inside, down)
    picked = jnp.take_along_axis(all_experts, chosen[..., None], axis=1)
    return jnp.sum(picked * shares[..., None], axis=1)


@pytest.mark.by_default("32-3-7-3", "3-3-1-1000", "4-2-40-1000")
@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize(("num", "per_token", "tokens"), [(4, 2, 40), (32, 3, 7), (3, 3, 1)])
def test_experts_give_what_all_of_them_give_picked(num, per_token, tokens, at_once, monkeypatch):
    monkeypatch.setattr(expert_blocks, "_TURN_BYTES", at_once * 4 * 3 * 6 * 5)
    x = jax.random.normal(jax.random.key(2), (tokens, 6))
    logits = 3 * jax.random.normal(jax.random.key(3), (tokens, num))
    settings = Experts(
        num=num, per_token=per_token, intermediate_size=5, normalize=False, layers=(0,)
    )
    weights = expert_weights(num)

    def total(function):
        def call(x, logits, weights):
            chosen, shares, _ = route(logits, settings)
            return jnp.sum(jnp.sin(0.1 * function(x, chosen, shares, weights)))

        return jax.jit(jax.value_and_grad(call, (0, 1, 2)))(x, logits, weights)

    def ours(x, chosen, shares, weights):
        return mix(x, chosen, shares, weights, gated(ACTIVATIONS["silu"]))

    for a, b in zip(
        jax.tree.leaves(total(ours)), jax.tree.leaves(total(mixed_densely)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=3e-5)


def softmax_of_rounded(x, w):
    """Of logits in bfloat16, as Transformers has them."""
    return jax.nn.softmax((x @ w.T).astype(jnp.float32))


def sigmoid_of_exact(x, w):
    return jax.nn.sigmoid(x.astype(jnp.float32) @ w.T.astype(jnp.float32))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(MixtureOfExperts, softmax_of_rounded), (BiasedMixture, sigmoid_of_exact)],
)
def test_routers_are_in_fp32_in_a_model_in_bf16(kind, expected):
    experts = Experts(
        num=32, per_token=4, intermediate_size=5, normalize=True, layers=(0,), shared_size=5
    )
    options = GroupedRouting(groups=1, groups_per_token=1, scale=1.5)
    config = dataclasses.replace(SMALL, experts=experts, options=options)
    mixture = kind(config, experts, ParameterMaker(nnx.Rngs(0), jnp.bfloat16, 0.2))
    tokens = jax.random.normal(jax.random.key(0), (50, config.hidden_size), jnp.bfloat16)
    chosen, shares, scores = mixture.route(tokens)
    assert shares.dtype == scores.dtype == jnp.float32
    exact = expected(tokens, mixture.gate.weight[...])
    np.testing.assert_allclose(scores, exact, rtol=1e-6)
    best, places = jax.lax.top_k(exact, 4)
    np.testing.assert_array_equal(chosen, places)
    scale = options.scale if kind is BiasedMixture else 1
    np.testing.assert_allclose(shares, scale * best / best.sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.by_default("64")
@pytest.mark.parametrize("num", [4, 64])
def test_arithmetic_does_not_grow_with_the_number_of_experts(num):
    chosen = jnp.arange(8192, dtype=jnp.int32).reshape(4096, 2) % num
    block = expert_blocks._block_size(chosen.size, num)
    slots, experts = expert_blocks._slots(chosen.reshape(-1), num, block)
    assert len(set(slots.tolist())) == chosen.size
    np.testing.assert_array_equal(experts[slots // block], chosen.reshape(-1))
    for bytes_of_one in (1, 2**20, 2**27):
        weights = jax.ShapeDtypeStruct((num, bytes_of_one // 4 or 1), jnp.float32)
        at_once = expert_blocks._blocks_at_once(weights, experts.size, block)
        turns = -(-experts.size // at_once)
        assert turns * at_once < experts.size + turns
        assert at_once <= max(1, block // 2)
    assert experts.size * block <= 1.25 * chosen.size


def test_an_even_load_costs_least():
    num, per_token = 4, 2
    even = jnp.array([[0, 1], [2, 3]] * 8)
    probabilities = jnp.full((16, num), 0.25)
    assert float(balancing_loss(tally(even, probabilities, None))) == pytest.approx(per_token)
    skewed = jnp.zeros_like(even).at[:, 1].set(1)
    leaning = jnp.array([[0.5, 0.4, 0.05, 0.05]] * 16)
    assert float(balancing_loss(tally(skewed, leaning, None))) > per_token
    none = tally(even, probabilities, jnp.zeros(16, bool))
    assert float(balancing_loss(none)) == 0.0
