"""From a loss to a program: traces it on abstract arrays, finds the blocks, cuts at them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.blocks import Leaf, Path, find_leaves
from megatrain_jax._src.program.index import Index
from megatrain_jax._src.program.inline import Inliner
from megatrain_jax._src.program.loss.stages import Program, cut
from megatrain_jax._src.program.loss.uncut import uncut_stacks
from megatrain_jax._src.program.loss.upstream import find_upstream
from megatrain_jax._src.program.pieces import Pieces, Value, constant, stack, stacked
from megatrain_jax._src.program.stacks import Stack, Stacks, find_stacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """A traced loss `(parameters, variables, batch, rng) -> (loss, metrics, variables)`.

    Attributes:
        traced: Its jaxpr over flat inputs.
        num_parameters: How many of the inputs are parameters.
        num_variables: How many are non-parameter state.
        num_batch: How many belong to the batch.
        metrics: Names of the metrics, in output order.
    """

    traced: jx.Traced
    num_parameters: int
    num_variables: int
    num_batch: int
    metrics: tuple[str, ...]

    @functools.cached_property
    def stacks(self) -> Stacks:
        """Its stacked parameters."""
        return find_stacks(self.traced, self.num_parameters)


def trace_loss(
    loss: Callable,
    parameters: Sequence[jax.ShapeDtypeStruct],
    variables: Sequence[jax.ShapeDtypeStruct],
    batch: Any,
) -> TracedLoss:
    """Traces `loss(parameters, variables, batch, rng) -> (loss, metrics, new_variables)`.

    Raises:
        ValueError: It computes in a mesh of several devices.
    """
    names: tuple[str, ...] = ()

    def flat(parameters, variables, batch, rng):
        nonlocal names
        value, metrics, new = loss(parameters, variables, batch, rng)
        names = tuple(metrics)
        # A metric may be a parameter itself; a copy makes it a value of some stage.
        return value, [jnp.copy(metrics[k]) for k in names], list(new)

    rng = jax.eval_shape(lambda: jax.random.key(0))
    traced = jx.trace(flat, list(parameters), list(variables), batch, rng)
    mesh = jx.largest_mesh(traced.jaxpr)
    if mesh is not None and mesh.size > 1:
        raise ValueError(
            f"loss_fn computes in a mesh of {mesh.size} devices, with the axes "
            f"{', '.join(map(str, mesh.axis_names))}, but training uses one device. Call it "
            "outside of `jax.set_mesh` and `shard_map`, or in a mesh of one device"
        )
    return TracedLoss(
        traced=jx.without_dead_code(traced),
        num_parameters=len(parameters),
        num_variables=len(variables),
        num_batch=len(jax.tree.leaves(batch)),
        metrics=names,
    )


def leaves_of(
    traced: TracedLoss,
    paths: Sequence[Path],
    shapes: Sequence[jax.ShapeDtypeStruct],
    is_trainable: Sequence[bool],
    stacks: Sequence[Stack] | None = None,
) -> tuple[Leaf, ...]:
    """The leaves of the model, with stacks split as the traced loss reads them; None for all."""
    source = traced.traced
    upstream = find_upstream(source.jaxpr, len(source.consts), traced.num_parameters)
    stacks = traced.stacks.stacks if stacks is None else stacks
    found = find_leaves(paths, shapes, stacks, upstream)
    return tuple(
        dataclasses.replace(leaf, is_trainable=is_trainable[leaf.parameter]) for leaf in found
    )


def cut_loss(traced: TracedLoss, leaves: Sequence[Leaf]) -> Program:
    """Cuts a traced loss into stages over `leaves`."""
    source = traced.traced
    invars = source.jaxpr.invars[len(source.consts) :]
    arrays = [invars[leaf.parameter].aval for leaf in leaves]
    avals = [
        jax.ShapeDtypeStruct(leaf.shape, aval.dtype)
        for leaf, aval in zip(leaves, arrays, strict=True)
    ]
    data = [jx.shape_of(v.aval) for v in invars[traced.num_parameters :]]
    keys = _module_keys(leaves)

    def flat(leaf_arrays, data_arrays):
        values = [Value(a, frozenset((k,))) for a, k in zip(leaf_arrays, keys, strict=True)]
        parameters = assemble(leaves, values, traced.num_parameters)
        inputs = [
            *map(constant, source.consts),
            *parameters,
            *(Value(a, None) for a in data_arrays),
        ]
        return [stack(v).array for v in Inliner().run(source.jaxpr, (), inputs)]

    program = cut(jx.trace(flat, avals, data), leaves, traced.num_variables)
    found = uncut_stacks(traced.stacks, leaves)
    return dataclasses.replace(program, warnings=(*program.warnings, *found))


def assemble(
    leaves: Sequence[Leaf], values: Sequence[Value], num_parameters: int
) -> list[Value | Pieces]:
    """The model's parameters from the values of its leaves."""
    parts: list[dict[Index, Value]] = [{} for _ in range(num_parameters)]
    for leaf, value in zip(leaves, values, strict=True):
        parts[leaf.parameter][leaf.index] = value
    return [stacked(rows) for rows in parts]


def _module_keys(leaves: Sequence[Leaf]) -> list:
    """What a `remat` may not span: a block, or a top-level module outside the blocks."""
    depth = 0
    paths = [leaf.path for leaf in leaves]
    while len({p[: depth + 1] for p in paths}) == 1 and all(len(p) > depth + 1 for p in paths):
        depth += 1
    return [leaf.block or leaf.path[: depth + 1] for leaf in leaves]
