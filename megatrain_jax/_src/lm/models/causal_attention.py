"""Causal attention with windows, packed documents and capped logits.

cuDNN computes it on GPUs, but for capped logits and sinks. The documents of a packed row are
separated by a T x T mask, or in long rows by extra dimensions of queries and keys, which carry the
documents' numbers, if cuDNN accepts heads of that width. All remaining cases are computed here, a
piece of the queries at a time.

Sparse attention sees the keys that an indexer has chosen, kept as a bit for each pair of tokens.
With images there is also attention between all patches in a vision tower, and in a decoder's rows
attention between the tokens of an image in both directions.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, UInt8

from megatrain_jax import trace_target
from megatrain_jax._src.common import attention_kernel, checks
from megatrain_jax._src.common.capability import capability_here
from megatrain_jax._src.lm.models.arrays import check_array
from megatrain_jax._src.lm.models.past import Past
from megatrain_jax._src.lm.models.rotary import positions_in

# Bytes of fp32 scores allowed for one piece of the queries.
_PIECE_BYTES = 2**28
# The maximum number of spans of queries, each with only the keys it needs. Eight spans compute 56%
# of the full square; infinitely many would compute half.
_MAX_SPANS = 8
# The longest rows with a mask where marks would do, and where they wouldn't. Forward and backward
# of 32 heads of 128 elements on an H200: 8.4 ms with a mask and 9.7 ms with marks for 16 rows of
# 2,048 tokens, 32.0 and 29.3 ms for 4 of 8,192, but masks save 2.0 and 1.7 GiB. A row of 16,384
# tokens has a mask of half a GiB.
_MASKED, _LONGEST_MASKED = 8192, 16_384
# Extra elements per query for the number of a document: two for each of its bits.
_MARK = 64
# The minimum drop of a score for every bit in which two documents differ: exp(-2048) is 0 in fp32,
# even if one document's scores differ by a thousand.
_APART = 2048.0
Queries = Float[Array, "rows length heads head_dim"]
Keys = Float[Array, "rows length kv_heads head_dim"]
Segments = Integer[Array, "rows length"]
Bits = UInt8[Array, "rows length bytes"]
"""A bit for each pair of a query and a key: whether the query attends to the key."""


def attention(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    segments: Segments | Past | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    piece: int | None = None,
) -> Queries:
    """Lets each token attend to itself and the tokens before it.

    Args:
        q: Queries, (rows, length, heads, head_dim).
        k: Keys, (rows, length, kv_heads, head_dim); kv_heads divides heads.
        v: Values, as `k`.
        segments: The document of each token, integers (rows, length): tokens attend only within it.
            While text is generated, a `Past` that computes attention with its cache.
        window: Number of tokens each token attends to, itself included; None for all.
        chunk: Each document is divided into chunks of this number of tokens, and tokens attend only
            within their chunk; None for one chunk.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        scale: Factor of the scores; None for 1 / sqrt(head_dim).
        sinks: For each head, the score of an extra key with value zero that every query sees.
        piece: Number of queries computed at a time where cuDNN isn't used; None for as many as have
            scores of a quarter of a GiB.

    Returns:
        An array with the shape and dtype of `q`; softmax is computed in fp32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't match, or a number is out of bounds.
    """
    if isinstance(segments, Past):
        options = {"window": window, "chunk": chunk, "softcap": softcap, "scale": scale}
        return segments.attend(q, k, v, sinks=sinks, **options)
    _check(q, k, v, segments)
    if sinks is not None:
        check_array("sinks", sinks, "(heads,)", num_axes=1)
        if sinks.shape != q.shape[2:3]:
            raise ValueError(f"`sinks` has shape {sinks.shape}, not {q.shape[2:3]} of `q`")
    for name, value in (("window", window), ("chunk", chunk), ("piece", piece)):
        if value is not None:
            checks.integer(name, value, other=", or None")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None:
            checks.number(name, value, above=0)
    if chunk is not None:
        segments = _in_chunks(segments, q.shape[:2], chunk)
    return _in_rows(q, k, v, segments, window, softcap, scale, sinks, piece)


def _in_rows(
    q, k, v, segments, window, softcap, scale, sinks=None, piece=None, images=None, ahead=0
) -> Queries:
    """Computes attention within rows; see `attention` and `in_spans`."""
    length = q.shape[1]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    # A window of the full length restricts nothing, and attention without a window is faster.
    if window is not None and window >= length:
        window = None
    is_causal = images is None
    fits = fits_cudnn(q, packed=segments is not None or not is_causal)
    if softcap is None and sinks is None and fits and (is_causal or length <= _LONGEST_MASKED):
        return _by_cudnn(q, k, v, segments, scale, window, causal=is_causal, images=images)
    piece = min(piece or piece_of(q.shape), length)
    spans = tuple(spans_of(length, piece))
    return in_spans(q, k, v, segments, sinks, spans, piece, window, softcap, scale, images, ahead)


def _by_cudnn(
    q: Queries,
    k: Keys,
    v: Keys,
    segments: Segments | None,
    scale: float,
    window: int | None,
    *,
    causal: bool,
    images: Segments | None = None,
    bits: Bits | None = None,
) -> Queries:
    """Computes attention by cuDNN, or in a plan as if by it; see `attention` and `in_spans`."""
    length, head_dim = q.shape[1], q.shape[-1]
    mask = None
    if segments is not None and images is None and _marks_fit(q, window):
        q, k, v = mark(q, k, v, segments, scale)
    elif causal and segments is not None or images is not None or bits is not None:
        own, others = (segments, images, bits), (segments, images)
        mask, window = _seen(own, others, 0, length, k.shape[1], window)[:, 0], None
    elif segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    if trace_target().card is not None:
        return attention_kernel.attend(q, k, v, mask, window, causal=causal)[..., :head_dim]
    sides = None if window is None else (window - 1, 0)
    options: dict[str, Any] = {"is_causal": causal, "local_window_size": sides, "mask": mask}
    mixed = jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn", **options)
    return mixed[..., :head_dim]


def _in_chunks(segments: Segments | None, shape: tuple[int, ...], size: int) -> Segments | None:
    """Returns numbers that differ between documents and between chunks of a document.

    For example, segments [1, 1, 1, 2, 2] in chunks of two tokens give [1, 1, 2, 3, 3].
    """
    if shape[1] <= size:
        return segments
    starts = positions_in(shape[1], segments) % size == 0
    return jnp.broadcast_to(jnp.cumsum(starts, axis=1, dtype=jnp.int32), shape)


# Jitted so that a model's layers are traced once; later layers find the first one's trace.
@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9, 11))
def in_spans(
    q, k, v, segments, sinks, spans, piece, window, softcap, scale, images=None, ahead=0, bits=None
) -> Queries:
    """Computes attention from the queries of each span to the keys it needs.

    Args:
        q: See `attention`.
        k: See `attention`.
        v: See `attention`.
        segments: See `attention`.
        sinks: See `attention`.
        spans: From `spans_of`.
        piece: See `attention`.
        window: See `attention`.
        softcap: See `attention`.
        scale: See `attention`.
        images: Numbers of the images of tokens, (rows, length), 0 for text: tokens of an image also
            attend to the later ones of the same image.
        ahead: Maximum number of later tokens that a token attends to.
        bits: The keys that each query attends to, from `choose_keys`; `segments` is None then.
    """
    attended = []
    for start, stop in spans:
        first = 0 if window is None else max(0, start - window + 1)
        last = min(stop + ahead, k.shape[1])
        keys = k[:, first:last], v[:, first:last]
        numbers = segments, images
        own = jax.tree.map(lambda x, at=slice(start, stop): x[:, at], (*numbers, bits))
        others = jax.tree.map(lambda x, at=slice(first, last): x[:, at], numbers)

        def attend(rows, own, at, keys=keys, first=first, others=others):
            return _attend(rows, keys, own, others, at - first, window, softcap, scale, sinks)

        attended.append(by_piece(attend, q[:, start:stop], own, start, piece))
    return attended[0] if len(attended) == 1 else jnp.concatenate(attended, axis=1)


def _check(q: Queries, k: Keys, v: Keys, segments: Segments | None) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_array(name, array, "(rows, length, heads, head_dim)", num_axes=4)
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != (rows, length, kv_heads, head_dim) or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"`k` has shape {k.shape}, but `q` {q.shape}: they must agree in all axes but heads, "
            "where that of `k` divides that of `q`"
        )
    if v.shape != k.shape:
        raise ValueError(f"`v` has shape {v.shape}, but `k` {k.shape}; they must be equal")
    if segments is not None:
        check_array("segments", segments, "(rows, length)", num_axes=2, of_integers=True)
        if segments.shape != (rows, length):
            raise ValueError(f"`segments` has shape {segments.shape}, not {(rows, length)} of `q`")


def mark(
    q: Queries, k: Keys, v: Keys, segments: jax.typing.ArrayLike, scale: float
) -> tuple[
    Float[Array, "rows length heads wider"],
    Float[Array, "rows length kv_heads wider"],
    Float[Array, "rows length kv_heads wider"],
]:
    """Widens heads so that tokens attend only within their document, without a mask.

    For each bit of its document's number, a query is extended by `size * (b, 1)` and a key by `size
    * (b, -1)`, where b is 1 or -1. Their product is 0 if the bits are equal and `-2 * size**2`
    otherwise; powers of two keep both exact. For example, a query in document 1 and a key in
    document 3 differ in the second bit: their score drops by `2 * size**2 * scale`, at least 2048,
    and becomes zero in the softmax.

    Returns:
        Queries, keys and values with heads of width head_dim + 64; the values are padded with
        zeros.
    """
    size = 2.0 ** math.ceil(math.log2(_APART / (2 * scale)) / 2)
    numbers = jnp.asarray(segments, jnp.int32)[:, :, None, None]
    bits = numbers >> jnp.arange(_MARK // 2, dtype=jnp.int32) & 1

    def behind(x: Array, second: int) -> Array:
        pairs = jnp.stack([2 * bits - 1, jnp.full_like(bits, second)], axis=-1)
        marks = size * pairs.astype(x.dtype).reshape(*x.shape[:2], 1, _MARK)
        return jnp.concatenate([x, jnp.broadcast_to(marks, (*x.shape[:3], _MARK))], axis=-1)

    return behind(q, 1), behind(k, -1), jnp.pad(v, [(0, 0)] * 3 + [(0, _MARK)])


def fits_cudnn(q: Queries, *, packed: bool) -> bool:
    """Whether cuDNN computes this attention on this GPU or the planned one.

    Args:
        q: The queries.
        packed: Whether tokens attend only to some of the earlier ones, such as their document's.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    length, _, head_dim = q.shape[1:]
    if length % 2:
        return False  # JAX 0.11 refuses to differentiate odd lengths
    if head_dim % 8 or head_dim > _widest_heads():
        return False
    return not packed or length <= _LONGEST_MASKED or _marks_fit(q, None)


def _marks_fit(q: Queries, window: int | None) -> bool:
    """Whether documents are separated by marks, not by a mask."""
    # A mask hides a window, too, but then cuDNN computes what lies before it.
    is_long = q.shape[1] > _MASKED or window is not None and 2 * window < q.shape[1]
    return is_long and q.shape[3] + _MARK <= _widest_heads()


def _widest_heads() -> int:
    """The largest head width that cuDNN supports on the GPU of the trace; 0 if none."""
    target = trace_target()
    if target.card is not None:
        return target.widest_heads
    capability = capability_here()
    if capability is None or capability < 8:  # as JAX requires for cuDNN's attention
        return 0
    return 256 if capability >= 9 else 128


def piece_of(shape: tuple[int, ...]) -> int:
    """Returns the number of queries computed at a time: a power of two, or all."""
    rows, length, heads, _ = shape
    fitting = max(16, _PIECE_BYTES // (4 * rows * heads * length))
    return min(length, 1 << (fitting.bit_length() - 1))


def spans_of(length: int, piece: int) -> list[tuple[int, int]]:
    """Returns spans of queries (start, stop); each needs only the keys before its own stop.

    For example, 100 queries in pieces of 8 are 13 pieces, so spans have 2 pieces: (0, 16), (16,
    32), ..., (96, 100).
    """
    pieces = -(-length // piece)
    step = piece * -(-pieces // _MAX_SPANS)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def by_piece(attend, q: Queries, own, start: int, piece: int) -> Array:
    """Calls `attend` for `piece` queries at a time; backward recomputes the scores.

    Args:
        attend: Function of some queries, their numbers, and the place of the first.
        q: The queries.
        own: Numbers of the queries: arrays (rows, length), or None.
        start: Place of the first query.
        piece: Number of queries of a call.
    """
    rows, length = q.shape[:2]
    count = -(-length // piece)
    if count == 1:
        # The scores of a single piece are small enough to be saved for backward.
        call = attend if start == 0 and piece >= length else jax.checkpoint(attend)
        return call(q, own, start)
    # Queries added as padding are cut off again below.
    split = [(0, 0), (0, count * piece - length)]

    def pieces(x: Array) -> Array:
        padded = jnp.pad(x, split + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, count, piece, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(item):
        return attend(*item)

    starts = start + piece * jnp.arange(count, dtype=jnp.int32)
    out = jax.lax.map(step, (pieces(q), jax.tree.map(pieces, own), starts))
    return jnp.moveaxis(out, 0, 1).reshape(rows, count * piece, *out.shape[3:])[:, :length]


def _attend(q, keys, own, others, offset, window, softcap, scale, sinks) -> Queries:
    """Attention of queries (rows, m, heads, head_dim) to keys (rows, n, kv_heads, head_dim).

    Args:
        q: The queries of a piece.
        keys: Keys and values.
        own: The documents and the images of queries, each (rows, m), and their chosen keys; None
            for one document per row, for no images, and for no choice.
        others: The documents and the images of keys, each (rows, n).
        offset: Number of the key that has the position of query 0.
        window: See `attention`.
        softcap: See `attention`.
        scale: See `attention`.
        sinks: See `attention`.
    """
    k, v = keys
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bmkgh,bnkh->bkgmn", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = _seen(own, others, offset, q.shape[1], k.shape[1], window)
    # Finite, because a padded query may see no key.
    scores = jnp.where(seen, scores, -1e30)
    if sinks is not None:
        # One more key with value zero: it takes a part of the softmax and contributes nothing.
        column = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgmn,bnkh->bmkgh", weights, v).reshape(q.shape)


def _seen(own, others, offset, num_queries, num_keys, window) -> Array:
    """The keys that each query attends to, as an array with the axes of scores; see `_attend`."""
    (segments, images, bits), (key_segments, key_images) = own, others
    if bits is not None:
        return jnp.unpackbits(bits, axis=-1, count=num_keys)[:, None, None] > 0
    here = offset + jnp.arange(num_queries)[:, None]
    there = jnp.arange(num_keys)
    seen = there <= here
    if images is not None:
        same = images[:, :, None] == key_images[:, None, :]
        seen = seen | (same & (images > 0)[:, :, None])
    if window is not None:
        seen &= there > here - window
    if segments is not None:
        seen = seen & (segments[:, :, None] == key_segments[:, None, :])
    return seen[:, None, None] if seen.ndim == 3 else seen


def attend_to_chosen(q: Queries, k: Keys, v: Keys, chosen: Bits, scale: float | None) -> Queries:
    """Computes `attention` to the keys from `choose_keys`; see there."""
    length, scale = q.shape[1], scale or 1 / math.sqrt(q.shape[3])
    if not fits_cudnn(q, packed=False):
        piece = piece_of(q.shape)
        spans = tuple(spans_of(length, piece))
        return in_spans(q, k, v, None, None, spans, piece, None, None, scale, bits=chosen)
    if length <= _LONGEST_MASKED:
        return _by_cudnn(q, k, v, None, scale, None, causal=True, bits=chosen)
    # Masks of some queries at a time.
    piece, attended = 1 << (_LONGEST_MASKED**2 // length).bit_length() - 1, []
    for start, stop in spans_of(length, piece):

        def attend(q, bits, _, k=k[:, :stop], v=v[:, :stop]):
            return _by_cudnn(q, k, v, None, scale, None, causal=False, bits=bits)

        own = slice(start, stop)
        attended.append(by_piece(attend, q[:, own], chosen[:, own], start, piece))
    return jnp.concatenate(attended, axis=1)


def choose_keys(
    q: Queries,
    weights: Float[Array, "rows length heads"],
    k: Float[Array, "rows length head_dim"],
    segments: Segments | Past | None,
    most: int,
) -> Bits | None:
    """Chooses the keys with the highest scores for each query, among those that it may attend to.

    A score is the weighted sum of the products of a query's heads with a key, negative ones as 0.

    Args:
        q: The queries of an indexer.
        weights: The weights of their heads, in fp32.
        k: The keys of the indexer; all heads share them.
        segments: See `attention`.
        most: Maximum number of keys of a query. Of equal scores, earlier keys come first.

    Returns:
        The chosen keys; None if no row has more than `most` tokens, as each query then attends to
        all. While text is generated, what `Past.choose_keys` returns.
    """
    q, weights, k = jax.lax.stop_gradient((q, weights, k))
    if isinstance(segments, Past):
        return segments.choose_keys(q, weights, k, most)
    return _choose_in_spans(q, weights, k, segments, most) if q.shape[1] > most else None


@functools.partial(jax.jit, static_argnums=4)
def _choose_in_spans(q, weights, k, segments, most) -> Bits:
    rows, length = q.shape[:2]
    # Indexers have many narrow heads: on an H200, scores of 16,384 queries to as many keys took 126
    # ms in pieces of 64, and 55 in pieces of 512.
    piece, chosen = min(length, 4 * piece_of(q.shape)), []
    for start, stop in spans_of(length, piece):
        others = jax.tree.map(lambda x, stop=stop: x[:, :stop], (k, segments))

        def choose(q, own, at, others=others):
            (weights, segments), (keys, numbers) = own, others
            queries, stop = q.shape[1], keys.shape[1]
            seen = _seen((segments, None, None), (numbers, None), at, queries, stop, None)
            seen = jnp.broadcast_to(seen.reshape(-1, queries, stop), (rows, queries, stop))
            if stop > most:
                seen = among_highest(q, weights, keys, seen, most)
            bits = jnp.packbits(seen, axis=-1)
            return jnp.pad(bits, ((0, 0), (0, 0), (0, -(-length // 8) - bits.shape[-1])))

        own = jax.tree.map(lambda x, at=slice(start, stop): x[:, at], (weights, segments))
        chosen.append(by_piece(choose, q[:, start:stop], own, start, piece))
    return jnp.concatenate(chosen, axis=1)


def among_highest(
    q: Queries, weights: Array, k: Array, seen: Bool[Array, "rows length keys"], most: int
) -> Bool[Array, "rows length keys"]:
    """Returns the keys with the highest scores of each query; see `choose_keys`.

    Args:
        q: The queries.
        weights: The weights of their heads.
        k: More than `most` keys.
        seen: The keys that each query may attend to.
        most: Maximum number of keys of a query.
    """
    scores = jnp.einsum("bmhd,bnd->bhmn", q, k, preferred_element_type=jnp.float32)
    scores = jnp.sum(jax.nn.relu(scores) * jnp.swapaxes(weights, 1, 2)[..., None], axis=1)
    _, at = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), most)

    @functools.partial(jnp.vectorize, signature="(most)->(keys)")
    def marked(at):
        return jnp.zeros(k.shape[1], bool).at[at].set(True, unique_indices=True)

    # Where a query sees fewer keys than it may attend to, others are among the highest, too.
    return seen & marked(at)


Heads = Float[Array, "rows length heads head_dim"]


def full_attention(
    q: Heads,
    k: Heads,
    v: Heads,
    segments: Segments | None = None,
    most: int | None = None,
    scale: float | None = None,
) -> Heads:
    """Lets each token attend to all tokens of its row, or of its segment.

    Args:
        q: Queries.
        k: Keys; see `attention`.
        v: Values, as `k`.
        segments: Number of each token's segment; the tokens of a segment follow each other. None
            if each row is one.
        most: The maximum number of tokens of a segment; None if it isn't known.
        scale: See `attention`.

    Returns:
        An array with the shape and dtype of `q`; softmax is computed in fp32.
    """
    scale, length = 1 / math.sqrt(q.shape[-1]) if scale is None else scale, q.shape[1]
    # Far fewer scores without cuDNN, which has windows only for causal attention.
    near = most if most is not None and _MAX_SPANS * most <= length else None
    if near is None and fits_cudnn(q, packed=segments is not None):
        return _by_cudnn(q, k, v, segments, scale, None, causal=False)
    keys = length if near is None else -(-length // _MAX_SPANS) + 2 * near
    piece = min(length, piece_of((q.shape[0], keys, *q.shape[2:])))
    spans = ((0, length),) if near is None else tuple(spans_of(length, piece))
    # All tokens are one image.
    images = jnp.ones(q.shape[:2], jnp.int32)
    ahead = length if near is None else near
    return in_spans(q, k, v, segments, None, spans, piece, near, None, scale, images, ahead)


@jax.tree_util.register_pytree_node_class
class ImageRows(Past):
    """Rows of text and images: layers get it in place of `segments` in training.

    Tokens attend to earlier tokens, and the tokens of an image also to the later ones of the
    same image, in all layers or in those with a window. There, no token attends further back than
    the window.
    """

    def __init__(
        self,
        segments: Integer[Array, "rows length"] | None,
        images: Integer[Array, "rows length"],
        most: int,
        *,
        local: bool = False,
    ):
        """Keeps the numbers of tokens.

        Args:
            segments: The document of each token, 0 for padding; None for one per row.
            images: The image of each token, counted from 1 in each row; 0 for text.
            most: The maximum number of tokens of an image.
            local: Whether only layers with a window let them attend to later ones.
        """
        self.segments, self.images, self.most, self.local = segments, images, most, local
        self.kind = "ImageRows"

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, bool]]:
        """Returns its arrays and the rest, for JAX."""
        return (self.segments, self.images), (self.most, self.local)

    @classmethod
    def tree_unflatten(cls, rest: tuple[int, bool], arrays: tuple[Any, Any]) -> "ImageRows":
        """Makes it anew, for JAX."""
        return cls(*arrays, rest[0], local=rest[1])

    def positions(self, length: int) -> Integer[Array, "rows length"]:
        """Returns positions that count from 0 in every document."""
        return positions_in(length, self.segments)

    def attend(self, q: Heads, k: Heads, v: Heads, **options: Any) -> Heads:
        """Computes `attention` within rows."""
        if options["chunk"] is not None or options["sinks"] is not None:
            self.refuse()
        numbers = (options[name] for name in ("window", "softcap", "scale"))
        images: dict[str, Any] = {"images": self.images, "ahead": self.most}
        if self.local and options["window"] is None:
            images = {}
        return _in_rows(q, k, v, self.segments, *numbers, **images)
