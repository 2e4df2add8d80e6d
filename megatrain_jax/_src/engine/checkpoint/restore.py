"""Restores a checkpoint into a store, slab by slab, reading the next slab while one is stored.

`check` looks for every possible fault before the store is touched: a damaged manifest, missing
files, arrays of a different model. `load` then drops the store's arrays, so that a pool of the
run's usual size is large enough, and fills it again. An error after that point loses the state.

An array reaches its slab in one of two ways:

- In chunks: a process reads only the chunks that its devices share.
- Converted, if the checkpoint stores it in a different form (fp32 for a compact run, or vice
  versa): loaded as a whole, verified, decoded and encoded again. Stacked arrays of this kind are
  loaded first and their slices kept in host memory, because each slice goes to a different slab.

Checksums are compared with the filled slab, not with the bytes read, so they cover the layout too.
At most two slabs exist beside the store at any time.

Example with the slabs a, b, c::

    main thread                                      reader's thread
                                                     reads a
    makes a's arrays from the chunks
    stores them, compares them with their checksums  reads b
    makes b's arrays
    stores and compares them                         reads c

If the arrays of checkpoint and run differ, the error names the likely cause and the remedy.
"""

import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.engine.checkpoint import contents, manifest, orbax
from megatrain_jax._src.engine.checkpoint.chunks import Cell
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    in_all_processes,
    read_error,
)
from megatrain_jax._src.engine.checkpoint.orbax import ChunkReader
from megatrain_jax._src.engine.program.layers.sliced_values import Index, selector
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.host_leaves import (
    Run,
    cut,
    encoded,
    joined_run,
    runs_of,
    write_part,
)
from megatrain_jax._src.engine.state.layout import Layout


def check(
    path: AnyPath, spec: RunSpec, entries: Sequence[contents.ArrayEntry]
) -> tuple[dict[str, Any], dict[contents.TreePath, contents.ConvertedArray]]:
    """Checks that a checkpoint is complete and belongs to this model and optimizer.

    Returns:
        The facts saved beside the arrays, and the arrays stored in a different form than the run's,
        by path.

    Raises:
        CheckpointError: If it is damaged, or has different arrays; the first differences are
            listed.
    """
    facts = manifest.facts_of(path)
    if facts["params_only"]:
        raise CheckpointError(
            f"{path} holds parameters only, so training can't go on from it exactly; to start "
            "a new run from them, give the folder to `fit` or `Trainer` as `params=`"
        )
    there = orbax.own_metadata(path)
    others = contents.arrays_to_convert(
        entries, contents.coding_of(spec, entries), there, facts["coded"]
    )
    wanted = [entry for entry in entries if entry.array not in others]
    wanted += [source for other in others.values() for source in other.sources]
    cause = partial(likely_cause, path)
    orbax.check_arrays(path, there, wanted, "a checkpoint of another model or optimizer", cause)
    return facts, others


def load(
    path: AnyPath,
    known: Mapping[str, Any],
    spec: RunSpec,
    store: Store,
    entries: Sequence[contents.ArrayEntry],
    others: Mapping[contents.TreePath, contents.ConvertedArray],
    done: Callable[[], object],
) -> None:
    """Fills a store at rest from a checked checkpoint.

    Each process reads the chunks that its devices share; checksums are computed while the next slab
    is read.

    Args:
        path: The checkpoint's folder.
        known: Chunks of its arrays and their checksums, by pointer.
        spec: The run, with the layouts of its slabs.
        store: The store, at rest; its arrays are dropped first.
        entries: Entries of all arrays of the run's checkpoints.
        others: The arrays that the checkpoint stores in a different form, by path.
        done: Callback after each group, for a progress bar.

    Raises:
        CheckpointError: If the checkpoint can't be read after all, or a checksum doesn't match. The
            state is then lost until another checkpoint is loaded.
    """
    store.drop()

    def fill() -> None:
        try:
            _Loading(path, known, spec, store, entries, others).fill(done)
        except Exception as error:
            # The error's frames hold arrays; keeping the error would keep their memory from a
            # retry.
            traceback.clear_frames(error.__traceback__)
            message = (
                f"{path} could not be read to its end ({type(error).__name__}: {error}). The state "
                "in memory is lost: restore another checkpoint."
            )
            raise read_error(message, error) from error

    # If one process loses its state, all do: the rest could not step without it.
    in_all_processes(store.placement.processes, f"the end of restoring {path.name}", fill)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slab:
    """A slab to fill: the key of its part, its layout, and the places of its leaves in order."""

    key: Key
    layout: Layout
    places: tuple[contents.StorePlace, ...]


_PartOf = tuple[contents.StorePlace, int]
"""A part of a leaf: the leaf's place in the store, and the part's number."""
_Arrays = Sequence[Mapping[int, np.ndarray]]
"""A slab's arrays at rest; each maps shard numbers to this process's shards."""


