"""Writes a checkpoint group by group, while training continues.

A store's arrays at rest are never modified: steps write new ones. So a checkpoint is written from
the store itself, without a copy. A step waits only before it replaces a group that is not yet on
disk, because the group's old arrays must live until then, and its new ones would be a second copy.

If several processes share the run, each writes its devices' part into one folder. At each step they
exchange whether they are done; when all are, the first process makes a checkpoint from the parts.
It does so before the next step if their signs of life already tell that all are done:

    process 0                                   process 1
    writes ocdbt.process_0, still               writes ocdbt.process_1, done
    settle() before step 8: no, yes             settle() before step 8: no, yes
    done
    settle() before step 9: yes, yes            settle() before step 9: yes, yes
    joins, describes, publishes                 continues
    wait(): how did it end?                     wait(): how did it end?

A process writes the chunks of arrays on its devices.

If several processes have a part of one chunk, for example of a small leaf, the first process writes
it, and the rest leave their pieces in files.

Example: entry 12 of a checkpoint, a bias with 5 elements in one chunk, over two processes::

    process 0    has elements 0 to 2: keeps them as "12-0-0" in pieces-0.npz
    process 1    has elements 3 and 4: keeps them as "12-0-3" in pieces-1.npz
    process 0    when both are done, reads the two files and writes chunk 0 of entry 12
"""

import errno
import io
import json
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.errors import call_all
from megatrain_jax._src.common.keys import LASTING
from megatrain_jax._src.common.object_paths import AnyPath, workspace_of
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.checkpoint import manifest, orbax, places
from megatrain_jax._src.engine.checkpoint.chunks import MOST_BYTES, Cell, Grid
from megatrain_jax._src.engine.checkpoint.contents import (
    PARAMS,
    ArrayEntry,
    SliceReader,
    TreePath,
    as_facts,
    check_finite,
    checksum,
    grids_of,
    pointer,
    slice_readers,
)
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError, in_first_process
from megatrain_jax._src.engine.checkpoint.object_workspace import ObjectWorkspace
from megatrain_jax._src.engine.checkpoint.workspace import WRITTEN, FolderWorkspace, Workspace
from megatrain_jax._src.engine.runtime.interrupt import SECONDS_AT_A_TIME, deferred_interrupt
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.host_leaves import Run, cut, joined_run
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes


class UnownedWorkspace:
    """A run's workspace in a process that does not own it and must not change the folder.

    The run's first process owns it, or nobody does, because the folder can't be written.

    Attributes:
        path: The folder.
        unwritable: The reason why nobody can write there; None if the first process holds it.
    """

    def __init__(self, path: AnyPath, unwritable: str | None = None):
        """Records the folder."""
        self.path, self.unwritable = path, unwritable

    def share(self) -> None:
        """Does nothing, because only the owner changes the folder."""

    def release(self, *, run: bool) -> None:
        """See `share`."""

    def clear(self) -> None:
        """See `share`."""


def written_at(workspace: AnyPath, path: AnyPath) -> AnyPath:
    """The folder in which the processes of a run write a checkpoint.

    Args:
        workspace: The workspace's folder.
        path: The checkpoint's folder, once it is complete.
    """
    return workspace / WRITTEN if isinstance(workspace, Path) else path


def claim_workspace(
    path: AnyPath,
    what: str,
    processes: Processes,
    *,
    only_read: bool = False,
    by_hand: AnyPath | None = None,
) -> Workspace | UnownedWorkspace:
    """The workspace of a run; its first process takes it for all of them.

    Args:
        path: See `Workspace`.
        what: See `Workspace`.
        processes: The processes that share the run.
        only_read: Whether the run may only need to read, so that a folder that can't be written is
            allowed.
        by_hand: The checkpoint to write, if it is the only one.

    Raises:
        CheckpointError: See `Workspace`; also if a process doesn't see the folder.
    """
    found: list[Workspace | UnownedWorkspace] = [UnownedWorkspace(path)]

    def claim() -> str | None:
        try:
            kind = FolderWorkspace if isinstance(path, Path) else ObjectWorkspace
            found[0] = own = kind(path, what)
        except CheckpointError as error:
            reason = getattr(error.__cause__, "errno", None)
            if not only_read or reason not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return str(error)
        if by_hand is not None:
            try:
                own.prepare(by_hand)
            except BaseException:
                own.release(run=True)
                raise
        return None

    unwritable = in_first_process(processes, f"the claim of {path.name}", claim)
    if unwritable is not None:
        return UnownedWorkspace(path, unwritable)
    sees = processes.gather(f"a look at {path.name}", path.is_dir())
    if not all(sees):
        found[0].release(run=True)
        raise CheckpointError(
            f"process {sees.index(False)} does not see {what}, which process 0 has made: "
            "checkpoints of several processes need a folder that all of them share, on a network "
            "file system or in an object store (gs://bucket/folder, s3://bucket/folder)"
        )
    return found[0]


