"""Finds, from the trace of a loss, the parameters upstream of each parameter.

Parameter i is upstream of j if j is combined with a value that depends on i and on data. List
elements that run in series are each upstream of the next: this distinguishes layers from experts,
which run side by side.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatrain_jax._src.engine.program import jaxpr as jx


class _Source(NamedTuple):
    """The sources of a value.

    Attributes:
        bits: Bit mask of the parameters that it depends on.
        data: Whether it depends on data.
    """

    bits: int
    data: bool


_NOTHING = _Source(0, False)


def find_upstream(jaxpr: Any, num_consts: int, num_parameters: int) -> list[int | None]:
    """Finds the parameters upstream of each parameter, from the values it is combined with.

    In `y = tanh(x @ w0) @ w1`, parameter 0 is combined with data alone and parameter 1 with a value
    that depends on parameter 0: the answer is `[0b00, 0b01]`. A stack that a scan reads slice by
    slice is upstream of itself if a slice takes the result of the slice before it. Reads in a
    single equation, a loop or a conditional, have no order among themselves.

    Args:
        jaxpr: A function of constants, then parameters, then data.
        num_consts: Number of constants.
        num_parameters: Number of parameters.

    Returns:
        For each parameter, a bit mask of parameters, or None if no data meets it.
    """
    walk = _Walk(num_parameters)
    # Python's integers have any length: joining two sets is one operation even for 10,000
    # parameters.
    sources = [_NOTHING] * num_consts
    sources += [_Source(1 << i, False) for i in range(num_parameters)]
    walk.run(jaxpr, sources + [_Source(0, True)] * (len(jaxpr.invars) - len(sources)))
    return walk.found


class _Walk:
    """A walk through the equations of a function, nested calls included.

    Attributes:
        found: For each parameter, the parameters upstream of it so far, or None.
        known: Each set of parameters met so far, mapped to itself.
    """

    def __init__(self, num_parameters: int):
        self.found: list[int | None] = [None] * num_parameters
        self.known: dict[int, int] = {}  # equal numbers share one object, because they are long

    def run(self, jaxpr: Any, ins: Sequence[_Source]) -> list[_Source]:
        """Sources of a jaxpr's outputs, from the sources of its inputs."""
        env: dict[Any, _Source] = dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom):
            return _NOTHING if jx.is_literal(atom) else env.get(atom, _NOTHING)

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._eqn(eqn, [read(a) for a in eqn.invars]), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _eqn(self, eqn, ins: list[_Source]) -> list[_Source]:
        """Sources of an equation's results; calls and scans over layers are walked into."""
        name = eqn.primitive.name
        if inner := jx.called(eqn):
            return self.run(inner.jaxpr, ins)
        if name == "scan":
            num_consts, num_carry = jx.scan_parts(eqn)
            first = num_consts + num_carry
            if any(s.bits and not s.data for s in ins[first:]):
                return self._scan(jx.loop_body(eqn).jaxpr, ins, num_consts, first)
        return [self._meet(eqn, ins)] * len(eqn.outvars)

    def _scan(self, body, ins, num_consts: int, first: int) -> list[_Source]:
        """Walks two iterations of a scan over layers; the second carries the first one's result.

        A stack, which is one parameter, thus meets itself if its layers are in series.
        """
        carry = ins[num_consts:first]
        for _ in range(2):
            out = self.run(body, [*ins[:num_consts], *carry, *ins[first:]])
            new = zip(carry, out[: len(carry)], strict=True)
            carry = [self._join(pair) for pair in new]
        return [*carry, *out[len(carry) :]]

    def _meet(self, eqn, ins: list[_Source]) -> _Source:
        """Joins an equation's operands; parameter-only operands meet the operands with data."""
        # Parameters combined only with each other, as in a sum of penalties, say nothing about
        # order.
        before = self._join([s for s in ins if s.data])
        joined = self._join(ins)
        if before.data:
            for atom, source in zip(eqn.invars, ins, strict=True):
                # A scalar made from parameters, such as a penalty, is not a layer's weights.
                if source.bits and not source.data and jx.num_elements(atom.aval) > 1:
                    self._record(source.bits, before.bits)
        return joined

    def _record(self, read: int, before: int) -> None:
        """Adds `before` to the parameters upstream of each parameter in `read`."""
        while read:
            lowest = read & -read
            i = lowest.bit_length() - 1
            self.found[i] = self._one((self.found[i] or 0) | before)
            read ^= lowest

    def _join(self, sources: Sequence[_Source]) -> _Source:
        bits = 0
        for source in sources:
            bits |= source.bits
        return _Source(self._one(bits), any(s.data for s in sources))

    def _one(self, bits: int) -> int:
        return self.known.setdefault(bits, bits)
