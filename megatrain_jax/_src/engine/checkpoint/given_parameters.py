"""Initial parameters given by the user, as arrays or as a checkpoint, instead of the model's own.

All parameters are checked before any is read. Then they are read one by one, from memory, from a
checkpoint or from memory-mapped files, so the whole model never exists beside its slabs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.trees import described, listed, module_path, path_name
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel, flatten
from megatrain_jax._src.engine.adapt.initial_values import InitialValues, strong_array
from megatrain_jax._src.engine.checkpoint import manifest, orbax
from megatrain_jax._src.engine.checkpoint.contents import (
    VARIABLES,
    Checksums,
    TreePath,
    decoded,
    part_names,
    pointer,
)
from megatrain_jax._src.engine.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    UnreadError,
    checkpoint_at,
    has_manifest,
)


def saved_arrays(where: AnyPath, argument: str = "params") -> dict[TreePath, ComputedArray]:
    """The arrays of a checkpoint by path; nothing is loaded yet.

    They are loaded one by one on demand, so that the whole model is never in memory. An array whose
    checksum does not match raises a `CheckpointError` then.

    Args:
        where: The checkpoint.
        argument: The user's argument, for errors.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read, or it is a damaged one of
            this library.
    """
    if not where.is_dir():
        raise CheckpointError(f"`{argument}`: there is no folder {where}")
    if not has_manifest(where) and (found := _checkpoints_in(where)):
        raise CheckpointError(
            f"`{argument}`={where} holds the checkpoints of a run; choose one: "
            f"{'..., ' if len(found) > 3 else ''}{', '.join(map(str, found[-3:]))}"
        )
    if not has_manifest(where) and orbax.has_our_arrays(where):
        raise CheckpointError(
            f"`{argument}`={where} is damaged: it is a checkpoint of megatrain_jax without its "
            f"{MANIFEST}, so its arrays can't be compared with their checksums. It must be a "
            "tree of arrays, a whole checkpoint of megatrain_jax, or any checkpoint that Orbax "
            "can read."
        )
    # Without a manifest, another program wrote the checkpoint: there are no checksums to compare.
    is_own = has_manifest(where)
    if not is_own and not isinstance(where, Path):
        raise CheckpointError(
            f"`{argument}`={where} is no checkpoint of megatrain_jax: those of other programs are "
            "read from disks only, so copy it to one"
        )
    facts = manifest.facts_of(where) if is_own else {}
    other = cast(Path, where)
    read = orbax.ChunkReader(where).read_whole if is_own else partial(orbax.load_arrays, other)
    checksums = Checksums(where, facts.get("arrays"))

    def saved(path: TreePath, found: Any) -> ComputedArray:
        like = jax.ShapeDtypeStruct(tuple(found.shape), jnp.dtype(found.dtype))

        def numbers(_: Any) -> np.ndarray:
            (array,) = read({path: like}).values()
            checksums.verify(path, array)
            return array

        return ComputedArray("/".join(path), like.shape, like.dtype, numbers)

    def codes(path: TreePath, coding: Mapping[str, Any]) -> ComputedArray:
        parts = [arrays.pop((*path, name)) for name in part_names(coding)]
        shape = tuple(coding["shape"])
        return ComputedArray(
            "/".join(path), shape, np.float32, lambda _: decoded(coding, *map(np.asarray, parts))
        )

    arrays = {
        path: saved(path, found)
        for path, found in _metadata(where, argument, is_own).items()
        if hasattr(found, "shape")  # Python numbers have no shape
    }
    # A parameter may be named "codes" too: only codes listed in the manifest are codes.
    by_pointer = {pointer(path[:-1]): path[:-1] for path in arrays if path[-1] == "codes"}
    codings = facts["coded"] if facts else {}
    coded = {path: codings[name] for name, path in by_pointer.items() if name in codings}
    of_codes = {path: codes(path, coding) for path, coding in coded.items()}
    return arrays | of_codes


def _checkpoints_in(folder: AnyPath) -> list[AnyPath]:
    """The checkpoints of a run in a folder, also of another program's run, by their numbers."""
    if orbax.is_described(folder):
        return []
    rows = []
    for path in folder.iterdir():
        # Their names are numbers, or end in one like `step_500`.
        number = re.fullmatch(r"(?:[A-Za-z]+[-_]?)?(\d+)", path.name)
        # Older versions of Orbax describe only the subfolders of a checkpoint.
        if number and (
            has_manifest(path)
            or orbax.is_described(path)
            or (path.is_dir() and any(map(orbax.is_described, path.iterdir())))
        ):
            rows.append((int(number[1]), path))
    return [path for _, path in sorted(rows)]


