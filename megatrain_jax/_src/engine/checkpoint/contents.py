"""The arrays of a checkpoint: their places in the store, their forms on disk, their checksums.

Paths are those of the user's model and of Optax's own state, so a checkpoint is readable without
this library.

Example: Adam on an embedding, in group 0, and layers::

    path                      place in the store
    params/embed              masters of group 0, leaf 0
    opt_state/0/count         small arrays of the optimizer, number 0
    opt_state/0/mu/embed      optimizer state of group 0, leaf 0
    opt_state/0/nu/embed      optimizer state of group 0, leaf 1
    ema/embed                 with `ema_decay`, the average: optimizer state, too
    run/key, run/step         small arrays of the run, numbers 0 and 1

Arrays are numbers of some dtype, or codes with scales.

A checkpoint with codes describes their coding in its manifest, so they can be decoded without the
run that wrote them. A run can also continue from a checkpoint in a different form: an fp32
checkpoint can start a compact run, and vice versa.

Example: the first moment of a (2, 6, 50) stack of layers that is trained layer by layer::

    opt_state/0/mu/w/codes    int8[2, 6, 50]
    opt_state/0/mu/w/scales   float32[2, 3]
    manifest: "coded": {"opt_state/0/mu/w": {"code": "dynamic", "bits": 8, "signed": true,
                        "block": 128, "shape": [2, 6, 50], "axes": [0]}}

Checksums protect arrays, and parameters of a run have to be finite.

Each checksum covers the bytes of a chunk, not of the files it was written to, so it protects the
whole way from the store to disk and back. xxHash is several times faster than a disk, and does not
block Python's remaining threads.

The manifest has, for each array, the shape of its chunks and their checksums in order::

    "params/w": {"chunk": [150, 256], "checksums": ["93f1…", "5c02…"]}
"""

import dataclasses
import enum
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.engine.checkpoint.chunks import Grid, grid_of
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
from megatrain_jax._src.engine.program.layers.sliced_values import (
    Index,
    numbers,
    range_of,
    sliced_axes,
)
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import AveragedState
from megatrain_jax._src.engine.runtime.store import Reader, Store
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.codec import Blockwise, Nf4
from megatrain_jax._src.engine.state.host_leaves import part_shape
from megatrain_jax._src.engine.state.layout import Layout

TreePath = tuple[str, ...]
"""The path of an array in the tree of a checkpoint, such as `("params", "layers", "3", "w")`."""
PARAMS, STATE, VARIABLES = "params", "opt_state", "variables"
EMA, EMA_COUNT = AveragedState._fields[:2]


class SmallArrays(enum.Enum):
    """The lists of small arrays, which belong to no group."""

    VARIABLES = enum.auto()  # the model's variables beside its parameters
    OPTIMIZER = enum.auto()  # shared by all groups: counts, keys, hyperparameters
    RUN = enum.auto()  # the seed's key and the number of the next step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorePlace:
    """The place of an array in the store.

    Attributes:
        holder: Masters or optimizer state of a group, or a list of small arrays.
        position: The array's position among the holder's leaves.
    """

    holder: Key | SmallArrays
    position: int

    @property
    def group(self) -> int | None:
        """The number of the array's group; None for an array in no group."""
        return self.holder.owner if isinstance(self.holder, Key) else None


