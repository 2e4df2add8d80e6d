"""Updates of coded slabs piece by piece, so that no decoded slab lies in device memory.

A scale is found from all numbers of a block before the first of them is coded, so that a compiler
writes the numbers in between: both moments of a slab, decoded. A loop over pieces writes as much
for one piece at a time.

A worked example, a slab of 6 blocks in pieces of 2 blocks; the last block is that of a norm, whose
state is not coded::

    regions    [0, 5) and [5, 6): a region is coded alike in each slab
    loop       blocks 0 and 1, then 2 and 3
    by itself  block 4, and then block 5
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.state.codec import Array
from megatrain_jax._src.state.draws import Draw
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout, Segment

PIECE = 1 << 23
"""Elements of each shard that are updated at once: an array of them takes 32 MiB in fp32."""

Compute = Callable[[Sequence[jax.Array], jax.Array, Sequence[jax.Array]], list[jax.Array]]
"""`([gradient, masters, *state], columns, messages) -> [masters, *state]` of some elements, (n,)
each; `columns` are their places in their shards."""


def update_in_pieces(compute: Compute, layout: GroupLayout, guarded: bool) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`.

    Args:
        compute: The update of some elements.
        layout: Layout of the group, whose slabs of state lie as its masters do.
        guarded: Whether nothing changes where `ok` is false.
    """
    slabs = layout.slabs
    # Between two edges every slab has one codec, since masters and state lie alike.
    edges = sorted({edge for slab in slabs for s in slab.segments for edge in (s.start, s.stop)})

    def update_group(masters, state, gradient, messages, ok, draw=None):
        gradient = gradient.reshape(layout.master.num_shards, -1)
        draws = layout.slab_draws(draw)

        def update(pieces, arrays, in_loop=False):
            start, length = pieces[0].start, pieces[0].length
            old = [piece.read(own) for piece, own in zip(pieces, arrays, strict=True)]
            grads = jax.lax.dynamic_slice_in_dim(gradient, start, length, axis=1)
            columns = start + jax.lax.broadcasted_iota(jnp.int32, grads.shape, 1)
            rows = [grads.reshape(-1).astype(layout.master.dtype)]
            rows += [piece.decode(own) for piece, own in zip(pieces, old, strict=True)]
            rows = compute(rows, columns.reshape(-1), messages)
            new = [p.encode(row, own) for p, row, own in zip(pieces, rows, draws, strict=True)]
            if guarded:
                # As in `updates`: what is not to change is not rounded again either.
                new = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
            if not in_loop:
                # All is read before any of it is written: else whole arrays would be copied first.
                new = jax.lax.optimization_barrier(new)
            return [p.write(own, x) for p, own, x in zip(pieces, arrays, new, strict=True)]

        arrays = [tuple(masters), *layout.state.by_slab(state)]
        for first, last in pairwise(edges):
            numbers = [slab.segment_at(first) for slab in slabs]

            def at(start, length, numbers=numbers):
                return [Columns(s, n, start, length) for s, n in zip(slabs, numbers, strict=True)]

            def step(i, arrays, first=first, at=at):
                # Segments begin at multiples of their blocks, and a piece is whole blocks: none is
                # cut.
                return update(at(first + i * PIECE, PIECE), arrays, in_loop=True)

            coded = any(s.segments[n].codec.block > 1 for s, n in zip(slabs, numbers, strict=True))
            # One pass reads and writes what is not coded: it needs no room for numbers in between.
            count = (last - first) // PIECE if coded else 0
            arrays = jax.lax.fori_loop(0, count, step, arrays) if count else arrays
            if left := last - first - count * PIECE:
                arrays = update(at(last - left, left), arrays)
        return arrays[0], tuple(x for own in arrays[1:] for x in own)

    return update_group


@dataclasses.dataclass(frozen=True)
class Columns:
    """Some columns of a segment, the same ones of each shard.

    Attributes:
        layout: Layout of the slab.
        number: Number of the segment.
        start: First column, counted from its shard's; a multiple of the codec's block.
        length: Number of columns.
    """

    layout: Layout
    number: int
    start: Any
    length: int

    def read(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Their part of each array at rest of their segment; all arrays are the slab's."""
        own = self._own(arrays)
        if self.is_whole:
            return own
        return tuple(
            self._sliced(x, at, length) for x, (at, length) in zip(own, self._ranges(), strict=True)
        )

    def decode(self, arrays: Sequence[Array]) -> Array:
        """The numbers that their arrays stand for, of shape (shards * length,)."""
        return self._segment.codec.decode(arrays, self.layout.dtype)

    def encode(self, row: Array, draw: Draw | None) -> tuple[Array, ...]:
        """The columns' arrays that stand for these numbers."""
        row = row.astype(self.layout.dtype).reshape(self.layout.num_shards, -1)
        return self.layout.encode_columns(row, self.number, self.start - self._segment.start, draw)

    def write(self, arrays: Sequence[Array], new: Sequence[Array]) -> tuple[Array, ...]:
        """The slab's arrays with new ones for these columns."""
        if not self.is_whole:
            new = [
                jax.lax.dynamic_update_slice_in_dim(self._rows(x), self._rows(n), at, 1).reshape(-1)
                for x, n, (at, _) in zip(self._own(arrays), new, self._ranges(), strict=True)
            ]
        segments = enumerate(self.layout.by_segment(arrays))
        return tuple(x for n, own in segments for x in (new if n == self.number else own))

    @property
    def is_whole(self) -> bool:
        """Whether they are all columns of their segment."""
        return self.length == self._segment.stop - self._segment.start

    @property
    def _segment(self) -> Segment:
        return self.layout.segments[self.number]

    def _own(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        return self.layout.by_segment(arrays)[self.number]

    def _ranges(self) -> list[tuple[Any, int]]:
        """First column and count of columns in each of the segment's arrays."""
        parts = self._segment.codec.parts(self.layout.dtype)
        start = self.start - self._segment.start
        return [(start // part.per, self.length // part.per) for part in parts]

    def _sliced(self, x: Array, at: Any, length: int) -> Array:
        if not isinstance(at, int):
            return jax.lax.dynamic_slice_in_dim(self._rows(x), at, length, axis=1).reshape(-1)
        # A slab that isn't divided is sliced as `Layout.unpack` does: with other equations around
        # it, a compiler would round an update otherwise.
        rows = x if self.layout.num_shards == 1 else self._rows(x)
        return jax.lax.slice_in_dim(rows, at, at + length, axis=-1).reshape(-1)

    def _rows(self, x: Array) -> Array:
        return x.reshape(self.layout.num_shards, -1)
