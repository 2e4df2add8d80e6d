"""Elementwise updates on whole slabs, and reductions of large arrays in pieces.

Leaves of an elementwise update are lined up in one long array.

Most optimizers treat every element of a parameter alike. The update of a group is then one
elementwise function of whole slabs, which a compiler can do in place. A function of many leaves
would need slabs to be split and reassembled beside the old ones.

Example: `p - lr * g` for leaves of shapes (2, 3) and (5,), with inputs p0, p1, g0, g1, lr:

    line_up(jaxpr, [(2, 3), (5,)], wide_inputs=[(0, 1), (2, 3)], wide_outputs=[(0, 1)])
    -> (0, 0), (f,)     both leaves use one function: f([p, g], {4: lr}) -> [new p], each of (11,)

With `2 * lr` for the second leaf there are two functions, (0, 1). With `g / norm(g)` there is none,
because a norm mixes elements.

Reductions of large arrays are separated from a fragment, so that a kernel can do them in pieces.

The sum of squares of a gradient reads each element once. Compiled as equations on whole arrays, it
may need an array of squares, or of the gradient in another dtype, as large as the gradient itself.

Example: the *reduce* of clipping by a global norm, with a large leaf `a` and a small `b`::

    g = square a       # a, of shape (128, 2048, 768), is large: these two equations are
    k = reduce_sum g   # the reduction (inputs (0,), f([a]) = [square a], "reduce_sum") of k
    h = square b
    m = reduce_sum h   # the rest computes this, and returns k and m
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import FOLDS
from megatrain_jax._src.engine.program.primitives import ELEMENTWISE


class _NotElementwise(Exception):
    """Raised for an equation that mixes elements, or depends on their position."""


def find_elementwise_functions(
    jaxpr: Any,
    shapes: Sequence[tuple[int, ...]],
    wide_inputs: Sequence[Sequence[int]],
    wide_outputs: Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], tuple[Callable, ...]] | None:
    """Finds the elementwise functions that compute a jaxpr's outputs from lined-up leaves.

    Args:
        jaxpr: A jaxpr without constants of its own, and with open calls.
        shapes: Shapes of the leaves.
        wide_inputs: Rows of inputs by position (all gradients, all masters, ...), with one input
            per leaf, of its shape. All remaining inputs are the same for all leaves.
        wide_outputs: Rows of outputs, likewise; each output belongs to one.

    Returns:
        For each leaf the index of its function, and the functions, each `(rows, others) -> rows`:
        `rows` has one long array for each of `wide_inputs`, `others` the remaining inputs by
        position. None if there are no such functions.
    """
    # A leaf of shape () could not be told from a number that is the same for all leaves.
    if sum(map(len, wide_outputs)) != len(jaxpr.outvars) or not all(shapes):
        return None
    # Most leaves share one function. Masks or labels make a few; each computes whole slabs, and
    # `updates` keeps the elements of its leaves.
    kinds: dict[Hashable, tuple[int, Callable]] = {}
    kind_of = []
    for leaf, shape in enumerate(shapes):
        mine = {row[leaf]: r for r, row in enumerate(wide_inputs)}
        outputs = [row[leaf] for row in wide_outputs]
        try:
            key, function = _leaf_function(jaxpr, shape, mine, outputs, wide_inputs)
        except _NotElementwise:
            return None
        kind_of.append(kinds.setdefault(key, (len(kinds), function))[0])
    return tuple(kind_of), tuple(function for _, function in kinds.values())


def _leaf_function(jaxpr, shape, mine: Mapping[int, int], outputs, wide_inputs):
    """The function of one leaf's outputs, with a key that is equal for equal functions.

    Raises:
        _NotElementwise: It needs another leaf, or is not elementwise.
    """
    used = [i in outputs for i in range(len(jaxpr.outvars))]
    # Only the equations behind this leaf's outputs.
    sliced, needed = partial_eval.dce_jaxpr(jaxpr, used)
    wide = {i for row in wide_inputs for i in row}
    places = [i for i, needs in enumerate(needed) if needs]
    if any(i in wide and i not in mine for i in places):
        raise _NotElementwise
    # `dce_jaxpr` returns outputs in ascending order.
    order = [sorted(outputs).index(i) for i in outputs]
    sources = tuple(("row", mine[i]) if i in mine else ("other", i) for i in places)
    widths = [i in mine for i in places]
    key, out_wide = _check(sliced, widths, shape)
    if not all(out_wide):
        raise _NotElementwise

    def function(rows: Sequence[jax.Array], others: Mapping[int, Any]) -> list[jax.Array]:
        values = [rows[at] if kind == "row" else others[at] for kind, at in sources]
        results = _run(sliced, values, shape, rows[0].shape)
        return [results[i] for i in order]

    return (key, sources, tuple(order)), function


def _check(jaxpr: Any, widths: Sequence[bool], shape: tuple[int, ...]):
    """Checks that a jaxpr treats all elements of a leaf alike.

    A variable is wide if it has the leaf's shape, element by element. All remaining variables must
    be single numbers.

    Returns:
        A key without shapes, and for each output whether it is wide.

    Raises:
        _NotElementwise: An equation mixes elements, or depends on their position.
    """
    numbers, body = itertools.count(), []

    # A variable's value here is its number, or the bytes of a literal, and whether it is wide.
    def literal(atom: Any) -> tuple[Hashable, bool]:
        return ("literal", np.asarray(atom.val).tobytes(), str(atom.aval.dtype)), False

    def results_of(eqn: Any, ins: list[tuple[Hashable, bool]]) -> list[tuple[int, bool]]:
        flags, shapes = [wide for _, wide in ins], [v.aval.shape for v in eqn.outvars]
        # Operands that are leaves, or numbers.
        are_fit = all(wide or a.aval.shape == () for a, wide in zip(eqn.invars, flags, strict=True))
        name = eqn.primitive.name
        # Computation on numbers shared by all leaves, such as a learning rate, may be anything.
        if not any(flags) and all(own == () for own in shapes):
            params, out_flags = _params(eqn), [False] * len(eqn.outvars)
        # A leaf filled with one number.
        elif name == "broadcast_in_dim" and not any(flags) and are_fit and shapes == [shape]:
            params, out_flags = (), [True]
        elif name in ELEMENTWISE and are_fit and all(own == shape for own in shapes):
            params, out_flags = _params(eqn), [True] * len(eqn.outvars)
        else:
            raise _NotElementwise
        outs = [(next(numbers), wide) for wide in out_flags]
        dtypes = tuple(str(v.aval.dtype) for v in eqn.outvars)
        body.append((name, tuple(key for key, _ in ins), params, dtypes))
        return outs

    inputs = [(next(numbers), wide) for wide in widths]
    results = jx.interpret(jaxpr, inputs, results_of, literal)
    key = tuple(body), tuple(key for key, _ in results)
    return key, [wide for _, wide in results]


def _params(eqn: Any) -> Hashable:
    """An equation's parameters as a key."""
    # As text, because some values, including jaxprs, can't be hashed.
    return tuple((name, str(value)) for name, value in sorted(eqn.params.items()))


def _run(jaxpr: Any, values: Sequence[Any], leaf: tuple[int, ...], shape: tuple[int, ...]) -> list:
    """Evaluates a jaxpr on arrays of a different shape in place of a leaf's."""

    def results_of(eqn: Any, operands: list[Any]) -> list[Any]:
        # Among these operations, only this one's parameters contain a leaf's shape.
        if eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.shape == leaf:
            return [jnp.broadcast_to(jnp.asarray(operands[0]), shape)]
        return jx.bind(eqn, operands)

    return jx.interpret(jaxpr, values, results_of)


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
        numbers, read = jx.behind(jaxpr.eqns, producer, [operand])
        eqns = [jaxpr.eqns[i] for i in sorted(numbers)]
        behind = jx.sub_jaxpr(jaxpr, eqns, jaxpr.invars, [operand])
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
