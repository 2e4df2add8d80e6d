"""The arguments of updates that draw random bits: the run's key, the gradient's step, the group."""

import jax
import numpy as np

from megatrain_jax._src.engine.runtime.store import Store


class RandomArguments:
    """Supplies these arguments; groups' numbers are put on the devices once."""

    def __init__(self, store: Store):
        """Starts with no group's number on the devices."""
        self._store = store
        self._numbers: dict[int, jax.Array] = {}

    def of(self, group: int, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """The arguments for a group's update by a step's gradient; None if it draws nothing.

        The run's key, the number of the step and the number of the group, as device arrays.
        """
        if not self._store.layouts[group].draws:
            return None
        return self._store.key, step, self.number(group)

    def number(self, of: int) -> jax.Array:
        """A number, such as a group's, as an array on the devices."""
        if of not in self._numbers:
            # Once per run: sent with each update, it would be an extra copy.
            placement = self._store.placement
            self._numbers[of] = placement.put(np.uint32(of), placement.small_on_device)
        return self._numbers[of]
