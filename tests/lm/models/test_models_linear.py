"""Linear attention against its definition, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from megatrain_jax._src.lm.models.delta_rule import delta_rule_and_state, short_convolution
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule


def arrays(rows: int, length: int, *channels: int, decay: float = 1.0):
    """Queries, keys that are much alike, values, logarithms of decays, and rates.

    With 8 channels, each channel of keys has its own decay.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(rows, length, 2, 8)) for _ in range(2))
    k = k + 2 * rng.normal(size=(1, 1, 2, 8))
    v = rng.normal(size=(rows, length, 4, 6))
    log_decay, rate = (rng.random((rows, length, 4, *more)) for more in (channels, ()))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, -decay * log_decay, rate)]


def documents(rows: int, length: int, *starts: int) -> np.ndarray:
    """Numbers of documents that begin at 0 and at `starts`; the last one is padding."""
    number = np.searchsorted(starts, np.arange(length), side="right") + 1
    return np.tile(np.where(number > len(starts), 0, number).astype(np.int32), (rows, 1))


def defined(q, k, v, log_decay, rate, starts):
    """The rule as its definition has it: one token after the other."""
    heads, width = v.shape[2], q.shape[3]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))

    def step(state, token):
        q, k, v, log_decay, rate, start = token
        decay = jnp.exp(log_decay).reshape(*v.shape[:2], -1, 1)
        state = jnp.where(start, 0.0, state * decay)
        wrong = v - jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + jnp.einsum("bhk,bhv->bhkv", k, wrong * rate[..., None])
        return state, jnp.einsum("bhk,bhkv->bhv", q / width**0.5, state)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, rate)]
    state = jnp.zeros((q.shape[0], heads, width, v.shape[3]))
    _, out = jax.lax.scan(step, state, (*tokens, starts))
    return jnp.moveaxis(out, 0, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("channels", [(), (8,)])
@pytest.mark.parametrize(
    ("length", "starts", "span_bytes"),
    [
        (70, (), 2**25),
        # Spans of two chunks; one document fills a chunk, one begins in the middle of one and
        # ends in that of another, and one has a token.
        (300, (64, 128, 150, 256, 257, 290), 2**14),
    ],
)
def test_chunks_give_what_the_definition_gives(length, starts, span_bytes, channels):
    def rule(*args):
        return delta_rule_and_state(*args, span_bytes=span_bytes)[0]

    given = arrays(2, length, *channels)
    weights = np.random.default_rng(1).normal(size=given[2].shape)
    segments = documents(2, length, *starts) if starts else None
    begins = np.isin(np.arange(length), (0, *starts))

    def both(function, *more):
        def loss(*args):
            out = function(*args, *more)
            return jnp.sum(out * weights), out

        gradients, out = jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(*given)
        return [out, *gradients]

    want = both(defined, begins)
    for found, expected in zip(both(rule, segments), want, strict=True):
        error = np.linalg.norm(found - expected)
        assert error <= 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("channels", [(), (8,)])
# Within a chunk, at the border of two, and within a chunk that begins with a state.
@pytest.mark.parametrize("start", [40, 64, 100])
def test_a_document_sees_nothing_of_another_one(start, channels):
    q, k, v, log_decay, rate = arrays(1, 150, *channels, decay=0.05)  # so that nothing fades away
    args = (log_decay, rate, jnp.asarray(documents(1, 150, start, 140)))
    changed = gated_delta_rule(q, k.at[:, :start].add(1.0), v.at[:, :start].set(1e4), *args)
    np.testing.assert_array_equal(gated_delta_rule(q, k, v, *args)[:, start:], changed[:, start:])


def test_a_convolution_ends_at_its_document():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 20, 3)), rng.normal(size=(3, 1, 4))
    segments = documents(2, 20, 2, 3, 9)
    expected = np.zeros_like(x)
    for row, at in np.ndindex(2, 20):
        for back in range(min(4, at + 1)):
            if segments[row, at - back] == segments[row, at]:
                expected[row, at] += x[row, at - back] * weight[:, 0, 3 - back]
    convolve = jax.jit(short_convolution)
    found = convolve(x.astype(np.float32), weight, segments)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    whole = convolve(x.astype(jnp.bfloat16), weight)
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_allclose(whole[:, :2].astype(np.float32), expected[:, :2], atol=0.05)


