"""What a checkpoint of a run holds: for each array its path there and where it lives in the store.

Paths are those of the user's model and of Optax's own state, so that a checkpoint is readable
without this library.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.program.index import Index, joined, numbers
from megatrain_jax._src.runtime.engine import Engine

Path = tuple[str, ...]
PARAMS, STATE, VARIABLES = "params", "opt_state", "variables"
_VARIABLES, _SMALL, _RUN = "V", "S", "R"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where an array of the store lives.

    Attributes:
        part: "P" masters or "O" optimizer state of a group; "V" variables, "S" small state of the
            optimizer, "R" the run's own.
        group: Its group; None for what is in no group.
        position: Its position among the leaves of its group's part, or in its list.
    """

    part: str
    group: int | None
    position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
        path: Its path in the checkpoint.
        shape: Its shape there.
        dtype: Name of its dtype there.
        places: Where it lives; several if the store keeps it layer by layer.
        indices: For each place which slice of the array it holds.
        key: Implementation of the random keys it holds the data of; None for other arrays.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    places: tuple[Place, ...]
    indices: tuple[Index, ...] = ((),)
    key: str | None = None

    @property
    def name(self) -> str:
        """The path as users read it."""
        return "/".join(self.path)

    @property
    def stacked(self) -> bool:
        """Whether the store keeps it layer by layer."""
        return any(self.indices)

    @property
    def groups(self) -> frozenset[int]:
        """The groups it is in."""
        return frozenset(place.group for place in self.places if place.group is not None)


def entries_of(spec: RunSpec) -> tuple[Entry, ...]:
    """Lists the arrays of a run's checkpoints; empty ones, which Orbax can't save, are left out."""
    found = [*_parameters(spec), *_state(spec), *_variables(spec), *_run()]
    return tuple(entry for entry in found if all(entry.shape))


def _parameters(spec: RunSpec) -> Iterable[Entry]:
    places: dict[int, list[tuple[Index, Place]]] = defaultdict(list)
    dtypes: dict[int, str] = {}
    for g, rows in enumerate(spec.grouping.leaves):
        for position, i in enumerate(rows):
            leaf = spec.leaves[i]
            dtypes[leaf.parameter] = spec.layouts[g].master.dtype
            place = Place(part="P", group=g, position=position)
            places[leaf.parameter].append((leaf.index, place))
    for p, (path, shape) in enumerate(zip(spec.adapted.paths, spec.adapted.shapes, strict=True)):
        yield _entry((PARAMS, *map(str, path)), shape.shape, dtypes[p], places[p])


def _state(spec: RunSpec) -> Iterable[Entry]:
    cut = spec.optimizer
    places: dict[int, list[tuple[Index, Place]]] = defaultdict(list)
    for g, rows in enumerate(cut.state):
        for position, leaf in enumerate(rows):
            place = Place(part="O", group=g, position=position)
            places[leaf.leaf].append((leaf.index, place))
    for position, leaf in enumerate(cut.globals):
        place = Place(part=_SMALL, group=None, position=position)
        places[leaf.leaf].append((leaf.index, place))
    tree = jax.tree.unflatten(cut.state_def, cut.state_shapes)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    for i, (keys, shape) in enumerate(flat):
        path = (STATE, *(jax.tree_util.keystr((key,), simple=True) for key in keys))
        yield _entry(path, shape.shape, shape.dtype, places[i])


def _variables(spec: RunSpec) -> Iterable[Entry]:
    shapes = zip(spec.adapted.variable_paths, spec.adapted.variable_shapes, strict=True)
    for position, (path, shape) in enumerate(shapes):
        place = Place(part=_VARIABLES, group=None, position=position)
        yield _entry((VARIABLES, *map(str, path)), shape.shape, shape.dtype, [((), place)])


def _run() -> Iterable[Entry]:
    """The seed's key and the number of the next step."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    for position, (name, aval) in enumerate({"key": key, "step": jnp.int32(0)}.items()):
        place = Place(part=_RUN, group=None, position=position)
        yield _entry(("run", name), aval.shape, aval.dtype, [((), place)])


def _entry(path: Path, shape: tuple[int, ...], dtype: Any, places: Sequence[Any]) -> Entry:
    key = None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        key, shape, dtype = str(dtype._impl.name), data.shape, data.dtype
    ordered = sorted(places, key=lambda row: numbers(row[0]))
    return Entry(
        path=path,
        shape=tuple(shape),
        dtype=jnp.dtype(dtype).name,
        places=tuple(place for _, place in ordered),
        indices=tuple(index for index, _ in ordered),
        key=key,
    )


def rows_of(
    spec: RunSpec, engine: Engine, entries: Iterable[Entry]
) -> list[tuple[Entry, list[Any]]]:
    """For each entry the arrays of its places, as views of the store.

    Args:
        spec: What the store holds.
        engine: The store; at rest.
        entries: Which arrays.
    """
    views: dict[tuple[str, int], list[np.ndarray]] = {}
    small = small_arrays(engine)

    def array(place: Place) -> np.ndarray:
        part, g = place.part, place.group
        if g is None:
            return as_data(small[part][place.position])
        if (part, g) not in views:
            layout, slabs = spec.layouts[g], engine.host.get((part, g), ())
            views[part, g] = (
                layout.master.views(slabs[0]) if part == "P" else layout.state.views(slabs)
            )
        return views[part, g][place.position]

    return [(entry, [array(place) for place in entry.places]) for entry in entries]


def small_arrays(engine: Engine) -> dict[str, list[jax.Array]]:
    """The arrays in no group, by part."""
    return {
        _VARIABLES: list(engine.variables),
        _SMALL: list(engine.globals),
        _RUN: [engine.key, engine.step],
    }


def set_small_arrays(engine: Engine, arrays: Mapping[str, list[jax.Array]]) -> None:
    """Replaces the arrays in no group."""
    engine.variables, engine.globals = list(arrays[_VARIABLES]), list(arrays[_SMALL])
    engine.key, engine.step = arrays[_RUN]


def whole_arrays(rows: Iterable[tuple[Entry, list[Any]]]) -> list[tuple[Entry, np.ndarray]]:
    """Entries with their arrays; only those that lie layer by layer are copied."""
    return [
        (entry, joined(zip(entry.indices, arrays, strict=True), entry.shape))
        for entry, arrays in rows
    ]


def tree_of(rows: Iterable[tuple[Entry, np.ndarray]]) -> dict[str, Any]:
    """Entries' arrays as a nested dict."""
    tree: dict[str, Any] = {}
    for entry, array in rows:
        put(tree, entry.path, array)
    return tree


def as_data(x: jax.Array) -> np.ndarray:
    """A small array as numbers; of random keys their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def pointer(path: Path) -> str:
    """A path as one string from which it can be told apart from all others (RFC 6901)."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Sets a leaf of a nested dict."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def flat(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """The leaves of a tree of dicts, lists and tuples, by path."""
    rows, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    return {tuple(simple((key,), simple=True) for key in keys): leaf for keys, leaf in rows}