_Slice = tuple[Index, StorePlace]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One array of a checkpoint: an array of the run, or one part of it if it is stored as codes.

    An array stored as codes has several parts, such as codes and scales; see `Part`.

    Attributes:
        path: The array's path in the checkpoint.
        array: Path of the run's array, without the part's own name.
        part: Number of the part.
        whole: Shape of the run's array.
        cuts: For each place, the index of the slice of the run's array that is stored there.
        shape: Shape of the array in the checkpoint.
        dtype: Name of the array's dtype in the checkpoint.
        places: The array's places in the store; several if the store keeps it layer by layer.
        indices: For each place, the index of the slice of the checkpoint's array stored there.
        key: If the array is the data of random keys, their implementation; else None.
    """

    path: TreePath
    array: TreePath
    part: int = 0
    whole: tuple[int, ...]
    cuts: tuple[Index, ...] = ((),)
    shape: tuple[int, ...]
    dtype: str
    places: tuple[StorePlace, ...]
    indices: tuple[Index, ...] = ((),)
    key: str | None = None

    @property
    def name(self) -> str:
        """The path as users read it."""
        return "/".join(self.path)

    @property
    def stacked(self) -> bool:
        """Whether the store keeps the array layer by layer."""
        return any(self.indices)

    @property
    def groups(self) -> frozenset[int]:
        """The numbers of the groups that hold the array or its slices."""
        return frozenset(place.group for place in self.places if place.group is not None)


SliceReader = tuple[ArrayEntry, Index, Reader]
"""One slice of an array as the store keeps it, or the whole array: its index and a reader."""


def entries_of(spec: RunSpec) -> tuple[ArrayEntry, ...]:
    """Lists the arrays of a run's checkpoints, without empty ones, which Orbax can't save.

    Raises:
        CheckpointError: If two of them would have one name on disk.
    """
    found = [*_parameters(spec), *_state(spec), *_variables(spec), *_run()]
    by_name: dict[str, ArrayEntry] = {}
    for entry in found:
        # By the name that Orbax gives an array; two paths may have the same.
        other = by_name.setdefault(".".join(entry.path), entry)
        if other is not entry:
            raise CheckpointError(
                f"{'/'.join(other.path)} and {'/'.join(entry.path)} would be one array in a "
                "checkpoint, where Orbax writes dots between the names of a path: rename one"
            )
    return tuple(entry for entry in found if all(entry.shape))


def _parameters(spec: RunSpec) -> Iterable[ArrayEntry]:
    slices: dict[int, list[_Slice]] = defaultdict(list)
    for g, rows in enumerate(spec.grouping.leaves):
        for position, i in enumerate(rows):
            leaf, place = spec.leaves[i], StorePlace(holder=Key(Kind.MASTERS, g), position=position)
            slices[leaf.parameter].append((leaf.index, place))
    for p, (path, shape) in enumerate(zip(spec.adapted.paths, spec.adapted.shapes, strict=True)):
        yield from _parts(spec, (PARAMS, *map(str, path)), shape.shape, slices[p])


def _state(spec: RunSpec) -> Iterable[ArrayEntry]:
    cut = spec.optimizer
    slices: dict[int, list[_Slice]] = defaultdict(list)
    for g, rows in enumerate(cut.state):
        for position, leaf in enumerate(rows):
            place = StorePlace(holder=Key(Kind.OPTIMIZER_STATE, g), position=position)
            slices[leaf.leaf].append((leaf.index, place))
    for position, leaf in enumerate(cut.globals):
        place = StorePlace(holder=SmallArrays.OPTIMIZER, position=position)
        slices[leaf.leaf].append((leaf.index, place))
    for i, (keys, shape) in enumerate(zip(cut.state_paths, cut.state_shapes, strict=True)):
        path = keys if i <= cut.num_averages > 0 else (STATE, *keys)
        # Shared state is not in a slab, so it is never stored as codes.
        if any(isinstance(place.holder, SmallArrays) for _, place in slices[i]):
            yield _entry(path, shape.shape, shape.dtype, slices[i])
        else:
            yield from _parts(spec, path, shape.shape, slices[i])


def _parts(
    spec: RunSpec, path: TreePath, shape: tuple[int, ...], slices: Sequence[_Slice]
) -> Iterable[ArrayEntry]:
    """The entries of an array in slabs: one, or one for each array that represents it."""
    layout, i = layout_at(spec, slices[0][1])
    for p, part in enumerate(layout.parts(i)):
        rows, whole = slices, shape
        if part.per > 1:
            own_shape = part_shape(layout, i, p)
            ranges = [(of, place) for index, place in slices if (of := range_of(index))]
            if ranges:
                # Blocks of codes end where ranges end, so the ranges' parts join to one array.
                whole = (len(slices) * own_shape[0],)
                rows = [((of.of(shape[0], whole[0]),), place) for of, place in ranges]
            else:
                # Such a part is flat for each slice. The sliced axes come first.
                axes = sliced_axes(slices[0][0])
                whole = (*(shape[axis] for axis in axes), *own_shape)
                rows = [(numbers(index), place) for index, place in slices]
        own = (*path, part.name) if part.name else path
        entry = _entry(own, whole, jnp.dtype(part.dtype), rows)
        cuts = tuple(sorted((index for index, _ in slices), key=numbers))
        yield dataclasses.replace(entry, array=path, part=p, whole=tuple(shape), cuts=cuts)


def layout_at(spec: RunSpec, place: StorePlace) -> tuple[Layout, int]:
    """The layout of an array's slab, and the array's number in it."""
    assert isinstance(place.holder, Key)
    return spec.layouts[place.holder.owner].leaf(place.holder.kind, place.position)


def _variables(spec: RunSpec) -> Iterable[ArrayEntry]:
    shapes = zip(spec.adapted.variable_paths, spec.adapted.variable_shapes, strict=True)
    for position, (path, shape) in enumerate(shapes):
        place = StorePlace(holder=SmallArrays.VARIABLES, position=position)
        yield _entry((VARIABLES, *map(str, path)), shape.shape, shape.dtype, [((), place)])


def _run() -> Iterable[ArrayEntry]:
    """The entries of the seed's key and the number of the next step."""
    key = _seed_key()
    for position, (name, aval) in enumerate({"key": key, "step": jnp.int32(0)}.items()):
        place = StorePlace(holder=SmallArrays.RUN, position=position)
        yield _entry(("run", name), aval.shape, aval.dtype, [((), place)])


