"""Fills the store with a run's first state, so that the whole model never exists beside it."""

import itertools
from collections.abc import Callable

import jax

from megatrain_jax._src.adapt.initial_values import Initial
from megatrain_jax._src.build.run_spec import Job
from megatrain_jax._src.kernels.initial import initial_state, pack
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.index import selector
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.state import pool


def initialise(job: Job, engine: Engine, initial: Initial, done: Callable[[], object]) -> None:
    """Fills an engine's host store with the model's and the optimizer's initial state.

    Outside the store never more exists than one group, or one parameter stacked over layers.

    Args:
        job: What the store is to hold.
        engine: The store.
        initial: The values.
        done: Called after each group.
    """
    slices = _unstacked(job, initial)
    for g, leaves in enumerate(job.grouping.leaves):
        whole = [i for i in leaves if i not in slices]
        values = initial.leaves([job.leaves[i].parameter for i in whole])
        by_leaf = dict(zip(whole, values, strict=True))
        by_leaf |= {i: jax.device_put(slices.pop(i), pool.device()) for i in leaves if i in slices}
        _store_group(job, engine, g, [by_leaf[i] for i in leaves])
        done()
    engine.variables = list(jax.device_put(list(initial.variables()), pool.pinned()))
    part = job.optimizer.initial_globals
    engine.globals = list(jax.device_put(jx.evaluate(part.jaxpr, part.consts), pool.pinned()))


def _unstacked(job: Job, initial: Initial) -> dict[int, jax.Array]:
    """The slices of parameters stacked over layers, in host memory until they are packed."""
    rows = [(leaf.parameter, leaf.index, i) for i, leaf in enumerate(job.leaves)]
    stacked = sorted((row for row in rows if row[1]), key=lambda row: (row[0], row[2]))
    slices: dict[int, jax.Array] = {}
    for parameter, members in itertools.groupby(stacked, key=lambda row: row[0]):
        (whole,) = initial.leaves([parameter])
        for _, index, i in members:
            dtype = job.precision.stored(job.leaves[i].trainable)
            slices[i] = jax.device_put(whole[selector(index)].astype(dtype), pool.pinned())
        jax.block_until_ready(list(slices.values()))
    return slices


def _store_group(job: Job, engine: Engine, g: int, leaves: list[jax.Array]) -> None:
    layout, part = job.layouts[g], job.optimizer.initial_state[g]
    start = engine.kernels.get(initial_state(part, layout))
    masters = engine.kernels.get(pack(layout.master))(leaves)
    engine.host["P", g] = jax.device_put(masters, pool.pinned())
    if layout.state.layouts:
        engine.host["O", g] = jax.device_put(start(masters), pool.pinned())
    # Waited for, so that the next group's arrays don't join this one's on the device.
    jax.block_until_ready([engine.host["P", g], engine.host.get(("O", g), ())])
