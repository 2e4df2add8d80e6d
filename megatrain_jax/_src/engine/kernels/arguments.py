"""Arguments for functions that are timed before a run has any state.

A small function computes a function's arguments on its devices, so nothing large is copied from
the host. Floating-point numbers are pseudo-random, because a GPU multiplies zeros faster than real
data.

A function's time may also depend on its integers: experts take longer the more tokens choose them,
and attention takes longer the longer documents are. So stages take the integers of a real batch.
The step's prologue computes some of them; stages pass on the rest, and so do these stages when they
are timed. Example: a router passes on each token's experts as value 7.

    1. the router is timed, and value 7 is kept
    2. a stage of experts takes value 7; its parameters and tokens are random numbers

The residuals of a backward come from its own forward. Scales of float8 products are residuals, and
with made-up scales all codes would be zeros: a backward took 26.4 ms on an H200 instead of 32.1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.stage_kernels import shardings
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.state.placement import Placement

# The largest absolute value of a random number.
_SCALE = 0.03

Integers = Mapping[int, jax.Array]
"""Integer values of a step on its devices, by id."""


def can_be_made(kernel: Kernel) -> bool:
    """Whether a kernel's arguments can be made; random keys of other generators can't."""
    return kernel.takes is not None and _has_usual_keys(kernel.takes)


def maker(kernel: Kernel, *, has_residuals: bool = False) -> jax.stages.Lowered:
    """The lowered function without arguments that makes a kernel's arguments.

    Args:
        kernel: The kernel.
        has_residuals: Whether its third argument is a stage's residuals, which are left out; see
            `with_residuals`.
    """
    # The square root of a negative second moment would be no number.
    lowest = 0.0 if kernel.name == "update" else -1.0
    assert kernel.takes is not None
    takes = (*kernel.takes[:2], [], *kernel.takes[3:]) if has_residuals else kernel.takes

    def make() -> Any:
        return jax.tree.map(lambda like: _numbers(like, lowest), takes)

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, takes)).lower()


def integers_of_batch(program: Program, placement: Placement, batch: Any) -> Integers:
    """The integer values that a step's prologue computes from a batch's first rows.

    Args:
        program: The step's program, of one microbatch.
        placement: Placement of the values.
        batch: This process's part of a batch. As many rows are read as a microbatch has.

    Returns:
        The values. There are none if `batch` has shapes instead of arrays, or if the prologue has
        effects or takes a random key of another generator than JAX's default.
    """
    leaves = jax.tree.leaves(batch)
    is_real = not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    # All processes have to compute together.
    if not all(placement.processes.gather("timing with a batch", is_real)):
        return {}
    ids = [i for i in program.prologue_values if _is_integer(program.values[i])]
    first = len(program.prologue_consts)
    data = [jx.shape_of(v.aval) for v in program.prologue.invars[first:]]
    if not ids or has_side_effects(program.prologue) or not _has_usual_keys(data):
        return {}
    num_variables = len(program.state.drawn)
    rows, count = program.examples.number, placement.processes.count
    # One microbatch's part; the first axes may differ if nothing is divided.
    real = {
        number: placement.put_parts(leaf[: data[number].shape[0] // count], placement.batch(rows))
        for number, leaf in enumerate(leaves, num_variables)
        if _is_integer(data[number])
    }

    def compute(real):
        made = [real[n] if n in real else _numbers(x, -1.0) for n, x in enumerate(data)]
        values = jx.evaluate(program.prologue, [*program.prologue_consts, *made])
        by_id = dict(zip(program.prologue_values, values, strict=True))
        return [by_id[i] for i in ids]

    values = jax.jit(compute, out_shardings=shardings(program, placement, ids))(real)
    return dict(zip(ids, values, strict=True))


def with_integers(
    arguments: Sequence[Any], reads: Sequence[int], known: Integers
) -> tuple[Any, ...]:
    """A stage's arguments with its input values of these ids replaced, where they are known."""
    masters, inputs, *rest = arguments
    rows = zip(reads, inputs, strict=True)
    return masters, [known.get(i, made) for i, made in rows], *rest


def with_residuals(arguments: Sequence[Any], forward: Callable[..., Any]) -> tuple[Any, ...]:
    """A backward's arguments with the residuals that its forward saves for the same inputs."""
    masters, inputs, _, *rest = arguments
    _, residuals = forward(masters, inputs)
    return masters, inputs, residuals, *rest


def integers_passed_on(writes: Sequence[int], outputs: Sequence[jax.Array]) -> Integers:
    """The integers among a stage's output values of these ids."""
    return {i: x for i, x in zip(writes, outputs, strict=True) if _is_integer(x)}


def _is_integer(aval: Any) -> bool:
    """Whether values are integers, but not codes of 8 bits such as a picture's."""
    return jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize > 1


def _has_usual_keys(avals: Any) -> bool:
    """Whether all random keys are of JAX's default generator."""
    keys = [x.dtype for x in jax.tree.leaves(avals) if _is_key(x)]
    return all(dtype == _key_dtype() for dtype in keys)


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _numbers(aval: jax.ShapeDtypeStruct, lowest: float) -> jax.Array:
    """Values of a shape and dtype; indices count along the last axis, so they are in bounds."""
    shape, dtype, size = aval.shape, aval.dtype, math.prod(aval.shape)
    if _is_key(aval):
        return jax.random.split(jax.random.key(0), size).reshape(shape)
    if aval.weak_type:  # only weak numbers give a weak array
        return jax.lax.broadcast(jnp.zeros((), dtype).item() + 1, shape)
    if dtype == jnp.bool_:
        return jnp.ones(shape, dtype)
    if _is_integer(aval):
        return (
            jax.lax.broadcasted_iota(dtype, shape, len(shape) - 1) if shape else jnp.ones((), dtype)
        )
    bits = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)).reshape(shape)
    if jnp.issubdtype(dtype, jnp.integer):  # codes
        return (bits >> 24).astype(dtype)
    share = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    return (_SCALE * (lowest + (1 - lowest) * share)).astype(dtype)
