"""Writes one process's part of a checkpoint: the chunks of arrays on its devices.

If several processes have a part of one chunk, for example of a small leaf, the first process writes
it, and the rest leave their pieces in files.

Example: entry 12 of a checkpoint, a bias with 5 elements in one chunk, over two processes::

    process 0    has elements 0 to 2: keeps them as "12-0-0" in pieces-0.npz
    process 1    has elements 3 and 4: keeps them as "12-0-3" in pieces-1.npz
    process 0    when both are done, reads the two files and writes chunk 0 of entry 12
"""

import json
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from orbax.checkpoint import type_handlers

from megatrain_jax._src.common.syncing import sync_tree
from megatrain_jax._src.engine.checkpoint import orbax
from megatrain_jax._src.engine.checkpoint.checksums import as_facts, check_finite, checksum
from megatrain_jax._src.engine.checkpoint.chunks import Cell, Grid
from megatrain_jax._src.engine.checkpoint.contents import (
    PARAMS,
    ArrayEntry,
    SliceReader,
    TreePath,
    pointer,
)
from megatrain_jax._src.engine.state.host_leaves import Run, cut, joined_run

# Files in the workspace that a process leaves for the first process to finish.
_PIECES, _CHECKSUMS = "pieces-{}.npz", "checksums-{}.json"


