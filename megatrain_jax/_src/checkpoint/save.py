"""Writes a checkpoint group by group, while training goes on.

The arrays of a store at rest never change: steps write new ones. So a checkpoint is written from
the store itself, without a copy, and a step waits only before it replaces a group that is not on
disk yet: until then, the group's old arrays live on, and its new ones would be a second copy.

Several processes write together, each part gathered by all of them; training waits meanwhile.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1

from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.checkpoint import manifest, orbax
from megatrain_jax._src.checkpoint.checksums import check_finite, checksums
from megatrain_jax._src.checkpoint.contents import (
    PARAMS,
    ArrayEntry,
    rows_of,
    tree_of,
    whole_arrays,
)
from megatrain_jax._src.checkpoint.folder import CheckpointError, sync, sync_tree
from megatrain_jax._src.checkpoint.workspace import NAME, Guest, Workspace, claimed
from megatrain_jax._src.common.keys import LASTING
from megatrain_jax._src.runtime.interrupt import SECONDS_AT_A_TIME, deferred_interrupt
from megatrain_jax._src.runtime.store import Reader, Store
from megatrain_jax._src.schedule.instructions import Op

# Bytes of a part, which Orbax gets at a time, at least: one part's end is not written beside the
# next one's beginning, which costs up to a second each time.
PART_BYTES = 8 << 30
# Bytes of a part that may be copied; a part of which more would be ends earlier.
_COPIED_BYTES = 1 << 30
# Name of the unfinished checkpoint in the workspace, where only one is written at a time.
_WRITTEN = "checkpoint"

_Part = tuple[tuple[int, ...], list[tuple[ArrayEntry, list[Reader]]]]


class Saving:
    """A checkpoint on its way to disk.

    Attributes:
        path: The folder that has the checkpoint once it is whole.
    """

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        store: Store,
        entries: Sequence[ArrayEntry],
        facts: Mapping[str, Any],
        params_only: bool = False,
        workspace: Workspace | Guest | None = None,
    ):
        """Starts writing.

        Args:
            path: The folder that the checkpoint is to have.
            spec: The run, whose schedule says which groups are replaced first.
            store: The store, at rest; it will wait for this before it replaces a group.
            entries: Entries of all arrays of the run's checkpoints.
            facts: The facts to keep beside the arrays, as JSON.
            params_only: Whether to write nothing but parameters.
            workspace: Workspace of the run whose checkpoint this is, which may then replace what is
                at `path`, and whose trained parameters have to be finite. None makes one for this
                checkpoint alone, and removes it.

        Raises:
            CheckpointError: If the folder can't be written.
        """
        self.path = path
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        if params_only:
            entries = [entry for entry in entries if entry.path[0] == PARAMS]
        self._entries, self._replaces = list(entries), workspace is not None
        self._frozen = frozenset(spec.grouping.frozen)
        self._parts = _parts(spec, store, entries)
        self._left = Counter(g for groups, _ in self._parts for g in groups)
        self._thread = threading.Thread(
            target=self._write, args=(dict(facts),), name="checkpoint", daemon=True
        )
        # An interrupt in between would leave the workspace to nobody. Insisting helps where the
        # workspace is waited for.
        with deferred_interrupt(insist=True):
            if workspace is None:
                # Whether anything can be written shows here, before training goes on.
                name = f"{path.name}.{NAME}"
                workspace = claimed(path.with_name(name), path, store.placement.processes)
            else:
                workspace.share()
            self._workspace = workspace
            store.before_replacing = self.wait_for
            self._processes = store.placement.processes
            self._thread.start()
            if self._processes.count > 1:
                self._finish_together()

    def _finish_together(self) -> None:
        """Waits for all processes' parts.

        Messages that the processes exchange while Orbax writes must not cross with a step's.
        """
        self.join()
        where = f"the end of saving {self.path.name}"
        rows = self._processes.gather(where, self._error and _words(self._error))
        if self._error is None and (errors := [row for row in rows if row is not None]):
            self._error = CheckpointError(f"process {rows.index(errors[0])}: {errors[0]}")

    def wait_for(self, group: int) -> None:
        """Waits until a group is on disk, or will never be."""
        with self._changed:
            while self._left[group]:
                self._changed.wait(SECONDS_AT_A_TIME)

    def join(self) -> None:
        """Waits until nothing is being written any more, and leaves errors to `wait`."""
        while self._thread.is_alive():
            self._thread.join(SECONDS_AT_A_TIME)

    def wait(self) -> None:
        """Waits until the checkpoint has its name.

        Raises:
            CheckpointError: If it could not be written; nothing is left of it. Raised once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"the checkpoint {self.path} could not be written: {_words(error)}. Older "
                "checkpoints and the training state are as they were."
            ) from error

    def _write(self, facts: dict[str, Any]) -> None:
        written = self._workspace.path / _WRITTEN
        try:
            # In this order a checkpoint is whole or has no name, whenever the process dies: arrays,
            # the manifest that lists their files, all of it on the disk, and only then the rename.
            facts["arrays"] = self._write_arrays(written)
            if isinstance(self._workspace, Workspace):
                orbax.check_arrays(written, self._entries, "not what was to be written")
                manifest.write(written, facts)
                sync_tree(written)
                self._publish(self._workspace, written)
        except BaseException as error:
            self._error = error
            with suppress(OSError):
                self._workspace.clear()
        finally:
            # Also after an error: a step must not wait for groups that nobody will write.
            self._parts.clear()
            self._release(list(self._left.elements()))
            self._workspace.release(run=not self._replaces)

    def _write_arrays(self, written: Path) -> dict[str, str]:
        """Has Orbax write all parts, and returns the checksums of their arrays."""
        found: dict[str, str] = {}
        with (
            orbax.context(),
            orbax.plain_path(written.parent) as parent,
            ThreadPoolExecutor(1, "checksums", initializer=_give_way) as beside,
        ):
            while self._parts:
                groups, rows = self._parts.pop(0)
                arrays = whole_arrays(rows)
                coming = beside.submit(self._inspected, arrays)
                v1.partial.save(str(parent / written.name), tree_of(arrays))
                # Nothing may hold the part's arrays when a step is told to replace them, as the
                # host has room for no second copy; checksums are still reading until `result`.
                del rows, arrays
                found |= coming.result()
                self._release(groups)
            v1.partial.finalize(str(parent / written.name))
        return found

    def _inspected(self, rows: Sequence[tuple[ArrayEntry, np.ndarray]]) -> dict[str, str]:
        """The checksums of arrays, of which a run's trained parameters have to be finite."""
        if self._replaces:
            for entry, array in rows:
                if entry.path[0] == PARAMS and not entry.groups & self._frozen:
                    check_finite(entry.name, array)
        return checksums(rows)

    def _publish(self, workspace: Workspace, written: Path) -> None:
        """Renames the checkpoint that was written to its own path."""
        exists, old = os.path.lexists(self.path), None
        if exists and not self._replaces:
            raise FileExistsError(f"there is something at {self.path} by now")
        # Moved away first: a folder can't be renamed to the name of one that isn't empty.
        if exists:
            old = workspace.take(self.path)
        written.rename(self.path)
        sync(self.path.parent)
        if old is not None:
            workspace.clear()

    def _release(self, groups: Iterable[int]) -> None:
        with self._changed:
            self._left.subtract(groups)
            self._changed.notify_all()


