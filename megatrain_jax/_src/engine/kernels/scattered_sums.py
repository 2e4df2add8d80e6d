"""Gradients of looked-up rows that are added to the same rows of a sum, not to the whole sum.

The gradient of an embedding's table is zero except for the rows that a microbatch looks up. If it
is computed as an array of its own, a GPU writes zeros and adds the rows to them. It then reads this
array and the whole sum, and writes the sum.

Example: a table of 152,064 rows of 3,584 numbers, of which 8,192 tokens look up one row each::

    z = broadcast_in_dim 0           # bfloat16: 1.1 GB
    g = scatter-add z ids rows
    sum + convert_element_type g     # float32: 5.5 GB

    scatter-add sum ids rows         # in float32: 0.3 GB
"""

from collections.abc import Callable
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx

# A result's elements in another shape or dtype.
_SAME_ELEMENTS = ("reshape", "convert_element_type")


def with_scattered_sums(function: Callable) -> Callable:
    """A function that scatters rows directly into the arguments that they are added to.

    Args:
        function: The function, of trees of arrays, without effects.
    """

    def run(*args: Any) -> Any:
        traced = jx.trace(function, *args)
        scattered, left_out = _scattered(traced.jaxpr)

        def compute(number: int, eqn: Any, value: Callable[[Any], Any]) -> list[Any] | None:
            if number in scattered:
                added_to, scatter = scattered[number]
                return [_onto(value(added_to), scatter, *map(value, scatter.invars[1:]))]
            if number in left_out:
                return None
            return jx.bind(eqn, [value(atom) for atom in eqn.invars])

        return traced.outputs(args, lambda jaxpr, ins: jx.evaluate_by(jaxpr, ins, compute))

    return run


def looks_up_inputs(jaxpr: Any) -> bool:
    """Whether an open jaxpr looks up rows of one of its inputs, in any shape and dtype."""
    tables = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "gather" and eqn.invars[0] in tables:
            return True
        if eqn.primitive.name in _SAME_ELEMENTS and eqn.invars[0] in tables:
            tables.update(eqn.outvars)
    return False


def _scattered(jaxpr: Any) -> tuple[dict[int, tuple[Any, Any]], set[int]]:
    """The additions of scattered rows to inputs, and the equations that are left out for them.

    Returns:
        For each addition, by its number, the input and the equation that scatters the rows; and the
        numbers of these equations and of all between them and the additions.
    """
    producer = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    num_readers = jx.num_readers(jaxpr)
    found, left_out, inputs = {}, set(), set(jaxpr.invars)
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        for v, added_to in (eqn.invars, eqn.invars[::-1]):
            if jx.is_literal(added_to) or jx.is_literal(v) or added_to not in inputs:
                continue
            chain = []
            while (at := producer.get(v)) is not None and num_readers[v] == 1:
                chain.append(at)
                if jaxpr.eqns[at].primitive.name not in _SAME_ELEMENTS:
                    break
                v = jaxpr.eqns[at].invars[0]
            scatter = jaxpr.eqns[chain[-1]] if chain else eqn
            if scatter.primitive.name == "scatter-add" and _is_zero(jaxpr, producer, scatter):
                found[number] = added_to, scatter
                left_out.update(chain)
                break
    return found, left_out


def _is_zero(jaxpr: Any, producer: dict[Any, int], scatter: Any) -> bool:
    """Whether the operand of a scatter consists of zeros."""
    at = producer.get(scatter.invars[0])
    if at is None or jaxpr.eqns[at].primitive.name != "broadcast_in_dim":
        return False
    (number, *_) = jaxpr.eqns[at].invars
    return jx.is_literal(number) and number.val == 0


def _onto(added_to: jax.Array, scatter: Any, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum of an array, in any shape, and the result of a scatter onto zeros."""
    params = scatter.params
    found = jax.lax.scatter_add(
        added_to.reshape(scatter.outvars[0].aval.shape),
        indices,
        rows.astype(added_to.dtype),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return found.reshape(added_to.shape)
