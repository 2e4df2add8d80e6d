"""The gated delta rule in chunks of tokens, with packed documents, and a short convolution.

State-space layers (Mamba-2) use the same chunks without the rule's corrections.

A head of linear attention keeps a state, a matrix that maps keys to values. Each token decays the
state and replaces the value stored for the token's key (https://arxiv.org/abs/2412.06464). Done
token by token, that is a long loop of small steps. Instead, all corrections within a chunk are one
triangular system (https://arxiv.org/abs/2406.06484), and a loop runs over chunks: everything is a
matrix product, and nothing is as large as length × length. All but inputs and outputs is in fp32,
as in Transformers.

On a Hopper GPU the kernels of `jla.ops` compute the rule, as primitives. They keep the state in
fp32, and read and write everything else in the dtype of the values. Backward computes the forward's
factors again, so nothing but the operands is saved.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from megatrain_jax._src.common.kernel_primitives import KernelCosts, define
from megatrain_jax._src.lm.models.past import Past

# Tokens per chunk, and the size up to which a triangular matrix is inverted without halving.
_CHUNK = 64  # also of the kernels
_BLOCK = 16
# Backward recomputes the prepared chunks: it saves the state before each span of chunks, and holds
# the intermediate values of one span, about twenty times these bytes, and with a decay for each
# channel about 36 times.
SPAN_BYTES = 2**25
Keys = Float[Array, "rows length key_heads key_dim"]
Values = Float[Array, "rows length heads value_dim"]
Numbers = Float[Array, "rows length heads"]
Decays = Numbers | Float[Array, "rows length heads key_dim"]
Segments = Integer[Array, "rows length"]
State = Float[Array, "rows key_heads group key_dim value_dim"]


class _Chunk(NamedTuple):
    """A chunk of tokens, or several stacked along a first axis.

    Attributes:
        q: Queries (rows, key_heads, tokens, key_dim), normalised and scaled.
        k: Keys (rows, key_heads, tokens, key_dim), normalised.
        v: Values (rows, key_heads, group, tokens, value_dim).
        log_decay: Logarithm of each token's decay factor for the state (rows, key_heads, group,
            tokens), or of the factors for each channel of keys (..., tokens, key_dim).
        rate: Fraction of a key's value that each token replaces (rows, key_heads, group, tokens);
            None if nothing is replaced.
        run: Number of each token's document, ascending (rows, tokens).
        before: Number of the document of the token before the chunk (rows,).
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    rate: Array | None
    run: Array
    before: Array


class _Prepared(NamedTuple):
    """A chunk prepared for the loop: its effect on the state, and the state's on its results.

    Attributes:
        corrections: The corrected values for an empty state (..., tokens, value_dim).
        known: Keys that look up the values stored in the state (..., tokens, key_dim); None if
            values are not corrected.
        read: Queries that read the state (..., tokens, key_dim).
        written: Keys under which values are written (..., tokens, key_dim).
        scores: Weights of the chunk's own values in its results (..., tokens, tokens).
        kept: Factor by which the chunk decays the previous state, for all channels of keys or for
            each (..., 1 or key_dim).
    """

    corrections: Array
    known: Array | None
    read: Array
    written: Array
    scores: Array
    kept: Array