# Files in the workspace that a process leaves for the first process to finish.
_PIECES, _CHECKSUMS = "pieces-{}.npz", "checksums-{}.json"


class Writer:
    """Writes one process's part of a checkpoint."""

    def __init__(
        self,
        workspace: AnyPath,
        folder: AnyPath,
        process: int,
        entries: Sequence[ArrayEntry],
        grids: Mapping[TreePath, Grid],
        finite: bool,
        frozen: frozenset[int],
    ):
        """Makes a writer that has written nothing yet.

        Args:
            workspace: The workspace's folder.
            folder: The folder of the unfinished checkpoint.
            process: Number of this process.
            entries: Entries of the checkpoint's arrays.
            grids: The chunks of each array.
            finite: Whether trained parameters must be finite.
            frozen: Numbers of the groups that are not trained.
        """
        self._workspace, self._folder, self._process = workspace, folder, process
        self._entries, self._grids = entries, grids
        self._numbers = {entry.path: n for n, entry in enumerate(entries)}
        self._finite, self._frozen = finite, frozen
        self._stores = orbax.stores()
        self._arrays: dict[TreePath, Any] = {}
        self._pieces: dict[str, np.ndarray] = {}
        self._sums: dict[TreePath, dict[int, str]] = defaultdict(dict)

    def write(self, rows: Sequence[SliceReader]) -> None:
        """Writes this process's part of some slices, and waits until it is in files."""
        chunks, num_bytes = [], 0
        for entry, index, read in rows:
            # Views of the store's arrays; steps replace these and never modify them.
            runs = read()
            rests_on_drive = any(not isinstance(run, np.ndarray) for _, run in runs)
            for cell in self._grids[entry.path].cells(index):
                own = (cell.stop - cell.start) * jnp.dtype(entry.dtype).itemsize
                if rests_on_drive and num_bytes + own > READ_BYTES:
                    self._write(chunks)
                    chunks, num_bytes = [], 0
                if (chunk := joined_run(runs, cell.start, cell.stop)) is not None:
                    chunks.append((entry, cell, np.asarray(chunk)))
                    num_bytes += own
                else:
                    self._keep(entry, cell, cut(runs, cell.start, cell.stop))
        self._write(chunks)

    def finish(self) -> None:
        """Syncs everything written to disk, and leaves the files that the first process needs."""
        pieces, sums = self._file(_PIECES, self._process), self._file(_CHECKSUMS, self._process)
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **self._pieces)  # pyright: ignore[reportArgumentType]
        pieces.write_bytes(file.getvalue())
        by_pointer = {pointer(path): found for path, found in self._sums.items()}
        sums.write_text(json.dumps(by_pointer), encoding="utf-8")
        # A process has written no file if it shares all of its chunks.
        own = orbax.folder_of(self._folder, self._process)
        if own.exists():
            places.sync_tree(own)

    def join(self, num_processes: int) -> dict[str, Any]:
        """Merges the parts of all processes to one checkpoint; runs in the first process.

        Returns:
            The manifest's facts about its arrays.
        """
        found = {pointer(entry.path): {} for entry in self._entries}
        parts: dict[str, list[Run]] = defaultdict(list)
        for process in range(num_processes):
            pieces = io.BytesIO(self._file(_PIECES, process).read_bytes())
            with np.load(pieces, allow_pickle=False) as file:
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
        orbax.join(self._folder, [entry.path for entry in self._entries])
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
                spec = orbax.write_spec(self._folder, *args)
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
            call_all(future.result for future in futures)

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

    def _file(self, name: str, process: int) -> AnyPath:
        return self._workspace / name.format(process)


