"""The use of Orbax: its options, and paths that it would misread given to it safely."""

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1

from megatrain_jax._src.checkpoint.contents import ArrayEntry, TreePath, flat, put
from megatrain_jax._src.checkpoint.folder import CheckpointError
from megatrain_jax._src.common.differences import described, listed

# Bytes that Orbax may hold beside the arrays it reads.
_CONCURRENT_BYTES = 512 << 20
# Bytes of a file at the most; Orbax writes several side by side.
FILE_BYTES = 512 << 20


def context() -> v1.Context:
    """Options with which Orbax copies little of what it writes and reads.

    While it writes, it still copies arrays of several files whose longest axis is not the first.
    Compression would need more time than it saves. Files of 2 GiB, which is what
    Orbax makes unless told otherwise, are written one after the other; smaller ones side by side.
    """
    context = v1.Context()
    context.array.saving.use_compression = False
    context.array.saving.use_zarr3 = True  # the limit of a file's size needs it
    context.array.saving.ocdbt_target_data_file_size = FILE_BYTES
    context.memory.deepcopy_host_arrays = False
    context.memory.read_concurrent_bytes = _CONCURRENT_BYTES
    context.pytree.loading.partial_load = True
    return context


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """A path of the folder without ``*``, ``?`` and ``[``, which Orbax takes for patterns.

    With a pattern in its path a checkpoint is finished without its arrays, or with some of another
    folder that the pattern fits.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def metadata(folder: Path) -> dict[TreePath, Any]:
    """The shapes and dtypes that Orbax has of a checkpoint's arrays, by path.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read.
    """
    try:
        with plain_path(folder) as path:
            found = v1.metadata(str(path)).metadata
        if found is None:  # Orbax logs why
            raise ValueError("what it knows of its arrays is unreadable")
        return flat(found)
    except Exception as error:
        raise CheckpointError(
            f"{folder} is no checkpoint that Orbax can read ({type(error).__name__}: {error})"
        ) from error


def load_arrays(folder: Path, arrays: Mapping[TreePath, Any]) -> dict[TreePath, np.ndarray]:
    """Loads arrays as NumPy's, in `context`.

    Args:
        folder: The checkpoint's folder.
        arrays: Objects with the arrays' shapes and dtypes, by path.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        # Describes the array to Orbax, and takes no memory.
        put(tree, path, np.broadcast_to(np.zeros((), jnp.dtype(array.dtype)), array.shape))
    if not tree:
        return {}
    with plain_path(folder) as path:
        return flat(v1.load(str(path), tree))


def check_arrays(folder: Path, entries: list[ArrayEntry], what: str) -> None:
    """Compares the arrays that Orbax finds in a checkpoint with what should be there.

    Args:
        folder: The checkpoint's folder.
        entries: Entries of the arrays that should be there.
        what: Description of a checkpoint that holds other arrays, for the message.

    Raises:
        CheckpointError: If they differ; the first differences are listed.
    """
    shown = metadata(folder)
    found = {
        path: (tuple(m.shape), jnp.dtype(m.dtype).name) if hasattr(m, "shape") else None
        for path, m in shown.items()
    }
    wanted = {entry.path: (entry.shape, entry.dtype) for entry in entries}
    differences = [
        *(f"{'/'.join(p)} is missing" for p in wanted if p not in found),
        *(f"{'/'.join(p)} is not part of this run" for p in found if p not in wanted),
        *(
            f"{'/'.join(p)} is {described(*there) if there else 'no array'} there, but "
            f"{described(*wanted[p])} here"
            for p, there in found.items()
            if p in wanted and there != wanted[p]
        ),
    ]
    if differences:
        raise CheckpointError(f"{folder} is {what}:{listed(differences)}")