def sizes_of(jaxpr) -> list[int]:
    """Returns the number of elements of all arrays of a jaxpr, those of inner ones too."""
    found = []
    for eqn in jaxpr.eqns:
        found += [v.aval.size for v in eqn.outvars if hasattr(v.aval, "size")]
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, jex.ClosedJaxpr | jex.Jaxpr):
                    found += sizes_of(getattr(inner, "jaxpr", inner))
    return found


def test_memory_grows_with_the_length_and_not_with_its_square():
    def largest(length: int) -> int:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(1, length)]
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(*args):
            return jnp.sum(delta_rule_and_state(*args, span_bytes=2**18)[0])

        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=range(5)))(*shapes, segments)
        return max(sizes_of(jaxpr.jaxpr))

    short, long = largest(4096), largest(16384)
    # The values of all tokens, up to the end of their last span, are the largest array.
    assert 16384 * 4 * 6 <= long < 1.1 * 16384 * 4 * 6 and long < 4.2 * short


@pytest.mark.parametrize("channels", [(), (8,)])
def test_decays_between_tokens_are_as_exact_as_token_by_token(channels):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 64, 1, 8)).astype(np.float32)
    v = rng.normal(size=(1, 64, 2, 8)).astype(np.float32)
    log_decay = -np.exp(rng.normal(size=(1, 64, 2, *channels)) + 1).astype(np.float32)
    state, expected = np.zeros((2, 8, 8)), np.zeros((64, 2, 8))
    for t in range(64):
        added = k[0, t, 0].astype(np.float64)[:, None] * v[0, t][:, None, :]
        state = state * np.exp(log_decay[0, t].astype(np.float64)).reshape(2, -1, 1) + added
        expected[t] = q[0, t, 0] @ state
    q, k, v, log_decay = map(jnp.asarray, (q, k, v, log_decay))
    found = gated_delta_rule(q, k, v, log_decay, None)
    # Rounded sums of decays, down to -300, would make an error of 1.4e-6.
    assert np.linalg.norm(found[0] - expected) <= 3e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize("channels", [(), (8,)])
def test_gradients_of_decays_are_as_exact_as_their_own_size(channels):
    rng = np.random.default_rng(0)
    length, decays = 130, -np.exp(2 * rng.normal(size=(1, 130, 2, *channels))).astype(np.float32)
    q, k = rng.normal(size=(2, 1, length, 1, 8)).astype(np.float32)
    v, weights = rng.normal(size=(2, 1, length, 2, 8)).astype(np.float32)

    def loss(log_decay):
        mixed = gated_delta_rule(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), log_decay, None)
        return jnp.sum(mixed * weights)

    found = jax.jit(jax.grad(loss))(jnp.asarray(decays))
    wide = [x[0].astype(np.float64) for x in (q[:, :, 0], k[:, :, 0], v, weights, decays)]
    q, k, v, weights, log_decay = wide
    log_decay = log_decay.reshape(length, 2, -1)  # one channel, or all
    sums = np.cumsum(log_decay, axis=0)
    products = np.einsum("ic,jc->ijc", q, k) if channels else (q @ k.T)[..., None]
    products = products[:, :, None] * np.einsum("ihd,jhd->ijh", weights, v)[..., None]
    products *= np.exp(np.minimum(sums[:, None] - sums, 0.0))
    expected = np.stack([products[s:, :s].sum((0, 1)) for s in range(length)])
    found = found.reshape(1, length, 2, -1)
    # As the gradient of a factor of all decays weighs them: a large decay's is small by itself.
    error = np.abs(found[0] - expected) * -log_decay
    assert np.linalg.norm(error) <= 5e-7 * np.linalg.norm(expected * log_decay)
