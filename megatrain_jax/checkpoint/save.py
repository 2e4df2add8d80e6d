"""Writes a checkpoint group by group, while training goes on.

The arrays of a store at rest never change: steps write new ones. So a checkpoint is written from
the store itself, without a copy, and a step waits only before it replaces a group that is not on
disk yet: until then, the group's old arrays live on, and its new ones would be a second copy.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from orbax.checkpoint import v1

from megatrain_jax.checkpoint import folder
from megatrain_jax.checkpoint.contents import (
    PARAMS,
    Entry,
    rows_of,
    tree_of,
)
from megatrain_jax.job import Job
from megatrain_jax.stream.engine import Engine
from megatrain_jax.stream.laps import LASTING, Op

# What Orbax may hold beside the arrays it reads.
_CONCURRENT_BYTES = 512 << 20
# Of one file; Orbax writes several side by side.
_FILE_BYTES = 512 << 20
# How much is given to Orbax at a time, at least: one part's end is not written beside the next
# one's beginning, which costs up to a second each time.
PART_BYTES = 8 << 30
# Less, if Orbax would copy more of it than this.
_COPIED_BYTES = 1 << 30

_Part = tuple[tuple[int, ...], list[tuple[Entry, list[Any]]]]


class Saving:
    """A checkpoint on its way to disk.

    Attributes:
        path: Its name once it is whole.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        engine: Engine,
        entries: Sequence[Entry],
        facts: Mapping[str, Any],
        params_only: bool = False,
    ):
        """Starts writing.

        Args:
            path: Where to; must not exist.
            job: What the store holds.
            engine: The store, at rest; it will wait for this before it replaces a group.
            entries: All arrays of the job's checkpoints.
            facts: What to keep beside the arrays, as JSON.
            params_only: Whether to write nothing but parameters.

        Raises:
            CheckpointError: If the folder can't be written.
        """
        self.path = path
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        if params_only:
            entries = [entry for entry in entries if entry.path[0] == PARAMS]
        self._parts = _parts(job, engine, entries)
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.remove_leftovers(path)
            temporary = folder.temporary(path)
            temporary.mkdir()  # whether it can be written shows here, before training goes on
            temporary.rmdir()
        self._left = Counter(g for groups, _ in self._parts for g in groups)
        engine.moves.before_replacing = self.wait_for
        self._thread = threading.Thread(
            target=self._write, args=(dict(facts),), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return not self._thread.is_alive()

    def wait_for(self, group: int) -> None:
        """Waits until a group is on disk, or will never be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left[group])

    def wait(self) -> None:
        """Waits until the checkpoint has its name.

        Raises:
            CheckpointError: If it could not be written; nothing is left of it.
        """
        self._thread.join()
        if self._error is not None:
            raise folder.CheckpointError(
                f"the checkpoint {self.path} could not be written: {_words(self._error)}. Older "
                "checkpoints and the training state are as they were."
            ) from self._error

    def _write(self, facts: dict[str, Any]) -> None:
        written = str(folder.temporary(self.path))
        try:
            with orbax_context():
                while self._parts:
                    groups, rows = self._parts.pop(0)
                    v1.partial.save(written, tree_of(rows))
                    del rows
                    self._release(groups)
                v1.partial.finalize(written)
            folder.publish(self.path, facts)
        except BaseException as error:
            self._error = error
            with suppress(OSError):
                folder.remove_leftovers(self.path)
        finally:
            self._parts.clear()
            self._release(list(self._left.elements()))

    def _release(self, groups: Iterable[int]) -> None:
        with self._changed:
            self._left.subtract(groups)
            self._changed.notify_all()


def orbax_context() -> v1.Context:
    """Options with which Orbax copies little of what it writes and reads.

    While it writes, it still copies arrays of several files whose longest axis is not the first.
    Compression would need more time than it saves. Files of 2 GiB, which is what
    Orbax makes unless told otherwise, are written one after the other; smaller ones side by side.
    """
    context = v1.Context()
    context.array.saving.use_compression = False
    context.array.saving.use_zarr3 = True  # the limit of a file's size needs it
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    context.memory.deepcopy_host_arrays = False
    context.memory.read_concurrent_bytes = _CONCURRENT_BYTES
    context.pytree.loading.partial_load = True
    return context


def _parts(job: Job, engine: Engine, entries: Sequence[Entry]) -> list[_Part]:
    """What to write at a time, in the order in which steps will want to replace it."""
    small = rows_of(job, engine, [entry for entry in entries if not entry.groups])
    parts: list[_Part] = [((), small)] if small else []
    offloads = (r for r in job.first.schedule.cold if r.op is Op.OFFLOAD)
    replaced = [r.group for r in offloads if r.group is not None and str(r.part) in LASTING]
    size, copied = PART_BYTES, 0  # so that the first group begins a part
    for g in dict.fromkeys([*replaced, *range(len(job.layouts))]):
        whole = [entry for entry in entries if entry.groups == {g} and not entry.stacked]
        if whole:
            copies = sum(map(_copied_bytes, whole))
            if size >= PART_BYTES or (copies and copied + copies > _COPIED_BYTES):
                parts.append(((), []))
                size, copied = 0, 0
            groups, rows = parts[-1]
            parts[-1] = (*groups, g), rows + rows_of(job, engine, whole)
            size += sum(slab.num_bytes for slab in job.layouts[g].slabs)
            copied += copies
    # One at a time, since each of them becomes a copy.
    for entry in entries:
        if entry.groups and entry.stacked:
            parts.append((tuple(entry.groups), rows_of(job, engine, [entry])))
    return parts


def _copied_bytes(entry: Entry) -> int:
    """Bytes of an array that Orbax copies: its files' chunks, cut across its longest axis."""
    num_bytes = math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
    cut = num_bytes > _FILE_BYTES and entry.shape[0] < max(entry.shape)
    return num_bytes if cut else 0


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise folder.CheckpointError(f"{path} can't be written: {_words(error)}") from error


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
