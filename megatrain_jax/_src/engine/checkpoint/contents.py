"""Lists the arrays of a run's checkpoints: each one's path there and place in the store.

Paths are those of the user's model and of Optax's own state, so a checkpoint is readable without
this library.

Example: Adam on an embedding, in group 0, and layers::

    path                      place in the store
    params/embed              masters of group 0, leaf 0
    opt_state/0/count         small arrays of the optimizer, number 0
    opt_state/0/mu/embed      optimizer state of group 0, leaf 0
    opt_state/0/nu/embed      optimizer state of group 0, leaf 1
    run/key, run/step         small arrays of the run, numbers 0 and 1
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

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.checkpoint.chunks import Grid, grid_of
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
from megatrain_jax._src.engine.program.layers.index import Index, numbers, range_of, sliced_axes
from megatrain_jax._src.engine.runtime.store import Reader, Store
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.host_leaves import part_shape
from megatrain_jax._src.engine.state.layout import Layout

TreePath = tuple[str, ...]
"""The path of an array in the tree of a checkpoint, such as `("params", "layers", "3", "w")`."""
PARAMS, STATE, VARIABLES = "params", "opt_state", "variables"


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
        path = (STATE, *keys)
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