def _metadata(folder: AnyPath, argument: str, is_own: bool) -> Mapping[TreePath, Any]:
    """The shapes and dtypes of a checkpoint's arrays; errors name the user's argument."""
    try:
        return orbax.own_metadata(folder) if is_own else orbax.metadata(cast(Path, folder))
    except UnreadError:
        raise
    except CheckpointError as error:
        hint = "It must be a tree of arrays or the folder of a checkpoint."
        if (folder / "config.json").is_file():
            hint = "`models.load_pretrained` reads checkpoints of Hugging Face Transformers."
        raise CheckpointError(f"`{argument}`={error}. {hint}") from error


# ---- given parameters

_Names = tuple[str, ...]
_TREE = "`params`"


def with_given_parameters(
    params: Any,
    initial: InitialValues,
    adapted: AdaptedModel,
    dtypes: Sequence[DTypeLike | None],
    saved: Mapping[TreePath, ComputedArray] | None = None,
) -> InitialValues:
    """Initial values with given parameters and statistics in place of the model's own.

    Statistics are the variables of floating dtypes. A warning names those that stay the model's
    own, because none were given or they differ in shape.

    Args:
        params: A tree of arrays under the model's own paths, or the folder of a checkpoint that
            Orbax can read, or of a run. Any object with a shape, a dtype and `__array__` is an
            array.
        initial: The model's own values.
        adapted: The model as parameters and a pure loss.
        dtypes: The dtype that must hold each parameter exactly; None if it may be rounded.
        saved: The `saved_arrays` of the folder, if the caller has them, and sees to the statistics.

    Raises:
        ValueError: If `params` doesn't match this model; the differences are listed.
        CheckpointError: If Orbax can't read the folder.
    """
    is_folder = isinstance(params, str | PathLike)
    params = checkpoint_at(params, "params") if is_folder else params
    every = (saved or saved_arrays(params)) if is_folder else _arrays(params)
    every = {_without_value(name): array for name, array in every.items()}
    own = [*map(_names, adapted.paths)]
    # Flat dicts match nested ones, unless two paths differ only in where they are split.
    is_clear = all(len(set(map(module_path, rows))) == len(rows) for rows in (own, every))
    text = _text if is_clear else repr

    def named(name: _Names) -> _Names:
        return _names(module_path(name)) if is_clear else name

    given = {named(name): array for name, array in every.items()}
    origin_of = dict(zip(given, every, strict=True))
    wanted = {named(name): s for name, s in zip(own, adapted.shapes, strict=True)}
    text_of = {name: text(path) for name, path in zip(wanted, own, strict=True)}
    dtype_of = dict(zip(wanted, dtypes, strict=True))
    own_variables = [named(_names(path)) for path in adapted.variable_paths]
    known = {*own_variables}
    prefix = _prefix(given, wanted)
    found = {n[len(prefix) :]: a for n, a in given.items() if n[: len(prefix)] == prefix}
    unknown_names = [(*prefix, *n) for n in found if n not in wanted and n not in known]
    # A checkpoint may hold more than parameters, such as an optimizer's state.
    if not is_folder:
        unknown_names += [n for n in given if n[: len(prefix)] != prefix and n not in known]
    if is_folder:  # Orbax can't save empty arrays, so checkpoints lack them
        empty = {name: s for name, s in wanted.items() if not all(s.shape) and name not in found}
        found |= {n: np.zeros(s.shape, jnp.dtype(dtype_of[n] or s.dtype)) for n, s in empty.items()}
    lines = [
        *(f"{text_of[name]} is missing" for name in wanted if name not in found),
        *(f"{text(origin_of[name])} is not part of the model" for name in unknown_names),
        *(
            line
            for name, shape in wanted.items()
            if name in found
            and (line := _difference(text_of[name], found[name], shape.shape, dtype_of[name]))
        ),
    ]
    origin = f"the checkpoint {params}" if is_folder else _TREE
    if lines:
        raise ValueError(f"{origin} does not fit the model:{listed(lines)}")
    sources = [found[name] for name in wanted]

    def leaves(indices: Sequence[int]) -> list[jax.Array]:
        return [strong_array(np.asarray(sources[i]), sources[i].dtype) for i in indices]

    # Arrays in files name them, like those of `models.load_pretrained`.
    rows = (getattr(source, "source_files", ()) for source in sources)
    files = tuple(dict.fromkeys(path for row in rows for path in row))
    dtypes = tuple(jnp.dtype(source.dtype) for source in sources)
    variables = initial.variables
    if saved is None:
        places = (named((VARIABLES,)), (), prefix)  # of this library, a tree, a part of one
        rows = [[given[n] for at in places if (n := (*at, *own)) in given] for own in own_variables]
        statistics = _statistics(adapted, [next(iter(row), None) for row in rows], origin)
        variables = _replaced(initial.variables, statistics)
    return InitialValues(leaves=leaves, dtypes=dtypes, variables=variables, files=files)


