"""Checksums of the arrays of a checkpoint.

Each is of an array's bytes, not of the files that they were written to: it holds from the store
to the disk and back, whatever lies between. xxHash is several times as fast as a disk, and other
threads run meanwhile.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from megatrain_jax.checkpoint.contents import Entry, pointer
from megatrain_jax.checkpoint.contents import Path as TreePath
from megatrain_jax.checkpoint.folder import CheckpointError


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """The 64 bits of XXH3, in hexadecimal, of the bytes of arrays one after the other."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def checksums(rows: Iterable[tuple[Entry, list[np.ndarray]]]) -> dict[str, str]:
    """The checksum of each array, by the pointer of its path."""
    return {pointer(entry.path): checksum(arrays) for entry, arrays in rows}


def verify(
    folder: Path, known: Mapping[str, str] | None, path: TreePath, arrays: Iterable[np.ndarray]
) -> None:
    """Compares what was read of an array with what was written.

    Args:
        folder: The checkpoint, for the message.
        known: The checkpoint's checksums; None if it was written without them.
        path: Path of the array there.
        arrays: What was read.

    Raises:
        CheckpointError: If it is something else.
    """
    if known is not None and known.get(pointer(path)) != checksum(arrays):
        raise CheckpointError(
            f"{folder} is damaged: {'/'.join(path)} is not what was written, though its files have "
            "the sizes they had. Use another checkpoint, and mistrust the disk."
        )
