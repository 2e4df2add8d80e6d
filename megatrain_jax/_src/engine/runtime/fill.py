"""Fills the store with a run's initial state, so that the whole model never exists beside it.

Files are read into the system's cache while a run waits for compilation and pinning.

When the store is filled, initial values in files are read one by one; they then come from the cache
instead of the disk. Compiling and pinning use neither the disk nor Python's lock much.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.adapt.initial_values import InitialValues
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.steps import initial_scalars, initial_state, pack
from megatrain_jax._src.engine.options.precision_values import NF4
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import range_of, selector
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.spec.codecs import stored_dtype
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.placement import Placement


def fill_store(
    spec: RunSpec,
    store: Store,
    kernels: KernelCache,
    initial: InitialValues,
    done: Callable[[], object],
) -> None:
    """Fills a store without slabs with the model's and the optimizer's initial state.

    Outside the store, at most one group exists at a time, or one parameter stacked over layers, or
    one block's experts.

    Args:
        spec: The run: its groups, their layouts and the optimizer.
        store: The store, at rest and without slabs.
        kernels: The run's compiled functions; functions that pack slabs are added.
        initial: The model's initial values.
        done: Callback after each group, for a progress bar.
    """
    placement, digest = store.placement, xxhash.xxh3_64()
    # Each process computes all values and keeps its own shards. If the values differed, slabs would
    # mix different models, so checksums are compared.
    if placement.processes.count > 1:
        initial = _noted(initial, digest)
    indices = {leaf.parameter: leaf.index for leaf in spec.leaves}
    stacked = {p for p, index in indices.items() if index and range_of(index) is None}
    slices = _unstacked(spec, store, initial, stacked)
    scalars: list[jax.Array] = []
    for g, leaves in enumerate(spec.grouping.leaves):
        # A block's groups are adjacent, so at most one block's experts are in memory at a time.
        divided = {spec.leaves[i].parameter for i in leaves if range_of(spec.leaves[i].index)}
        missing = {p for p in divided if not any(spec.leaves[i].parameter == p for i in slices)}
        slices |= _unstacked(spec, store, initial, missing)
        whole = [i for i in leaves if i not in slices]
        values = initial.leaves([spec.leaves[i].parameter for i in whole])
        by_leaf = dict(zip(whole, values, strict=True))
        by_leaf |= {i: slices.pop(i) for i in leaves if i in slices}
        # Replicated on every device; the kernel packs them into the device's shard.
        on_device = placement.put([by_leaf[i] for i in leaves], placement.small_on_device)
        scalars += _fill_group(spec, store, kernels, g, on_device)
        done()
        progressed()
    digests = {"initial parameters": digest.hexdigest()}
    placement.processes.agree("the end of initialising", lambda: digests)
    store.variables = store.small(list(initial.variables()))
    part = spec.optimizer.initial_globals
    store.globals = store.small(jx.evaluate(part.jaxpr, [*part.consts, *scalars]))


def initial_kernels(
    spec: RunSpec, placement: Placement, initial: InitialValues
) -> Iterator[Kernel]:
    """The kernels of all groups' initial state, to be compiled before they are used."""
    for leaves, layout, state, scalars in zip(
        spec.grouping.leaves,
        spec.layouts,
        spec.optimizer.initial_state,
        spec.optimizer.initial_scalars,
        strict=True,
    ):
        yield pack(layout.master, [_dtype(spec, i, initial) for i in leaves], placement)
        if layout.state.layouts:
            yield initial_state(state, layout, placement)
        if scalars.jaxpr.outvars:
            yield initial_scalars(scalars, layout, placement)


def _dtype(spec: RunSpec, i: int, initial: InitialValues) -> Any:
    """The dtype of a leaf when it is packed."""
    leaf = spec.leaves[i]
    given, held = initial.dtypes[leaf.parameter], stored_dtype(spec.precision, leaf)
    # Slices are kept in the dtype that the host stores. Only codes are made later, in packing.
    in_held = leaf.index and held != NF4 and jnp.issubdtype(held, jnp.floating)
    return held if in_held else given


