"""A jaxpr as a flat list of operations on numbered values, with all calls opened.

Each call of a jaxpr gets fresh values. Numbers avoid making new variables: an operation is an
equation, used only for its primitive, parameters and context, with the numbers of its operands and
results.

Example: `jit(lambda x: 2 * sin(x))(y) + y` with y an input::

    values   0: y   1: the literal 2   2: sin y   3: 2 * sin y   4: the sum
    ops      sin (0,) -> (2,)    mul (1, 2) -> (3,)    add (3, 0) -> (4,)
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx
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
    ops = _needed(opening.ops, outputs)
    return Flow(
        ops=tuple(ops),
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
        env: dict[Any, int] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var.aval, const)

        def number(atom: Any) -> int:
            return self.constant(atom.aval, atom.val) if jx.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._eqn(eqn, [*map(number, eqn.invars)]), strict=True))
        return [number(atom) for atom in jaxpr.outvars]

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


def _needed(ops: Sequence[Operation], outputs: Sequence[int]) -> list[Operation]:
    """The operations that outputs depend on, and all operations with effects."""
    needed, kept = set(outputs), []
    for op in reversed(ops):
        if op.eqn.effects or not needed.isdisjoint(op.makes):
            kept.append(op)
            needed.update(op.reads)
    return kept[::-1]
