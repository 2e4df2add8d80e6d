"""Equations on tiles: common code of the kernels in Pallas for a GPU.

Pallas compiles such a kernel by Triton. It computes one tile of an array at a time. Its equations
come from a function that was traced on arrays of the tile's shape, or on scalars.
"""

import warnings
from collections.abc import Iterable, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES

# Elementwise operations that Pallas lowers to Triton.
ON_TILES = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt
    select_n sign sin sqrt square sub tanh xor
    """.split()
)
# Operations that return their operand.
_SAME = frozenset(("copy", "stop_gradient"))
_OPENED = CALLS | CUSTOM_RULES


def pallas() -> tuple[Any, Any]:
    """Pallas and its Triton part, imported for the runs that need them: it takes half a second."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    # JAX 0.11 warns of its removal whenever a kernel is compiled. Users can't do anything about it,
    # and `has_triton` checks whether it exists.
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    return pallas, triton


def has_triton(devices: Iterable[Any]) -> bool:
    """Whether these GPUs run such kernels: from NVIDIA's Ampere on, with a JAX that has them."""
    try:
        pallas()
    except ImportError:  # JAX 0.12 says that a later version will not have Triton
        return False
    versions = [str(getattr(device, "compute_capability", "")) for device in devices]
    # The compute capabilities of AMD's GPUs are names, such as "gfx942".
    return all(v.split(".")[0].isdigit() and int(v.split(".")[0]) >= 8 for v in versions)


def fits_tile(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether a kernel can compute an equation on tiles of this shape."""
    if (body := jx.called(eqn, _OPENED)) is not None:
        return not body.consts and all(fits_tile(inner, shape) for inner in body.jaxpr.eqns)
    avals = [a.aval for a in (*eqn.invars, *eqn.outvars)]
    if not all(v.dtype.itemsize <= 4 and v.shape in ((), shape) for v in avals):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return not eqn.invars[0].aval.shape
    return eqn.primitive.name in ON_TILES | _SAME


def evaluate_on_tile(
    eqns: Iterable[Any], values: MutableMapping[Any, Any], shape: tuple[int, ...]
) -> None:
    """Computes equations, and adds their results to the values of variables.

    Each result is rounded to its dtype, as if it were written to memory.
    """

    def value(atom: Any) -> Any:
        return atom.val if jx.is_literal(atom) else values[atom]

    for eqn in eqns:
        if (body := jx.called(eqn, _OPENED)) is not None:
            inner = dict(zip(body.jaxpr.invars, map(value, eqn.invars), strict=True))
            evaluate_on_tile(body.jaxpr.eqns, inner, shape)
            found = (a.val if jx.is_literal(a) else inner[a] for a in body.jaxpr.outvars)
            values.update(zip(eqn.outvars, found, strict=True))
            continue
        ins = [_wide(value(a)) for a in eqn.invars]
        (result,) = eqn.outvars
        dtype = result.aval.dtype
        if eqn.primitive.name == "broadcast_in_dim":
            values[result] = jnp.full(shape, ins[0], dtype)
        elif eqn.primitive.name in _SAME | {"convert_element_type"}:
            values[result] = ins[0].astype(dtype)
        else:
            values[result] = eqn.primitive.bind(*ins, **eqn.params).astype(dtype)


def _wide(x: Any) -> jax.Array:
    """Numbers in fp32 if they are narrower, because a GPU has few operations on these."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
