"""The caches of generation, for each way in which layers mix tokens.

A cache has one row per text. Two forms of `Past` stand in the place of `segments`:

- `PrefillPast` reads prompts, padded at their ends, and returns the caches of these rows;
- `DecodePast` reads one token per row, and returns the caches with this token added.

    layers                  cache of a row
    attention               keys and values (kv_heads, size, head_dim)
    attention, window W     the same with at most W places, as a ring: position p is in place p % W
    attention, chunks of C  the same with at most C places
    latent attention        latents and rotated keys (size, latent_rank + rotated_dim)
    an indexer beside it    its keys (size, index_dim)
    linear attention        the state, and the last inputs of the convolution
    state space             the same
    convolution             its last inputs
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.lm.models.causal_attention import among_highest, attention, choose_keys
from megatrain_jax._src.lm.models.delta_rule import (
    delta_rule_and_state,
    one_token,
    short_convolution,
)
from megatrain_jax._src.lm.models.lora import is_adapted
from megatrain_jax._src.lm.models.past import LatentHeads, Past

# Numbers of parts in which rows move; the first one that divides the places is taken.
_PARTS = (4, 3, 5, 7, 2, 1)


class LayerCache(NamedTuple):
    """The cache of a layer; an array is None if the layer has no such part.

    Attributes:
        keys: Rotated keys (rows, kv_heads, size, head_dim); a row's places are contiguous.
        values: Values (rows, kv_heads, size, head_dim).
        latents: Normalised latents and rotated keys (rows, size, latent_rank + rotated_dim).
        state: The state of linear attention (rows, key_heads, group, key_dim, value_dim), in fp32.
        inputs: The last inputs of its convolution (rows, taps - 1, channels).
        index: The keys of an indexer (rows, size, index_dim).
    """

    keys: Any = None
    values: Any = None
    latents: Any = None
    state: Any = None
    inputs: Any = None
    index: Any = None


class _CachingPast(Past):
    """A layer's past that collects the parts of its cache.

    Attributes:
        kept: The layer's cache after its call; empty if it has none of its own.
    """

    def __init__(self, kind: str, *, borrows: bool):
        """Starts with an empty cache.

        Args:
            kind: The name of the layer's class.
            borrows: Whether the layer uses another layer's keys and values.
        """
        self.kind, self.kept, self._borrows = kind, LayerCache(), borrows

    def _keep(self, **parts: Array) -> None:
        """Adds parts to the cache; layers with two parts of one kind are not supported yet."""
        if any(getattr(self.kept, name) is not None for name in parts):
            self.refuse()
        self.kept = self.kept._replace(**parts)


class PrefillPast(_CachingPast):
    """The past during prefill: prompts are read from their first token."""

    def __init__(
        self, kind: str, lengths: Int[Array, " rows"], *, borrows: bool, images: Past | None = None
    ):
        """Starts without a cache.

        Args:
            kind: The name of the layer's class.
            lengths: Number of tokens of each row; later ones are padding.
            borrows: Whether the layer uses another layer's keys and values.
            images: What layers get in training for the images of the rows, if anything.
        """
        super().__init__(kind, borrows=borrows)
        self._lengths, self._images = lengths, images

    def positions(self, length: int) -> Int[Array, "1 length"]:
        """See `Past`."""
        return jnp.arange(length, dtype=jnp.int32)[None]

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """See `Past`. Padding needs no mask: it comes after all tokens."""
        if not self._borrows:
            size = min(options[name] or k.shape[1] for name in ("window", "chunk"))
            size = min(size, k.shape[1])
            keys, values = (jnp.swapaxes(self._last(x, size), 1, 2) for x in (k, v))
            self._keep(keys=keys, values=values)
        return attention(q, k, v, **options, segments=self._images)

    def attend_latent(self, attention: Any, given: LatentHeads, chosen: Any) -> Array:
        """See `Past`."""
        latents = jnp.concatenate([given.latent, given.k_rotated[:, :, 0]], axis=-1)
        self._keep(latents=latents)
        return attention.attend(given, None, chosen)

    def choose_keys(self, q: Array, weights: Array, k: Array, most: int) -> Array | None:
        """See `Past`."""
        self._keep(index=k)
        return choose_keys(q, weights, k, None, most)

    def convolve(self, x: Array, weight: Array) -> Array:
        """See `Past`."""
        taps = weight.shape[-1]
        padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        at = self._lengths[:, None] + jnp.arange(taps - 1)
        self._keep(inputs=jnp.take_along_axis(padded, at[..., None], axis=1))
        return short_convolution(x, weight)

    def delta_rule(
        self, q: Array, k: Array, v: Array, log_decay: Array, rate: Array | None
    ) -> Array:
        """See `Past`. Padding writes nothing and keeps the state."""
        inside = jnp.arange(q.shape[1]) < self._lengths[:, None]

        def kept(x: Array) -> Array:
            return jnp.where(jnp.expand_dims(inside, range(2, x.ndim)), x, 0)

        rate = None if rate is None else kept(rate)
        out, state = delta_rule_and_state(q, kept(k), v, kept(log_decay), rate)
        self._keep(state=state)
        return out

    def _last(self, x: Array, size: int) -> Array:
        """Returns the last `size` tokens of each row (rows, size, ...) in the places of a ring."""
        if size == x.shape[1]:
            return x
        ends = self._lengths[:, None] - 1
        at = jnp.maximum(ends - (ends - jnp.arange(size)) % size, 0)
        return jnp.take_along_axis(x, at[..., None, None], axis=1)


class DecodePast(_CachingPast):
    """The past during decoding: each text gets one more token."""

    def __init__(
        self,
        kind: str,
        cache: LayerCache,
        positions: Int[Array, " rows"],
        active: Bool[Array, " rows"],
        *,
        borrows: bool,
    ):
        """Starts with a cache.

        Args:
            kind: The name of the layer's class.
            cache: The cache of this layer, or of the layer whose keys and values it uses.
            positions: Position of each row's token.
            active: Whether the row is continued; the caches of the remaining rows stay unchanged.
            borrows: Whether the layer uses another layer's keys and values.
        """
        super().__init__(kind, borrows=borrows)
        self._cache, self._positions, self._active = cache, positions, active

    def positions(self, length: int) -> Int[Array, "rows length"]:
        """See `Past`."""
        return self._positions[:, None]

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """See `Past`."""
        softcap, scale, sinks = (options[name] for name in ("softcap", "scale", "sinks"))
        keys, values = self._cache.keys, self._cache.values
        if not self._borrows:
            keys, values = (self._written(x, new[:, 0]) for x, new in ((keys, k), (values, v)))
            self._keep(keys=keys, values=values)
        rows, kv_heads, size, head_dim = keys.shape
        grouped = q.reshape(rows, kv_heads, -1, head_dim)
        scores = jnp.einsum("bkgh,bkjh->bkgj", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1)
        weights = _softmax(scores, self._seen(size, options["chunk"])[:, None, None], sinks)
        mixed = jnp.einsum("bkgj,bkjh->bkgh", weights.astype(values.dtype), values)
        return mixed.reshape(q.shape)

    def attend_latent(self, attention: Any, given: LatentHeads, chosen: Any) -> Array:
        """See `Past`. Queries are mapped to the latent space; no keys or values are computed."""
        q, q_rotated, latent, k_rotated = given
        sizes, heads = attention.sizes, q.shape[2]
        new = jnp.concatenate([latent[:, 0], k_rotated[:, 0, 0]], axis=-1)
        latents = self._written(self._cache.latents, new)
        self._keep(latents=latents)
        matrix = _matrix_of(attention.kv_b_proj).reshape(heads, -1, sizes.latent_rank)
        to_keys, to_values = jnp.split(matrix, [sizes.plain_dim], axis=1)
        q = jnp.einsum("bhp,hpr->bhr", q[:, 0], to_keys)
        q = jnp.concatenate([q, q_rotated[:, 0]], axis=-1)
        scores = jnp.einsum("bhr,bjr->bhj", q, latents, preferred_element_type=jnp.float32)
        width = sizes.plain_dim + sizes.rotated_dim
        scores = scores * (width**-0.5 if attention.scale is None else attention.scale)
        seen = self._seen(latents.shape[1])[:, None] if chosen is None else chosen
        weights = _softmax(scores, seen, None).astype(latents.dtype)
        mixed = jnp.einsum("bhj,bjr->bhr", weights, latents[..., : sizes.latent_rank])
        return jnp.einsum("bhr,hvr->bhv", mixed, to_values)[:, None]

    def choose_keys(self, q: Array, weights: Array, k: Array, most: int) -> Array | None:
        """See `Past`; the chosen places of each row (rows, 1, size)."""
        keys = self._written(self._cache.index, k[:, 0])
        self._keep(index=keys)
        if (size := keys.shape[1]) <= most:
            return None
        return among_highest(q, weights, keys, self._seen(size)[:, None], most)

    def convolve(self, x: Array, weight: Array) -> Array:
        """See `Past`."""
        inputs = jnp.concatenate([self._cache.inputs, x], axis=1)
        kept = jnp.where(self._active[:, None, None], inputs[:, 1:], self._cache.inputs)
        self._keep(inputs=kept)
        factors = weight[:, 0].T.astype(jnp.float32)
        return jnp.sum(inputs.astype(jnp.float32) * factors, axis=1, keepdims=True).astype(x.dtype)

    def delta_rule(
        self, q: Array, k: Array, v: Array, log_decay: Array, rate: Array | None
    ) -> Array:
        """See `Past`."""
        old, rate = self._cache.state, None if rate is None else rate[:, 0]
        q, k, v, log_decay = (x[:, 0] for x in (q, k, v, log_decay))
        out, state = one_token(old, q, k, v, log_decay, rate)
        state = jnp.where(self._active[:, None, None, None, None], state, old)
        self._keep(state=state)
        return out[:, None]

    def _written(self, cache: Array, new: Array) -> Array:
        """Returns a cache (rows, ..., size, width) with a token of each row (rows, ..., width)."""
        rows, size = cache.shape[0], cache.shape[-2]
        # A place past the end drops the token.
        at = jnp.where(self._active, self._positions % size, size)
        index = (jnp.arange(rows), *(slice(None),) * (cache.ndim - 3), at)
        return cache.at[index].set(new.astype(cache.dtype), mode="drop", unique_indices=True)

    def _seen(self, size: int, chunk: int | None = None) -> Bool[Array, "rows size"]:
        """Returns the places of a ring that hold tokens of the text, or of its current chunk.

        A ring has no more places than its window or its chunk.
        """
        positions = self._positions[:, None]
        back = (positions - jnp.arange(size)) % size
        return back <= (positions if chunk is None else positions % chunk)


def _softmax(scores: Array, seen: Array, sinks: Array | None) -> Float[Array, "*rows size"]:
    """Returns the softmax over the places that are seen; a sink takes a part of it."""
    scores = jnp.where(seen, scores, -1e30)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[..., None])
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[..., None] - highest)
    return weights / total


def _matrix_of(linear: Any) -> Float[Array, "out in"]:
    """Returns the matrix by which a linear layer multiplies, its adapters included."""
    weight = linear.weight[...]
    if not is_adapted(linear):
        return weight
    added = linear.lora_settings.scale * (linear.lora_B[...] @ linear.lora_A[...])
    if linear.lora_settings.dora:
        rows = weight.astype(added.dtype) + added
        norms = jnp.linalg.norm(rows, axis=1)
        factor = linear.lora_magnitude[...] / (norms + (norms == 0))
        return (factor[:, None] * rows).astype(weight.dtype)
    return (weight + added.astype(weight.dtype)).astype(weight.dtype)


def rows_of(tree: Any, at: Int[Array, " rows"]) -> Any:
    """Returns some rows of caches."""
    return jax.tree.map(lambda x: x[at], tree)


def moved_rows(tree: Any, at: Int[Array, " rows"]) -> Any:
    """Returns caches with other rows in the place of all rows, as `rows_of` does.

    The rows move in the caches' own memory, a part of their places at a time: in a loop over steps,
    XLA would keep a second copy of all layers' caches.
    """

    def one(x: Array) -> Array:
        axis = x.ndim - 2
        number = next(n for n in _PARTS if x.shape[axis] % n == 0)
        size = x.shape[axis] // number

        def move(i: Array, x: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
            return jax.lax.dynamic_update_slice_in_dim(x, part[at], i * size, axis)

        return jax.lax.fori_loop(0, number, move, x)

    return jax.tree.map(one, tree)


def with_rows(tree: Any, at: Int[Array, " rows"], new: Any) -> Any:
    """Returns caches with some rows replaced; the new rows may have fewer places.

    Args:
        tree: The caches.
        at: The numbers of the rows; rows past the end are dropped.
        new: The caches of the new rows.
    """

    def one(old: Array, rows: Array) -> Array:
        index = at, *(slice(0, n) for n in rows.shape[1:])
        return old.at[index].set(rows.astype(old.dtype), mode="drop")

    return jax.tree.map(one, tree, new)


def on_device(cache: Any) -> Any:
    """Returns a layer's cache on the device; a page is copied there."""
    return _moved(cache, "device") if is_page(cache) else cache


def as_page(cache: Any) -> Any:
    """Returns a layer's cache in pinned host memory."""
    return _moved(cache, "pinned_host")


def is_page(cache: Any) -> bool:
    """Whether a layer's cache is in pinned host memory."""
    return any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(cache))


def _moved(cache: Any, kind: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), cache)


def grown(tree: Any, shapes: Any) -> Any:
    """Returns caches padded with zeros to some shapes."""

    def one(x: Array, shape: jax.ShapeDtypeStruct) -> Array:
        return jnp.pad(x, [(0, n - m) for n, m in zip(shape.shape, x.shape, strict=True)])

    return jax.tree.map(one, tree, shapes)
