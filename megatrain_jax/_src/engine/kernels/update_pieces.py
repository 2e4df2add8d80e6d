"""Updates coded slabs piece by piece, so that no decoded slab lies in device memory.

A block's scale depends on all its numbers, so a compiler writes the numbers to memory before it
encodes them: both moments of a slab, decoded. A loop over pieces needs this memory for one piece at
a time.

Example: a slab of 6 blocks in pieces of 2 blocks; the last block belongs to a norm with uncoded
state::

    regions    [0, 5) and [5, 6): each slab has one codec per region
    loop       blocks 0 and 1, then 2 and 3
    separate   block 4, and then block 5
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.state.codec import Array, Draw
from megatrain_jax._src.engine.state.groups import GroupLayout
from megatrain_jax._src.engine.state.layout import Layout, Segment

PIECE = 1 << 23
"""Elements of each shard in one piece; an array of them takes 32 MiB in fp32."""

Compute = Callable[[Sequence[jax.Array], jax.Array, Sequence[jax.Array]], list[jax.Array]]
"""`([gradient, masters, *state], columns, messages) -> [masters, *state]` of some elements, (n,)
each; `columns` are their places in their shards."""


class InOnePass(Protocol):
    """A faster update of columns; see `fused_updates.update_in_one_pass`."""

    def __call__(
        self,
        compute: Compute,
        columns: Sequence["Columns"],
        arrays: Sequence[tuple[Array, ...]],
        gradient: Sequence[Array],
        messages: Sequence[Array],
        ok: Array | None,
        draws: Sequence[Draw | None],
    ) -> list[tuple[Array, ...]] | None:
        """The slabs with new columns; None if it can't compute the update."""
        ...


