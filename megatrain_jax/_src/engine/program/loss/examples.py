"""Finds the values that have rows for each example of the batch; devices can divide these."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The values along the batch: they depend on it, and their first axis spans examples.

    A first axis spans examples if its length is a multiple of their number: for 8 examples with 16
    tokens, shapes (8, 16, 64) and (128, 64) qualify, and so does a mask (16, 16) that depends on
    the batch. The division over devices affects only their communication, never results.

    Attributes:
        number: Number of examples in a microbatch.
        values: Ids of the values.
    """

    number: int
    values: frozenset[int]

    def along(self, aval: Any) -> bool:
        """Whether an array with this shape that depends on the batch has rows for examples."""
        # Decided by the shape alone. A mistake costs communication between devices, never a result.
        return bool(aval.shape) and not aval.shape[0] % self.number

    def num_bytes(self, avals: Iterable[Any], num_devices: int) -> int:
        """Bytes per device of arrays that depend on the batch."""
        return sum(jx.num_bytes(x) // (num_devices if self.along(x) else 1) for x in avals)

    def undivided(self) -> "Examples":
        """The same batch with nothing divided."""
        return dataclasses.replace(self, values=frozenset())


def find_examples(jaxpr: Any, batch: Sequence[Any], ids: Iterable[tuple[Any, int]]) -> Examples:
    """Finds the values along the batch of a flat traced loss.

    Args:
        jaxpr: The loss.
        batch: Its inputs that are arrays of the batch.
        ids: Variables of the jaxpr with the ids of their values.
    """
    of_batch = jx.dependent(jaxpr, batch)
    # All arrays of a batch have the same leading axis; this was checked before.
    number = max(batch[0].aval.shape[0], 1)  # 0 if a graph has no edges
    found = Examples(number=number, values=frozenset())
    values = frozenset(i for v, i in ids if v in of_batch and found.along(v.aval))
    return dataclasses.replace(found, values=values)
