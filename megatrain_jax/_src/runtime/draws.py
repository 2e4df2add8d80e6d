"""What updates draw random bits from: the run's key, the step of the gradient, and the group."""

import jax
import numpy as np

from megatrain_jax._src.runtime.store import Store


class Draws:
    """The arguments that make updates draw; groups' numbers are put on the devices once."""

    def __init__(self, store: Store):
        """Holds no number yet."""
        self._store = store
        self._numbers: dict[int, jax.Array] = {}

    def of(self, group: int, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """What the update of a group by a step's gradient draws from; None if it draws nothing."""
        store = self._store
        if not store.layouts[group].draws:
            return None
        if group not in self._numbers:
            number = store.placement.put(np.uint32(group), store.placement.small_on_device)
            self._numbers[group] = number
        return store.key, step, self._numbers[group]
