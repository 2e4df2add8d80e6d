"""The store: the one owner of a run's state, on its way through a step and at rest.

Parts of groups (masters, optimizer state, gradients), residuals, and activations that wait in the
host are tuples of arrays by key, in two tiers: pinned host memory and the devices. An update of
group 3's masters, streamed:

                          host[key]       on_device[key]      key = Key(Kind.MASTERS, 3)
    at rest               version 1       -
    FETCH                 version 1       version 1
    UPDATE                -               version 2          a stale copy has no place in the host
    OFFLOAD, at rest      version 2       -

Arrays in the host never change: what is replaced is the entry. So whoever reads one, such as a
checkpoint being written, keeps reading what it was given.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.host_leaves import Run, read_leaves, runs_of
from megatrain_jax._src.state.placement import Placement

Slabs = tuple[jax.Array, ...]
Reader = Callable[[], list[Run]]
"""Reads what this process has of an array, as it was when the reader was made."""


class Store:
    """Holds all state of a run.

    Between steps, and for whoever reads or fills it, all of it is at rest: in pinned host memory,
    and nothing on the devices. The engine wakes the small state with its first step after that.

    Attributes:
        layouts: Layout of each group's state in slabs, by the group's number.
        placement: The devices and memories of its arrays.
        host: Slabs in pinned host memory, and activations and residuals of all microbatches.
        on_device: Slabs and residuals on the devices; activations are in the rows of their step.
        variables: Non-parameter state of the model.
        globals: Optimizer state that belongs to no group.
        ok: Whether all numbers have been finite so far, or in this step if steps may be skipped;
            updates do nothing where it is false.
        step: Number of the next step, from 0.
        key: The key that all random numbers of the loss are drawn from.
        before_replacing: Called with a group before its state gets new arrays in the host, if
            somebody still reads the old ones.
    """

    def __init__(self, layouts: Sequence[GroupLayout], placement: Placement, key: jax.Array):
        """Makes a store at rest and without slabs, before step 0.

        Args:
            layouts: Layout of each group's state in slabs, by the group's number.
            placement: The devices and memories of its arrays.
            key: The key that all random numbers of the loss are drawn from.
        """
        self.layouts, self.placement = tuple(layouts), placement
        self.host: dict[Key, Slabs] = {}
        self.on_device: dict[Key, Slabs] = {}
        self.variables: list[jax.Array] = []
        self.globals: list[jax.Array] = []
        self.ok = self.small(jnp.array(True))
        self.step = self.small(jnp.array(0, jnp.int32))
        self.key = self.small(key)
        self.before_replacing: Callable[[int], None] | None = None
        # Of several processes, the slabs that were last gathered from all, and the copies: a slab's
        # leaves are read one after another, and each would gather it anew.
        self._copied: tuple[Slabs, tuple[Any, ...]] | None = None

    # ---- filling, at rest

    def append(self, key: Key, arrays: Sequence[jax.Array | np.ndarray]) -> Slabs:
        """Adds arrays, as a layout encodes slabs, to a part at rest; slabs come in their order.

        Returns:
            The arrays at rest, which may still be on their way.
        """
        return self._append(key, self.placement.put(list(arrays), self.placement.slabs_at_rest))

    def append_shards(self, key: Key, arrays: Sequence[Mapping[int, np.ndarray]]) -> Slabs:
        """Adds arrays as `append` does, of which this process gives its devices' shards."""
        placement = self.placement
        return self._append(key, placement.put_shards(arrays, placement.slabs_at_rest))

    def _append(self, key: Key, resting: Iterable[jax.Array]) -> Slabs:
        added = tuple(resting)
        self.host[key] = (*self.host.get(key, ()), *added)
        return added

    def small(self, value: Any) -> Any:
        """A copy at rest of a small array, or a pytree of them, which the store doesn't keep."""
        return self.placement.put(value, self.placement.small_at_rest)

    def drop(self) -> None:
        """Drops all slabs, wherever they are, to be filled anew."""
        self.host.clear()
        self.on_device.clear()
        self.ok = self.small(jnp.array(True))

    # ---- reading, at rest

    def leaves(self, key: Key) -> list[np.ndarray]:
        """The leaves of a part as arrays in host memory, which share its bytes where they can."""
        layout, arrays = self.layouts[key.owner], self._readable(self.host.get(key, ()))
        own = layout.master if key.kind is Kind.MASTERS else layout.state
        return read_leaves(own, arrays)

    def reader(self, key: Key, position: int, part: int) -> Reader:
        """A function that reads this process's runs of one part of a leaf; it holds its slab."""
        layout, arrays = self.layouts[key.owner], self.host[key]
        own, i = layout.leaf(key.kind, position)
        if key.kind is Kind.OPTIMIZER_STATE:
            arrays = layout.state.by_slab(arrays)[layout.state.places[position][0]]
        return lambda: runs_of(own, arrays, i, part)

    def _readable(self, arrays: Slabs) -> tuple[Any, ...]:
        """Arrays at rest that this process can read all of; of copies, the last ones are kept."""
        if self.placement.processes.count == 1:
            return arrays
        # Arrays at rest never change, so the same objects have the same copies.
        if self._copied is None or list(map(id, arrays)) != list(map(id, self._copied[0])):
            self._copied = arrays, tuple(map(self.placement.readable, arrays))
        return self._copied[1]

    def on_host(self, arrays: Iterable[jax.Array]) -> list[Any]:
        """Small state as numpy arrays; typed keys, which numpy doesn't know, on the device."""
        return [
            self.placement.put(x, self.placement.small_on_device)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else np.asarray(x)
            for x in arrays
        ]

    # ---- between rest and steps

    def wake(self) -> None:
        """Moves the small state to the devices; slabs are fetched one by one."""
        self._copied = None  # steps replace the originals
        self._move_small(self.placement.small_on_device)

    def rest(self) -> None:
        """Moves the small state to the host, where slabs rest already, and blocks until it is."""
        assert not self.on_device
        self._move_small(self.placement.small_at_rest)
        jax.block_until_ready([self.variables, self.globals])

    def forget_step(self) -> None:
        """Drops the device's slabs of a step that was cut off, and what it alone has in the host.

        Masters and optimizer state in the host stay: an evaluation, the step that may be dropped,
        updates nothing.
        """
        self.on_device.clear()
        for key in [key for key in self.host if key.kind not in LASTING]:
            del self.host[key]

    def _move_small(self, sharding: jax.sharding.Sharding) -> None:
        small = (self.variables, self.globals, self.ok, self.step, self.key)
        moved = self.placement.put(small, sharding)
        self.variables, self.globals, self.ok, self.step, self.key = moved
