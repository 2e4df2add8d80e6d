"""Chooses which operations of a flow are divided into tiles, and along which axes.

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
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from megatrain_jax._src.engine.program.axes import MAPPED, Axes, Division, Label
from megatrain_jax._src.engine.program.tiling.flow import Flow


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PropagatedLabels:
    """The divisions and labels that follow from the label of one value.

    Attributes:
        ways: The possible divisions of each operation that has some, by its position.
        labels: Values with their labels; a value may have several.
    """

    ways: Mapping[int, Collection[Division]]
    labels: Collection[tuple[int, Label]]


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
        return PropagatedLabels(ways={n: tuple(w) for n, w in ways.items() if w}, labels=seen)


def chosen(flow: Flow, carried: PropagatedLabels, *, last: bool) -> Labels:
    """Chooses one division for each operation that has some.

    Args:
        flow: The flow.
        carried: Its possible divisions.
        last: Whether ties between axes go to the last axis instead of the first. For example, a
            softmax runs along the keys of its scores, so dividing along queries needs fewer loops;
            which of the two axes comes first depends on the model.
    """
    divisions: dict[int, Division] = {}
    made: dict[int, Label] = {}
    # By axis: the first choice is the first axis, or with `last` the last one.
    open_ways = {n: sorted(w, key=_order, reverse=last) for n, w in carried.ways.items()}
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
    return [(-1, 0, 0) if x is None else dataclasses.astuple(x) for x in labels], way.kind


def _matching(flow: Flow, reads: tuple[int, ...], way: Division, made: Mapping[int, Label]) -> int:
    """Bytes of operands that a division reads tile by tile as they are made, less mismatches."""
    pairs = zip(reads, way.operands, strict=True)
    # A value read in a different division must be whole first: the cost equals the gain of a match.
    return sum(flow.num_bytes(v) * (1 if made[v] == x else -1) for v, x in pairs if v in made)
