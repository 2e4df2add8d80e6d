"""Updates segment by segment, coded ones in pieces, or leaf by leaf.

Coded slabs are updated piece by piece, so that no decoded slab lies in device memory.

A block's scale depends on all its numbers, so a compiler writes the numbers to memory before it
encodes them: both moments of a slab, decoded. A loop over pieces needs this memory for one piece at
a time.

Example: a slab of 6 blocks in pieces of 2 blocks; the last block belongs to a norm with uncoded
state::

    regions    [0, 5) and [5, 6): each slab has one codec per region
    loop       blocks 0 and 1, then 2 and 3
    separate   block 4, and then block 5

Optimizers that need a whole leaf at a time update leaf by leaf.

Adafactor's means over rows, or Muon's products, need a whole matrix, but only one at a time. If a
compiler chooses the order of leaves, it keeps temporaries of several leaves at once, and a second
slab beside the old one. Here each turn updates one large leaf, or several small ones, in place; a
barrier keeps the next turn from starting early.

Example: Adafactor for an MLP's `up` and `down`, both large, and the norm before it::

    turn 1    norm and its second moments
    turn 2    up, the means of its squared gradient over rows and over columns
    turn 3    down, likewise
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.cut import Fragment, groups_behind
from megatrain_jax._src.engine.state.codec import Array, Draw
from megatrain_jax._src.engine.state.layout import GroupLayout, Layout, Segment

PIECE = 1 << 23
"""Elements of each shard in one piece; an array of them takes 32 MiB in fp32."""

Compute = Callable[[Sequence[jax.Array], jax.Array, Sequence[jax.Array]], list[jax.Array]]
"""`([gradient, masters, *state], columns, messages) -> [masters, *state]` of some elements, (n,)
each; `columns` are their places in their shards."""


InOnePass = Callable[..., list[tuple[Array, ...]] | None]
"""A faster update of columns, or None if it can't compute it; see `update_in_one_pass`."""


