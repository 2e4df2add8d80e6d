"""Computes elementwise updates on whole slabs, with leaves lined up in one long array.

Most optimizers treat every element of a parameter alike. The update of a group is then one
elementwise function of whole slabs, which a compiler can do in place. A function of many leaves
would need slabs to be split and reassembled beside the old ones.

Example: `p - lr * g` for leaves of shapes (2, 3) and (5,), with inputs p0, p1, g0, g1, lr:

    line_up(jaxpr, [(2, 3), (5,)], wide_inputs=[(0, 1), (2, 3)], wide_outputs=[(0, 1)])
    -> (0, 0), (f,)     both leaves use one function: f([p, g], {4: lr}) -> [new p], each of (11,)

With `2 * lr` for the second leaf there are two functions, (0, 1). With `g / norm(g)` there is none,
because a norm mixes elements.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES, ELEMENTWISE


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
        jaxpr: A jaxpr without constants of its own.
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


def _inner(eqn: Any) -> Any | None:
    """The jaxpr that an equation only wraps (a `jit`, a custom rule), or None."""
    inner = jx.called(eqn, CALLS | CUSTOM_RULES)
    if inner is not None and inner.consts:
        raise _NotElementwise
    return inner and inner.jaxpr


def _check(jaxpr: Any, widths: Sequence[bool], shape: tuple[int, ...]):
    """Checks that a jaxpr treats all elements of a leaf alike.

    A variable is wide if it has the leaf's shape, element by element. All remaining variables must
    be single numbers.

    Returns:
        A key without shapes, and for each output whether it is wide.

    Raises:
        _NotElementwise: An equation mixes elements, or depends on their position.
    """
    numbers: dict[Any, int] = {}
    is_wide: dict[Any, bool] = {}

    def define(v: Any, wide: bool) -> int:
        numbers[v], is_wide[v] = len(numbers), wide
        return numbers[v]

    def read(a: Any):
        if jx.is_literal(a):
            return "literal", np.asarray(a.val).tobytes(), str(a.aval.dtype)
        return numbers[a]

    for v, wide in zip(jaxpr.invars, widths, strict=True):
        define(v, wide)
    body = []
    for eqn in jaxpr.eqns:
        operands = tuple(read(a) for a in eqn.invars)
        flags = [not jx.is_literal(a) and is_wide[a] for a in eqn.invars]
        name, inner = eqn.primitive.name, _inner(eqn)
        if inner is not None:
            params, out_flags = _check(inner, flags, shape)
        # Computation on numbers shared by all leaves, such as a learning rate, may be anything.
        elif not any(flags) and all(v.aval.shape == () for v in eqn.outvars):
            params, out_flags = _params(eqn), [False] * len(eqn.outvars)
        elif name == "broadcast_in_dim" and _fills(eqn, flags, shape):
            params, out_flags = (), [True]
        elif name in ELEMENTWISE and _is_pointwise(eqn, flags, shape):
            params, out_flags = _params(eqn), [True] * len(eqn.outvars)
        else:
            raise _NotElementwise
        outs = tuple(define(v, w) for v, w in zip(eqn.outvars, out_flags, strict=True))
        body.append((name, operands, params, outs, tuple(str(v.aval.dtype) for v in eqn.outvars)))
    results = tuple(read(a) for a in jaxpr.outvars)
    return (tuple(body), results), [not jx.is_literal(a) and is_wide[a] for a in jaxpr.outvars]


def _params(eqn: Any) -> Hashable:
    """An equation's parameters as a key."""
    # As text, because some values, including jaxprs, can't be hashed.
    return tuple((name, str(value)) for name, value in sorted(eqn.params.items()))


def _fills(eqn: Any, flags: Sequence[bool], shape: tuple[int, ...]) -> bool:
    """Whether a broadcast fills a leaf with one number."""
    return not any(flags) and eqn.invars[0].aval.shape == () and eqn.outvars[0].aval.shape == shape


def _is_pointwise(eqn: Any, flags: Sequence[bool], shape: tuple[int, ...]) -> bool:
    """Whether operands are leaves or numbers, and all results have the leaf's shape."""
    operands = zip(eqn.invars, flags, strict=True)
    return all(wide or a.aval.shape == () for a, wide in operands) and all(
        v.aval.shape == shape for v in eqn.outvars
    )


def _run(jaxpr: Any, values: Sequence[Any], leaf: tuple[int, ...], shape: tuple[int, ...]) -> list:
    """Evaluates a jaxpr on arrays of a different shape in place of a leaf's."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))

    def read(a: Any) -> Any:
        return a.val if jx.is_literal(a) else env[a]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        inner = _inner(eqn)
        if inner is not None:
            results = _run(inner, operands, leaf, shape)
        # Among these operations, only this one's parameters contain a leaf's shape.
        elif eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.shape == leaf:
            results = [jnp.broadcast_to(jnp.asarray(operands[0]), shape)]
        else:
            results = jx.bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]
