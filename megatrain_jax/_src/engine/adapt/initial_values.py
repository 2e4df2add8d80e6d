"""A model's initial values, computed a few leaves at a time.

A model larger than the accelerator, or than the remaining host memory, must never exist whole
beside its slabs. So the initialisation is traced once, and each request evaluates only the
equations that the requested leaves need. Scalars are computed once for all requests, because NNX
counts the keys that it has drawn, so that a model's last key needs as many additions as it has
parameters::

    n1 = n0 + 1         scalars, computed at the first request
    n2 = n1 + 1
    key = fold_in(seed, n2)
    w = normal(key)     computed when its leaf is requested
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from megatrain_jax._src.engine.program import effects
from megatrain_jax._src.engine.program import jaxpr as jx


@dataclass(frozen=True, kw_only=True)
class InitialValues:
    """A model's initial values. Drop it once they are stored, because it may hold the whole model.

    Attributes:
        leaves: `leaves(indices)` returns the values of these parameter leaves, in the order
            requested. They may be the user's own arrays: don't donate or change them.
        dtypes: The dtype of each of these values.
        variables: `variables()` returns the untrained state, in the order of
            `AdaptedModel.variable_paths`, as fresh arrays.
        files: The files that the parameters' values are read from, in the same order.
        leaked_tracer: Shape and dtype of an array in the model that an earlier trace created and
            that therefore has no values (a leaked tracer); None if there is none.
    """

    leaves: Callable[[Sequence[int]], list[jax.Array]]
    dtypes: tuple[Any, ...]
    variables: Callable[[], tuple[jax.Array, ...]]
    files: tuple[Path, ...] = ()
    leaked_tracer: str | None = None

    def check(self) -> None:
        """Checks that all values exist.

        A plan needs no values, so a model from a function with a cache can be planned, not trained.

        Raises:
            ValueError: The model holds an array that an earlier trace created.
        """
        if self.leaked_tracer is not None:
            raise ValueError(
                f"model holds an array ({self.leaked_tracer}) that was made while it was traced "
                "before, as by `plan`, and so has no values: a cache (`functools.cache`, a global) "
                "has kept it. Let a function that builds the model build a new one at every call."
            )


def strong_array(value: Any, dtype: Any) -> jax.Array:
    """Returns `value` as a JAX array of `dtype` without a weak type; typed keys stay as they are.

    Args:
        value: an array, a NumPy array, a Python number or a tracer.
        dtype: its dtype, or a dtype that it can be cast to.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.asarray(value)
    return jnp.asarray(value, dtype=dtype)


def initial_values_of(
    params: Sequence[Any], variables: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]
) -> InitialValues:
    """Initial values of a model that already has arrays.

    Args:
        params: parameter leaves.
        variables: leaves of the untrained state.
        shapes: shapes with the dtypes to cast to, parameters first.
    """
    values = [*params, *variables]
    return _initial_values(
        lambda indices: [values[index] for index in indices], len(params), shapes, values
    )


def initial_values_of_trace(
    traced: Any, args: Any, num_params: int, shapes: Sequence[jax.ShapeDtypeStruct]
) -> InitialValues:
    """Initial values from a traced initialisation, evaluated only for the requested leaves.

    The equations run one by one outside jit, as the user's own eager initialisation does: a jitted
    one may round differently.

    Args:
        traced: the result of `jax.make_jaxpr`; its outputs are the parameter leaves followed by the
            leaves of the untrained state.
        args: the pytree of arguments that it was traced with.
        num_params: number of parameter leaves.
        shapes: the dtypes of all outputs.
    """
    # Equations needed by several requests run once for each; `silent` keeps prints from repeating.
    inputs, consts = jax.tree.leaves(args), traced.consts
    # In JAX 0.10 a closed jaxpr wraps an open one; from 0.11 on they are the same object.
    given = [*consts, *inputs]
    scalars, jaxpr = _split_scalars(effects.silent(traced.jaxpr), given)
    num_outputs = len(jaxpr.outvars)

    @functools.cache
    def everything_given() -> list[Any]:
        return [*given, *jx.evaluate(scalars, given)]

    def evaluate(indices: Sequence[int]) -> list[jax.Array]:
        # `dce_jaxpr` keeps the outputs' order, not the order of the request.
        wanted = sorted(set(indices))
        mask = [False] * num_outputs
        for index in wanted:
            mask[index] = True
        sliced, used = partial_eval.dce_jaxpr(jaxpr, mask)
        needed = [x for x, is_used in zip(everything_given(), used, strict=True) if is_used]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in needed):
            raise ValueError(
                "The model's initial values depend on the values of `sample_batch`, which "
                "holds only shapes (jax.ShapeDtypeStruct); pass a `sample_batch` of arrays."
            )
        found = dict(zip(wanted, jx.evaluate(sliced, needed), strict=True))
        return [found[index] for index in indices]

    return _initial_values(evaluate, num_params, shapes, consts)


def _initial_values(
    evaluate: Callable[[Sequence[int]], list[Any]],
    num_params: int,
    shapes: Sequence[jax.ShapeDtypeStruct],
    held: Sequence[Any],
) -> InitialValues:
    """Initial values from a function that gives values by number, parameters first.

    Args:
        evaluate: The function.
        num_params: Number of parameter leaves.
        shapes: Shapes with the dtypes to cast to.
        held: All arrays that the function holds.
    """

    def cast(indices: Sequence[int]) -> list[jax.Array]:
        rows = zip(evaluate(indices), indices, strict=True)
        return [strong_array(value, shapes[index].dtype) for value, index in rows]

    def leaves(indices: Sequence[int]) -> list[jax.Array]:
        assert all(0 <= i < num_params for i in indices), f"of {num_params} leaves: {indices}"
        return cast(indices)

    def variables() -> tuple[jax.Array, ...]:
        # A training step may donate its state, and that must not delete the user's arrays.
        values = cast(range(num_params, len(shapes)))
        return tuple(jnp.array(value, copy=True) for value in values)

    return InitialValues(
        leaves=leaves,
        dtypes=tuple(shape.dtype for shape in shapes[:num_params]),
        variables=variables,
        leaked_tracer=jx.leaked_tracer(held),
    )


def _split_scalars(jaxpr: Any, given: Sequence[Any]) -> tuple[Any, Any]:
    """Divides an open jaxpr into the equations that compute scalars from scalars, and the rest.

    Args:
        jaxpr: The jaxpr, without effects.
        given: Its constants and arguments; shapes in place of unknown ones.

    Returns:
        Two jaxprs without constants. The first one maps `given` to scalars; the second one maps
        `given` and these scalars to the results.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]
    rows = zip(variables, given, strict=True)
    known = {v for v, x in rows if not isinstance(x, jax.ShapeDtypeStruct) and not v.aval.shape}
    apart, rest = [], []
    for eqn in jaxpr.eqns:
        # Calls stay whole, because each request computes only a part of them.
        is_scalar = not (any(v.aval.shape for v in eqn.outvars) or jx.inner_jaxprs(eqn))
        if is_scalar and known.issuperset(jx.variables(eqn.invars)):
            known.update(eqn.outvars)
            apart.append(eqn)
        else:
            rest.append(eqn)
    made = {v for eqn in apart for v in eqn.outvars}
    read = jx.variables([*(a for eqn in rest for a in eqn.invars), *jaxpr.outvars])
    scalars = [v for v in dict.fromkeys(read) if v in made]
    return (
        jx.sub_jaxpr(jaxpr, apart, variables, scalars),
        jx.sub_jaxpr(jaxpr, rest, [*variables, *scalars], jaxpr.outvars),
    )