def update_in_pieces(
    compute: Compute, layout: GroupLayout, guarded: bool, in_one_pass: InOnePass | None = None
) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`.

    Args:
        compute: The update of some elements.
        layout: Layout of the group; its state has the same offsets as its masters, and without
            codes, the same segments.
        guarded: Whether nothing changes if `ok` is false.
        in_one_pass: Updates coded columns in one pass over memory, if it can; None to use none.
    """
    slabs, shards = layout.slabs, layout.master.num_shards
    # Between two edges every slab has one codec, because masters and state have equal offsets.
    edges = sorted({edge for slab in slabs for s in slab.segments for edge in (s.start, s.stop)})

    def update_group(masters, state, segments, messages, ok, draw=None):
        draws = layout.slab_draws(draw)

        def update(pieces, arrays, in_loop=False):
            old = [piece.read(own) for piece, own in zip(pieces, arrays, strict=True)]
            own = pieces[0]
            grads = segments[own.number]
            if not own.is_whole:
                grads = grads.reshape(shards, -1)
                grads = jax.lax.dynamic_slice_in_dim(grads, own.inside, own.length, axis=1)
            columns = jax.lax.broadcasted_iota(jnp.int32, (shards, own.length), 1) + own.start
            rows = [grads.reshape(-1).astype(layout.master.dtype)]
            rows += [piece.decode(own) for piece, own in zip(pieces, old, strict=True)]
            rows = compute(rows, columns.reshape(-1), messages)
            new = [p.encode(row, own) for p, row, own in zip(pieces, rows, draws, strict=True)]
            if guarded:
                # Selects among arrays at rest, so that unchanged state is not rounded again.
                new = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
            if layout.num_coded and not in_loop:
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


# ---- updates leaf by leaf

# Maximum total elements of the small leaves in one turn.
_TOGETHER = 1 << 24

Place = tuple[int, int]
"""A leaf's slab (0 for masters, 1 and up for state), and the leaf's number in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn:
    """A part of an update, which may use the results of earlier turns.

    Attributes:
        reads: Positions of the leaves that no earlier turn has read, among the fragment's inputs.
        eqns: The equations that no earlier turn has evaluated, in order.
        writes: Positions of the results that it writes, among the fragment's outputs.
    """

    reads: tuple[int, ...]
    eqns: tuple[Any, ...]
    writes: tuple[int, ...]


def update_by_leaf(fragment: Fragment, layout: GroupLayout, guarded: bool) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`.

    Args:
        fragment: The group's part of the optimizer's *apply*.
        layout: Layout of the group.
        guarded: Whether nothing changes if `ok` is false.
    """
    jaxpr, first, count = fragment.jaxpr, len(fragment.consts), len(layout.master.shapes)
    # The fragment takes constants, gradients, masters, state and messages, in this order, and
    # returns masters and state.
    places: list[Place] = [*((0, i) for i in range(count))]
    places += [(1 + slab, i) for slab, i in layout.state.places]
    old_of = dict(enumerate(places, first + count))
    turns = _turns(fragment, layout)

    def update_group(masters, state, gradient, messages, ok, draw=None):
        given = slabs = [tuple(masters), *layout.state.by_slab(state)]
        draws, written = layout.slab_draws(draw), set()
        values = dict(zip(jaxpr.invars, fragment.consts, strict=False))
        values.update(zip(jaxpr.invars[first + count + len(places) :], messages, strict=True))

        def read(at: int) -> Array:
            if at < first + count:
                return layout.master.unpack_from(gradient, at - first).astype(layout.master.dtype)
            number, i = old_of[at]
            # If an earlier turn has written a leaf, its old value is read.
            arrays = given if (number, i) in written else slabs
            return _read(layout.slabs[number], i, arrays[number])

        for turn in turns:
            values.update((jaxpr.invars[at], read(at)) for at in turn.reads)
            _evaluate(turn.eqns, values)
            new = {places[at]: _value(jaxpr.outvars[at], values) for at in turn.writes}
            slabs = _written(layout, slabs, new, draws, ok if guarded else None)
            written.update(new)
            if turn is not turns[-1]:
                slabs, gradient = jax.lax.optimization_barrier((slabs, gradient))
        return slabs[0], tuple(x for own in slabs[1:] for x in own)

    return update_group


def _turns(fragment: Fragment, layout: GroupLayout) -> list[_Turn]:
    """The turns of a group's update, in the order of its leaves' offsets."""
    jaxpr, first, count = fragment.jaxpr, len(fragment.consts), len(layout.master.shapes)
    turn_of = _together(layout.master)
    # An array of optimizer state is updated with the last leaf that it depends on.
    leaf_of = {jaxpr.invars[first + at]: at % count for at in range(2 * count)}
    behind = groups_behind(jaxpr, leaf_of)
    of_outputs = [turn_of[at] for at in range(count)]
    of_outputs += [max((turn_of[i] for i in leaves), default=0) for leaves in behind[count:]]

    end = first + 2 * count + len(layout.state.places)
    leaves = {v: at for at, v in enumerate(jaxpr.invars[:end]) if at >= first}
    producer = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    met: set[Any] = set()
    turns = []
    for turn in range(max(of_outputs) + 1):
        writes = tuple(at for at, own in enumerate(of_outputs) if own == turn)
        todo, eqns, reads = [jaxpr.outvars[at] for at in writes], set(), set()
        while todo:
            atom = todo.pop()
            if jx.is_literal(atom) or atom in met:
                continue
            met.add(atom)
            if atom in producer:
                eqns.add(producer[atom])
                met.update(jaxpr.eqns[producer[atom]].outvars)
                todo += jaxpr.eqns[producer[atom]].invars
            elif atom in leaves:
                reads.add(leaves[atom])
        ordered = tuple(jaxpr.eqns[n] for n in sorted(eqns))
        turns.append(_Turn(reads=tuple(sorted(reads)), eqns=ordered, writes=writes))
    return turns


def _together(layout: Layout) -> list[int]:
    """The turn of each leaf: small neighbours share one."""
    turns, turn, filled = [0] * len(layout.shapes), 0, 0
    for i in sorted(range(len(turns)), key=lambda i: (layout.offsets[i], i)):
        filled += layout.shares[i]
        if filled > _TOGETHER and filled > layout.shares[i]:
            turn, filled = turn + 1, layout.shares[i]
        turns[i] = turn
    return turns


def _evaluate(eqns: Sequence[Any], values: dict[Any, Any]) -> None:
    for eqn in eqns:
        results = jx.bind(eqn, [_value(a, values) for a in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))


def _value(atom: Any, values: Mapping[Any, Any]) -> Any:
    return atom.val if jx.is_literal(atom) else values[atom]


def _columns(layout: Layout, i: int) -> Columns:
    """The columns of a leaf in a slab's shards, rounded up to whole blocks of its code."""
    segment, number = layout.segment_of(i)
    block = segment.codec.block
    length = max(1, -(-layout.shares[i] // block)) * block
    return Columns(layout, number, layout.offsets[i], length)


def _read(layout: Layout, i: int, arrays: Sequence[Array]) -> Array:
    """Leaf `i` of a slab at rest."""
    columns = _columns(layout, i)
    flat = columns.decode(columns.read(arrays))
    if layout.num_shards > 1 and columns.length > layout.shares[i]:
        flat = flat.reshape(layout.num_shards, -1)[:, : layout.shares[i]].reshape(-1)
    return flat[: math.prod(layout.shapes[i])].reshape(layout.shapes[i])


def _written(
    layout: GroupLayout,
    slabs: Sequence[tuple[Array, ...]],
    new: Mapping[Place, Array],
    draws: Sequence[Draw | None],
    ok: Array | None,
) -> list[tuple[Array, ...]]:
    """The slabs with new leaves, or with the old ones if `ok` is false."""
    coded = {}
    for (number, i), leaf in new.items():
        slab = layout.slabs[number]
        columns = _columns(slab, i)
        row = leaf.reshape(-1).astype(slab.dtype)
        row = jnp.pad(row, (0, slab.num_shards * slab.shares[i] - row.size))
        row = row.reshape(slab.num_shards, -1)
        row = jnp.pad(row, ((0, 0), (0, columns.length - slab.shares[i])))
        encoded = columns.encode(row, draws[number])
        if ok is not None:
            # Selects among arrays at rest, so that unchanged state is not rounded again.
            old = columns.read(slabs[number])
            encoded = jax.tree.map(lambda n, o: jnp.where(ok, n, o), encoded, old)
        coded[number, i] = encoded
    # All reads come before the first write; otherwise the compiler would copy the whole array.
    parts = {at: x for at, x in coded.items() if not _columns(layout.slabs[at[0]], at[1]).is_whole}
    coded |= jax.lax.optimization_barrier(parts)
    slabs = list(slabs)
    for (number, i), encoded in coded.items():
        slabs[number] = _columns(layout.slabs[number], i).write(slabs[number], encoded)
    return slabs
