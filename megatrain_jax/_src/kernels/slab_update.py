"""Updates that leave slabs whole, where an optimizer treats all elements of a leaf alike.

A slab is updated in as many pieces as there are ways in which its elements are held: with its
matrices' moments in codes and its vectors' in fp32 in two. One array of all of a slab's numbers
would have to be written and read once more.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.program.optimizer.elementwise import line_up
from megatrain_jax._src.program.optimizer.slicing import Fragment
from megatrain_jax._src.state.draws import part_of
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout


def update_of_slabs(fragment: Fragment, layout: GroupLayout) -> Callable | None:
    """The update of a group by elementwise functions of slabs; None if it is none.

    Returns:
        The function `(masters, state, gradient, messages, draws) -> (masters, state)`, of arrays
        at rest and of draws for masters and for state.
    """
    count, first = len(layout.master.shapes), len(fragment.consts)
    slabs = (layout.master, *layout.state.layouts)
    # A state that lies otherwise than the masters has no element in line with theirs.
    if any(slab.offsets != layout.master.offsets for slab in slabs):
        return None
    state = [
        [i for i, (slab, _) in enumerate(layout.state.places) if slab == s]
        for s in range(len(layout.state.layouts))
    ]
    leaves = list(range(count))
    starts = [[first + i for i in leaves], [first + count + i for i in leaves]]
    inputs = [*starts, *([first + 2 * count + i for i in row] for row in state)]
    outputs = [leaves, *([count + i for i in row] for row in state)]
    found = line_up(fragment.jaxpr, layout.master.shapes, inputs, outputs)
    if found is None:
        return None
    kind_of, functions = found
    cuts = sorted({at for slab in slabs for at in slab.cuts})

    def compute(masters, state, gradient, messages, draws):
        others = dict(enumerate(fragment.consts))
        others.update(enumerate(messages, first + sum(map(len, inputs))))
        held = [masters, *layout.state.by_slab(state)]
        columns = [
            layout.master.pieces(gradient, cuts),
            *(slab.decode_pieces(own, cuts) for slab, own in zip(slabs, held, strict=True)),
        ]
        pieces = []
        for start, *rows in zip(cuts, *columns, strict=True):
            kinds = _kinds_at(layout.master, kind_of, start, rows[0].shape[-1])
            results = {kind: functions[kind](rows, others) for kind in sorted(set(kinds.values()))}
            pieces.append(
                [
                    _by_leaf(
                        layout.master, kinds, start, [(k, new[s]) for k, new in results.items()]
                    ).astype(slab.dtype)
                    for s, slab in enumerate(slabs)
                ]
            )
        new = [list(column) for column in zip(*pieces, strict=True)]
        return (
            layout.master.encode_pieces(new[0], cuts, draws[0]),
            tuple(
                x
                for s, (slab, own) in enumerate(zip(slabs[1:], new[1:], strict=True))
                for x in slab.encode_pieces(own, cuts, draws[1] and part_of(draws[1], s))
            ),
        )

    return compute


def _kinds_at(layout: Layout, kind_of: Sequence[int], start: int, size: int) -> dict[int, int]:
    """For each leaf in a piece of a slab, which function computes it; never none at all."""
    inside = [i for i, at in enumerate(layout.offsets) if start <= at < start + size]
    return {i: kind_of[i] for i in inside or [0]}


def _by_leaf(
    layout: Layout, kinds: dict[int, int], start: int, values: Sequence[tuple[int, jax.Array]]
) -> jax.Array:
    """A piece of a slab in which each leaf's elements come from the array of its kind.

    With leaves at 0, 64 and 128 of kinds 0, 1 and 0, elements 64 to 127 that leaf 1 fills are those
    of the array of kind 1, all others those of the array of kind 0.

    Args:
        layout: Layout of the slab.
        kinds: For each leaf in the piece, which function of those found computes it.
        start: First element of the piece in every shard.
        values: The piece as each of these functions computes it, by kind.
    """
    _, chosen = values[0]
    if len(values) == 1:
        return chosen
    at = start + jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
    for kind, array in values[1:]:
        inside = jnp.zeros(chosen.shape, bool)
        for leaf in (leaf for leaf, other in kinds.items() if other == kind):
            offset = layout.offsets[leaf]
            inside |= (at >= offset) & (at < offset + layout.shares[leaf])
        chosen = jnp.where(inside, array, chosen)
    return chosen
