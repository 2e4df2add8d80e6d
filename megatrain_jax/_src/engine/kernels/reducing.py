"""Reductions of a group's slabs: the optimizer's *reduce*, and the norm of a gradient.

Large leaves and slabs are read in pieces. Otherwise a compiler may convert a whole bfloat16
gradient to an fp32 array, twice as large, only to reduce it to one number.

Example: a leaf of 40M elements in pieces of 16M, which take 64 MiB in fp32::

    reduced(0, 16M)                    # the first piece, converted, squared and summed
    + reduced(16M, 16M)                # a loop over further whole pieces
    + reduced(32M, 8M)                 # the rest

With several devices, each reduces pieces of its own shard, and their results are combined last.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.elementwise import Reduction, find_reductions
from megatrain_jax._src.engine.program.optimizer.slicing import Fragment
from megatrain_jax._src.engine.state.groups import GroupLayout
from megatrain_jax._src.engine.state.layout import Layout

# Elements per piece. A leaf or slab with a larger share per device is read in pieces.
_PIECE = 1 << 24
# The start of a piece is an unsigned 32-bit number.
_LONGEST = 1 << 32

_Sums = tuple[jax.Array, jax.Array]
_Numbers = TypeVar("_Numbers", jax.Array, _Sums)

Place = tuple[int, Layout, int]
"""A leaf's slab by its number, the slab's layout, and the leaf's number in it."""


def squared_norm_and_ok(
    gradient: Sequence[Float[Array, " size"]],
    ok: Bool[Array, ""],
    guarded: bool,
    num_shards: int,
    scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The squared norm of a gradient in fp32, and `ok`; if guarded, false for non-finite elements.

    The elements are checked, because the squared norm of finite elements above 1.8e19 is infinite.
    The gradient has an array for each segment of its slab, and is divided by the scale, if any.
    """
    inverse = None if scale is None else 1 / scale

    # Two sums of one shape, so that a GPU computes both in one pass, and devices exchange them
    # together. Padding in a gradient's slab is zero and adds nothing.
    def sums(x: jax.Array, axis: int | None) -> _Sums:
        wide = x.astype(jnp.float32)
        wide = wide if inverse is None else wide * inverse
        return jnp.sum(wide * wide, axis), jnp.sum(~jnp.isfinite(x), axis, jnp.float32)

    def add(x: _Sums, y: _Sums) -> _Sums:
        return x[0] + y[0], x[1] + y[1]

    def of_segment(x: jax.Array) -> _Sums:
        rows = x.reshape(num_shards, -1)
        if not _is_large(rows.shape[1]):
            return sums(x, None)
        by_shard = _in_pieces(lambda start, n: sums(_piece(rows, start, n), 1), rows.shape[1], add)
        return jnp.sum(by_shard[0]), jnp.sum(by_shard[1])

    square, not_finite = functools.reduce(add, map(of_segment, gradient))
    # The count would suffice. But XLA fuses values with at most one reader into the update's kernel
    # (the norm on a GPU, the count on a CPU), and that changes how updates are rounded.
    spoiled = jnp.where(not_finite == 0, 0.0, square + not_finite)
    return square, ok & jnp.isfinite(spoiled) if guarded else ok


def reduction(fragment: Fragment, layout: GroupLayout) -> Callable[..., list[jax.Array]]:
    """The function `(gradient, masters, state slabs, others) -> scalars` of a fragment.

    Gradient, masters and each slab of the state have an array for each segment. Masters and state
    may be None if the fragment doesn't read them.

    Args:
        fragment: The group's part of the optimizer's *reduce*.
        layout: Layout of the group.
    """
    first, leaves = len(fragment.consts), range(len(layout.master.shapes))
    # The fragment takes constants, gradients, masters, state and scalars, in this order.
    places: list[Place] = [
        *((0, layout.master, i) for i in leaves),
        *((1, layout.master, i) for i in leaves),
        *((2 + s, layout.state.layouts[s], i) for s, i in layout.state.places),
    ]
    large = {
        first + at: (slab.shapes[i], slab.shares[i])
        for at, (_, slab, i) in enumerate(places)
        if _is_divisible(slab, i)
    }
    split = find_reductions(fragment.jaxpr, large)

    def reduce_leaves(gradient, masters, state, others) -> list[jax.Array]:
        slabs = [gradient, masters, *state]
        given: dict[int, Any] = dict(enumerate(fragment.consts))
        given.update(enumerate(others, first + len(places)))

        def leaf(at: int) -> jax.Array:
            number, slab, i = places[at - first]
            return slab.unpack_from(slabs[number], i).astype(slab.dtype)

        numbers = [
            _reduced(found, [places[at - first] for at in found.arrays], slabs, given)
            for found in split.found
        ]
        given.update(enumerate(numbers, len(fragment.jaxpr.invars)))
        args = [given[at] if at in given else leaf(at) for at in split.inputs]
        return jx.evaluate(split.rest, args)

    return reduce_leaves


def _reduced(
    found: Reduction, places: Sequence[Place], slabs: Sequence[Any], others: Mapping[int, Any]
) -> jax.Array:
    """A reduction of leaves with equal layouts, in pieces."""
    _, layout, i = places[0]

    def piece(place: Place, start: Any, size: int) -> jax.Array:
        number, slab, i = place
        array, first = slab.place_of(i, slabs[number])
        rows = array.reshape(slab.num_shards, -1)
        return _piece(rows, start + first, size).astype(slab.dtype)

    def of_piece(start: Any, size: int) -> jax.Array:
        (row,) = found.function([piece(place, start, size) for place in places], others)
        return found.reduced(row)

    return found.reduced(_in_pieces(of_piece, layout.shares[i], found.together))


def _in_pieces(
    reduced: Callable[[Any, int], _Numbers],
    size: int,
    together: Callable[[_Numbers, _Numbers], _Numbers],
) -> _Numbers:
    """Reduces each shard's elements from 0 to `size`, a piece at a time.

    Args:
        reduced: Reduces a piece, given its first element and its length, to one number per shard,
            or to two.
        size: Number of elements of a shard, at least one piece.
        together: Joins the results of two pieces.
    """

    def add(total: _Numbers, start: jax.Array) -> tuple[_Numbers, None]:
        return together(total, reduced(start, _PIECE)), None

    total = reduced(0, _PIECE)
    starts = jnp.asarray(np.arange(_PIECE, size - _PIECE + 1, _PIECE, dtype=np.uint32))
    total, _ = jax.lax.scan(add, total, starts)
    if left := size % _PIECE:
        total = together(total, reduced(size - left, left))
    return total


def _piece(rows: jax.Array, start: Any, size: int) -> jax.Array:
    """`size` elements of each row, from a start that may be a loop's variable."""
    # Without the barrier a compiler may convert all rows once, before the loop.
    rows, start = jax.lax.optimization_barrier((rows, jnp.uint32(start)))
    return jax.lax.dynamic_slice_in_dim(rows, start, size, axis=1)


def _is_large(size: int) -> bool:
    """Whether a shard of this size is read in pieces."""
    return _PIECE < size < _LONGEST


def _is_divisible(layout: Layout, i: int) -> bool:
    """Whether a leaf is read in pieces: it is large, and no shard of it is padded."""
    share, shards = layout.shares[i], layout.num_shards
    longest = layout.size // shards < _LONGEST
    return longest and _is_large(share) and share * shards == math.prod(layout.shapes[i])
