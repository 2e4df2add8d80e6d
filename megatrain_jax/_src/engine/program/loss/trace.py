"""Traces a loss on abstract arrays, finds the model's leaves, and cuts the loss into stages.

Example: float32 parameters `e (4, 8)` and `w (2, 8, 8)`, and a `jax.lax.scan` over `w`.
`trace_loss` lists equations on these shapes. `leaves_of` finds `e`, `w[0]` and `w[1]`. `cut_loss`
traces again on these leaves, with the scan unrolled, and cuts at its layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.common.sizes import counted
from megatrain_jax._src.common.trees import ModelPath
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import ordered_callbacks
from megatrain_jax._src.engine.program.layers import blocks
from megatrain_jax._src.engine.program.layers.inline import Inliner
from megatrain_jax._src.engine.program.layers.sliced_values import Value, stack
from megatrain_jax._src.engine.program.layers.stacks import Stack, Stacks, find_stacks
from megatrain_jax._src.engine.program.loss.builder import cut
from megatrain_jax._src.engine.program.loss.stage_warnings import uncut_stack_warnings
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.trace_target import traced_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """A traced loss `(parameters, variables, batch, rng) -> (loss, metrics, variables)`.

    A prediction, `(...) -> (arrays, variables)`, is traced and cut like a loss.

    Attributes:
        traced: The loss's jaxpr over flat inputs.
        num_parameters: Number of inputs that are parameters.
        num_variables: Number of inputs that are variables: untrained state.
        metrics: Names of the metrics, in output order.
        rows: Structure of the arrays that a prediction returns; None for a loss.
        name: The user's argument, for errors.
    """

    traced: jx.Traced
    num_parameters: int
    num_variables: int
    metrics: tuple[str, ...]
    rows: Any = None
    name: str = "loss_fn"

    @functools.cached_property
    def stacks(self) -> Stacks:
        """Stacked parameters, and the reasons why similar ones stay whole."""
        return find_stacks(self.traced, self.num_parameters)


def trace_loss(
    loss: Callable,
    parameters: Sequence[jax.ShapeDtypeStruct],
    variables: Sequence[jax.ShapeDtypeStruct],
    batch: Any,
    num_devices: int = 1,
    devices: Collection[Any] | None = None,
    builder: str | None = None,
    expert_groups: int = 1,
    name: str = "loss_fn",
) -> TracedLoss:
    """Traces `loss(parameters, variables, batch, rng) -> (loss, metrics, new_variables)`.

    Args:
        loss: The loss; a prediction returns None in its place, and a tree of arrays as metrics.
        parameters: Shapes and dtypes of the parameters.
        variables: Shapes and dtypes of the untrained state.
        batch: Shapes and dtypes of the batch.
        num_devices: Number of the run's devices.
        devices: The run's devices; None if only their number is known.
        builder: Name of the function that builds the model; None for a model given as it is.
        expert_groups: See `TraceTarget`.
        name: The user's argument that the loss was given as, for errors.

    Raises:
        ValueError: The loss uses a mesh of its own, and the mesh or the run has several devices; or
            it places values on other devices than the run's; or it has ordered callbacks and the
            run has several devices; or it reads an array that an earlier trace created.
    """
    names: tuple[str, ...] = ()
    structure: Any = None

    def flat(parameters, variables, batch, rng):
        nonlocal names, structure
        value, metrics, new = loss(parameters, variables, batch, rng)
        # The metrics' names are known only while tracing; only values can leave the trace.
        if value is None:
            arrays, structure = jax.tree.flatten(metrics)
        else:
            names, arrays = tuple(metrics), list(metrics.values())
        # A metric may be a parameter itself; a copy makes it a value of some stage.
        return value, list(map(jnp.copy, arrays)), list(new)

    ambient = jax.sharding.get_abstract_mesh()
    rng = jax.eval_shape(lambda: jax.random.key(0))
    with traced_for(num_devices=num_devices, expert_groups=expert_groups):
        traced = jx.trace(flat, list(parameters), list(variables), batch, rng)
    if (kept := jx.leaked_tracer(traced.consts)) is not None:
        built = (
            f"If {builder} makes it and a static part of the model keeps it, such as a function in "
            f"a static field, pass the model that {builder} builds: call it yourself. Otherwise a "
            if builder
            else "A "
        )
        raise ValueError(
            f"{name}, or the model that it calls, reads an array ({kept}) that was made while it "
            f"was traced before, and so has no values. {built}cache (`functools.cache`, an "
            "attribute, a global) has kept it: make the array anew at every call, or keep it as a "
            "NumPy array"
        )
    mesh = jx.largest_mesh(traced.jaxpr)
    if mesh is not None and max(mesh.size, num_devices) > 1:
        entered = (
            "Leave the `jax.set_mesh` around this call, and choose devices by `mesh=` instead"
            if mesh == ambient
            else "Call it outside of `jax.set_mesh` and `shard_map`"
        )
        raise ValueError(
            f"{name} computes in a mesh of {mesh.size} devices, with the axes "
            f"{', '.join(map(str, mesh.axis_names))}, but only training on one device allows that, "
            f"for a mesh of one. {entered}: several devices share its work without its help. Or "
            "choose one by `mesh`"
        )
    for found in jx.device_sets(traced.jaxpr):
        if len(found) != num_devices or (devices is not None and found != set(devices)):
            own, of_run = (
                ", ".join(map(str, sorted(group, key=str)[:4]))
                + (", ..." if len(group) > 4 else "")
                for group in (found, devices or ())
            )
            raise ValueError(
                f"{name} places values on devices of its own ({own}), by a sharding such as in "
                f"`with_sharding_constraint` or `device_put`, but the run is on "
                f"{of_run or counted(num_devices, 'device')}. Leave these shardings out: `mesh` "
                "chooses the devices, and several devices share the loss's work without its help"
            )
    if num_devices > 1 and (ordered := ordered_callbacks(traced.jaxpr)):
        raise ValueError(
            f"{name} calls {', '.join(ordered)} with ordered=True, which JAX allows on one device "
            f"only, but `mesh` has {num_devices}: leave `ordered` out, or train on one device, "
            'with mesh=jax.make_mesh((1,), ("data",))'
        )
    return TracedLoss(
        traced=jx.without_dead_code(traced),
        num_parameters=len(parameters),
        num_variables=len(variables),
        metrics=names,
        rows=structure,
        name=name,
    )


def leaves_of(
    traced: TracedLoss,
    paths: Sequence[ModelPath],
    shapes: Sequence[jax.ShapeDtypeStruct],
    is_trainable: Sequence[bool],
    stacks: Sequence[Stack] | None = None,
) -> tuple[blocks.Leaf, ...]:
    """Lists the leaves of the model, with stacked parameters split as the loss reads them.

    Args:
        traced: The loss.
        paths: Path of each parameter.
        shapes: Shape and dtype of each parameter, as the model declares it.
        is_trainable: Whether each parameter is trained.
        stacks: Stacks to split; None for all that the loss reads slice by slice.
    """
    source = traced.traced
    upstream = blocks.find_upstream(source.jaxpr, len(source.consts), traced.num_parameters)
    stacks = traced.stacks.stacks if stacks is None else stacks
    found = blocks.find_leaves(paths, shapes, stacks, upstream)
    return tuple(
        dataclasses.replace(leaf, is_trainable=is_trainable[leaf.parameter]) for leaf in found
    )


def cut_loss(traced: TracedLoss, leaves: Sequence[blocks.Leaf], *, opened: bool = False) -> Program:
    """Cuts a traced loss into stages over `leaves`.

    Args:
        traced: The loss.
        leaves: The leaves.
        opened: Whether to open each `remat` that reads more than one leaf, not only each one that
            spans several blocks. Such a program tells where blocks can be cut; its stages all have
            different keys.

    Raises:
        ValueError: The loss can't be differentiated stage by stage; see `builder.cut`.
    """
    source = traced.traced
    # Leaves keep the dtypes of the first trace, in which parameters already have their compute
    # dtype.
    invars = source.jaxpr.invars[len(source.consts) :]
    dtypes = [invars[leaf.parameter].aval.dtype for leaf in leaves]
    avals = [jax.ShapeDtypeStruct(x.shape, t) for x, t in zip(leaves, dtypes, strict=True)]
    data = [jx.shape_of(v.aval) for v in invars[traced.num_parameters :]]
    modules = list(range(len(leaves))) if opened else _module_keys(leaves)
    inliner = Inliner(modules=modules)

    # Traced again, with one input per leaf, so that slices of stacks are separate variables.
    def flat(leaf_arrays, data_arrays):
        values = [Value(a, frozenset((k,))) for k, a in enumerate(leaf_arrays)]
        places = [(leaf.parameter, leaf.index) for leaf in leaves]
        parameters = blocks.assemble(places, values, traced.num_parameters)
        inputs = [*parameters, *(Value(a, None) for a in data_arrays)]
        # Outputs must be whole, so stacked results are put together.
        return [stack(v).array for v in inliner.run(source.jaxpr, source.consts, inputs)]

    # Blocks in any number of parts share this trace, unless a `remat` is opened for their borders.
    places = tuple((leaf.parameter, leaf.index) for leaf in leaves)
    known: list[tuple[jx.Traced, Inliner]]
    known = remembered("flat losses", lambda: (IdentityKey(traced), places), list)
    flat_loss = next((made for made, used in known if used.opens_same(modules)), None)
    if flat_loss is None:
        flat_loss = jx.without_dead_code(jx.trace(flat, avals, data))
        known.append((flat_loss, inliner))
    what = flat_loss, leaves, traced.num_variables
    is_loss = traced.rows is None
    program = cut(*what, is_loss=is_loss, name=traced.name, alike=not opened)
    found = uncut_stack_warnings(traced.stacks, leaves)
    warnings = *program.warnings, *found
    return dataclasses.replace(program, metrics=traced.metrics, rows=traced.rows, warnings=warnings)


def _module_keys(leaves: Sequence[blocks.Leaf]) -> list:
    """Module of each leaf: its block, or its top-level module outside blocks.

    A `remat` that spans several modules is opened. A path prefix that all parameters share is not a
    module.
    """
    depth = 0
    paths = [leaf.modules for leaf in leaves]
    # A common prefix, such as a wrapper's `model`, does not distinguish parameters.
    while len({p[: depth + 1] for p in paths}) == 1 and all(len(p) > depth + 1 for p in paths):
        depth += 1
    return [leaf.block or leaf.modules[: depth + 1] for leaf in leaves]
