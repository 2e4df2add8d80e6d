"""Jaxprs in tiles, for tests: all ways to divide one, and tiles against the whole."""

import jax
from jax.extend.core import jaxpr_as_fun

from megatrain_jax._src.engine.program.axes import Label
from megatrain_jax._src.engine.program.tiling.flow import (
    LabelPropagator,
    TileLoop,
    chosen,
    flow_of,
    ordered,
)
from megatrain_jax._src.engine.program.tiling.tiled import Tiled, coarsest, tiled
from runs import check_close

TOLERANCE = 2e-6


def flat_jaxpr(function, *args):
    """The jaxpr of a function from the leaves of its arguments to those of its results."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    return jax.make_jaxpr(flat)(*leaves)


def tile_counts(jaxpr, **options) -> tuple[int, ...]:
    """The numbers of tiles that are worth trying."""
    found = coarsest(jaxpr, **options)
    return () if found is None else found.counts


def check_same(jaxpr, num_tiles, args, whole=None):
    """Checks that tiles give what the whole gives; says whether there are tiles."""
    flow = flow_of(jaxpr)
    division, few = tiled(jaxpr, num_tiles, flow=flow), coarsest(jaxpr, flow=flow)
    if few is not None and num_tiles in few.counts:
        # Few tiles, divided further, are the tiles that a search for so many finds.
        assert contents(few.into(num_tiles)) == contents(division)
    if division is None:
        return False
    whole = jax.jit(jaxpr_as_fun(jaxpr))(*args) if whole is None else whole
    parts = jax.jit(division)(*args)
    assert [x.dtype for x in parts] == [x.dtype for x in whole]
    check_close(parts, list(whole), TOLERANCE, "result")
    return True


def contents(division):
    """How a jaxpr is divided, to compare divisions of one flow; None if it isn't."""
    if division is None:
        return None
    loops = [(loop.ops, loop.stored, loop.summed) for loop in loops_of(division)]
    return division.num_tiles, division.num_rows, division.labels.made, loops


def all_divisions(jaxpr, num_tiles):
    """All ways to divide a jaxpr along one axis, whatever they spare."""
    flow = flow_of(jaxpr)
    propagator, seen = LabelPropagator(flow), set()
    for v in (v for op in flow.ops for v in op.makes):
        for axis, size in enumerate(getattr(flow.avals[v], "shape", ())):
            label = Label(axis, 1, size // num_tiles)
            if size % num_tiles or (v, label) in seen:
                continue
            ways, labels = propagator.carry(v, label, num_tiles)
            seen.update(labels)
            for last in (False, True):
                labels = chosen(flow, ways, last=last)
                steps = ordered(flow, labels)
                yield Tiled(
                    jaxpr=jaxpr, num_tiles=num_tiles, num_rows=num_tiles, flow=flow,
                    labels=labels, steps=steps,
                )  # fmt: skip


def loops_of(division):
    return [step for step in division.steps if isinstance(step, TileLoop)]


def in_loops(division):
    """The names of the operations that a division computes in tiles."""
    return {op.name for loop in loops_of(division) for op, _ in loop.ops}
