"""A device that takes its time, so that on a CPU, too, what is not waited for is not ready."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_SIZE = 384


class SlowDevice:
    """Computes in order, as a GPU does, and gives each result some milliseconds late.

    Attributes:
        last: A number that is ready when all that was computed so far is over; nobody takes it.
    """

    def __init__(self):
        self.last = jnp.zeros(())

    def __call__(self, tree: Any) -> Any:
        """The same arrays, which are not ready when this returns."""
        tree, self.last = _late(tree, self.last)
        return tree


def are_ready(arrays: Iterable[Any]) -> bool:
    """Whether all arrays have been made, but for those that are gone."""
    return all(x.is_deleted() or x.is_ready() for x in arrays)


def is_computed(outputs: Sequence[Any]) -> bool:
    """Whether a computation is over: its outputs become ready one by one, all at its end."""
    live = [x for x in outputs if not x.is_deleted()]
    return not live or any(x.is_ready() for x in live)


@jax.jit
def _late(tree, last):
    first = [x.ravel()[0].astype(jnp.float32) for x in jax.tree.leaves(tree)]
    work = jnp.full((_SIZE, _SIZE), last + sum(first))
    for _ in range(3):
        work = jnp.tanh(work @ work)
    # No compiler knows that this is 0.
    zero = (jnp.abs(work[0, 0]) > 2).astype(jnp.float32)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree), zero
