"""Lays out leaves in a slab: their order, their shares and their offsets.

Example: leaves of shapes (3, 2), (5,) and (70,) over two shards, aligned to 64 elements::

    shares     3, 3 and 35 elements of each shard; the second leaf has one element of padding
    offsets    0, 64 and 128, in both shards
    size       2 * 192
"""

import math
from collections.abc import Collection, Hashable, Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.state.codec import Plain
from megatrain_jax._src.engine.state.layout import ALIGNMENT, PLAIN, Layout, Segment

# The maximum padding that a leaf's shares may add, as a fraction of its size.
_PADDING = 1 / 16
# A leaf gets its own segment if it has at least LEAST_APART elements, and at least 1/_MOST_APART of
# its slab's elements.
LEAST_APART = 1 << 20
_MOST_APART = 32


def layout_of(
    shapes: Sequence[tuple[int, ...]],
    dtype: jax.typing.DTypeLike,
    num_shards: int = 1,
    codecs: Sequence[Plain] | None = None,
    order: Sequence[int] | None = None,
    unit: int = 1,
    apart: Collection[int] = (),
) -> Layout:
    """Lays out leaves of one dtype back to back, each aligned, in each shard.

    Args:
        shapes: Shape of each leaf.
        dtype: Compute dtype of the leaves.
        num_shards: Number of equal parts that the slab is divided into.
        codecs: Codec of each leaf; None for plain ones.
        order: The leaves in the order of their offsets; None puts leaves of one codec together.
        unit: Number of elements that are encoded together: leaves and their shares begin at
            multiples of it.
        apart: Leaves with their own segments; see `large_leaves`.
    """
    # Leaves of one codec are adjacent, so that a slab has few segments and few arrays at rest.
    codecs = codecs or [PLAIN] * len(shapes)
    order = in_order(codecs) if order is None else order
    shares = tuple(_share(tuple(shape), num_shards, unit) for shape in shapes)
    offsets, end, step = [0] * len(shapes), 0, max(ALIGNMENT, unit)
    segments: list[Segment] = []
    before = None
    for i in order:
        offsets[i] = start = end
        # A leaf without elements also takes space, so that no slab and no segment is empty.
        end += max(1, -(-shares[i] // step)) * step
        # Neighbours with one codec form one segment, including the padding between them.
        is_alike = segments and segments[-1].codec == codecs[i]
        if is_alike and i not in apart and before not in apart:
            start = segments.pop().start
        segments.append(Segment(codec=codecs[i], start=start, stop=end))
        before = i
    return Layout(
        dtype=jnp.dtype(dtype).name,
        shapes=tuple(tuple(s) for s in shapes),
        shares=shares,
        offsets=tuple(offsets),
        size=end * num_shards,
        num_shards=num_shards,
        segments=tuple(segments),
    )


def large_leaves(shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The leaves that are worth their own arrays, if many microbatches read and add to them.

    A matrix product can read weights in place, and add to the sum of their gradients in place, if
    they have their own array. A part of an array would be copied first. But each array takes time
    to dispatch.
    """
    sizes = [math.prod(shape) for shape in shapes]
    least = max(LEAST_APART, sum(sizes) / _MOST_APART)
    return frozenset(i for i, size in enumerate(sizes) if size >= least)


def in_order(kinds: Sequence[Hashable]) -> list[int]:
    """Positions of leaves, sorted so that equal kinds are adjacent: [a, b, a] gives [0, 2, 1]."""
    first = {kind: n for n, kind in reversed(list(enumerate(kinds)))}
    return sorted(range(len(kinds)), key=lambda i: first[kinds[i]])


def _share(shape: tuple[int, ...], num_shards: int, unit: int) -> int:
    """Elements of a leaf in each shard.

    A share consists of whole rows along the leaf's first axis. If that adds too much padding, more
    leading axes are merged. For example, (8, 3, 64) over 4 shards gives each shard two rows of 192
    elements. But (3, 3, 64) has three rows for four shards, and nine rows of 64 elements are no
    better, so each shard gets 144 of the 576 elements. A `unit` of elements that are encoded
    together is never divided, so that units are the same for any number of shards.
    """
    size = inner = math.prod(shape)
    share = size
    for axis in shape:
        inner //= max(axis, 1)
        share = -(-size // (inner * num_shards)) * inner if inner else 0
        if share * num_shards <= size * (1 + _PADDING):
            break
    return share if num_shards == 1 else -(-share // unit) * unit
