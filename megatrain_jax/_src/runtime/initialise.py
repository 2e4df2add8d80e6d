"""Fills the store with a run's first state, so that the whole model never exists beside it."""

import itertools
from collections.abc import Callable

import jax

from megatrain_jax._src.adapt.initial_values import Initial
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.kernels import updates as functions
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.index import selector
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.state.placement import Placement


def initialise(spec: RunSpec, engine: Engine, initial: Initial, done: Callable[[], object]) -> None:
    """Fills an engine's host store with the model's and the optimizer's initial state.

    Outside the store never more exists than one group, or one parameter stacked over layers.

    Args:
        spec: What the store is to hold.
        engine: The store.
        initial: The values.
        done: Called after each group.
    """
    slices = _unstacked(spec, engine.placement, initial)
    on_device, at_rest = engine.placement.small_on_device, engine.placement.small_at_rest
    for g, leaves in enumerate(spec.grouping.leaves):
        whole = [i for i in leaves if i not in slices]
        values = initial.leaves([spec.leaves[i].parameter for i in whole])
        by_leaf = dict(zip(whole, values, strict=True))
        by_leaf |= {i: jax.device_put(slices.pop(i), on_device) for i in leaves if i in slices}
        _store_group(spec, engine, g, [by_leaf[i] for i in leaves])
        done()
    engine.variables = list(jax.device_put(list(initial.variables()), at_rest))
    part = spec.optimizer.initial_globals
    engine.globals = list(jax.device_put(jx.evaluate(part.jaxpr, part.consts), at_rest))


def _unstacked(spec: RunSpec, placement: Placement, initial: Initial) -> dict[int, jax.Array]:
    """The slices of parameters stacked over layers, in host memory until they are packed."""
    rows = [(leaf.parameter, leaf.index, i) for i, leaf in enumerate(spec.leaves)]
    stacked = sorted((row for row in rows if row[1]), key=lambda row: (row[0], row[2]))
    slices: dict[int, jax.Array] = {}
    for parameter, members in itertools.groupby(stacked, key=lambda row: row[0]):
        (whole,) = initial.leaves([parameter])
        for _, index, i in members:
            dtype = spec.precision.stored(spec.leaves[i].is_trainable)
            slices[i] = jax.device_put(
                whole[selector(index)].astype(dtype), placement.small_at_rest
            )
        jax.block_until_ready(list(slices.values()))
    return slices


def _store_group(spec: RunSpec, engine: Engine, g: int, leaves: list[jax.Array]) -> None:
    layout, part = spec.layouts[g], spec.optimizer.initial_state[g]
    pack = engine.templates.get(("pack", layout.master), lambda: layout.master.pack)
    start = engine.templates.get(
        ("initial", part.key, layout), lambda: functions.initial_state(part, layout)
    )
    masters, at_rest = pack(leaves), engine.placement.slabs_at_rest
    engine.host["P", g] = (jax.device_put(masters, at_rest),)
    if layout.state.layouts:
        engine.host["O", g] = tuple(jax.device_put(start(masters), at_rest))
    # Waited for, so that the next group's arrays don't join this one's on the device.
    jax.block_until_ready([engine.host["P", g], engine.host.get(("O", g), ())])