def _parts(spec: RunSpec, store: Store, entries: Sequence[ArrayEntry]) -> list[_Part]:
    """The parts of a checkpoint, written one at a time in the order that steps replace groups in.

    Small arrays are first, then whole groups, some to a part, then arrays stacked over layers.
    """
    small = rows_of(store, [entry for entry in entries if not entry.groups])
    parts: list[_Part] = [((), small)] if small else []
    offloaded = (r.key for r in spec.first.schedule.cold if r.op is Op.OFFLOAD)
    replaced = [key.owner for key in offloaded if key is not None and key.kind in LASTING]
    size, copied = PART_BYTES, 0  # so that the first group begins a part
    for g in dict.fromkeys([*replaced, *range(len(spec.layouts))]):
        whole = [entry for entry in entries if entry.groups == {g} and not entry.stacked]
        if whole:
            copies = sum(_copied_bytes(entry, store.placement.num_devices) for entry in whole)
            if size >= PART_BYTES or (copies and copied + copies > _COPIED_BYTES):
                parts.append(((), []))
                size, copied = 0, 0
            groups, rows = parts[-1]
            parts[-1] = (*groups, g), rows + rows_of(store, whole)
            size += sum(slab.num_bytes for slab in spec.layouts[g].slabs)
            copied += copies
    # One at a time, since each of them becomes a copy.
    for entry in entries:
        if entry.groups and entry.stacked:
            parts.append((tuple(entry.groups), rows_of(store, [entry])))
    return parts


def _copied_bytes(entry: ArrayEntry, num_devices: int) -> int:
    """Bytes of an array that are copied: by Orbax, or to join what several devices have of it.

    Orbax copies the chunks of its files, which are cut across an array's longest axis.
    """
    num_bytes = math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
    cut = num_bytes > orbax.FILE_BYTES and entry.shape[0] < max(entry.shape)
    return num_bytes if cut or num_devices > 1 else 0


def _give_way() -> None:
    """Lets all other threads go first: the disk has to be fed, checksums only be there in time."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
