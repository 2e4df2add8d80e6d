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
    layout_at,
    set_small_arrays,
    small_arrays,
)
from megatrain_jax._src.checkpoint.folder import CheckpointError
from megatrain_jax._src.checkpoint.forms import OtherForm, coding_of, other_forms
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.program.index import selector
from megatrain_jax._src.runtime.store import Store
from megatrain_jax._src.state.host_leaves import encoded, read_part, write_part
from megatrain_jax._src.state.layout import Layout


def check(
    path: Path, spec: RunSpec, entries: Sequence[ArrayEntry]
) -> tuple[dict[str, Any], dict[TreePath, OtherForm]]:
    """Checks that a checkpoint is whole and of this model and optimizer.

    Returns:
        The facts kept beside the arrays, and the arrays that it holds in another form than the
        run, by path.

    Raises:
        CheckpointError: If it is damaged, or holds other arrays; the first differences are listed.
    """
    facts = manifest.facts_of(path)
    if facts["params_only"]:
        raise CheckpointError(
            f"{path} holds parameters only, so training can't go on from it exactly; to start "
            "a new run from them, give the folder to `fit` or `Trainer` as `params=`"
        )
    own, coded = coding_of(spec, entries), facts.get("coded", {})
    others = other_forms(entries, own, orbax.metadata(path), coded)
    wanted = [entry for entry in entries if entry.array not in others]
    wanted += [source for other in others.values() for source in other.sources]
    orbax.check_arrays(path, wanted, "a checkpoint of another model or optimizer")
    return facts, others


