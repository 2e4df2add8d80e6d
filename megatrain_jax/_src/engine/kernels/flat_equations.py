"""A jaxpr as one list of equations, and the order in which a GPU is expected to run its kernels.

Calls, remats and loops of one iteration are opened, a split becomes slices, sums with zeros
disappear, and equations that no result needs are left out. A call gets new values, so equations
are plain records here: JAX's equations would need new variables.

Example: `jit(lambda x: 0 + sin(x))(y) * y` becomes `a = sin y; b = mul a y`.

Equations that write arrays are nodes. They run in the order of the equations, with exceptions:
nodes that depend only on arguments run when they are needed, nodes without new arrays as early as
possible, and products that no product needs last.
"""

from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import BARRIER, CALLS, CUSTOM_RULES, REMAT

_CAST = SimpleNamespace(name="convert_element_type")
_RESHAPE = SimpleNamespace(name="reshape")
_SLICE = SimpleNamespace(name="slice")
_SUMS = ("add", "add_any")


class FlatValue:
    """A value: its shape and dtype. Values are compared by identity."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        """Makes a new value."""
        self.aval = aval


class Equation(NamedTuple):
    """An equation on values and literals, with the fields of JAX's equations, and one more.

    Attributes:
        operands: The values that it reads, once each.
    """

    primitive: Any
    params: dict[str, Any]
    invars: Sequence[Any]
    outvars: Sequence[FlatValue]
    effects: Any
    operands: Sequence[Any]

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.primitive.name


def _equation(
    primitive: Any,
    params: dict[str, Any],
    invars: Sequence[Any],
    outvars: Sequence[FlatValue],
    effects: Any = frozenset(),
) -> Equation:
    operands = list(dict.fromkeys(jx.variables(invars)))
    return Equation(primitive, params, invars, outvars, effects, operands)


class FlatEquations:
    """The equations of a jaxpr, with its inputs and results as values.

    Attributes:
        eqns: The equations.
        invars: The inputs, in the order of the jaxpr's.
        outvars: The results: values or literals.
    """

    def __init__(self, jaxpr: Any, stored: Sequence[Any] = ()):
        """Opens a jaxpr, closed or not.

        Args:
            jaxpr: The jaxpr.
            stored: For each input, the dtype that it is cast from first; None if it isn't cast.
        """
        jaxpr = jx.opened(jaxpr)
        self.eqns: list[Equation] = []
        self._zeros: set[FlatValue] = set()
        values = [FlatValue(v.aval) for v in jaxpr.invars]
        self.invars = list(values)
        for i, dtype in enumerate(stored):
            if dtype is not None:
                self.invars[i] = FlatValue(values[i].aval.update(dtype=dtype))
                self.eqns.append(_equation(_CAST, {}, [self.invars[i]], [values[i]]))
        self.outvars = self._run(jaxpr, values)
        needed, kept = set(jx.variables(self.outvars)), []
        for eqn in reversed(self.eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                kept.append(eqn)
                needed.update(eqn.operands)
        self.eqns = kept[::-1]

    def _run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Adds the equations of an open jaxpr on these values; returns its results."""
        values = [*(FlatValue(v.aval) for v in jaxpr.constvars), *args]
        return jx.interpret(jaxpr, values, self._eqn, lambda atom: atom)

    def _eqn(self, eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if inner := jx.called(eqn, CALLS | REMAT | CUSTOM_RULES):
            return self._run(inner.jaxpr, args)
        if name == "scan" and eqn.params["length"] == 1:
            return self._only_iteration(eqn, args)
        if name == BARRIER:  # separate barriers, because the values have different readers
            return [
                a if jx.is_literal(a) else self._add(eqn.primitive, {}, [a], [a.aval])[0]
                for a in args
            ]
        made = [v.aval for v in eqn.outvars]
        if name == "split":  # separate slices, because a part is made when it is needed
            return self._parts(eqn, args, made)
        if name in _SUMS:
            for zero, other in (args, args[::-1]):
                if not jx.is_literal(zero) and zero in self._zeros and _is_alike(other, made[0]):
                    return [other]
        found = self._add(eqn.primitive, eqn.params, args, made, eqn.effects)
        if name == "broadcast_in_dim" and jx.is_literal(args[0]) and args[0].val == 0:
            self._zeros.add(found[0])
        return found

    def _only_iteration(self, eqn: Any, args: list[Any]) -> list[Any]:
        """The equations of a loop's only iteration; the compiler runs it without a loop."""
        body = jx.loop_body(eqn).jaxpr
        num_consts, num_carry = jx.scan_parts(eqn)
        whole = num_consts + num_carry
        rows = zip(args[whole:], body.invars[whole:], strict=True)
        out = self._run(body, [*args[:whole], *(self._reshaped(a, v.aval) for a, v in rows)])
        stacked = zip(out[num_carry:], eqn.outvars[num_carry:], strict=True)
        return [*out[:num_carry], *(self._reshaped(a, v.aval) for a, v in stacked)]

    def _parts(self, eqn: Any, args: list[Any], made: Sequence[Any]) -> list[Any]:
        axis, start, found = eqn.params["axis"], 0, []
        for aval in made:
            starts = [0] * len(aval.shape)
            starts[axis], start = start, start + aval.shape[axis]
            ends = [a + n for a, n in zip(starts, aval.shape, strict=True)]
            params = {"start_indices": tuple(starts), "limit_indices": tuple(ends), "strides": None}
            found += self._add(_SLICE, params, args, [aval])
        return found

    def _reshaped(self, atom: Any, aval: Any) -> FlatValue:
        params = {"new_sizes": aval.shape, "dimensions": None}
        return self._add(_RESHAPE, params, [atom], [aval])[0]

    def _add(
        self,
        primitive: Any,
        params: dict[str, Any],
        invars: Sequence[Any],
        made: Sequence[Any],
        effects: Any = frozenset(),
    ) -> list[FlatValue]:
        found = [FlatValue(aval) for aval in made]
        self.eqns.append(_equation(primitive, params, invars, found, effects))
        return found


def _is_alike(atom: Any, aval: Any) -> bool:
    return (atom.aval.shape, atom.aval.dtype) == (aval.shape, aval.dtype)


# ---- the order of a GPU's kernels


class Node(NamedTuple):
    """An equation that writes arrays.

    Attributes:
        eqn: The equation.
        reads: The arrays that it reads, also through fused values.
        waits: The nodes that it has to follow.
        makes: The arrays that it allocates.
        arguments_only: Whether it depends only on arguments.
        multiplies: Whether it computes a matrix product, at least of a sum.
    """

    eqn: Equation
    reads: frozenset[Any]
    waits: frozenset[int]
    makes: Sequence[Any]
    arguments_only: bool
    multiplies: bool


def in_order(nodes: Sequence[Node], held: Any) -> list[int]:
    """The numbers of nodes in the order of their execution.

    Args:
        nodes: The nodes, in the order of their equations.
        held: Function from arrays to the bytes that they allocate.
    """
    followers: dict[int, list[int]] = {}
    missing = [len(node.waits) for node in nodes]
    for number, node in enumerate(nodes):
        for before in node.waits:
            followers.setdefault(before, []).append(number)
    # A kernel that decodes several weights at once makes all of them.
    together: dict[Any, list[int]] = {}
    for number, node in enumerate(nodes):
        if node.arguments_only and len(node.reads) > 1:
            like = node.reads, held(node.makes)
            together.setdefault(like, []).append(number)
    order: dict[int, None] = {}

    def run(number: int) -> None:
        todo = [number]
        while todo:
            number = todo.pop()
            if number in order:
                continue
            node = nodes[number]
            if lacking := [before for before in node.waits if before not in order]:
                todo += [number, *sorted(lacking, reverse=True)]
                continue
            order[number] = None
            if node.arguments_only:
                todo += together.get((node.reads, held(node.makes)), ())
            for other in followers.get(number, ()):
                missing[other] -= 1
                # A node without new arrays runs at once, because it may free memory.
                is_free = not nodes[other].multiplies and not held(nodes[other].makes)
                if not missing[other] and is_free:
                    todo.append(other)

    readers: dict[Any, list[int]] = {}
    for number, node in enumerate(nodes):
        for array in node.reads if node.multiplies else ():
            readers.setdefault(array, []).append(number)
    firm = sorted(
        (number for number, node in enumerate(nodes) if not node.arguments_only),
        key=_last(nodes).__contains__,
    )
    for number, following in zip_longest(firm, firm[1:]):
        # A weight may be cut out before the product's last operand is computed.
        if following is not None and number in nodes[following].waits:
            for before in sorted(nodes[following].waits):
                if nodes[before].arguments_only:
                    run(before)
        for smaller in sorted(_smaller(nodes, number, held, order, readers)):
            run(smaller)
        run(number)
    for number in range(len(nodes)):  # results that depend only on arguments
        run(number)
    return list(order)


def _last(nodes: Sequence[Node]) -> set[int]:
    """The nodes that run last: products that no product needs, and their followers."""
    needed: set[int] = set()  # by a product
    for number in reversed(range(len(nodes))):
        if nodes[number].multiplies or number in needed:
            needed.update(nodes[number].waits)
    found: set[int] = set()
    for number, node in enumerate(nodes):
        is_last = node.multiplies and number not in needed
        if is_last or not found.isdisjoint(node.waits):
            found.add(number)
    return found


def _smaller(nodes, number, held, order, readers):
    """Products that share an operand with a product, could run before it, and need less memory."""
    node = nodes[number]
    if not node.multiplies or number in order:
        return []
    found = {n for array in node.reads for n in readers[array] if n > number and n not in order}
    return [
        n
        for n in found
        if 0 < held(nodes[n].makes) < held(node.makes)
        and all(before in order or nodes[before].arguments_only for before in nodes[n].waits)
    ]
