"""The order of a divided flow: loops over tiles, operations between them, and their memory.

Operations that share a loop over tiles are computed together, with operations between loops.

Each operation has a level. Level l first computes its undivided operations, then one loop for its
divided ones. A value that is made whole, or read in a different division than it was made, needs
the previous loop to have ended. Levels are chosen to minimise the bytes that wait between levels: a
linear program with difference constraints, so its solution is integral. A value that a later loop
needs is stored, or recomputed there from values that are stored anyway.

Example: a decoder's block with its backward, `x` and `dy` given::

    level 0   loop   n = norm x;  q, k, v = n w                          q, k, v are stored
    level 1   whole  a = attention q k v
              loop   h = x + a w; y = h + mlp h;  dh = mlp' dy;  da      dh, da; sums for weights
    level 2   whole  dq, dk, dv = attention' q k v da
              loop   n = norm x, again;  sums for weights of n and dq;  dx

The memory that a divided flow needs is estimated to compare ways to divide it.

A value takes its bytes from the step that makes it to the last step that reads it. An elementwise
result that only one elementwise operation or reduction reads is fused and never in memory: its
operands live on instead. Within a loop, a value made in tiles takes the bytes of one tile.

Example: x f32[8, 2] is in memory before, 4 tiles::

    h = x w       f32[8, 100]    in a loop with its readers: 800 bytes for one tile
    y = exp h                    read by a product: 800 bytes for one tile
    z = y v       f32[8, 2]      stored: 64 bytes. At most 800 + 800 + 64 bytes, else 6464
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import MAPPED, Division
from megatrain_jax._src.engine.program.primitives import CUMULATIVE, FREE, FUSED, FUSING, PRODUCTS
from megatrain_jax._src.engine.program.tiling.flow import Flow, Labels, Operation

# Operations that are not recomputed to save a value's bytes. A product is recomputed if its result
# is much larger than its operands, as attention scores and an MLP's hidden layer are.
_COSTLY = CUMULATIVE | {"sort", "top_k"}
_MUCH_LARGER = 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TileLoop:
    """A loop over tiles.

    Attributes:
        ops: The operations of each tile, in order, with their divisions.
        stored: Values that tiles write part by part.
        summed: Values that are sums over the tiles.
    """

    ops: tuple[tuple[Operation, Division], ...]
    stored: tuple[int, ...]
    summed: tuple[int, ...]


def ordered(flow: Flow, labels: Labels) -> tuple[TileLoop | Operation, ...]:
    """A divided flow as a sequence of loops over tiles and operations on whole values."""
    reads = _Reads(flow, labels)
    levels = _levels(flow, labels, reads)
    stored = _stored(flow, labels, reads, levels)
    steps: list[TileLoop | Operation] = []
    for level in range(max(levels, default=0) + 1):
        own = [n for n, at in enumerate(levels) if at == level]
        steps += [flow.ops[n] for n in own if n not in labels.divisions]
        loop = _loop(flow, labels, reads, stored, [n for n in own if n in labels.divisions])
        steps += [loop] if loop.ops else []
    return tuple(steps)


class _Reads:
    """The maker of each value, and the operands that each operation reads in tiles, or whole."""

    def __init__(self, flow: Flow, labels: Labels) -> None:
        self.maker = {v: n for n, op in enumerate(flow.ops) for v in op.makes}
        # For each operation, its computed operands: read tile by tile as they are made, or only
        # when they are whole.
        self.along: list[list[int]] = []
        self.whole: list[list[int]] = []
        for n, op in enumerate(flow.ops):
            division = labels.divisions.get(n)
            operands = division.operands if division else (None,) * len(op.reads)
            made = [(v, x) for v, x in zip(op.reads, operands, strict=True) if v in self.maker]
            along = {v for v, x in made if x is not None and labels.made.get(v) == x}
            # An operand may be read both ways, as both sides of one product.
            whole = {v for v, x in made if x is None or labels.made.get(v) != x}
            self.along.append(sorted(along))
            self.whole.append(sorted(whole))


def _levels(flow: Flow, labels: Labels, reads: _Reads) -> list[int]:
    """The level of each operation, such that the fewest bytes wait between levels."""
    # For each pair of operations, the minimum number of levels between them.
    edges: dict[tuple[int, int], int] = {}
    lasts: dict[int, set[int]] = {}
    for n in range(len(flow.ops)):
        for v in reads.along[n] + reads.whole[n]:
            maker = reads.maker[v]
            waits = maker in labels.divisions and (v in reads.whole[n] or v not in labels.made)
            edges[maker, n] = max(edges.get((maker, n), 0), int(waits))
            lasts.setdefault(v, set()).add(n)
    firing = [n for n, op in enumerate(flow.ops) if op.eqn.effects]
    # Prints and callbacks keep their order, though no value connects them.
    edges.update({pair: 0 for pair in itertools.pairwise(firing) if pair not in edges})
    earliest = [0] * len(flow.ops)
    # Operations are numbered in a computable order, so one pass is enough.
    for (maker, n), step in sorted(edges.items(), key=lambda item: item[0][1]):
        earliest[n] = max(earliest[n], earliest[maker] + step)
    # All divided operations fit in one loop: there is nothing to choose.
    if not max(earliest, default=0):
        return earliest
    return _least_waiting(flow, reads, edges, lasts, max(earliest))


def _least_waiting(
    flow: Flow,
    reads: _Reads,
    edges: Mapping[tuple[int, int], int],
    lasts: Mapping[int, set[int]],
    highest: int,
) -> list[int]:
    """Solves for levels that minimise each value's bytes times its lifetime in levels."""
    # A different number of tiles usually leads to the same problem for the same flow.
    asked = tuple(edges.items()), tuple((v, *sorted(lasts[v])) for v in sorted(lasts)), highest
    if asked in flow.levels:
        return flow.levels[asked]
    count = len(flow.ops)
    values = sorted(lasts)
    # Variables: a level for each operation, then for each value the level of its last use. A value
    # costs its bytes times (last use - making). A small cost per level breaks ties towards early
    # levels; without it, an operation that no bytes depend on could be anywhere.
    cost = np.full(count + len(values), 1e-6)
    total = sum(map(flow.num_bytes, values)) or 1
    rows: list[tuple[int, int, int]] = [(a, b, step) for (a, b), step in edges.items()]
    for at, v in enumerate(values, count):
        size = flow.num_bytes(v) / total
        cost[at] += size
        cost[reads.maker[v]] -= size
        rows += [(n, at, 0) for n in lasts[v]]
    first, second, step = (np.array(column) for column in zip(*rows, strict=True))
    # Each row says `first - second <= -step`, with one +1 and one -1. Such a matrix is totally
    # unimodular, so the simplex method ends at an integral vertex.
    which = np.arange(len(rows))
    signs = np.repeat([1.0, -1.0], len(rows))
    places = (np.concatenate([which, which]), np.concatenate([first, second]))
    matrix = csr_array((signs, places), shape=(len(rows), len(cost)))
    found = linprog(cost, A_ub=matrix, b_ub=-step, bounds=(0, highest), method="highs-ds")
    assert found.success, found.message
    flow.levels[asked] = [int(level) for level in np.rint(found.x[:count])]
    return flow.levels[asked]


