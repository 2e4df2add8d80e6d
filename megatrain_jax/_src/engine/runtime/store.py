"""The store: the single owner of a run's state, during steps and at rest.

Parts of groups (masters, optimizer state, gradients), residuals, and activations that wait in the
host are tuples of arrays by key, in two tiers: pinned host memory and the devices. Masters and
optimizer state may rest on disks instead; see `disk.py`. Example: a streamed update of group 3's
masters:

                          host[key]       on_device[key]      key = Key(Kind.MASTERS, 3)
    at rest               version 1       -
    FETCH                 version 1       version 1
    UPDATE                -               version 2          the stale host copy is dropped
    OFFLOAD, at rest      version 2       -

Arrays in the host are never modified; only the entry is replaced. So a reader, such as a checkpoint
being written, keeps reading the arrays it was given.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.kernels.steps import Scaling
from megatrain_jax._src.engine.runtime.disk import Disk, Slabs
from megatrain_jax._src.engine.state import host_leaves
from megatrain_jax._src.engine.state.layout import GroupLayout, Layout
from megatrain_jax._src.engine.state.placement import Placement

Reader = Callable[[], list[host_leaves.Run]]
"""Reads this process's part of an array, as it was when the reader was made."""


class _FoundWhenRead(dict[Key, Slabs]):
    """Slabs that are found anew whenever they are read, beside those that were put there."""

    def __init__(self, find: Callable[[Key], Slabs]):
        super().__init__()
        self._find = find

    def __missing__(self, key: Key) -> Slabs:
        return self._find(key)


