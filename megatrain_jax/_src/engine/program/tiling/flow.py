"""A jaxpr as operations on numbered values, and the choice of those that are divided into tiles.

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
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import MAPPED, Axes, Division, Label
from megatrain_jax._src.engine.program.primitives import BARRIER, CALLS, CUSTOM_RULES, REMAT


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
        levels: Cache of solved levels of its operations; see `loop_order.py`.
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
        if inner := jx.called(eqn, CALLS | REMAT | CUSTOM_RULES):
            if name in REMAT and eqn.params["prevent_cse"] and eqn.params["differentiated"]:
                reads = self._barriers(eqn, reads)
            return self.run(inner.jaxpr, inner.consts, reads)
        # A barrier of several values becomes one each, because only some of them may have tiles.
        if name == BARRIER:
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