def _stored(flow: Flow, labels: Labels, reads: _Reads, levels: Sequence[int]) -> set[int]:
    """The values made in tiles that are stored whole."""
    outputs = set(flow.outputs)
    stored = {v for whole in reads.whole for v in whole} | outputs
    stored &= labels.made.keys()
    # From the first level on, because values stored for an earlier cut serve later ones too.
    for level in range(1, max(levels) + 1):
        own = [n for n in labels.divisions if levels[n] == level]
        needed = {v for n in own for v in reads.along[n] if levels[reads.maker[v]] < level}
        stored |= _cut(flow, labels, reads, needed - stored, stored)
    return stored


def _cut(
    flow: Flow, labels: Labels, reads: _Reads, needed: Iterable[int], stored: set[int]
) -> set[int]:
    """The fewest bytes to store so that all needed values can be recomputed from them.

    This is a minimum cut. A path leads from each needed value to the values it is made from,
    through edges with their bytes as capacity, to values that can't be recomputed. Stored values
    end a path.
    """
    nodes: dict[int, int] = {}
    edges: dict[tuple[int, int], int] = {}
    endless = 2**31 - 1
    todo = list(needed)
    if not todo:
        return set()
    # SciPy's flows are 32-bit integers: in this unit all bytes together stay below `endless`.
    unit = max(1, sum(map(flow.num_bytes, labels.made)) // 2**29)
    source, sink = 0, 1
    while todo:
        v = todo.pop()
        if v in nodes:
            continue
        # A value is two nodes joined by an edge with its bytes: cutting it means storing the value.
        at = nodes[v] = 2 + 2 * len(nodes)
        edges[at, at + 1] = max(1, flow.num_bytes(v) // unit)
        maker = reads.maker[v]
        if _is_costly(flow, labels, maker):
            edges[at + 1, sink] = endless
        todo += [u for u in reads.along[maker] if u not in stored]
    for v, at in nodes.items():
        maker = reads.maker[v]
        edges.update({(at + 1, nodes[u]): endless for u in reads.along[maker] if u not in stored})
    edges.update({(source, nodes[v]): endless for v in needed})
    # Edges between values are endless, so only storing a value can cut a path.
    first, second = zip(*edges, strict=True)
    size = 2 + 2 * len(nodes)
    capacity = csr_array((np.array([*edges.values()], np.int32), (first, second)), (size, size))
    rest = capacity - maximum_flow(capacity, source, sink).flow
    rest.eliminate_zeros()
    # The nodes that the source still reaches through the remaining capacity are one side of a
    # minimum cut; a value is cut if its two nodes lie on different sides.
    reached = set(breadth_first_order(rest, source, return_predecessors=False))
    return {v for v, at in nodes.items() if at in reached and at + 1 not in reached}


def _is_costly(flow: Flow, labels: Labels, number: int) -> bool:
    op = flow.ops[number]
    if op.name not in PRODUCTS:
        return op.name in _COSTLY
    pairs = zip(op.reads, labels.divisions[number].operands, strict=True)
    read = sum(flow.num_bytes(v) for v, label in pairs if label is not None)
    return flow.num_bytes(op.makes[0]) < _MUCH_LARGER * read


def _loop(
    flow: Flow, labels: Labels, reads: _Reads, stored: set[int], own: Sequence[int]
) -> TileLoop:
    """The loop for these operations, reduced to the ones needed for stored and summed values."""
    summed = [v for n in own if labels.divisions[n].kind != MAPPED for v in flow.ops[n].makes]
    kept = [v for n in own for v in flow.ops[n].makes if v in stored]
    mine, found = set(own), set()
    # Backward from the loop's results: operations of earlier levels are repeated if their results
    # are needed and not stored; operations that nothing here needs are left out.
    todo = [reads.maker[v] for v in [*summed, *kept]]
    while todo:
        n = todo.pop()
        if n in found:
            continue
        found.add(n)
        for v in reads.along[n]:
            if v not in stored or reads.maker[v] in mine:
                todo.append(reads.maker[v])
    ops = tuple((flow.ops[n], labels.divisions[n]) for n in sorted(found))
    return TileLoop(ops=ops, stored=tuple(kept), summed=tuple(summed))


# A step: the values it reads and makes, its primitive, and the bytes it needs internally.
_Event = tuple[Iterable[int], Sequence[int], str, int]


def peak_bytes(flow: Flow, steps: Sequence[TileLoop | Operation], num_tiles: int) -> int:
    """Estimates the peak bytes of a flow's own values, not counting its results."""
    outputs = set(flow.outputs)
    sizes = {v: flow.num_bytes(v) for op in flow.ops for v in op.makes if v not in outputs}
    events: list[_Event] = []
    for step in steps:
        if isinstance(step, Operation):
            events.append((step.reads, step.makes, step.name, 0))
            continue
        for v in step.summed:  # in fp32
            aval = flow.avals[v]
            if jx.is_float(aval) and aval.dtype.itemsize < 4:
                sizes[v] = 4 * jx.num_elements(aval)
        inside = {v for op, _ in step.ops for v in op.makes}
        reads = {v for op, _ in step.ops for v in op.reads} - inside
        reads |= {v for op, _ in step.ops for v in op.reads if v in step.stored}
        within = loop_bytes(flow, step) // num_tiles
        events.append((sorted(reads), (*step.stored, *step.summed), "loop", within))
    return _peak(events, sizes)


def loop_bytes(flow: Flow, loop: TileLoop) -> int:
    """Estimates the peak bytes within a loop if it had one tile."""
    given = {*loop.stored, *loop.summed}
    made = {v for op, _ in loop.ops for v in op.makes} - given
    events = [(op.reads, op.makes, op.name, 0) for op, _ in loop.ops]
    return _peak(events, {v: flow.num_bytes(v) for v in made})


def _peak(events: Sequence[_Event], sizes: dict[int, int]) -> int:
    """The peak bytes over a sequence of events."""
    readers: dict[int, list[bool]] = {}
    for reads, _, name, _ in events:
        for v in set(reads):
            readers.setdefault(v, []).append(name in FUSING)
    # The values in memory that each value is computed from.
    roots: dict[int, frozenset[int]] = {}
    steps = []
    for reads, makes, name, within in events:
        behind = frozenset().union(*(roots.get(v, ()) for v in reads))
        for v in makes:
            read = readers.get(v, [])
            # Fused into its only reader, a result is never written. With two readers a compiler may
            # compute it twice or keep it; this counts it as kept.
            free = name in FREE or (name in FUSED and len(read) <= 1)
            roots[v] = behind if free and all(read) else frozenset((v,))
        steps.append(([v for v in makes if v in roots[v]], behind, within))
    return jx.peak_bytes(steps, lambda v: sizes.get(v, 0))
