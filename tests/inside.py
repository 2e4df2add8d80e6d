"""What is inside a trainer, for tests of its parts: the one file that knows where it keeps them."""

from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.store import Store


def spec_of(trainer: mt.Trainer) -> RunSpec:
    """The run as it was before it had arrays."""
    return trainer._spec


def engine_of(trainer: mt.Trainer) -> Engine:
    """The engine that runs its steps."""
    return trainer._engine


def store_of(trainer: mt.Trainer) -> Store:
    """The store of all its state."""
    return trainer._store


def count_steps(trainer: Any, num_steps: int) -> None:
    """Has a trainer believe that it has done so many steps."""
    trainer._training.num_steps = num_steps
