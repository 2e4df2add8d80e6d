"""Checks of a checkpoint's arrays: their checksums, and that their numbers are finite.

Each checksum is of an array's bytes, not of the files that they were written to: it holds from the
store to the disk and back, whatever lies between. xxHash is several times as fast as a disk, and
other threads run meanwhile.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.checkpoint.contents import ArrayEntry, TreePath, pointer
from megatrain_jax._src.checkpoint.folder import CheckpointError

# Elements tested at a time, so that the booleans of a large array take little memory.
_PIECE = 1 << 22


def checksum(array: np.ndarray) -> str:
    """The 64 bits of XXH3, in hexadecimal, of an array's bytes."""
    return xxhash.xxh3_64(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def checksums(rows: Iterable[tuple[ArrayEntry, np.ndarray]]) -> dict[str, str]:
    """The checksum of each array, by the pointer of its path."""
    return {pointer(entry.path): checksum(array) for entry, array in rows}


def check_finite(name: str, array: np.ndarray) -> None:
    """Refuses an array that training can't go on from.

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


def verify(
    folder: Path, known: Mapping[str, str] | None, path: TreePath, array: np.ndarray
) -> None:
    """Compares an array that was read with the checksum of what was written.

    Args:
        folder: Folder of the checkpoint, for the message.
        known: The checkpoint's checksums by pointer; None if it was written without them.
        path: Path of the array in the checkpoint.
        array: The array that was read.

    Raises:
        CheckpointError: If its checksum differs.
    """
    if known is not None and known.get(pointer(path)) != checksum(array):
        raise CheckpointError(
            f"{folder} is damaged: {'/'.join(path)} is not what was written, though its files have "
            "the sizes they had. Use another checkpoint, and mistrust the disk."
        )