def _statistics(adapted: AdaptedModel, found: Sequence[Any], origin: str) -> dict[int, Any]:
    """The given values of the model's statistics, by their numbers among its variables.

    Args:
        adapted: The model.
        found: The given value of each variable, or None.
        origin: The place where they were given, for the warning.
    """
    fitting, lines = {}, []
    rows = zip(adapted.variable_paths, adapted.variable_shapes, found, strict=True)
    for i, (path, own, array) in enumerate(rows):
        # Counts and keys of random numbers are the run's own.
        if not jnp.issubdtype(own.dtype, jnp.floating) or not all(own.shape):
            continue
        if array is None:
            lines.append(f"{path_name(path)} is missing")
        elif line := _difference(path_name(path), array, own.shape, None):
            lines.append(line)
        else:
            fitting[i] = array
    if lines:
        warn_user(
            f"{origin} does not have these statistics of the model, which keeps its own:"
            f"{listed(lines)}"
        )
    return fitting


def _replaced(
    own: Callable[[], tuple[jax.Array, ...]], given: Mapping[int, Any]
) -> Callable[[], tuple[jax.Array, ...]]:
    """A model's variables with given values in the place of some."""

    def variables() -> tuple[jax.Array, ...]:
        return tuple(
            jnp.array(np.asarray(given[i]), value.dtype, copy=True) if i in given else value
            for i, value in enumerate(own())
        )

    return variables


def _arrays(params: Any) -> dict[_Names, Any]:
    paths, leaves, _ = flatten(params)
    return {_names(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _names(path: Iterable[str | int]) -> _Names:
    return tuple(map(str, path))


def _prefix(given: Mapping[_Names, Any], wanted: Mapping[_Names, Any]) -> _Names:
    """The path that is the parent of most parameters; for example, `params` for Linen."""
    # Each array votes for every prefix that would make it a parameter, so a few extra arrays don't
    # hide the right prefix.
    votes = Counter(name[:i] for name in given for i in range(len(name) + 1) if name[i:] in wanted)
    return max(votes, key=lambda prefix: (votes[prefix], -len(prefix)), default=())


def _without_value(name: _Names) -> _Names:
    # An nnx.State saved directly has one more level, for the value of each variable.
    return name[:-1] if len(name) > 1 and name[-1] == "value" else name


def _difference(
    name: str, array: Any, shape: tuple[int, ...], kept: DTypeLike | None
) -> str | None:
    there, dtype = tuple(array.shape), jnp.dtype(array.dtype)
    if there != shape:
        return f"{name} is {described(there, dtype)} there, but has shape {list(shape)} here"
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"{name} is {dtype.name} there, but parameters are real floating numbers"
    if kept is not None and jnp.promote_types(dtype, kept) != kept:
        narrow = jnp.dtype(kept).name
        return f"{name} is {dtype.name} there, which masters in {narrow} can't hold exactly"
    return None


def _text(name: _Names) -> str:
    return "/".join(name)