class Writer:
    """Writes one process's part of a checkpoint."""

    def __init__(
        self,
        workspace: Path,
        name: str,
        process: int,
        entries: Sequence[ArrayEntry],
        grids: Mapping[TreePath, Grid],
        finite: bool,
        frozen: frozenset[int],
    ):
        """Makes a writer that has written nothing yet.

        Args:
            workspace: The workspace's folder.
            name: Name of the unfinished checkpoint in it.
            process: Number of this process.
            entries: Entries of the checkpoint's arrays.
            grids: The chunks of each array.
            finite: Whether trained parameters must be finite.
            frozen: Numbers of the groups that are not trained.
        """
        self._workspace, self._name, self._process = workspace, name, process
        self._entries, self._grids = entries, grids
        self._numbers = {entry.path: n for n, entry in enumerate(entries)}
        self._finite, self._frozen = finite, frozen
        self._stores = type_handlers.get_ts_context(use_ocdbt=True)
        self._arrays: dict[TreePath, Any] = {}
        self._pieces: dict[str, np.ndarray] = {}
        self._sums: dict[TreePath, dict[int, str]] = defaultdict(dict)

    def write(self, rows: Sequence[SliceReader]) -> None:
        """Writes this process's part of some slices, and waits until it is in files."""
        chunks = []
        for entry, index, read in rows:
            # Views of the store's arrays; steps replace these and never modify them.
            runs = read()
            for cell in self._grids[entry.path].cells(index):
                if (chunk := joined_run(runs, cell.start, cell.stop)) is not None:
                    chunks.append((entry, cell, chunk))
                else:
                    self._keep(entry, cell, cut(runs, cell.start, cell.stop))
        self._write(chunks)

    def finish(self) -> None:
        """Syncs everything written to disk, and leaves the files that the first process needs."""
        pieces, sums = self._file(_PIECES, self._process), self._file(_CHECKSUMS, self._process)
        with pieces.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._pieces)  # pyright: ignore[reportArgumentType]
        by_pointer = {pointer(path): found for path, found in self._sums.items()}
        sums.write_text(json.dumps(by_pointer), encoding="utf-8")
        # A process has written no file if it shares all of its chunks.
        own = orbax.folder_of(self._workspace / self._name, self._process)
        if own.exists():
            sync_tree(own)

    def join(self, num_processes: int) -> dict[str, Any]:
        """Merges the parts of all processes to one checkpoint; runs in the first process.

        Returns:
            The manifest's facts about its arrays.
        """
        found = {pointer(entry.path): {} for entry in self._entries}
        parts: dict[str, list[Run]] = defaultdict(list)
        for process in range(num_processes):
            with np.load(self._file(_PIECES, process), allow_pickle=False) as file:
                for key in file.files:
                    chunk, start = key.rsplit("-", 1)
                    parts[chunk].append((int(start), file[key]))
            own = json.loads(self._file(_CHECKSUMS, process).read_text(encoding="utf-8"))
            for left in (_PIECES, _CHECKSUMS):
                self._file(left, process).unlink()
            for name, sums in own.items():
                found[name] |= {int(number): text for number, text in sums.items()}
        # The files have this process's checksums, too. From here on, `_sums` collects the checksums
        # of assembled chunks.
        self._sums.clear()
        self._write([self._put_together(key, rows) for key, rows in parts.items()])
        for path, sums in self._sums.items():
            found[pointer(path)] |= sums
        orbax.join(self._workspace / self._name, [entry.path for entry in self._entries])
        return {
            pointer(e.path): as_facts(self._grids[e.path], found[pointer(e.path)])
            for e in self._entries
        }

    def _write(self, chunks: Sequence[tuple[ArrayEntry, Cell, np.ndarray]]) -> None:
        """Writes chunks in parallel, and waits for them."""
        opening = {}
        for entry, _, _ in chunks:
            if entry.path not in self._arrays and entry.path not in opening:
                args = self._process, entry.path, self._grids[entry.path], entry.dtype
                spec = orbax.write_spec(self._workspace / self._name, *args)
                opening[entry.path] = ts.open(
                    ts.Spec(spec), create=True, open=True, context=self._stores
                )
        self._arrays |= {path: opened.result() for path, opened in opening.items()}
        futures = []
        with ThreadPoolExecutor(1, "checksums", initializer=_lower_priority) as beside:
            for entry, cell, chunk in chunks:
                target = self._arrays[entry.path][cell.box]
                shaped = chunk.reshape(target.shape)
                # By reference: arrays at rest are never modified, so no copy is needed.
                futures.append(target.write(shaped, can_reference_source_data_indefinitely=True))
                futures.append(beside.submit(self._inspect, entry, cell.number, chunk))
            _wait(futures)

    def _inspect(self, entry: ArrayEntry, number: int, chunk: np.ndarray) -> None:
        """Records a chunk's checksum; a run's trained parameters must be finite."""
        if self._finite and entry.path[0] == PARAMS and not entry.groups & self._frozen:
            check_finite(entry.name, chunk)
        self._sums[entry.path][number] = checksum(chunk)

    def _keep(self, entry: ArrayEntry, cell: Cell, pieces: Sequence[Run]) -> None:
        """Keeps this process's pieces of a shared chunk, as bytes for the file."""
        for start, piece in pieces:
            key = f"{self._numbers[entry.path]}-{cell.number}-{start}"
            # A copy, because a view would keep all of the group's old arrays, and the host has no
            # space for them.
            self._pieces[key] = np.array(piece).view(np.uint8)

    def _put_together(self, key: str, rows: Sequence[Run]) -> tuple[ArrayEntry, Cell, np.ndarray]:
        """A chunk assembled from the pieces of all processes."""
        entry_number, number = map(int, key.split("-"))
        entry = self._entries[entry_number]
        # Sorted by first element, because the pieces of a chunk are contiguous.
        whole = np.concatenate([piece for _, piece in sorted(rows, key=lambda row: row[0])])
        cell = self._grids[entry.path].cell(number)
        chunk = whole.view(jnp.dtype(entry.dtype))
        assert chunk.size == cell.stop - cell.start
        return entry, cell, chunk

    def _file(self, name: str, process: int) -> Path:
        return self._workspace / name.format(process)


def _wait(futures: Sequence[Future | Any]) -> None:
    """Waits for all futures, then raises the first error."""
    errors = []
    for future in futures:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _lower_priority() -> None:
    """Lowers this thread's priority, because checksums only have to keep up with the disk."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