class _Loading:
    """Reads one checkpoint into a store."""

    def __init__(self, path, known, spec, store, entries, others):
        """Sorts the entries; see `load`."""
        self.path, self.spec, self.store = path, spec, store
        self.sums = contents.Checksums(path, known)
        self.chunks = ChunkReader(path)
        self.small = [e for e in entries if not e.groups and e.array not in others]
        self.begun = [e for e in entries if not e.groups and e.array in others]
        held = [entry for entry in entries if entry.groups]
        self.same = [entry for entry in held if entry.array not in others]
        self.others = {
            entry.array: (entry, others[entry.array]) for entry in held if entry.array in others
        }
        self.by_part = {
            (place, e.part): (e, index)
            for e in self.same
            for place, index in zip(e.places, e.indices, strict=True)
        }
        self.grids = {e.path: self.sums.grid(e.path, e.shape) for e in self.same}
        self.other_at = {p: row for row in self.others.values() for p in row[0].places}
        self.slices: dict[_PartOf, jax.Array] = {}

    def fill(self, done: Callable[[], object]) -> None:
        """Reads all arrays, beginning with stacked ones to convert."""
        with ThreadPoolExecutor(1) as reader:
            self._read_stacked()
            slabs = _slabs(self.spec)
            coming = reader.submit(self._read, slabs[0])
            for slab, after in zip(slabs, [*slabs[1:], None], strict=True):
                arrays = self._filled(slab, coming.result())
                if after is not None:
                    # Not earlier, because this slab's sources would be a third copy beside the
                    # store.
                    coming = reader.submit(self._read, after)
                resting = self.store.append_shards(slab.key, arrays)
                # Verifies chunks stored in the run's own form, while they are being stored: read
                # back from the slab, so that this covers its layout as well.
                for i, p, part in _parts(slab):
                    for entry, cell, own in self._known(slab, arrays, i, p, part):
                        if own is not None:
                            self._compare(entry, own, cell)
                # Freed before the next slab is made: at most two exist beside the store.
                del arrays
                jax.block_until_ready(resting)
                if after is None or after.key.owner != slab.key.owner:
                    done()
                    progressed()
            self._read_small()

    def _read_stacked(self) -> None:
        """Keeps slices of stacked arrays in a different form in host memory."""
        for entry, other in self.others.values():
            if entry.stacked:
                whole = self._converted(other)
                for place, index in zip(entry.places, entry.cuts, strict=True):
                    layout, i = contents.layout_at(self.spec, place)
                    for p, part in enumerate(encoded(layout, whole[selector(index)], i)):
                        self.slices[place, p] = self.store.small(np.ascontiguousarray(part))
                jax.block_until_ready(list(self.slices.values()))

    def _read(self, slab: _Slab) -> dict[_PartOf, list[Run]]:
        """Loads the parts of a slab's leaves as runs, except for kept slices."""
        # Runs on the reader's thread, so it must not use a device or an array of the store.
        empty, found = self._empty(slab), {}
        wanted: list[tuple[_PartOf, contents.ArrayEntry, Cell]] = []
        for i, p, part in _parts(slab):
            if part in self.slices or part not in self.by_part:
                continue
            entry, index = self.by_part[part]
            own = runs_of(slab.layout, empty, i, p)
            cells = self._cells(entry, index)
            wanted += [(part, entry, cell) for cell in cells if cut(own, cell.start, cell.stop)]
            found[part] = []
        rows = self.chunks.read([(entry, cell) for _, entry, cell in wanted])
        for (part, _, cell), chunk in zip(wanted, rows, strict=True):
            found[part].append((cell.start, chunk))
        for i, place in enumerate(slab.places):
            # Encoded as in an update, but rounded to nearest: nothing accumulates here.
            if place in self.other_at and (place, 0) not in self.slices:
                leaf = self._converted(self.other_at[place][1])
                for p, part in enumerate(encoded(slab.layout, leaf, i)):
                    found[place, p] = [(0, part.reshape(-1))]
        return found

    def _cells(self, entry: contents.ArrayEntry, index: Index) -> Iterator[Cell]:
        """The chunks of a slice of an array."""
        grid = self.grids[entry.path]
        if not grid.divides(index):
            raise CheckpointError(f"the chunks of {entry.name} are not of this library")
        return grid.cells(index)

    def _empty(self, slab: _Slab) -> list[dict[int, np.ndarray]]:
        """Zeros for this process's shards of a slab's arrays at rest."""
        numbers, num_shards = self.store.placement.shards_here, slab.layout.num_shards
        return [
            {n: np.zeros(aval.size // num_shards, aval.dtype) for n in numbers}
            for aval in slab.layout.at_rest
        ]

    def _filled(self, slab: _Slab, loaded: Mapping[_PartOf, Sequence[Run]]) -> _Arrays:
        """A slab's arrays at rest, made from loaded parts and kept slices; the slices are dropped.

        Leaves without elements, which no checkpoint has, are zeros.
        """
        arrays = self._empty(slab)
        for i, p, part in _parts(slab):
            runs = loaded.get(part, ())
            if part in self.slices:
                runs = [(0, np.asarray(self.slices.pop(part)).reshape(-1))]
            # Chunks shared with other processes are verified before their remaining part is
            # dropped.
            for entry, cell, own in self._known(slab, arrays, i, p, part):
                if own is None:
                    whole = joined_run(runs, cell.start, cell.stop)
                    assert whole is not None
                    self._compare(entry, whole, cell)
            write_part(slab.layout, arrays, i, p, runs)
        return arrays

    def _known(
        self, slab: _Slab, arrays: _Arrays, i: int, p: int, part: _PartOf
    ) -> Iterator[tuple[contents.ArrayEntry, Cell, np.ndarray | None]]:
        """The chunks of a part that this process has read.

        Yields each with its elements in the arrays; None if other processes have some of them.
        """
        if part not in self.by_part:
            return
        entry, index = self.by_part[part]
        runs = runs_of(slab.layout, arrays, i, p)
        for cell in self._cells(entry, index):
            if cut(runs, cell.start, cell.stop):
                yield entry, cell, joined_run(runs, cell.start, cell.stop)

    def _compare(self, entry: contents.ArrayEntry, chunk: np.ndarray, cell: Cell) -> None:
        self.sums.verify(entry.path, chunk, cell.number)

    def _converted(self, other: contents.ConvertedArray) -> np.ndarray:
        """An array that the checkpoint stores in a different form, as numbers."""
        loaded = self._load(other.sources)
        for source in other.sources:
            self.sums.verify(source.path, loaded[source.path])
        return other.numbers([loaded[source.path] for source in other.sources])

    def _read_small(self) -> None:
        arrays, loaded = contents.small_arrays(self.store), self._load(self.small)
        for entry in self.small:
            (place,), value = entry.places, loaded[entry.path]
            self.sums.verify(entry.path, value)
            if entry.key is not None:
                value = jax.random.wrap_key_data(jnp.asarray(value), impl=entry.key)
            assert isinstance(place.holder, contents.SmallArrays)
            arrays[place.holder][place.position] = self.store.small(value)
        for entry in self.begun:
            (place,) = entry.places
            assert isinstance(place.holder, contents.SmallArrays)
            zero = jnp.zeros(entry.shape, entry.dtype)
            arrays[place.holder][place.position] = self.store.small(zero)
        contents.set_small_arrays(self.store, arrays)

    def _load(self, entries: Iterable[contents.ArrayEntry]) -> dict[contents.TreePath, np.ndarray]:
        return self.chunks.read_whole([entry.path for entry in entries])


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
            places = tuple(contents.StorePlace(holder=key, position=i) for i in positions)
            found.append(_Slab(key=key, layout=slab, places=places))
    return found


def _parts(slab: _Slab) -> Iterator[tuple[int, int, _PartOf]]:
    """The parts of a slab's leaves: the leaf's number, the part's number, and both as a key."""
    for i, place in enumerate(slab.places):
        for p in range(len(slab.layout.parts(i))):
            yield i, p, (place, p)


def likely_cause(folder: AnyPath, unequal: Collection[contents.TreePath], only_dtypes: bool) -> str:
    """Sentences on the argument that probably differs from the run that saved a checkpoint.

    Args:
        folder: The checkpoint's folder.
        unequal: Paths of the arrays that differ, or that only the checkpoint or the run has.
        only_dtypes: Whether both have the same arrays in the same shapes.
    """
    if only_dtypes:
        return (
            "The likely cause is another `precision`, or jax_enable_x64: set both as in the run "
            "that saved it."
        )
    # A model's other parameters change the optimizer's state, too.
    if {path[0] for path in unequal} & {contents.PARAMS, contents.VARIABLES}:
        return (
            "The likely cause is another `model`: other layers, sizes or names. Build the model of "
            "the run that saved it, or choose another `checkpoint_dir` for this one."
        )
    if any(path[0] == contents.EMA for path in unequal):
        return (
            "The likely cause is that it holds averages of the parameters, and this run has no "
            "`ema_decay`: pass one to go on with them."
        )
    if any(path[0] == contents.STATE for path in unequal):
        return (
            "The likely cause is another `optimizer`, or another `trainable`: pass those of the "
            "run that saved it. To go on with new ones, start a new run from its parameters: "
            f"params={str(folder)!r}, with another `checkpoint_dir`."
        )
    return "The likely cause is another version of JAX, or another kind of random keys."
