"""Checks a checkpoint's arrays: their checksums, and that their numbers are finite.

Each checksum covers the bytes of a chunk, not of the files it was written to, so it protects the
whole way from the store to disk and back. xxHash is several times faster than a disk, and does not
block Python's remaining threads.

The manifest has, for each array, the shape of its chunks and their checksums in order::

    "params/w": {"chunk": [150, 256], "checksums": ["93f1…", "5c02…"]}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.engine.checkpoint.chunks import Grid
from megatrain_jax._src.engine.checkpoint.contents import TreePath, pointer
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError

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

    def __init__(self, folder: Path, known: Mapping[str, Any] | None):
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
