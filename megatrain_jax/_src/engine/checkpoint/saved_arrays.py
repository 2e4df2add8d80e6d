"""Arrays of any checkpoint that Orbax can read, loaded on demand."""

import dataclasses
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.checkpoint import manifest, orbax
from megatrain_jax._src.engine.checkpoint.checksums import Checksums
from megatrain_jax._src.engine.checkpoint.contents import TreePath, pointer
from megatrain_jax._src.engine.checkpoint.encodings import decoded, part_names
from megatrain_jax._src.engine.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    UnreadError,
    has_manifest,
    local_path,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedArray:
    """An array of a checkpoint on disk, which NumPy loads through `__array__`.

    Attributes:
        folder: The checkpoint's folder.
        path: The array's path in the checkpoint.
        shape: The array's shape.
        dtype: The array's dtype.
        checksums: Checksums of the checkpoint's arrays.
    """

    folder: Path
    path: TreePath
    shape: tuple[int, ...]
    dtype: np.dtype
    checksums: Checksums

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Loads the array.

        Raises:
            CheckpointError: If its checksum does not match.
        """
        # Loaded one by one on demand, so that the whole model is never in memory.
        with orbax.context():
            (array,) = orbax.load_arrays(self.folder, {self.path: self}).values()
        self.checksums.verify(self.path, array)
        return array if dtype is None else array.astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedCodes:
    """An array stored as codes in a checkpoint on disk, which NumPy loads through `__array__`.

    Attributes:
        parts: Its codes and their scales, in the order of `part_names`.
        coding: The array's coding, from the checkpoint's manifest.
    """

    parts: tuple[SavedArray, ...]
    coding: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self.coding["shape"])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the decoded numbers."""
        return np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Loads the array and decodes it.

        Raises:
            CheckpointError: If a checksum does not match.
        """
        array = decoded(self.coding, *map(np.asarray, self.parts))
        return array if dtype is None else array.astype(dtype)


def saved_arrays(folder: str | PathLike[str]) -> dict[TreePath, SavedArray | SavedCodes]:
    """The arrays of a checkpoint by path; nothing is loaded yet.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read, or it is a damaged one of
            this library.
    """
    where = local_path(folder, "params")
    if not where.is_dir():
        raise CheckpointError(f"`params`: there is no folder {where}")
    if not has_manifest(where) and (found := _checkpoints_in(where)):
        raise CheckpointError(
            f"`params`={where} holds the checkpoints of a run; choose one: "
            f"{'..., ' if len(found) > 3 else ''}{', '.join(map(str, found[-3:]))}"
        )
    if not has_manifest(where) and orbax.has_our_arrays(where):
        raise CheckpointError(
            f"`params`={where} is damaged: it is a checkpoint of megatrain_jax without its "
            f"{MANIFEST}, so its arrays can't be compared with their checksums. `params` must be a "
            "tree of arrays, a whole checkpoint of megatrain_jax, or any checkpoint that Orbax "
            "can read."
        )
    # Without a manifest, another program wrote the checkpoint: there are no checksums to compare.
    facts = manifest.facts_of(where) if has_manifest(where) else {}
    checksums = Checksums(where, facts.get("arrays"))
    arrays = {
        path: SavedArray(
            folder=where,
            path=path,
            shape=tuple(found.shape),
            dtype=jnp.dtype(found.dtype),
            checksums=checksums,
        )
        for path, found in _metadata(where).items()
        if hasattr(found, "shape")  # Python numbers have no shape
    }
    # A parameter may be named "codes" too: only codes listed in the manifest are codes.
    by_pointer = {pointer(path[:-1]): path[:-1] for path in arrays if path[-1] == "codes"}
    codings = facts["coded"] if facts else {}
    coded = {path: codings[name] for name, path in by_pointer.items() if name in codings}
    parts = {
        path: tuple(arrays.pop((*path, name)) for name in part_names(coding))
        for path, coding in coded.items()
    }
    return arrays | {
        path: SavedCodes(parts=parts[path], coding=coding) for path, coding in coded.items()
    }


def _checkpoints_in(folder: Path) -> list[Path]:
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


def _metadata(folder: Path) -> dict[TreePath, Any]:
    """The shapes and dtypes of a checkpoint's arrays; errors name the user's argument."""
    try:
        return orbax.metadata(folder)
    except UnreadError:
        raise
    except CheckpointError as error:
        hint = "It must be a tree of arrays or the folder of a checkpoint."
        if (folder / "config.json").is_file():
            hint = "`models.load_pretrained` reads checkpoints of Hugging Face Transformers."
        raise CheckpointError(f"`params`={error}. {hint}") from error
