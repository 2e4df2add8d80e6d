"""Arrays of any checkpoint that Orbax can read, loaded when they are asked for."""

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1

from megatrain_jax.checkpoint.contents import Path as TreePath
from megatrain_jax.checkpoint.contents import flat, put
from megatrain_jax.checkpoint.folder import CheckpointError
from megatrain_jax.checkpoint.save import orbax_context


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedArray:
    """An array on disk.

    Attributes:
        folder: The checkpoint.
        path: Its path in there.
        shape: Its shape.
        dtype: Its dtype.
    """

    folder: Path
    path: TreePath
    shape: tuple[int, ...]
    dtype: np.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Loads it."""
        with orbax_context():
            (array,) = load_arrays(self.folder, {self.path: self}).values()
        return array if dtype is None else array.astype(dtype)


def saved_arrays(folder: str | PathLike[str]) -> dict[TreePath, SavedArray]:
    """The arrays of a checkpoint by path; nothing is loaded yet.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read.
    """
    where = Path(folder).absolute()
    return {
        path: SavedArray(
            folder=where, path=path, shape=tuple(found.shape), dtype=jnp.dtype(found.dtype)
        )
        for path, found in metadata(where).items()
        if hasattr(found, "shape")  # Python numbers have none
    }


def metadata(folder: Path) -> dict[TreePath, Any]:
    """What Orbax knows of the arrays of a checkpoint, by path.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read.
    """
    try:
        return flat(v1.metadata(str(folder)).metadata)
    except Exception as error:
        raise CheckpointError(
            f"{folder} is no checkpoint that Orbax can read ({type(error).__name__}: {error})"
        ) from error


def load_arrays(folder: Path, arrays: dict[TreePath, Any]) -> dict[TreePath, np.ndarray]:
    """Loads arrays as NumPy's, in `orbax_context`.

    Args:
        folder: The checkpoint.
        arrays: Things with a shape and a dtype, by path.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        # Describes the array to Orbax, and takes no memory.
        put(tree, path, np.broadcast_to(np.zeros((), jnp.dtype(array.dtype)), array.shape))
    return flat(v1.load(str(folder), tree)) if tree else {}