def _noted(initial: InitialValues, digest: xxhash.xxh3_64) -> InitialValues:
    """Initial values whose bytes are added to a checksum as they are read."""

    def leaves(indices: Sequence[int]) -> list[jax.Array]:
        values = initial.leaves(indices)
        for value in values:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return values

    return dataclasses.replace(initial, leaves=leaves)


def _unstacked(
    spec: RunSpec, store: Store, initial: InitialValues, parameters: Collection[int]
) -> dict[int, jax.Array]:
    """The slices of some parameters, kept in host memory until they are packed."""
    rows = [(leaf.parameter, leaf.index, i) for i, leaf in enumerate(spec.leaves)]
    own = (row for row in rows if row[0] in parameters)
    stacked = sorted(own, key=lambda row: (row[0], row[2]))
    slices: dict[int, jax.Array] = {}
    for parameter, members in itertools.groupby(stacked, key=lambda row: row[0]):
        # All slices are taken at once; otherwise each group would compute the whole parameter
        # again.
        (whole,) = initial.leaves([parameter])
        for _, index, i in members:
            slices[i] = store.small(whole[selector(index)].astype(_dtype(spec, i, initial)))
        jax.block_until_ready(list(slices.values()))  # before the next whole array is computed
    return slices


def _fill_group(
    spec: RunSpec, store: Store, kernels: KernelCache, g: int, leaves: list[jax.Array]
) -> list[jax.Array]:
    """Fills the slabs of a group; returns the scalars for the initial shared state."""
    layout, part = spec.layouts[g], spec.optimizer.initial_state[g]
    dtypes = [leaf.dtype for leaf in leaves]
    masters = kernels.get(pack(layout.master, dtypes, store.placement))(leaves)
    resting = [store.append(Key(Kind.MASTERS, g), masters)]
    if layout.state.layouts:
        state = kernels.get(initial_state(part, layout, store.placement))(masters)
        resting.append(store.append(Key(Kind.OPTIMIZER_STATE, g), state))
    scalars, part = [], spec.optimizer.initial_scalars[g]
    if part.jaxpr.outvars:
        kernel = initial_scalars(part, layout, store.placement)
        scalars = list(kernels.get(kernel)(masters))
    # Waits, so that the device holds the arrays of one group at a time.
    jax.block_until_ready([resting, scalars])
    return scalars


# Bytes per read. Python's lock is free during a read, and the thread can end only between reads.
_CHUNK_BYTES = 2**23


class ReadAhead:
    """A context with a thread that reads files, as far as free memory allows.

    Only the system's cache keeps the data, and gives it up if memory is short.
    """

    def __init__(self, paths: Iterable[Path], limit_bytes: int):
        """Makes the thread.

        Args:
            paths: The files, in the order of their later use.
            limit_bytes: Maximum bytes to read.
        """
        self.read_bytes, self._left, self._ended = 0, limit_bytes, threading.Event()
        # A daemon, so that a process can exit without waiting for a disk.
        run = threading.Thread(target=self._read, args=[list(paths)], daemon=True)
        run.name = "files read ahead"
        self._thread = run

    def __enter__(self) -> "ReadAhead":
        """Starts to read."""
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the thread after its current read."""
        self._ended.set()

    def wait(self) -> None:
        """Waits until everything is read."""
        self._thread.join()

    def _read(self, paths: Iterable[Path]) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for path in paths:
            try:
                with path.open("rb", buffering=0) as file:
                    while self._left > 0 and not self._ended.is_set():
                        count = file.readinto(buffer[: self._left])
                        if not count:
                            break
                        self.read_bytes += count
                        self._left -= count
            except OSError:
                return  # the later reader of the file reports its error