class Store:
    """Holds all state of a run.

    Between steps, and whenever it is read or filled, everything is at rest: in pinned host memory,
    with nothing on the devices. The next step moves the small state to the devices.

    Attributes:
        layouts: Layout of each group's state in slabs, by the group's number.
        placement: The devices and memories of its arrays.
        host: Slabs in pinned host memory, and activations and residuals of all microbatches.
        disk: Slabs on disks, or None.
        on_device: Slabs and residuals on the devices; activations are in `LiveValues.rows`.
        variables: The model's variables beside its parameters.
        globals: Optimizer state that belongs to no group.
        ok: Whether all numbers have been finite so far, or in this step if steps may be skipped;
            updates do nothing while it is false.
        step: Number of the next step, from 0.
        key: The key from which all random numbers of the loss are drawn.
        scaling: Scale of the next step's loss and the count of good steps; None without scaling.
        before_replacing: Called with a group before its state gets new arrays in the host, if the
            old ones are still being read.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        placement: Placement,
        key: jax.Array,
        scaling: Scaling | None = None,
        disk: Disk | None = None,
    ):
        """Makes a store at rest and without slabs, before step 0.

        Args:
            layouts: Layout of each group's state in slabs, by the group's number.
            placement: The devices and memories of its arrays.
            key: The key from which all random numbers of the loss are drawn.
            scaling: Scale of the first step's loss and its count; None without scaling.
            disk: Holds the parts that rest on disks; None for none.
        """
        self.layouts, self.placement, self.disk = tuple(layouts), placement, disk
        self.host: dict[Key, Slabs] = {}
        self.on_device: dict[Key, Slabs] = {}
        self.variables: list[jax.Array] = []
        self.globals: list[jax.Array] = []
        self.ok = self.small(jnp.array(True))
        self.step = self.small(jnp.array(0, jnp.int32))
        self.key, self.scaling = self.small(key), self.small(scaling)
        self.before_replacing: Callable[[int], None] | None = None
        # With several processes: the two parts that were gathered last, with the gathered copies.
        # Leaves are read one by one, perhaps those of a matrix and of its adapters in turn; without
        # this cache, each read would gather a whole part.
        self._copied: tuple[tuple[Sequence[host_leaves.Held], tuple[Any, ...]], ...] = ()
        self._find: Callable[[Key], Sequence[host_leaves.Held]] | None = None  # see `of_averages`

    # ---- filling, at rest

    def append(self, key: Key, arrays: Sequence[jax.Array | np.ndarray]) -> Slabs:
        """Adds arrays, encoded by a layout, to a part at rest; slabs come in order.

        Returns:
            The arrays at rest, which may still be in flight; none of a part on disks.
        """
        return self._append(key, self.placement.put(list(arrays), self.placement.slabs_at_rest))

    def append_shards(self, key: Key, arrays: Sequence[Mapping[int, np.ndarray]]) -> Slabs:
        """Adds arrays like `append`, given as the shards of this process's devices."""
        placement = self.placement
        return self._append(key, placement.put_shards(arrays, placement.slabs_at_rest))

    def _append(self, key: Key, resting: Iterable[jax.Array]) -> Slabs:
        added = tuple(resting)
        if self.disk is not None and key in self.disk:
            self.disk.append(key, added)
            return ()
        self.host[key] = (*self.host.get(key, ()), *added)
        return added

    def small(self, value: Any) -> Any:
        """A copy at rest of a small array, or a pytree of them; the store doesn't keep it."""
        return self.placement.put(value, self.placement.small_at_rest)

    def drop(self) -> None:
        """Drops all slabs in both tiers, to be filled anew."""
        self.host.clear()
        self.on_device.clear()
        if self.disk is not None:
            self.disk.drop()
        self.ok = self.small(jnp.array(True))

    # ---- reading, at rest

    def held(self, key: Key) -> Sequence[host_leaves.Held]:
        """The arrays of a part; those on disks as shards that are read later; none of no part."""
        if self._find is not None:
            return self._find(key)
        if self.disk is not None and key in self.disk:
            return self.disk.shards(key)
        return self.host.get(key, ())

    def at_rest(self, key: Key) -> Slabs:
        """The arrays of a part in pinned memory; new ones of a part on disks."""
        return self._in_memory(self.held(key))

    def _in_memory(self, arrays: Sequence[host_leaves.Held]) -> Slabs:
        to = self.placement.slabs_at_rest
        return tuple(
            x if isinstance(x, jax.Array) else next(iter(self.placement.put_shards([_read(x)], to)))
            for x in arrays
        )

    def on_devices(self, key: Key) -> Slabs:
        """Copies of a part on the devices, which may be in flight; the store doesn't keep them."""
        to = self.placement.slabs_on_device
        if self.disk is None or key not in self.disk:
            return tuple(self.placement.move(self.at_rest(key), to))
        copies = tuple(self.placement.move(self.disk.take_now(key), to))
        self.disk.copied(key, copies)
        return copies

    def leaves(self, key: Key) -> list[np.ndarray]:
        """The leaves of a part as host arrays, which share its memory if possible."""
        layout = self.layouts[key.owner]
        own = layout.master if key.kind is Kind.MASTERS else layout.state
        return host_leaves.read_leaves(own, self._readable(self.held(key)))

    def unread(self, key: Key, number: int) -> list[ComputedArray]:
        """The first leaves of a part, each read when it is needed.

        Several processes read a part together: all have to need it at the same point of the run.

        Args:
            key: The part.
            number: Number of leaves.
        """
        held = self.held(key)

        def unread(position: int) -> ComputedArray:
            own, _, i = self._leaf(key, position, held)

            def read(_: Any) -> np.ndarray:
                _, arrays, _ = self._leaf(key, position, self._readable(held))
                return host_leaves.read_leaf(own, arrays, i)

            what = f"leaf {position} of {key}"
            return ComputedArray(what, own.shapes[i], host_leaves.leaf_dtype(own, i), read)

        return list(map(unread, range(number)))

    def reader(self, key: Key, position: int, part: int) -> Reader:
        """A function that reads this process's runs of one part of a leaf; it keeps the slab.

        A part on disks is read when the function is called; see `before_replacing`.
        """
        own, arrays, i = self._leaf(key, position, self.held(key))
        return lambda: host_leaves.runs_of(own, arrays, i, part)

    def _leaf(
        self, key: Key, position: int, arrays: Sequence[host_leaves.Held]
    ) -> tuple[Layout, Sequence[host_leaves.Held], int]:
        """The layout of a leaf's slab, the slab's arrays among a part's, and the leaf's number."""
        layout = self.layouts[key.owner]
        own, i = layout.leaf(key.kind, position)
        if key.kind is Kind.OPTIMIZER_STATE:
            arrays = layout.state.by_slab(arrays)[layout.state.places[position][0]]
        return own, arrays, i

    def _readable(self, arrays: Sequence[host_leaves.Held]) -> Sequence[host_leaves.Held]:
        """A part's arrays as this process can read them completely; the last copies are cached."""
        if self.placement.num_processes == 1:
            return arrays
        # Arrays at rest are never modified, so the same objects have the same copies.
        for gathered, copies in self._copied:
            if list(map(id, arrays)) == list(map(id, gathered)):
                return copies
        self.placement.processes.gather("reading state together")
        self._copied = self._copied[-1:]  # first, so that its memory is free
        copies = tuple(map(self.placement.readable, self._in_memory(arrays)))
        self._copied += ((arrays, copies),)
        return copies

    def on_host(self, arrays: Iterable[jax.Array]) -> list[Any]:
        """Small state as NumPy arrays; typed keys, which NumPy can't represent, on the device."""
        return [
            self.placement.put(x, self.placement.small_on_device)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else np.asarray(x)
            for x in arrays
        ]

    def of_averages(self, layouts: Sequence[GroupLayout]) -> "Store":
        """A store at rest that has averages of parameters in place of masters, to read from.

        Args:
            layouts: Layout of each group with its averages as masters.
        """

        def averages(key: Key) -> Sequence[host_leaves.Held]:
            own = self.layouts[key.owner]
            if key.kind is not Kind.MASTERS or layouts[key.owner] is own:
                return self.held(key)
            first, *_ = own.state.by_slab(self.held(Key(Kind.OPTIMIZER_STATE, key.owner)))
            return first

        found = copy.copy(self)
        found.layouts, found._copied, found.disk = tuple(layouts), (), None
        found._find = averages
        found.host = _FoundWhenRead(lambda key: self._in_memory(averages(key)))
        return found

    # ---- between rest and steps

    def wake(self) -> None:
        """Moves the small state to the devices; slabs are fetched one by one."""
        self._copied = ()  # steps replace the originals
        self._move_small(self.placement.small_on_device)

    def rest(self) -> None:
        """Moves the small state to the host, where slabs already rest, and waits for it."""
        assert not self.on_device
        self._move_small(self.placement.small_at_rest)
        jax.block_until_ready([self.variables, self.globals])

    def forget_step(self) -> None:
        """Drops the device's slabs of an interrupted step, and its temporary parts in the host.

        Masters and optimizer state in the host stay: only an evaluation is dropped this way, and it
        updates nothing.
        """
        self.on_device.clear()
        for key in [key for key in self.host if key.kind not in LASTING]:
            del self.host[key]

    def _move_small(self, sharding: jax.sharding.Sharding) -> None:
        small = (self.variables, self.globals, self.ok, self.step, self.key, self.scaling)
        moved = self.placement.put(small, sharding)
        self.variables, self.globals, self.ok, self.step, self.key, self.scaling = moved


def _read(shards: Any) -> dict[int, np.ndarray]:
    return {n: np.asarray(shard) for n, shard in shards.items()}
