"""Leaves in host memory: read from the arrays at rest that a slab is held as, and written to them.

A worked example, the first moment of a (6, 50) matrix, its first leaf's, as 8-bit codes::

    layout.at_rest              int8[384], float32[3]
    read_part(…, 0, 0)          codes, int8[6, 50]: the first 300, as a view
    read_part(…, 0, 1)          scales, float32[3]
    read_leaf(…, 0)             what they stand for, float32[6, 50]

Over several devices each of these is joined from every device's share.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.state.codec import Array
from megatrain_jax._src.state.layout import Layout
from megatrain_jax._src.state.mixed_layout import MixedLayout


def read_leaves(layout: Layout | MixedLayout, arrays: Sequence[Array]) -> list[np.ndarray]:
    """All leaves of arrays at rest; read-only, and views where they can be."""
    if isinstance(layout, MixedLayout):
        pairs = zip(layout.layouts, layout.by_slab(arrays), strict=True)
        rows = [read_leaves(own, held) for own, held in pairs]
        return [rows[slab][i] for slab, i in layout.places]
    return [read_leaf(layout, arrays, i) for i in range(len(layout.shapes))]


def read_leaf(layout: Layout, arrays: Sequence[Array], i: int) -> np.ndarray:
    """Leaf `i` of arrays at rest; see `read_leaves`."""
    # No block of codes reaches from one shard into the next, so each share is decoded by itself.
    codec = layout.segment_of(i)[0].codec
    dtype = jnp.dtype(codec.read_dtype(layout.dtype))
    pieces = [_pieces(layout, arrays, i, p) for p in range(len(layout.parts(i)))]
    shares = [codec.decode(share, dtype) for share in zip(*pieces, strict=True)]
    return _joined(shares, layout.shapes[i])


def part_shape(layout: Layout, i: int, p: int) -> tuple[int, ...]:
    """Shape of part `p` of leaf `i`: the leaf's own if it has an element for each number."""
    shape, per = layout.shapes[i], layout.parts(i)[p].per
    return shape if per == 1 else (-(-math.prod(shape) // per),)


def read_part(layout: Layout, arrays: Sequence[Array], i: int, p: int) -> np.ndarray:
    """Part `p` of leaf `i`, as it is held."""
    return _joined(_pieces(layout, arrays, i, p), part_shape(layout, i, p))


def write_part(
    layout: Layout, arrays: Sequence[np.ndarray], i: int, p: int, part: np.ndarray
) -> None:
    """Writes part `p` of leaf `i` into NumPy's arrays, which are shaped as those at rest."""
    at, flat = 0, part.reshape(-1)
    for piece in _pieces(layout, arrays, i, p):
        own = flat[at : at + piece.size]
        piece[: own.size] = own
        at += piece.size


def encoded(layout: Layout, leaf: np.ndarray, i: int) -> tuple[np.ndarray, ...]:
    """The parts that stand for leaf `i`, in their shapes; rounded to nearest."""
    codec = layout.segment_of(i)[0].codec
    flat = leaf.reshape(-1)
    parts = codec.encode(np.pad(flat, (0, -flat.size % codec.block)), None)
    shapes = [part_shape(layout, i, p) for p in range(len(parts))]
    return tuple(_joined([x], shape) for x, shape in zip(parts, shapes, strict=True))


def _pieces(layout: Layout, arrays: Sequence[Array], i: int, p: int) -> list[np.ndarray]:
    """Part `p` of leaf `i`: its elements in each shard of arrays at rest, as views."""
    # Offsets are multiples of a block, so they divide by `per` without a rest.
    segment, number = layout.segment_of(i)
    per = layout.parts(i)[p].per
    start = (layout.offsets[i] - segment.start) // per
    stop = start + -(-layout.shares[i] // per)
    shards = _shards_of(layout.by_segment(arrays)[number][p], layout.num_shards)
    return [shard[start:stop] for shard in shards]


def _joined(pieces: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """An array of its shares, in the order of shards, without what is padding."""
    flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return flat[: math.prod(shape)].reshape(shape)


def _shards_of(array: Array, num_shards: int) -> list[np.ndarray]:
    """The shards of an array in host memory, in the order of devices and without copies."""
    if isinstance(array, np.ndarray) or num_shards == 1:
        return list(np.asarray(array).reshape(num_shards, -1))
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]
