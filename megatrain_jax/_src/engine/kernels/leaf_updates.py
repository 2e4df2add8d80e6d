"""Updates leaf by leaf, for optimizers that need a whole leaf at a time.

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
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.update_pieces import Columns
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.slicing import Fragment, groups_behind
from megatrain_jax._src.engine.state.codec import Array, Draw
from megatrain_jax._src.engine.state.groups import GroupLayout
from megatrain_jax._src.engine.state.layout import Layout

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