# Cached, because each abstract evaluation leaves memory in JAX, and every checkpoint lists the
# arrays.
@functools.cache
def _seed_key() -> Any:
    """The shape and dtype of a run's seed."""
    return jax.eval_shape(lambda: jax.random.key(0))


@functools.cache
def _key_data(shape: tuple[int, ...], dtype: Any) -> Any:
    """The shape and dtype of random keys' data."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


def _entry(path: TreePath, shape: tuple[int, ...], dtype: Any, places: Sequence[Any]) -> ArrayEntry:
    key = None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = _key_data(tuple(shape), dtype)
        key, shape, dtype = str(dtype._impl.name), data.shape, data.dtype
    # Sorted by index; the store has the order in which groups are used.
    ordered = sorted(places, key=lambda row: numbers(row[0]))
    return ArrayEntry(
        path=path,
        array=path,
        whole=tuple(shape),
        cuts=tuple(index for index, _ in ordered),
        shape=tuple(shape),
        dtype=jnp.dtype(dtype).name,
        places=tuple(place for _, place in ordered),
        indices=tuple(index for index, _ in ordered),
        key=key,
    )


def slice_readers(
    store: Store, entries: Iterable[ArrayEntry], group: int | None = None
) -> list[SliceReader]:
    """The slices of entries that belong to a group, with readers of the store's current arrays.

    Args:
        store: The store; at rest.
        entries: The arrays' entries.
        group: The group's number; None for arrays in no group, which the first process writes.
    """
    # Arrays are captured now and read later: steps replace the store's arrays, but never modify
    # them.
    small = small_arrays(store) if group is None else {}

    def reader(place: StorePlace, part: int) -> Reader:
        if isinstance(place.holder, Key):
            return store.reader(place.holder, place.position, part)
        value = _as_data(small[place.holder][place.position]).reshape(-1)
        return lambda: [(0, value)]

    return [
        (entry, index, reader(place, entry.part))
        for entry in entries
        for index, place in zip(entry.indices, entry.places, strict=True)
        if place.group == group
    ]


def grids_of(spec: RunSpec, entries: Iterable[ArrayEntry]) -> dict[TreePath, Grid]:
    """The chunks of each entry's array, as this run writes it."""
    found = {}
    for entry in entries:
        # Small arrays are whole in each process. Slices of a stack are alike, so the first one
        # stands for all.
        share, itemsize = math.prod(entry.shape), jnp.dtype(entry.dtype).itemsize
        if entry.groups:
            layout, i = layout_at(spec, entry.places[0])
            share = -(-layout.shares[i] // layout.parts(i)[entry.part].per)
        found[entry.path] = grid_of(entry.shape, entry.indices[0], share, itemsize)
    return found


def small_arrays(store: Store) -> dict[SmallArrays, list[jax.Array]]:
    """The store's arrays that belong to no group, by list."""
    return {
        SmallArrays.VARIABLES: list(store.variables),
        SmallArrays.OPTIMIZER: list(store.globals),
        SmallArrays.RUN: [store.key, store.step],
    }


def set_small_arrays(store: Store, arrays: Mapping[SmallArrays, list[jax.Array]]) -> None:
    """Replaces the store's arrays that belong to no group."""
    store.variables = list(arrays[SmallArrays.VARIABLES])
    store.globals = list(arrays[SmallArrays.OPTIMIZER])
    store.key, store.step = arrays[SmallArrays.RUN]


def _as_data(x: jax.Array) -> np.ndarray:
    """A small array as a NumPy array; random keys as their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def pointer(path: TreePath) -> str:
    """A path as one unambiguous string (RFC 6901)."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


def put(tree: dict[str, Any], path: TreePath, value: Any) -> None:
    """Sets a leaf of a nested dict."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def flat(tree: Mapping[str, Any]) -> dict[TreePath, Any]:
    """The leaves of a tree of dicts, lists and tuples, by path."""
    rows, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    return {tuple(simple((key,), simple=True) for key in keys): leaf for keys, leaf in rows}


# ---- codes and other dtypes

_FLOATS = ("bfloat16", "float32")


def coding_of(spec: RunSpec, entries: Sequence[ArrayEntry]) -> dict[str, dict[str, Any]]:
    """The coding of each array that a run stores as codes, by the pointer of its path, as JSON."""
    found = {}
    for first, *others in _by_array(entries).values():
        if not others:
            continue
        layout, i = layout_at(spec, first.places[0])
        codec = layout.segment_of(i)[0].codec
        assert isinstance(codec, Blockwise | Nf4)
        found[pointer(first.array)] = {
            **codec.coding,
            "shape": list(first.whole),
            "axes": list(sliced_axes(first.cuts[0])),
        }
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertedArray:
    """An array that a checkpoint stores in a different form than the run.

    Attributes:
        sources: Entries of the checkpoint's arrays that represent it; none for a count from 0.
        coding: The array's coding in the checkpoint; None for numbers.
    """

    sources: tuple[ArrayEntry, ...]
    coding: Mapping[str, Any] | None = None

    def numbers(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The array's numbers, from the arrays that represent it; fp32 or narrower."""
        return arrays[0] if self.coding is None else decoded(self.coding, *arrays)


def _codec_of(coding: Mapping[str, Any]) -> Blockwise | Nf4:
    if coding["code"] == "nf4":
        return Nf4()
    codec = Blockwise(code=coding["code"], bits=coding["bits"], signed=coding["signed"])
    assert coding["block"] == codec.block
    return codec


def part_names(coding: Mapping[str, Any]) -> list[str]:
    """The names of the arrays that represent an array, below its path; codes come first."""
    return [part.name for part in _codec_of(coding).parts("float32")]


def decoded(coding: Mapping[str, Any], codes: np.ndarray, *scales: np.ndarray) -> np.ndarray:
    """Decodes codes and scales of a checkpoint to fp32.

    Args:
        coding: The array's coding, from `coding_of`.
        codes: The codes.
        *scales: The scales, in the order of `part_names`.
    """
    codec = _codec_of(coding)
    shape, axes = tuple(coding["shape"]), tuple(coding["axes"])
    # Each slice of a stack was coded separately. 8-bit codes have the array's axes. Two 4-bit codes
    # share a byte, so these are laid out like scales: a row for each slice.
    front = tuple(range(len(axes)))
    moved = np.moveaxis(np.empty(shape, bool), axes, front).shape
    if coding["bits"] == 8:
        codes = np.moveaxis(codes, axes, front)
    slices = int(np.prod(moved[: len(axes)]))
    size = int(np.prod(moved[len(axes) :]))
    rows = zip(*(part.reshape(slices, -1) for part in (codes, *scales)), strict=True)
    whole = np.stack([codec.decode(row, np.float32)[:size] for row in rows])
    return np.moveaxis(whole.reshape(moved), front, axes)


def arrays_to_convert(
    entries: Sequence[ArrayEntry],
    here: Mapping[str, Mapping[str, Any]],
    there: Mapping[TreePath, Any],
    coded: Mapping[str, Mapping[str, Any]],
) -> dict[TreePath, ConvertedArray]:
    """Finds the arrays that a checkpoint stores in a different, but readable form.

    Averages of parameters that it lacks are its parameters themselves, as at the start of a run.

    Args:
        entries: Entries of the run's arrays.
        here: Codings of the run's arrays, from `coding_of`.
        there: Orbax's metadata of the checkpoint's arrays, by path.
        coded: Codings of the checkpoint's arrays.
    """
    found = {}
    begins = not any(path[0] == EMA for path in there)
    for array, rows in _by_array(entries).items():
        if begins and array == (EMA_COUNT,):
            found[array] = ConvertedArray(sources=())
        # Arrays in no group, integers and float64 are never converted: a different dtype is a
        # mistake, which `check_arrays` reports.
        if not rows[0].groups or (len(rows) == 1 and rows[0].dtype not in _FLOATS):
            continue
        own = here.get(pointer(array))
        path = (PARAMS, *array[1:]) if begins and array[0] == EMA else array
        coding = coded.get(pointer(path))
        same = all(_dtype(there.get(row.path)) == row.dtype for row in rows)
        if same and coding == own:
            continue
        if coding is not None and tuple(coding["shape"]) == rows[0].whole:
            paths = [(*path, name) for name in part_names(coding)]
        elif _dtype(there.get(path)) in _FLOATS:
            paths, coding = [path], None
        else:
            continue
        sources = tuple(_source(path, there[path], rows[0]) for path in paths if path in there)
        if coding is None and sources[0].shape != rows[0].whole:
            continue
        found[array] = ConvertedArray(sources=sources, coding=coding)
    return found


def _by_array(entries: Sequence[ArrayEntry]) -> dict[TreePath, list[ArrayEntry]]:
    found: dict[TreePath, list[ArrayEntry]] = defaultdict(list)
    for entry in entries:
        found[entry.array].append(entry)
    return found


def _dtype(metadata: Any) -> str | None:
    return jnp.dtype(metadata.dtype).name if hasattr(metadata, "shape") else None


def _source(path: TreePath, metadata: Any, like: ArrayEntry) -> ArrayEntry:
    """The entry of a checkpoint's array, in its form there."""
    shape, dtype = tuple(metadata.shape), jnp.dtype(metadata.dtype).name
    return dataclasses.replace(like, path=path, shape=shape, dtype=dtype)


# ---- checksums

# Elements tested at a time, so that a large array's booleans take little memory.
_PIECE = 1 << 22


def checksum(array: np.ndarray) -> str:
    """The 64-bit XXH3 hash of an array's bytes, in hexadecimal."""
    return xxhash.xxh3_64(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def check_finite(name: str, array: np.ndarray) -> None:
    """Refuses an array from which training can't continue.

    Raises:
        ValueError: If a number in the array is not finite.
    """
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    pieces = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
    if not all(bool(np.isfinite(piece).all()) for piece in pieces):
        raise ValueError(
            f"{name} is not finite, so training could not go on from it (a constant such as a "
            "mask is to be frozen with `trainable`)"
        )


def as_facts(grid: Grid, found: Mapping[int, str]) -> dict[str, Any]:
    """The manifest's facts about an array, from the checksums of its chunks by number."""
    return {"chunk": list(grid.chunk), "checksums": [found[n] for n in range(grid.num_cells)]}


class Checksums:
    """The checksums of a checkpoint's arrays."""

    def __init__(self, folder: AnyPath, known: Mapping[str, Any] | None):
        """Reads the checksums of the manifest.

        Args:
            folder: Folder of the checkpoint, for messages.
            known: The manifest's facts about each array, by pointer; None without a manifest.
        """
        self._folder, self._known = folder, known

    def grid(self, path: TreePath, shape: tuple[int, ...]) -> Grid:
        """The chunks of an array.

        Raises:
            CheckpointError: If the manifest's chunks don't fit the array's shape.
        """
        facts = self._facts(path)
        chunk = tuple(facts["chunk"])
        found = Grid(shape=shape, chunk=chunk) if len(chunk) == len(shape) else None
        if found is None or found.num_cells != len(facts["checksums"]):
            raise CheckpointError(f"{self._folder}: the chunks of {'/'.join(path)} are not its own")
        return found

    def verify(self, path: TreePath, array: np.ndarray, number: int | None = None) -> None:
        """Compares an array, or one of its chunks, with its checksum.

        Args:
            path: Path of the array in the checkpoint.
            array: The array or chunk that was read.
            number: Number of the chunk; None for the whole array.

        Raises:
            CheckpointError: If a checksum differs.
        """
        if self._known is None:
            return
        expected = self._facts(path)["checksums"]
        if number is not None:
            same = expected[number] == checksum(array)
        else:
            grid = self.grid(path, array.shape)
            same = all(checksum(array[box]) == expected[n] for n, box in grid.boxes())
        if not same:
            raise CheckpointError(
                f"{self._folder} is damaged: {'/'.join(path)} differs from the saved values, "
                "although its files have the right sizes. Use another checkpoint, and check the "
                "disk."
            )

    def _facts(self, path: TreePath) -> Mapping[str, Any]:
        facts = (self._known or {}).get(pointer(path))
        if facts is None:
            raise CheckpointError(f"{self._folder}: the manifest has no {'/'.join(path)}")
        return facts
