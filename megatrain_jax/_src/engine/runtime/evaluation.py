"""Evaluation: the loss and metrics of batches, or predictions, without training on them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.common.activity import doing
from megatrain_jax._src.engine.options.batch_checks import num_rows
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.run_spec import batch_key
from megatrain_jax._src.engine.state.layout import GroupLayout
from megatrain_jax._src.engine.state.placement import Placement


def owned(batch: Any) -> Any:
    """A batch with copies of its NumPy arrays.

    Data may fill its arrays anew while they are on their way to a device, or read there: on a CPU,
    JAX's arrays may be the same memory.
    """
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)


def put_batch(batch: Any, step: BoundStep, placement: Placement) -> list[jax.Array]:
    """Puts the arrays of a batch on the devices, divided among them if microbatches allow.

    Args:
        batch: A pytree of arrays with examples as first axis: this process's part of them.
        step: The step that will read it.
        placement: The devices.
    """
    # Arrays that are divided have equally many examples, as checked before.
    leaves = jax.tree.leaves(owned(batch))
    examples = leaves[0].shape[0] * placement.num_processes
    sharding = placement.batch(examples // step.microbatches)
    if placement.num_processes == 1:
        return jax.device_put(leaves, sharding)
    return [placement.put_parts(leaf, sharding) for leaf in leaves]


def batch_shapes(batch: Any, times: int = 1, parts: int = 1) -> Any:
    """The shapes and dtypes of a batch with `times` as many rows, or of one of equal parts."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] * times // parts, *x.shape[1:]), x.dtype)

    return jax.tree.map(shape, batch)


_END = object()
_AGREED_SHAPES = "the shapes of the batches that are evaluated, and their number,"


def evaluate_batches(
    engine: Engine,
    batches: Iterable[Any],
    bind: Callable[[Any], BoundStep],
    averaged: Sequence[GroupLayout] | None,
) -> Iterator[tuple[Any, int | None]]:
    """Evaluates batch by batch; a signal takes effect between two batches.

    Args:
        engine: The engine, at rest or not.
        batches: Pytrees of arrays on the host, drawn one by one.
        bind: Function that checks a batch and returns its bound step.
        averaged: Layouts with averages as masters, to evaluate with them; see `Engine.evaluate`.

    Yields:
        What `Engine.evaluate` computes for each batch, on the device and maybe not ready yet, and
        the number of examples of each; None for unequal leading axes.
    """
    iterator, placement = iter(batches), engine.store.placement
    for number in itertools.count(1):
        # A second signal interrupts an iterator that hangs.
        with (
            deferred_interrupt(second_interrupts=True),
            doing(f"drawing batch {number} of an evaluation", of_user=True),
        ):
            batch = next(iterator, _END)
        step = None if batch is _END else bind(batch)
        with deferred_interrupt(), placement.outside_meshes():
            where = f"batch {number} of an evaluation"
            # All processes agree on the end too: a process with one more batch would wait for its
            # peers in a collective.
            facts = {_AGREED_SHAPES: None if step is None else batch_key(batch)}
            placement.processes.agree(where, facts.copy)
            if step is None:
                return
            with doing(f"computing {where}"):
                arrays = put_batch(batch, step, placement)
                found = engine.evaluate(step, arrays, number - 1, averaged), num_rows(arrays)
        yield found