# Jitted so that a model's layers are traced once; later layers find the first one's trace.
@functools.partial(jax.jit, static_argnames="span_bytes")
def delta_rule_and_state(
    q: Keys,
    k: Keys,
    v: Values,
    log_decay: Decays,
    rate: Numbers | None,
    segments: Segments | None = None,
    *,
    span_bytes: int = SPAN_BYTES,
) -> tuple[Values, State]:
    """Returns the result of `gated_delta_rule` by chunks, and the state after the last token.

    Args:
        q: See `gated_delta_rule`.
        k: See `gated_delta_rule`.
        v: See `gated_delta_rule`.
        log_decay: See `gated_delta_rule`.
        rate: See `gated_delta_rule`.
        segments: See `gated_delta_rule`.
        span_bytes: Bytes, in fp32, of queries and values of the chunks that are prepared at once.
    """
    rows, length, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    group = heads // key_heads
    tokens = min(_CHUNK, _BLOCK * -(-length // _BLOCK))
    chunks = -(-length // tokens)
    one = 4 * rows * heads * tokens * (key_dim + value_dim)
    spans = -(-chunks // max(1, span_bytes // one))
    span = -(-chunks // spans)  # all about equally large
    total = spans * span * tokens

    def split(x: Array, to: int) -> Array:
        """(rows, length, ...) to (spans, chunks, rows, ...) with the chunk's tokens as axis `to`.

        The padding is zeros, which write nothing.
        """
        x = jnp.pad(x, [(0, 0), (0, total - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(rows, -1, span, tokens, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 0, 2), 3, to)

    by_head = rows, length, key_heads, group
    run = _runs(segments, rows, length)
    before = jnp.pad(run, ((0, 0), (1, total - length)))[:, :total:tokens]
    items = _Chunk(
        q=split(q, -2),
        k=split(k, -2),
        v=split(v.reshape(*by_head, value_dim), -2),
        log_decay=split(log_decay.reshape(*by_head, *log_decay.shape[3:]), 2 - log_decay.ndim),
        rate=None if rate is None else split(rate.reshape(by_head), -1),
        run=split(run, -1),
        before=jnp.moveaxis(before.reshape(rows, -1, span), 0, 2),
    )
    state = jnp.zeros((rows, key_heads, group, key_dim, value_dim), jnp.float32)
    state, out = jax.lax.scan(jax.checkpoint(_one_span), state, items)
    # (spans, chunks, rows, key_heads, group, tokens, value_dim); the first two are in token order.
    out = jnp.moveaxis(jnp.moveaxis(out, 5, 2), 3, 0).reshape(rows, total, heads, value_dim)
    return out[:, :length], state


def _runs(segments: Segments | None, rows: int, length: int) -> Int[Array, "rows length"]:
    """Returns document numbers counted from 0: [7, 7, 3, 3, 0] becomes [0, 0, 1, 1, 2]."""
    if segments is None:
        return jnp.zeros((rows, length), jnp.int32)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def _one_span(state: State, raw: _Chunk) -> tuple[State, Array]:
    """Passes the state through the chunks of a span; results have the dtype of the values."""
    dtype = raw.v.dtype
    q, k, v = (x.astype(jnp.float32) for x in (raw.q, raw.k, raw.v))
    rate = None if raw.rate is None else raw.rate.astype(jnp.float32)
    if rate is not None:
        q, k = _unit(q) / math.sqrt(q.shape[-1]), _unit(k)
    prepared = _prepare(raw._replace(q=q, k=k, v=v, rate=rate))

    def step(state: State, chunk: _Prepared) -> tuple[State, Array]:
        values = chunk.corrections
        if chunk.known is not None:
            values = values - chunk.known @ state
        out = chunk.read @ state + chunk.scores @ values
        state = state * chunk.kept[..., None]
        return state + jnp.swapaxes(chunk.written, -1, -2) @ values, out.astype(dtype)

    return jax.lax.scan(step, state, prepared)


def one_token(
    state: State,
    q: Float[Array, "rows key_heads key_dim"],
    k: Float[Array, "rows key_heads key_dim"],
    v: Float[Array, "rows heads value_dim"],
    log_decay: Float[Array, "rows heads"] | Float[Array, "rows heads key_dim"],
    rate: Float[Array, "rows heads"] | None,
) -> tuple[Float[Array, "rows heads value_dim"], State]:
    """Returns the result of `gated_delta_rule` for one token, and the state after it.

    Args:
        state: The state before the token.
        q: See `gated_delta_rule`.
        k: See `gated_delta_rule`.
        v: See `gated_delta_rule`.
        log_decay: See `gated_delta_rule`.
        rate: See `gated_delta_rule`; None for a sum without corrections, of q and k as they are.
    """
    rows, key_heads, group, _, value_dim = state.shape
    by_head = (rows, key_heads, group)
    q, k = (x.astype(jnp.float32) for x in (q, k))
    if rate is not None:
        q, k = _unit(q) / math.sqrt(q.shape[-1]), _unit(k)
    q, k = (x[:, :, None, None] for x in (q, k))
    state = state * jnp.exp(log_decay).reshape(*by_head, -1, 1)
    values = v.astype(jnp.float32).reshape(*by_head, 1, value_dim)
    if rate is not None:
        rate = rate.astype(jnp.float32).reshape(by_head)[..., None, None]
        values = rate * (values - k @ state)
    state = state + jnp.swapaxes(k, -1, -2) * values
    out = q @ state
    return out.reshape(v.shape).astype(v.dtype), state


def _unit(x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _prepare(chunk: _Chunk) -> _Prepared:
    """Solves a chunk's corrections; all axes before the tokens are batch axes.

    With `decay[i, j]` the decay from token j to token i of the same document, the corrected values
    solve `values_i = rate_i (v_i - sum_j<i decay[i, j] (k_i k_j) values_j)`, less the value that
    the previous state stores for the key.
    """
    k = chunk.k
    same = (chunk.run[..., :, None] == chunk.run[..., None, :])[..., None, None, :, :]
    seen = jnp.tril(jnp.ones(same.shape[-2:], bool)) & same
    knows = (chunk.run == chunk.before[..., None])[..., None, None, :, None]
    by_channel = chunk.log_decay.ndim == chunk.v.ndim
    matches, fading, written = (_by_channel if by_channel else _by_head)(k, chunk.log_decay, seen)
    corrections, known = chunk.v, None
    if chunk.rate is not None:
        rate = chunk.rate[..., None]
        inverse = _inverse(jnp.tril(matches(k) * rate, -1))
        corrections = inverse @ (chunk.v * rate)
        known = inverse @ (k[..., None, :, :] * jnp.where(knows, rate * fading, 0.0))
    return _Prepared(
        corrections=corrections,
        known=known,
        read=chunk.q[..., None, :, :] * jnp.where(knows, fading, 0.0),
        written=written(),
        scores=matches(chunk.q),
        kept=jnp.where(knows[..., -1, :], fading[..., -1, :], 0.0),
    )


Matches = Callable[[Float[Array, "*batch tokens key_dim"]], Float[Array, "*batch tokens tokens"]]


def _by_head(
    k: Float[Array, "*batch tokens key_dim"],
    log_decay: Float[Array, "*batch group tokens"],
    seen: Bool[Array, "*batch group tokens tokens"],
) -> tuple[Matches, Array, Callable[[], Array]]:
    """Returns a chunk's products with keys and its decays, for one decay factor per head.

    Args:
        k: Keys.
        log_decay: Logarithm of each token's decay.
        seen: Whether token j, the last axis, is before token i in its document, or is token i.

    Returns:
        A function from vectors like `k` to their products with the keys that they see, decayed from
        token j to token i; the decays up to each token, (..., tokens, 1); and a function that
        returns the keys, decayed from each token to the last one, 0 in other documents.
    """
    between, summed = _running_sums(log_decay)
    # The logarithm is masked, not the result, because it may be large where nothing is seen.
    decay = jnp.exp(jnp.where(seen, between, -jnp.inf))

    def matches(x: Array) -> Array:
        return (x @ jnp.swapaxes(k, -1, -2))[..., None, :, :] * decay

    def written() -> Array:
        return k[..., None, :, :] * decay[..., -1, :, None]

    return matches, jnp.exp(summed)[..., None], written


def _by_channel(
    k: Float[Array, "*batch tokens key_dim"],
    log_decay: Float[Array, "*batch group tokens key_dim"],
    seen: Bool[Array, "*batch group tokens tokens"],
) -> tuple[Matches, Array, Callable[[], Array]]:
    """The same for one factor per channel of keys; decays have the shape (..., tokens, key_dim).

    Each channel is decayed before the products sum the channels. In pairs of blocks of 1, 2, 4, ...
    tokens, vectors of the second block are decayed from its start, and keys of the first one up to
    its end, so that no factor is above 1, however strong the decay. Any two tokens are in the two
    blocks of one such pair.
    """
    n, k = k.shape[-2], k[..., None, :, :]
    sums = np.tri(n, dtype=np.float32), np.tri(n, k=-1, dtype=np.float32).T
    fading, left = (jnp.exp(_exact(ones, log_decay)) for ones in sums)
    sizes = [2**i for i in range((n - 1).bit_length())]
    decays = [jnp.exp(_exact(_to_border(n, size), log_decay)) for size in sizes]

    def matches(x: Array) -> Array:
        x = x[..., None, :, :]
        total = jnp.eye(n) * jnp.sum(x * k, axis=-1, keepdims=True)
        for size, decay in zip(sizes, decays, strict=True):
            product = (x * decay) @ jnp.swapaxes(k * decay, -1, -2)
            total = jnp.where(_corners(n, size), product, total)
        return jnp.where(seen, total, 0.0)

    return matches, fading, lambda: jnp.where(seen[..., -1, :, None], k * left, 0.0)


def _to_border(n: int, size: int) -> Float[np.ndarray, "n n"]:
    """Returns 1 at [t, s] if s is between t and the border of the two blocks around t, else 0.

    In a second block, that is up to t, and in a first one, after t.
    """
    t, s = np.ogrid[:n, :n]
    second = t // size % 2 == 1
    return ((t // size == s // size) & np.where(second, s <= t, s > t)).astype(np.float32)


def _running_sums(
    x: Float[Array, "*batch tokens"],
) -> tuple[Float[Array, "*batch tokens tokens"], Float[Array, "*batch tokens"]]:
    """Returns the sums of the numbers after token j up to token i, at [i, j], and all up to i.

    Each sum is computed from its own numbers, in blocks, because a difference of two larger sums
    would have their rounding errors. A number's gradient, too, sums only gradients of its own sums.
    Sums at [i, j] with j > i mean nothing.
    """
    blocks = x.reshape(*x.shape[:-1], -1, _BLOCK)
    num = blocks.shape[-2]
    up_to = _exact(blocks, np.tri(_BLOCK, dtype=np.float32).T)
    after = _exact(blocks, np.tri(_BLOCK, k=-1, dtype=np.float32))
    within = _exact(blocks, _pairs(_BLOCK, 0)).reshape(*blocks.shape, _BLOCK)
    totals = up_to[..., -1]
    # In different blocks: the end of j's block, the blocks between, and i's block up to i.
    gaps = _exact(totals, _pairs(num, 1)).reshape(*totals.shape, num)
    rest = up_to[..., None] + gaps[..., None, :]
    apart = rest[..., None] + after[..., None, None, :, :]
    own = np.eye(num, dtype=bool)[:, None, :, None]
    between = jnp.where(own, within[..., None, :], apart)
    before = _exact(totals, np.tri(num, k=-1, dtype=np.float32).T)
    summed = up_to + before[..., None]
    return between.reshape(*x.shape, x.shape[-1]), summed.reshape(x.shape)


def _pairs(n: int, less: int) -> Float[np.ndarray, "n pairs"]:
    """Returns 1 at [s, (i, j)] for j < s <= i - less, else 0."""
    s, i, j = np.ogrid[:n, :n, :n]
    return ((j < s) & (s <= i - less)).reshape(n, n * n).astype(np.float32)


@jax.custom_vjp
def _inverse(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Returns (I + lower)^-1 for matrices that are zero on and above their diagonals.

    A triangular solver would work row by row. Here both halves are inverted at once and then
    joined: [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]].
    """
    n = lower.shape[-1]
    if n <= _BLOCK or n % 2:
        return _inverse_of_block(lower)
    half = n // 2
    first, second = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_exact(_exact(second, lower[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _inverse_of_block(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Joins diagonal blocks of 1, 2, 4, ... rows by products of whole matrices."""
    n = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(n, dtype=lower.dtype), lower.shape)
    size = 1
    while size < n:
        off = jnp.where(_corners(n, size), lower, 0.0)
        inverse = inverse - _exact(_exact(inverse, off), inverse)
        size *= 2
    return inverse


def _corners(n: int, size: int) -> Bool[Array, "n n"]:
    """Mask of the off-diagonal corners: rows in a pair's second block, columns in its first.

    For example, (1, 0) and (3, 2) for four rows and size 1.
    """
    block = jnp.arange(n) // size
    return (block[:, None] == block[None] + 1) & (block[None] % 2 == 0)


def _exact(
    a: Float[Array, "*batch n m"] | Float[np.ndarray, "n m"],
    b: Float[Array, "*batch m l"] | Float[np.ndarray, "m l"],
) -> Float[Array, "*batch n l"]:
    # Rounding errors would be multiplied again and again.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _inverse_forward(lower):
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_exact(_exact(transposed, cotangent), transposed), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def short_convolution(
    x: Float[Array, "rows length channels"],
    weight: Float[Array, "channels 1 taps"],
    segments: Segments | Past | None = None,
) -> Float[Array, "rows length channels"]:
    """Sums each channel's last tokens with weights of the channel, within documents.

    Args:
        x: The channels of each token.
        weight: Weights as in PyTorch's `Conv1d`: the last one belongs to the token itself.
        segments: The document of each token; None if each row is one document. While text is
            generated, a `Past` with the tokens before.

    Returns:
        An array with the dtype of `x`; sums are in fp32.
    """
    if isinstance(segments, Past):
        return segments.convolve(x, weight)
    taps = weight.shape[-1]
    run = None if segments is None else _runs(segments, *x.shape[:2])
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(min(taps, x.shape[1])):
        factor = weight[:, 0, taps - 1 - back].astype(jnp.float32)
        moved = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]].astype(jnp.float32)
        if run is not None and back:
            there = jnp.pad(run, ((0, 0), (back, 0)), constant_values=-1)[:, : x.shape[1]]
            moved = jnp.where((there == run)[..., None], moved, 0.0)
        total = total + moved * factor
    return total.astype(x.dtype)


_WIDTHS = (64, 128)
_DTYPES = (jnp.bfloat16, jnp.float16)


def fits(q: Any, k: Any, v: Any, log_decay: Any) -> bool:
    """Whether the kernels support operands of these dtypes and shapes: one decay per head."""
    widths = {k.shape[-1], v.shape[-1]}
    same = q.dtype == k.dtype == v.dtype and v.dtype in _DTYPES
    return same and widths.issubset(_WIDTHS) and v.shape[1] > 0 and log_decay.ndim == 3


@jax.custom_vjp
def delta_rule(q: Any, k: Any, v: Any, log_decay: Any, rate: Any, segments: Any) -> Any:
    """Computes `gated_delta_rule`; its documents may be None."""
    return _forward_p.bind(*_operands(q, k, v, log_decay, rate, segments))


def _operands(*given: Any) -> list[Any]:
    return [array for array in given if array is not None]


def _forward(q, k, v, log_decay, rate, segments):
    saved = q, k, v, log_decay, rate, segments
    return delta_rule(*saved), saved


def _backward(saved, cotangent):
    *differentiated, segments = saved
    found = _backward_p.bind(*_operands(cotangent, *saved))
    dsegments = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
    return *found, dsegments


delta_rule.defvjp(_forward, _backward)


# Jitted so that the layers of a function share one lowering.
@jax.jit
def _on_gpu(q, k, v, log_decay, rate, segments=None):
    from jla.ops import linear_attention  # pyright: ignore[reportMissingImports]

    return linear_attention(
        "gated_deltanet",
        q,
        k,
        v,
        g=log_decay,
        beta=rate,
        segment_ids=segments,
        use_qk_l2norm=True,
        impl="mosaic_gpu",
    )[0]


def _elsewhere(q, k, v, log_decay, rate, segments=None):
    return delta_rule_and_state(q, k, v, log_decay, rate, segments)[0]


def _gradients_of(compute):
    @jax.jit
    def gradients(cotangent, *operands):
        differentiated, segments = operands[:5], operands[5:]
        return jax.vjp(lambda *args: compute(*args, *segments), *differentiated)[1](cotangent)

    return gradients


def _flops(eqn: Any, *, first: int, times: int) -> int:
    """Counts the operations of the rule in chunks, `times` over; keys are operand `first + 1`.

    Within a chunk, keys meet keys and queries, and weights meet values twice; the state is read by
    keys and by queries and written once.
    """
    keys, values = (eqn.invars[first + n].aval.shape for n in (1, 2))
    width, value_width = keys[-1], values[-1]
    of_token = 4 * _CHUNK * (width + value_width) + 6 * width * value_width
    return times * math.prod(values[:3]) * of_token


def _workspace(eqn: Any, *, first: int, has_gradients: bool) -> int:
    keys, values = (eqn.invars[first + n].aval.shape for n in (1, 2))
    itemsize = eqn.outvars[0].aval.dtype.itemsize
    tokens = math.prod(values[:3])  # times heads of values
    # Normalised queries and keys, and the inverse of each chunk's corrections. XLA's figure on an
    # H200, for 8,192 tokens, 16 heads of keys and 32 of values of width 128, is 98 MiB; this, 96.
    forward = 2 * math.prod(keys) * itemsize + tokens * _CHUNK * itemsize
    if not has_gradients:
        return forward
    # Also the states before all chunks and their gradients: 389 MiB; this, 384.
    states = 2 * tokens * keys[-1] * values[-1] * itemsize // _CHUNK
    return forward + states + tokens * _CHUNK * itemsize


_PURPOSE = "the gated delta rule"
_forward_p = define(
    "delta_rule_forward",
    lambda q, k, v, *_: v,
    _on_gpu,
    _elsewhere,
    KernelCosts(
        purpose=_PURPOSE,
        flops=functools.partial(_flops, first=0, times=1),
        workspace=functools.partial(_workspace, first=0, has_gradients=False),
    ),
)
_backward_p = define(
    "delta_rule_backward",
    lambda cotangent, *operands: list(operands[:5]),
    _gradients_of(_on_gpu),
    _gradients_of(_elsewhere),
    # The gradient takes about three times as many operations. Its first operand is the cotangent.
    KernelCosts(
        purpose=_PURPOSE,
        flops=functools.partial(_flops, first=1, times=3),
        workspace=functools.partial(_workspace, first=1, has_gradients=True),
    ),
    several=True,
)