def _lower_priority() -> None:
    """Lowers this thread's priority, because checksums only have to keep up with the disk."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


# ---- a checkpoint on its way

# Minimum bytes of a part. A part is written in parallel as a whole, but its end does not overlap
# with the next part's beginning.
PART_BYTES = 8 << 30

# Parts of error messages about a full disk, from the system and TensorStore.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))

# Maximum bytes that are read from drives before they are written, unless one chunk has more.
READ_BYTES = MOST_BYTES

_Part = tuple[tuple[int, ...], list[SliceReader]]


class Saving:
    """A checkpoint on its way to disk.

    Attributes:
        path: The checkpoint's folder, once it is complete.
    """

    def __init__(
        self,
        path: AnyPath,
        spec: RunSpec,
        store: Store,
        entries: Sequence[ArrayEntry],
        facts: Mapping[str, Any],
        params_only: bool = False,
        workspace: Workspace | UnownedWorkspace | None = None,
    ):
        """Starts writing.

        Args:
            path: The checkpoint's future folder.
            spec: The run; its schedule determines the groups that are replaced first.
            store: The store, at rest; it will wait for this before it replaces a group.
            entries: Entries of all arrays of the run's checkpoints.
            facts: The facts to save beside the arrays, as JSON.
            params_only: Whether to write only parameters.
            workspace: Workspace of the run that saves this checkpoint. It may then replace the
                contents of `path`, and its trained parameters must be finite. None makes a
                workspace for this checkpoint alone, and removes it.

        Raises:
            CheckpointError: If the folder can't be written.
        """
        self.path = path
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # Written: this process has written its part, or failed. Agreed: all processes know that all
        # have. Known: all processes know whether saving failed.
        self._is_written, self._is_agreed = threading.Event(), threading.Event()
        self._is_known = False
        if params_only:
            entries = [entry for entry in entries if entry.path[0] == PARAMS]
        self._entries, self._replaces = list(entries), workspace is not None
        self._processes = processes = store.placement.processes
        # Where each process holds all state, one of them writes it.
        processes.num_saves += 1
        self._number = processes.num_saves
        self._num_parts = 0 if store.placement.copy else store.placement.num_processes
        self._parts = _parts(spec, store, entries)
        # 1 for each group that is not on disk yet.
        self._left = Counter(g for groups, _ in self._parts for g in groups)
        self._thread = threading.Thread(
            target=self._write, args=(dict(facts),), name="checkpoint", daemon=True
        )
        # An interrupt within these lines would leave the workspace without an owner. A second one
        # takes effect, because claiming the workspace may wait long for another thread.
        with deferred_interrupt(second_interrupts=True):
            if workspace is None:
                # A folder that can't be written is noticed here, before training continues.
                beside = workspace_of(path)
                workspace = claim_workspace(beside, str(path), processes, by_hand=path)
            else:
                workspace.share()
            self._workspace = workspace
            self._written = written_at(workspace.path, path)
            self._writer = Writer(
                workspace.path,
                self._written,
                processes.index if self._num_parts > 1 else 0,
                self._entries,
                grids_of(spec, entries),
                finite=self._replaces,
                frozen=frozenset(spec.grouping.frozen),
            )
            store.before_replacing = self.wait_for
            self._thread.start()

    def wait_for(self, group: int) -> None:
        """Waits until a group is on disk, or its writing has failed."""
        with self._changed:
            while self._left[group]:
                self._changed.wait(SECONDS_AT_A_TIME)

    @property
    def is_whole(self) -> bool:
        """Whether all processes are known to have written their parts."""
        presence = self._processes.presence
        return presence is not None and presence.have_written(self._number)

    def settle(self) -> None:
        """Starts publishing the checkpoint if all processes have written their parts.

        All of them must call this, at the same point of the run.

        Raises:
            PeerEndedError: If another process has ended, or can't be reached.
        """
        if self._num_parts < 2 or self._is_agreed.is_set():
            return
        done = self._is_written.is_set()
        row = done, self._error and _words(self._error)
        rows = self._processes.gather(f"the parts of {self.path.name}", row)
        if all(done for done, _ in rows):
            self._adopt([words for _, words in rows])
            self._is_agreed.set()

    def _adopt(self, rows: Sequence[str | None]) -> None:
        """Adopts an error of another process, from each process's message."""
        if self._error is None and (errors := [row for row in rows if row is not None]):
            self._error = CheckpointError(f"process {rows.index(errors[0])}: {errors[0]}")

    def join(self) -> None:
        """Waits until nothing is being written any more; errors are left to `wait`.

        Raises:
            PeerEndedError: If another process ends first; this can then be called again.
        """
        while not self._is_written.wait(SECONDS_AT_A_TIME):
            pass
        try:
            self.settle()
            self._wait_for_thread()
            if self._processes.count > 1 and not self._is_known:
                where = f"the end of saving {self.path.name}"
                self._adopt(self._processes.gather(where, self._error and _words(self._error)))
                self._is_known = True
        except PeerEndedError:
            if self._processes.unreachable is None:
                raise
            self._wait_for_thread()

    def _wait_for_thread(self) -> None:
        while self._thread.is_alive():
            self._thread.join(SECONDS_AT_A_TIME)

    def wait(self) -> None:
        """Waits until the checkpoint is complete and has its name.

        Raises:
            CheckpointError: If it could not be written; nothing is left of it. Raised once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"{self._lack(error)}the checkpoint {self.path} could not be written: "
                f"{_words(error)}. Older checkpoints and the training state are as they were."
            ) from error

    def _lack(self, error: BaseException) -> str:
        """The missing disk space, as a sentence, if that is the cause of an error."""
        if not any(text in str(error) for text in _FULL):
            return ""
        needed = sum(
            math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize for entry in self._entries
        )
        free = places.num_free_bytes(self.path.parent)
        if free is None:
            return ""
        lacks = f"lacks {sized(needed - free)} of" if needed > free else "had no room for"
        return (
            f"{self.path.parent} {lacks} the {sized(needed)} that a checkpoint takes, beside those "
            f"that are kept; {sized(free)} are free: "
        )

    def _write(self, facts: dict[str, Any]) -> None:
        # Runs on its own thread, with everything it calls; the other methods run on the main
        # thread. Only the main thread communicates with other processes, because their messages
        # must have the same order in each.
        workspace, several = self._workspace, self._num_parts > 1
        try:
            self._write_parts()
        except BaseException as error:
            self._error = error
        finally:
            # Also after an error: a step must not wait for groups that nobody will write.
            self._parts.clear()
            self._release(list(self._left.elements()))
            self._is_written.set()
        while several and not self._is_agreed.wait(SECONDS_AT_A_TIME) and not self.is_whole:
            if self._processes.unreachable is not None:
                self._error = self._error or PeerEndedError(self._processes.unreachable)
                break
        try:
            if self._error is None and isinstance(workspace, Workspace):
                self._finish(workspace, facts)
        except BaseException as error:
            self._error = error
        finally:
            # A process that can't be reached may still write.
            if self._error is not None and self._processes.unreachable is None:
                with suppress(OSError):
                    workspace.clear()
            workspace.release(run=not self._replaces)

    def _write_parts(self) -> None:
        while self._parts:
            groups, rows = self._parts.pop(0)
            self._writer.write(rows)
            # The part's arrays must be freed when a step may replace them, because the host has no
            # space for a second copy.
            del rows
            progressed()
            self._release(groups)
        if self._num_parts:
            self._writer.finish()
            self._processes.tell_written(self._number)

    def _finish(self, workspace: Workspace, facts: dict[str, Any]) -> None:
        # In this order the checkpoint is complete or counts as none, whenever the process dies:
        # arrays, the manifest that lists their files, and on a disk, after all is on it, the name.
        written = self._written
        facts["arrays"] = self._writer.join(self._num_parts)
        found = orbax.own_metadata(written)
        orbax.check_arrays(written, found, self._entries, "not what was to be written")
        workspace.check()
        manifest.write(written, facts)
        workspace.publish(self.path, replaces=self._replaces)

    def _release(self, groups: Iterable[int]) -> None:
        with self._changed:
            self._left.subtract(groups)
            self._changed.notify_all()


def _parts(spec: RunSpec, store: Store, entries: Sequence[ArrayEntry]) -> list[_Part]:
    """The parts of a checkpoint, in the order in which steps replace groups.

    Small arrays, written by the first process, come first; then groups, several per part. If each
    process holds all state, the first one writes it.
    """
    if store.placement.copy:
        return []
    small = slice_readers(store, entries) if store.placement.processes.is_first else []
    parts: list[_Part] = [((), small)] if small else []
    offloaded = (r.key for r in spec.first.schedule.cold if r.op is Op.OFFLOAD)
    replaced = [key.owner for key in offloaded if key is not None and key.kind in LASTING]
    size = PART_BYTES  # so that the first group begins a part
    for g in dict.fromkeys([*replaced, *range(len(spec.layouts))]):
        if size >= PART_BYTES:
            parts.append(((), []))
            size = 0
        groups, rows = parts[-1]
        parts[-1] = (*groups, g), rows + slice_readers(store, entries, g)
        size += sum(slab.num_bytes for slab in spec.layouts[g].slabs)
    return parts


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
