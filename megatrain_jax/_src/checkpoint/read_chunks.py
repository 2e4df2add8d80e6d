"""Reads chunks of a checkpoint's arrays, so that a process reads only what it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from orbax.checkpoint import type_handlers

from megatrain_jax._src.checkpoint import orbax
from megatrain_jax._src.checkpoint.chunks import Cell
from megatrain_jax._src.checkpoint.contents import ArrayEntry, TreePath


class ChunkReader:
    """Reads chunks of a checkpoint's arrays."""

    def __init__(self, folder: Path):
        """Makes a reader of a checkpoint with chunks in its manifest; opens nothing yet.

        Args:
            folder: The checkpoint's folder.
        """
        self._folder = folder
        self._stores = type_handlers.get_ts_context(use_ocdbt=True)
        self._arrays: dict[TreePath, Any] = {}

    def read(self, wanted: Sequence[tuple[ArrayEntry, Cell]]) -> list[np.ndarray]:
        """Reads chunks in parallel, as flat arrays.

        Args:
            wanted: Entries of the arrays, with a chunk of each.
        """
        new = {entry.path for entry, _ in wanted} - self._arrays.keys()
        # All are opened, then all read: TensorStore works in parallel within each phase.
        specs = {path: ts.Spec(orbax.read_spec(self._folder, path)) for path in new}
        opening = {path: ts.open(spec, context=self._stores) for path, spec in specs.items()}
        self._arrays |= {path: opened.result() for path, opened in opening.items()}
        coming = [self._arrays[entry.path][cell.box].read() for entry, cell in wanted]
        return [np.ascontiguousarray(chunk.result()).reshape(-1) for chunk in coming]
