"""Separates reductions of large arrays from a fragment, so that a kernel can do them in pieces.

The sum of squares of a gradient reads each element once. Compiled as equations on whole arrays, it
may need an array of squares, or of the gradient in another dtype, as large as the gradient itself.

Example: the *reduce* of clipping by a global norm, with a large leaf `a` and a small `b`::

    g = square a       # a, of shape (128, 2048, 768), is large: these two equations are
    k = reduce_sum g   # the reduction (inputs (0,), f([a]) = [square a], "reduce_sum") of k
    h = square b
    m = reduce_sum h   # the rest computes this, and returns k and m
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import FOLDS
from megatrain_jax._src.engine.program.optimizer.elementwise import find_elementwise_functions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """A number to which an elementwise function of arrays is reduced.

    Attributes:
        eqn: The equation that reduces.
        arrays: Positions of the arrays among the jaxpr's inputs.
        function: The elementwise function `(rows, others) -> [row]` of these arrays, of any shape,
            and of the remaining inputs by position.
    """

    eqn: Any
    arrays: tuple[int, ...]
    function: Callable[[Sequence[jax.Array], Mapping[int, Any]], list[jax.Array]]

    def reduced(self, row: jax.Array) -> jax.Array:
        """Reduces the last axis of rows of the function's values."""
        params = {**self.eqn.params, "axes": (row.ndim - 1,)}
        return jx.bind(self.eqn.replace(params=params), [row])[0]

    def together(self, total: jax.Array, more: jax.Array) -> jax.Array:
        """Combines the results of two parts of the arrays."""
        return FOLDS[self.eqn.primitive.name](total, more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reductions:
    """A jaxpr split in two: reductions of large arrays, and the rest.

    Attributes:
        found: The reductions.
        rest: A jaxpr that computes the outputs.
        inputs: For each input of `rest`, its position among the whole jaxpr's inputs followed by
            the results of `found`.
    """

    found: tuple[Reduction, ...]
    rest: Any
    inputs: tuple[int, ...]


def find_reductions(jaxpr: Any, large: Mapping[int, Hashable]) -> Reductions:
    """Splits a jaxpr without constants of its own into reductions of large arrays and the rest.

    A reduction qualifies if it runs along all axes of an elementwise expression of single numbers
    and of large arrays with the same layout; everything else is left whole.

    Args:
        jaxpr: The jaxpr.
        large: The large inputs by position, each with a value that is equal for arrays whose
            elements have the same layout.
    """
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    found = []
    for eqn in jaxpr.eqns if large else ():
        if eqn.primitive.name not in FOLDS or jx.is_literal(eqn.invars[0]):
            continue
        (operand,) = eqn.invars
        shape = operand.aval.shape
        behind, read = _behind(jaxpr, operand, producer)
        arrays = tuple(sorted(number[v] for v in read if v.aval.shape))
        # A sum along one axis gives an array. A small array among the operands would have to be cut
        # into pieces too, but it is not.
        if len(eqn.params["axes"]) < len(shape) or not large.keys() >= set(arrays):
            continue
        # All of one shape, so that their pieces contain the same elements.
        if {jaxpr.invars[i].aval.shape for i in arrays} != {shape}:
            continue
        if len({large[i] for i in arrays}) > 1:
            continue
        lined_up = find_elementwise_functions(behind, [shape], [(i,) for i in arrays], [(0,)])
        if lined_up is not None:
            found.append(Reduction(eqn=eqn, arrays=arrays, function=lined_up[1][0]))
    taken = {id(reduction.eqn) for reduction in found}
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    results = [reduction.eqn.outvars[0] for reduction in found]
    rest = jx.sub_jaxpr(jaxpr, eqns, [*jaxpr.invars, *results], jaxpr.outvars)
    # Inputs that only the reductions read, including large arrays, are dropped here.
    rest, used = partial_eval.dce_jaxpr(rest, [True] * len(rest.outvars))
    inputs = tuple(i for i, yes in enumerate(used) if yes)
    return Reductions(found=tuple(found), rest=rest, inputs=inputs)


def _behind(jaxpr: Any, result: Any, producer: Mapping[Any, int]) -> tuple[Any, set[Any]]:
    """The equations behind a variable, as a jaxpr of all inputs, and the inputs they read."""
    present: set[int] = set()
    read: set[Any] = set()
    todo = [result]
    while todo:
        v = todo.pop()
        if v not in producer:
            read.add(v)
        elif producer[v] not in present:
            present.add(producer[v])
            todo += jx.variables(jaxpr.eqns[producer[v]].invars)
    eqns = [jaxpr.eqns[i] for i in sorted(present)]
    return jx.sub_jaxpr(jaxpr, eqns, jaxpr.invars, [result]), read
