"""A jaxpr as operations on numbered values, divided into loops over tiles.

A flow is a flat list of operations on numbered values, with all calls opened.

Each call of a jaxpr gets fresh values. Numbers avoid making new variables: an operation is an
equation, used only for its primitive, parameters and context, with the numbers of its operands and
results.

Example: `jit(lambda x: 2 * sin(x))(y) + y` with y an input::

    values   0: y   1: the literal 2   2: sin y   3: 2 * sin y   4: the sum
    ops      sin (0,) -> (2,)    mul (1, 2) -> (3,)    add (3, 0) -> (4,)

Labels say which operations of a flow are divided into tiles, and along which axes.

The division of one value is propagated, in both directions, to all values that must be divided with
it. Some operations could be divided in several ways: attention scores along queries or along keys.
Their operands' labels then decide, and for values without operands, such as masks, the labels that
their readers want.

Example: `x` f32[4, 8, 6] (examples, tokens, width) in 2 tiles along tokens::

    q = x wq            x (1, 1, 4)    q (1, 1, 4), along tokens as x
    k = x wk                           k (1, 1, 4)
    s = q k             q (1, 1, 4)    k whole; s (1, 1, 4), along queries
    m = mask over keys                 m (1, 1, 4), since it is added to s
    y = (s + m) x       s + m          x whole; y (1, 1, 4)
    dw = y x            y, x           dw: a sum over tiles

Operations that share a loop over tiles are computed together, with operations between loops.

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
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import primitives
from megatrain_jax._src.engine.program.axes import MAPPED, Axes, Division, Label


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation: an equation, and the numbers of the values that it reads and makes."""

    eqn: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """A jaxpr as operations on numbered values, without operations that no output needs.

    Attributes:
        ops: The operations, in an order in which they can be computed.
        avals: Shape and dtype of each value.
        constants: Literals and constants, by number.
        inputs: Numbers of the inputs.
        outputs: Numbers of the outputs.
        levels: Cache of solved levels of its operations; see `ordered`.
    """

    ops: tuple[Operation, ...]
    avals: tuple[Any, ...]
    constants: Mapping[int, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    levels: dict[Hashable, list[int]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each value."""
        return tuple(map(jx.num_bytes, self.avals))

    @functools.cached_property
    def propagator(self) -> "LabelPropagator":
        """Propagates labels through it."""
        return LabelPropagator(self)

    @functools.cached_property
    def whole_bytes(self) -> int:
        """The estimate of `peak_bytes` without tiles."""
        return peak_bytes(self, self.ops, 1)

    def num_bytes(self, value: int) -> int:
        """Bytes of a value."""
        return self.sizes[value]


def flow_of(jaxpr: Any) -> Flow:
    """Opens all calls in a closed jaxpr, including custom derivative rules and remats.

    Where a remat must not share equations with equal ones outside, its operands pass a barrier, as
    in JAX's lowering; else the compiler would keep values that are meant to be recomputed.
    """
    opening = _Opening()
    body = jx.opened(jaxpr)
    inputs = [opening.value(v.aval) for v in body.invars]
    outputs = opening.run(body, jx.constants(jaxpr), inputs)
    # All operations with effects, and those that outputs depend on.
    needed, ops = set(outputs), []
    for op in reversed(opening.ops):
        if op.eqn.effects or not needed.isdisjoint(op.makes):
            ops.append(op)
            needed.update(op.reads)
    return Flow(
        ops=tuple(reversed(ops)),
        avals=tuple(opening.avals),
        constants=opening.constants,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


class _Opening:
    """Collects values and operations while calls are opened."""

    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.ops: list[Operation] = []

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, aval: Any, value: Any) -> int:
        number = self.value(aval)
        self.constants[number] = value
        return number

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[int]) -> list[int]:
        """Adds the operations of an open jaxpr on these values; returns its results' numbers."""
        fixed = [self.constant(v.aval, x) for v, x in zip(jaxpr.constvars, consts, strict=True)]
        return jx.interpret(
            jaxpr, [*fixed, *args], self._eqn, lambda atom: self.constant(atom.aval, atom.val)
        )

    def _eqn(self, eqn: Any, reads: list[int]) -> list[int]:
        name = eqn.primitive.name
        # A kernel's jaxpr is already differentiated, so a custom rule is an ordinary call.
        if inner := jx.called(eqn, primitives.CALLS | primitives.REMAT | primitives.CUSTOM_RULES):
            if (
                name in primitives.REMAT
                and eqn.params["prevent_cse"]
                and eqn.params["differentiated"]
            ):
                reads = self._barriers(eqn, reads)
            return self.run(inner.jaxpr, inner.consts, reads)
        # A barrier of several values becomes one each, because only some of them may have tiles.
        if name == primitives.BARRIER:
            return self._barriers(eqn, reads)
        # Loops and conditionals are one operation each, on whole values.
        makes = [self.value(v.aval) for v in eqn.outvars]
        self.ops.append(Operation(eqn, tuple(reads), tuple(makes)))
        return makes

    def _barriers(self, eqn: Any, values: list[int]) -> list[int]:
        """Adds a barrier for each operand of an equation that is not a constant."""
        passed = []
        for atom, value in zip(eqn.invars, values, strict=True):
            if value not in self.constants:
                # Only the primitive, parameters and context of an operation's equation count, so
                # any variables will do.
                barrier = eqn.replace(
                    primitive=_barrier_primitive(),
                    params={},
                    effects=frozenset(),
                    invars=[atom],
                    outvars=[atom],
                )
                made = self.value(self.avals[value])
                self.ops.append(Operation(barrier, (value,), (made,)))
                value = made
            passed.append(value)
        return passed


@functools.cache
def _barrier_primitive() -> Any:
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """The divided operations of a flow, with their divisions.

    Attributes:
        divisions: The division of each divided operation, by its position.
        made: The label of each value when it is made; values that are missing are made whole.
    """

    divisions: Mapping[int, Division]
    made: Mapping[int, Label]

    def all(self) -> Iterator[Label]:
        """The labels of all operands and results."""
        for way in self.divisions.values():
            yield from (x for x in (*way.operands, *way.results) if x is not None)


# What follows from the label of one value: the possible divisions of each operation that has some,
# by its position; and values with their labels, of which a value may have several.
PropagatedLabels = tuple[Mapping[int, Collection[Division]], Collection[tuple[int, Label]]]


class LabelPropagator:
    """Propagates labels through a flow, between the maker and the readers of each value."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._axes = [Axes(op.eqn) for op in flow.ops]
        self._places: dict[int, list[tuple[int, int]]] = {}
        for number, op in enumerate(flow.ops):
            for at, v in enumerate((*op.reads, *op.makes)):
                self._places.setdefault(v, []).append((number, at))

    def carry(self, value: int, label: Label, num_tiles: int) -> PropagatedLabels:
        """Propagates one value's label to all values that must be divided with it."""
        ways: dict[int, dict[Division, None]] = {}
        seen, todo = {(value, label)}, [(value, label)]
        while todo:
            value, label = todo.pop()
            for number, at in self._places.get(value, ()):
                way = self._axes[number].division(at, label, num_tiles)
                if way is None or way in ways.setdefault(number, {}):
                    continue
                ways[number][way] = None
                op = self._flow.ops[number]
                labels = (*way.operands, *way.results)
                for v, other in zip((*op.reads, *op.makes), labels, strict=True):
                    # Labels don't pass through constants: two readers of one constant need not
                    # agree on its axes.
                    if other is None or v in self._flow.constants or (v, other) in seen:
                        continue
                    seen.add((v, other))
                    todo.append((v, other))
        return {n: tuple(w) for n, w in ways.items() if w}, seen


def chosen(flow: Flow, ways: Mapping[int, Collection[Division]], *, last: bool) -> Labels:
    """Chooses one division for each operation that has some.

    Args:
        flow: The flow.
        ways: The possible divisions of each operation that has some, by its position.
        last: Whether ties between axes go to the last axis instead of the first. For example, a
            softmax runs along the keys of its scores, so dividing along queries needs fewer loops;
            which of the two axes comes first depends on the model.
    """
    divisions: dict[int, Division] = {}
    made: dict[int, Label] = {}
    # By axis: the first choice is the first axis, or with `last` the last one.
    open_ways = {n: sorted(w, key=_order, reverse=last) for n, w in ways.items()}
    readers: dict[int, list[tuple[int, int]]] = {}
    for number, op in enumerate(flow.ops):
        for at, v in enumerate(op.reads):
            readers.setdefault(v, []).append((number, at))

    def decide(number: int, way: Division) -> None:
        divisions[number] = way
        del open_ways[number]
        if way.kind == MAPPED:
            made.update(
                (v, r) for v, r in zip(flow.ops[number].makes, way.results, strict=True) if r
            )

    def forward() -> None:
        for number in sorted(open_ways):
            op, options = flow.ops[number], open_ways[number]
            known = [v in made for v in op.reads]
            if len(options) == 1 or any(known):
                decide(number, max(options, key=lambda way: _matching(flow, op.reads, way, made)))

    # Forward, as far as operands decide; then backward, from readers to values without operands. If
    # neither decides anything, the first open operation is decided by order alone, and both
    # continue. Each round decides at least one, so this ends.
    while open_ways:
        before = len(open_ways)
        forward()
        for number in sorted(open_ways, reverse=True):
            wanted: Counter[Label] = Counter()
            for v in flow.ops[number].makes:
                for reader, at in readers.get(v, ()):
                    if reader in divisions and (label := divisions[reader].operands[at]):
                        wanted[label] += 1
            options = [w for w in open_ways[number] if any(wanted[r] for r in w.results if r)]
            if options:
                decide(number, max(options, key=lambda w: sum(wanted[r] for r in w.results if r)))
        if len(open_ways) == before:
            decide(min(open_ways), open_ways[min(open_ways)][0])
    return Labels(divisions=divisions, made=made)


def _order(way: Division) -> tuple:
    """A sort key for divisions that is the same in every run."""
    labels = [*way.results, *way.operands]
    return [(-1, 0, 0) if x is None else (x.axis, x.outer, x.inner) for x in labels], way.kind


def _matching(flow: Flow, reads: tuple[int, ...], way: Division, made: Mapping[int, Label]) -> int:
    """Bytes of operands that a division reads tile by tile as they are made, less mismatches."""
    pairs = zip(reads, way.operands, strict=True)
    # A value read in a different division must be whole first: the cost equals the gain of a match.
    return sum(flow.num_bytes(v) * (1 if made[v] == x else -1) for v, x in pairs if v in made)


# Operations that are not recomputed to save a value's bytes. A product is recomputed if its result
# is much larger than its operands, as attention scores and an MLP's hidden layer are.
_COSTLY = primitives.CUMULATIVE | {"sort", "top_k"}
_MUCH_LARGER = 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TileLoop:
    """A loop over tiles.

    Attributes:
        ops: The operations of each tile, in order, with their divisions.
        stored: Values that tiles write part by part.
        summed: Values that are sums over the tiles.
        num_bytes: Estimate of the peak bytes within it if it had one tile.
    """

    ops: tuple[tuple[Operation, Division], ...]
    stored: tuple[int, ...]
    summed: tuple[int, ...]
    num_bytes: int


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
    # Imported here, because importing SciPy takes a third of a second, and few runs need tiles.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

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
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

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
    if op.name not in primitives.PRODUCTS:
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
    num_bytes = _loop_bytes(flow, [op for op, _ in ops], {*kept, *summed})
    return TileLoop(ops=ops, stored=tuple(kept), summed=tuple(summed), num_bytes=num_bytes)


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
        within = step.num_bytes // num_tiles
        events.append((sorted(reads), (*step.stored, *step.summed), "loop", within))
    return _peak(events, sizes)


def _loop_bytes(flow: Flow, ops: Sequence[Operation], given: set[int]) -> int:
    """Estimates the peak bytes within a loop if it had one tile, beside its results."""
    made = {v for op in ops for v in op.makes} - given
    events = [(op.reads, op.makes, op.name, 0) for op in ops]
    return _peak(events, {v: flow.num_bytes(v) for v in made})


def _peak(events: Sequence[_Event], sizes: dict[int, int]) -> int:
    """The peak bytes over a sequence of events."""
    readers: dict[int, list[bool]] = {}
    for reads, _, name, _ in events:
        for v in set(reads):
            readers.setdefault(v, []).append(name in primitives.FUSING)
    # The values in memory that each value is computed from.
    roots: dict[int, frozenset[int]] = {}
    steps = []
    for reads, makes, name, within in events:
        behind = frozenset().union(*(roots.get(v, ()) for v in reads))
        for v in makes:
            read = readers.get(v, [])
            # Fused into its only reader, a result is never written. With two readers a compiler may
            # compute it twice or keep it; this counts it as kept.
            free = name in primitives.FREE or (name in primitives.FUSED and len(read) <= 1)
            roots[v] = behind if free and all(read) else frozenset((v,))
        steps.append(([v for v in makes if v in roots[v]], behind, within))
    return jx.peak_bytes(steps, lambda v: sizes.get(v, 0))
