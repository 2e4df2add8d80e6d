"""The parts inside a trainer, for tests: the one file that knows where it keeps them."""

import dataclasses
import gc
from typing import Any

import jax
from jax.sharding import Mesh

import megatrain_jax as mt
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.rescheduled import with_all_waves, with_recomputed_spans
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state.placement import Placement, placed_on


def pinned_arrays() -> dict[int, jax.Array]:
    """All live arrays in pinned host memory, by identity, after garbage was collected.

    Tests compare two of them: a trainer of an earlier file may be alive, since `conftest.py`
    freezes garbage that Python has not collected when a file begins.
    """
    gc.collect()
    return {id(x): x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"}


def spec_of(trainer: mt.Trainer) -> RunSpec:
    """The spec of a trainer's run."""
    return trainer.run_state.spec


def unread_of(trainer: mt.Trainer) -> tuple[int, int]:
    """The numbers of steps that a trainer has not read yet, and of records that it has."""
    return len(trainer.run_state.training._in_flight), len(trainer.run_state.history)


def num_parts_of(trainer: mt.Trainer) -> int:
    """The number of microbatches of a trainer's whole batch, as its checkpoints have it."""
    return trainer.run_state.num_parts


def settings_of(trainer: mt.Trainer) -> dict[str, Any]:
    """The settings of a trainer's run, as its checkpoints have them."""
    return trainer.run_state.saved_settings


def engine_of(trainer: mt.Trainer) -> Engine:
    """The engine that runs a trainer's steps."""
    return trainer.run_state.engine


def steps_of(trainer: mt.Trainer) -> list[BoundStep]:
    """The steps of a trainer, one of each batch shape and kind that it has met."""
    return list(trainer.run_state.bound.values())


def store_of(trainer: mt.Trainer) -> Store:
    """The store of a trainer's state."""
    return trainer.run_state.store


def count_steps(trainer: Any, num_steps: int) -> None:
    """Has a trainer believe that it has done so many steps."""
    trainer.run_state.training.num_steps = num_steps


def divide(trainer: mt.Trainer, room: float) -> None:
    """Has a trainer compute its stages in the fewest tiles that need so many bytes."""
    tiles = TileFinder(trainer.run_state.engine.kernels, trainer.run_state.store.placement)
    first = tiles.within(trainer.run_state.spec.first, room)
    trainer.run_state.spec = dataclasses.replace(trainer.run_state.spec, first=first)
    trainer.run_state.bound = {first.key: first}


def compute_again(trainer: mt.Trainer, span: int, host_room: float = 0) -> None:
    """Has a trainer compute all but one of every `span` blocks again before their backward.

    In the host it has so much room beside the state, or takes the least.
    """
    spec = trainer.run_state.spec
    first = with_all_waves(with_recomputed_spans(spec.first, span, spec.budget_bytes, host_room))
    trainer.run_state.spec = dataclasses.replace(spec, host_room=host_room, first=first)
    trainer.run_state.bound = {first.key: first}


def on_one_device() -> Placement:
    """The placement of a run on the first device alone."""
    return placed_on(Mesh(jax.devices()[:1], "data"))


def bound_functions(trainer: Any) -> list[Any]:
    """The losses and predictions whose bound steps a trainer keeps, one for each step."""
    return [function for _, _, function in trainer.run_state.bound]


def num_programs(trainer: Any) -> int:
    """The number of compiled functions that a trainer keeps."""
    return len(trainer.run_state.engine.kernels)
