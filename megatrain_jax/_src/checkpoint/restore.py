"""Reads a checkpoint into a store, group by group; while one slab is stored, the next is read.

All that can be wrong with a checkpoint is looked for before the store is touched; then its
old arrays make room for the new ones, so that a full pool is large enough.
"""

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.checkpoint import manifest, orbax
from megatrain_jax._src.checkpoint.checksums import verify
from megatrain_jax._src.checkpoint.contents import (
    ArrayEntry,
    Small,
    StorePlace,
    TreePath,
    set_small_arrays,
    small_arrays,
)
from megatrain_jax._src.checkpoint.folder import CheckpointError
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.program.index import selector
from megatrain_jax._src.runtime.store import Store
from megatrain_jax._src.state.layout import Layout


def check(path: Path, entries: Sequence[ArrayEntry]) -> dict[str, Any]:
    """Checks that a checkpoint is whole and of this model and optimizer.

    Returns:
        The facts kept beside the arrays.

    Raises:
        CheckpointError: If it is damaged, or holds other arrays; the first differences are listed.
    """
    facts = manifest.facts_of(path)
    if facts["params_only"]:
        raise CheckpointError(
            f"{path} holds parameters only, so training can't go on from it exactly; to start "
            "a new run from them, give the folder to `fit` or `Trainer` as `params=`"
        )
    orbax.check_arrays(path, list(entries), "a checkpoint of another model or optimizer")
    return facts


def load(
    path: Path,
    known: Mapping[str, str] | None,
    spec: RunSpec,
    store: Store,
    entries: Sequence[ArrayEntry],
    done: Callable[[], object],
) -> None:
    """Fills a store that is at rest with a checkpoint that was checked.

    Each array's checksum is computed while what comes next is read.

    Args:
        path: The checkpoint's folder.
        known: Checksums of its arrays by pointer; None if it has none.
        spec: The run, whose layouts say how slabs are filled.
        store: The store, at rest; its arrays are dropped first.
        entries: Entries of all arrays of the run's checkpoints.
        done: Callback after each group, for a progress bar.

    Raises:
        CheckpointError: If the checkpoint can't be read after all, or is not what was written. The
            store is then lost, until another checkpoint is loaded.
    """
    store.drop()
    try:
        _fill(path, known, spec, store, entries, done)
    except Exception as error:
        # Whoever holds the error would else hold arrays, too, and need their room.
        traceback.clear_frames(error.__traceback__)
        raise CheckpointError(
            f"{path} could not be read to its end ({type(error).__name__}: {error}). What was in "
            "memory is lost: restore another checkpoint."
        ) from error


def _fill(
    path: Path,
    known: Mapping[str, str] | None,
    spec: RunSpec,
    store: Store,
    entries: Sequence[ArrayEntry],
    done: Callable[[], object],
) -> None:
    by_place = {place: entry for entry in entries for place in entry.places}
    slices: dict[StorePlace, jax.Array] = {}

    def read(slab: _Slab) -> dict[StorePlace, np.ndarray]:
        whole = {p: by_place[p] for p in slab.places if p in by_place and p not in slices}
        with orbax.context():
            loaded = _load(path, whole.values())
        return {place: loaded[entry.path] for place, entry in whole.items()}

    with orbax.context(), ThreadPoolExecutor(1) as reader:
        for entry in (entry for entry in entries if entry.stacked):
            whole = _load(path, [entry])[entry.path]
            checked = reader.submit(verify, path, known, entry.path, whole)
            for place, index in zip(entry.places, entry.indices, strict=True):
                row = np.ascontiguousarray(whole[selector(index)])
                slices[place] = store.small(row)
            jax.block_until_ready(list(slices.values()))
            checked.result()
        slabs = _slabs(spec)
        coming = reader.submit(read, slabs[0])
        for slab, after in zip(slabs, [*slabs[1:], None], strict=True):
            values = _filled(slab, coming.result(), slices)
            if after is not None:
                # Not earlier: what this slab was made of would be a third beside the store.
                coming = reader.submit(read, after)
            values = slab.layout.encode(values)
            arrays = store.append(slab.key, values)
            for i, place in enumerate(slab.places):
                if place in by_place and not by_place[place].stacked:
                    leaf = slab.layout.read_leaf(values, i)
                    verify(path, known, by_place[place].path, leaf)
            del values
            jax.block_until_ready(arrays)
            if after is None or after.key.owner != slab.key.owner:
                done()
        _load_small(path, known, store, [entry for entry in entries if not entry.groups])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slab:
    """A slab to fill: the key of its part, its layout, and its leaves' places in their order."""

    key: Key
    layout: Layout
    places: tuple[StorePlace, ...]


def _slabs(spec: RunSpec) -> list[_Slab]:
    """All slabs, group by group, masters first."""
    found = []
    for g, layout in enumerate(spec.layouts):
        rows = list(enumerate(layout.state.places))
        masters = Kind.MASTERS, layout.master, range(len(layout.master.shapes))
        state = [
            (Kind.OPTIMIZER_STATE, slab, [i for i, (at, _) in rows if at == s])
            for s, slab in enumerate(layout.state.layouts)
        ]
        for kind, slab, positions in [masters, *state]:
            key = Key(kind, g)
            places = tuple(StorePlace(holder=key, position=i) for i in positions)
            found.append(_Slab(key=key, layout=slab, places=places))
    return found


def _filled(
    slab: _Slab, loaded: Mapping[StorePlace, np.ndarray], slices: dict[StorePlace, jax.Array]
) -> np.ndarray:
    """A slab of what was loaded and of slices, which are dropped; zeros for leaves without one."""
    filled = np.zeros(slab.layout.size, jnp.dtype(slab.layout.dtype))
    for i, place in enumerate(slab.places):
        if place in slices:
            slab.layout.fill(filled, i, np.asarray(slices.pop(place)))
        elif place in loaded:
            slab.layout.fill(filled, i, loaded[place])
    return filled


def _load(path: Path, entries: Iterable[ArrayEntry]) -> dict[TreePath, np.ndarray]:
    return orbax.load_arrays(path, {entry.path: entry for entry in entries})


def _load_small(
    path: Path, known: Mapping[str, str] | None, store: Store, entries: Sequence[ArrayEntry]
) -> None:
    arrays, loaded = small_arrays(store), _load(path, entries)
    for entry in entries:
        (place,), value = entry.places, loaded[entry.path]
        verify(path, known, entry.path, value)
        if entry.key is not None:
            value = jax.random.wrap_key_data(jnp.asarray(value), impl=entry.key)
        assert isinstance(place.holder, Small)
        arrays[place.holder][place.position] = store.small(value)
    set_small_arrays(store, arrays)