def update_in_pieces(
    compute: Compute, layout: GroupLayout, guarded: bool, in_one_pass: InOnePass | None = None
) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`.

    Args:
        compute: The update of some elements.
        layout: Layout of the group; its state has the same offsets as its masters.
        guarded: Whether nothing changes if `ok` is false.
        in_one_pass: Updates coded columns in one pass over memory, if it can; None to use none.
    """
    slabs = layout.slabs
    # Between two edges every slab has one codec, because masters and state have equal offsets.
    edges = sorted({edge for slab in slabs for s in slab.segments for edge in (s.start, s.stop)})

    def update_group(masters, state, segments, messages, ok, draw=None):
        gradient = [x.reshape(layout.master.num_shards, -1) for x in segments]
        draws = layout.slab_draws(draw)

        def update(pieces, arrays, in_loop=False):
            start, length = pieces[0].start, pieces[0].length
            old = [piece.read(own) for piece, own in zip(pieces, arrays, strict=True)]
            own = pieces[0]
            grads = jax.lax.dynamic_slice_in_dim(gradient[own.number], own.inside, length, axis=1)
            columns = start + jax.lax.broadcasted_iota(jnp.int32, grads.shape, 1)
            rows = [grads.reshape(-1).astype(layout.master.dtype)]
            rows += [piece.decode(own) for piece, own in zip(pieces, old, strict=True)]
            rows = compute(rows, columns.reshape(-1), messages)
            new = [p.encode(row, own) for p, row, own in zip(pieces, rows, draws, strict=True)]
            if guarded:
                # Selects among arrays at rest, so that unchanged state is not rounded again.
                new = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
            if not in_loop:
                # All reads come before the first write; otherwise whole arrays would be copied.
                new = jax.lax.optimization_barrier(new)
            return [p.write(own, x) for p, own, x in zip(pieces, arrays, new, strict=True)]

        arrays = [tuple(masters), *layout.state.by_slab(state)]
        for first, last in pairwise(edges):
            numbers = [slab.segment_at(first) for slab in slabs]

            def at(start, length, numbers=numbers):
                return [Columns(s, n, start, length) for s, n in zip(slabs, numbers, strict=True)]

            def step(i, arrays, first=first, at=at):
                # Segments begin at whole blocks, and a piece has whole blocks, so none is cut.
                return update(at(first + i * PIECE, PIECE), arrays, in_loop=True)

            coded = any(s.segments[n].codec.block > 1 for s, n in zip(slabs, numbers, strict=True))
            if coded and in_one_pass is not None:
                given = segments, messages, ok if guarded else None, draws
                new = in_one_pass(compute, at(first, last - first), arrays, *given)
                if new is not None:
                    arrays = new
                    continue
            # Uncoded regions are updated in one pass, which needs no temporary numbers.
            count = (last - first) // PIECE if coded else 0
            arrays = jax.lax.fori_loop(0, count, step, arrays) if count else arrays
            if left := last - first - count * PIECE:
                arrays = update(at(last - left, left), arrays)
        return arrays[0], tuple(x for own in arrays[1:] for x in own)

    return update_group


@dataclasses.dataclass(frozen=True)
class Columns:
    """A range of columns of a segment, in every shard.

    Attributes:
        layout: Layout of the slab.
        number: Number of the segment.
        start: First column within the shard; a multiple of the codec's block.
        length: Number of columns.
    """

    layout: Layout
    number: int
    start: Any
    length: int

    def read(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """These columns of the segment's arrays, given all arrays of the slab."""
        own = self.own(arrays)
        if self.is_whole:
            return own
        return tuple(
            self._sliced(x, at, length) for x, (at, length) in zip(own, self._ranges(), strict=True)
        )

    def decode(self, arrays: Sequence[Array]) -> Array:
        """The numbers decoded from the columns' arrays, of shape (shards * length,)."""
        return self.segment.codec.decode(arrays, self.layout.dtype)

    def encode(self, row: Array, draw: Draw | None) -> tuple[Array, ...]:
        """The columns' arrays that encode these numbers."""
        row = row.astype(self.layout.dtype).reshape(self.layout.num_shards, -1)
        return self.layout.encode_columns(row, self.number, self.inside, draw)

    def write(self, arrays: Sequence[Array], new: Sequence[Array]) -> tuple[Array, ...]:
        """The slab's arrays with new ones for these columns."""
        if not self.is_whole:
            new = [
                jax.lax.dynamic_update_slice_in_dim(self._rows(x), self._rows(n), at, 1).reshape(-1)
                for x, n, (at, _) in zip(self.own(arrays), new, self._ranges(), strict=True)
            ]
        return self.replaced(arrays, new)

    def own(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The whole arrays of the segment, given all arrays of the slab."""
        return self.layout.by_segment(arrays)[self.number]

    def replaced(self, arrays: Sequence[Array], new: Sequence[Array]) -> tuple[Array, ...]:
        """The slab's arrays with new whole arrays for the segment."""
        segments = enumerate(self.layout.by_segment(arrays))
        return tuple(x for n, own in segments for x in (new if n == self.number else own))

    @property
    def segment(self) -> Segment:
        """The segment."""
        return self.layout.segments[self.number]

    @property
    def inside(self) -> Any:
        """The first column within the segment."""
        return self.start - self.segment.start

    @property
    def is_whole(self) -> bool:
        """Whether they are all columns of their segment."""
        return self.length == self.segment.stop - self.segment.start

    def _ranges(self) -> list[tuple[Any, int]]:
        """First column and count of columns in each of the segment's arrays."""
        parts = self.segment.codec.parts(self.layout.dtype)
        start = self.inside
        return [(start // part.per, self.length // part.per) for part in parts]

    def _sliced(self, x: Array, at: Any, length: int) -> Array:
        if not isinstance(at, int):
            return jax.lax.dynamic_slice_in_dim(self._rows(x), at, length, axis=1).reshape(-1)
        # An undivided slab is sliced like in `Layout.unpack`, because with different equations a
        # compiler might round an update differently.
        rows = x if self.layout.num_shards == 1 else self._rows(x)
        return jax.lax.slice_in_dim(rows, at, at + length, axis=-1).reshape(-1)

    def _rows(self, x: Array) -> Array:
        return x.reshape(self.layout.num_shards, -1)