def load(
    path: Path,
    known: Mapping[str, str] | None,
    spec: RunSpec,
    store: Store,
    entries: Sequence[ArrayEntry],
    others: Mapping[TreePath, OtherForm],
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
        others: The arrays that the checkpoint holds in another form, by path.
        done: Callback after each group, for a progress bar.

    Raises:
        CheckpointError: If the checkpoint can't be read after all, or is not what was written. The
            store is then lost, until another checkpoint is loaded.
    """
    store.drop()
    try:
        _Loading(path, known, spec, store, entries, others).fill(done)
    except Exception as error:
        # Frames of the error hold arrays; whoever keeps it would keep their memory from a retry.
        traceback.clear_frames(error.__traceback__)
        raise CheckpointError(
            f"{path} could not be read to its end ({type(error).__name__}: {error}). What was in "
            "memory is lost: restore another checkpoint."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slab:
    """A slab to fill: the key of its part, its layout, and its leaves' places in their order."""

    key: Key
    layout: Layout
    places: tuple[StorePlace, ...]


_PartOf = tuple[StorePlace, int]
"""A part of a leaf, by the leaf's place in the store and the part's number."""


class _Loading:
    """A checkpoint being read into a store."""

    def __init__(self, path, known, spec, store, entries, others):
        """Sorts the entries; see `load`."""
        self.path, self.known, self.spec, self.store = path, known, spec, store
        self.small = [entry for entry in entries if not entry.groups]
        held = [entry for entry in entries if entry.groups]
        self.same = [entry for entry in held if entry.array not in others]
        self.others = {
            entry.array: (entry, others[entry.array]) for entry in held if entry.array in others
        }
        self.by_part = {(place, e.part): e for e in self.same for place in e.places}
        self.other_at = {p: row for row in self.others.values() for p in row[0].places}
        self.slices: dict[_PartOf, jax.Array] = {}

    def fill(self, done: Callable[[], object]) -> None:
        """Reads all arrays; what is stacked over layers first, since it comes as a whole."""
        with orbax.context(), ThreadPoolExecutor(1) as reader:
            self._read_stacked(reader)
            slabs = _slabs(self.spec)
            coming = reader.submit(self._read, slabs[0])
            for slab, after in zip(slabs, [*slabs[1:], None], strict=True):
                arrays = self._filled(slab, coming.result())
                if after is not None:
                    # Not earlier: what this slab was made of would be a third beside the store.
                    coming = reader.submit(self._read, after)
                resting = self.store.append(slab.key, arrays)
                self._verify(slab, arrays)
                del arrays
                jax.block_until_ready(resting)
                if after is None or after.key.owner != slab.key.owner:
                    done()
            self._read_small()

    def _read_stacked(self, reader: ThreadPoolExecutor) -> None:
        """Keeps the slices of arrays that are stacked over layers, in host memory."""
        for entry in (entry for entry in self.same if entry.stacked):
            whole = self._load([entry])[entry.path]
            checked = reader.submit(verify, self.path, self.known, entry.path, whole)
            for place, index in zip(entry.places, entry.indices, strict=True):
                self._keep(place, entry.part, whole[selector(index)])
            jax.block_until_ready(list(self.slices.values()))
            checked.result()
        for entry, other in self.others.values():
            if entry.stacked:
                whole = self._converted(other)
                for place, index in zip(entry.places, entry.cuts, strict=True):
                    layout, i = layout_at(self.spec, place)
                    for p, part in enumerate(encoded(layout, whole[selector(index)], i)):
                        self._keep(place, p, part)
                jax.block_until_ready(list(self.slices.values()))

    def _keep(self, place: StorePlace, part: int, array: np.ndarray) -> None:
        self.slices[place, part] = self.store.small(np.ascontiguousarray(array))

    def _read(self, slab: _Slab) -> dict[_PartOf, np.ndarray]:
        """The parts of a slab's leaves but those that were kept."""
        parts = [(place, p) for i, place in enumerate(slab.places) for p in _numbers(slab, i)]
        here = [part for part in parts if part in self.by_part and part not in self.slices]
        with orbax.context():  # Orbax's options are each thread's own
            loaded = self._load([self.by_part[part] for part in here])
            found = {part: loaded[self.by_part[part].path] for part in here}
            for i, place in enumerate(slab.places):
                if place in self.other_at and (place, 0) not in self.slices:
                    leaf = self._converted(self.other_at[place][1])
                    for p, part in enumerate(encoded(slab.layout, leaf, i)):
                        found[place, p] = part
        return found

    def _filled(self, slab: _Slab, loaded: Mapping[_PartOf, np.ndarray]) -> list[np.ndarray]:
        """A slab's arrays at rest, of what was loaded and of slices, which are dropped.

        Leaves without elements, which no checkpoint has, are zeros.
        """
        arrays = [np.zeros(aval.shape, aval.dtype) for aval in slab.layout.at_rest]
        for i, place in enumerate(slab.places):
            for p in _numbers(slab, i):
                if (place, p) in self.slices:
                    part = np.asarray(self.slices.pop((place, p)))
                elif (place, p) in loaded:
                    part = loaded[place, p]
                else:
                    continue
                write_part(slab.layout, arrays, i, p, part)
        return arrays

    def _verify(self, slab: _Slab, arrays: Sequence[np.ndarray]) -> None:
        """Compares arrays that came as they are held with their checksums, while they are stored.

        Arrays of other forms, and stacked ones, were compared when they were loaded.
        """
        # Read back from the slab rather than compared before: this covers its layout as well.
        for i, place in enumerate(slab.places):
            for p in _numbers(slab, i):
                entry = self.by_part.get((place, p))
                if entry is not None and not entry.stacked:
                    part = read_part(slab.layout, arrays, i, p)
                    verify(self.path, self.known, entry.path, part)

    def _converted(self, other: OtherForm) -> np.ndarray:
        """An array that the checkpoint holds in another form, as numbers."""
        loaded = self._load(other.sources)
        for source in other.sources:
            verify(self.path, self.known, source.path, loaded[source.path])
        return other.numbers([loaded[source.path] for source in other.sources])

    def _read_small(self) -> None:
        arrays, loaded = small_arrays(self.store), self._load(self.small)
        for entry in self.small:
            (place,), value = entry.places, loaded[entry.path]
            verify(self.path, self.known, entry.path, value)
            if entry.key is not None:
                value = jax.random.wrap_key_data(jnp.asarray(value), impl=entry.key)
            assert isinstance(place.holder, Small)
            arrays[place.holder][place.position] = self.store.small(value)
        set_small_arrays(self.store, arrays)

    def _load(self, entries: Iterable[ArrayEntry]) -> dict[TreePath, np.ndarray]:
        return orbax.load_arrays(self.path, {entry.path: entry for entry in entries})


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


def _numbers(slab: _Slab, i: int) -> range:
    """The numbers of the parts that stand for leaf `i`."""
    return range(len(slab.layout.parts(i)))
