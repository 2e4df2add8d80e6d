"""The workspace of a run in an object store, where nothing can be renamed or locked.

A checkpoint is written under its own name and is complete with its manifest, the last object to be
written. Whenever a process dies, what has no manifest has a mark in the workspace, and is deleted
by the next run. A checkpoint to delete loses its manifest first.

The lock is an object that names its holder, who writes it anew every few seconds, on the condition
that nobody else has. A second run waits whether that happens: if it does, the folder is in use; if
not, the holder has died, and the lock is taken over, on the same condition. A holder that was only
stopped notices that when it publishes its next checkpoint, and fails. If the store ignores
conditions, a warning tells that nothing keeps a second run from writing.

Example: a run's folder while step 8 is saved and step 5 is deleted after it::

    megatrain-unfinished/lock            the run's, version 17
    megatrain-unfinished/of-8            8 has no manifest yet
    megatrain-unfinished/pieces-1.npz    left by process 1 for the first one
    5, 6, 7                              complete
    8/state/...                          is being written
"""

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from typing import Any, cast

from megatrain_jax._src.common.object_paths import AnyPath, ObjectPath, discard, mark_of, marked
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.checkpoint.folder import MANIFEST
from megatrain_jax._src.engine.checkpoint.workspace import LOCK, Workspace, holder, in_use

# A holder writes its lock anew this often, and is taken for dead if it didn't for so long.
_RENEWED_SECONDS, _DEAD_SECONDS = 10.0, 60.0
_LOOK_SECONDS = 1.0
_BOOT, _PROCESSES = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


class ObjectWorkspace(Workspace):
    """A workspace in an object store; `path` is an `ObjectPath`."""

    path: ObjectPath

    def _lock(self) -> None:
        self._file = self.path / LOCK
        self._facts = {**holder(), "machine": _machine(), "id": uuid.uuid4().hex}
        self._renewals = 0
        value, version = self._file.read_version()
        if value is not None:
            version = self._version_of_dead(value, version)
        self._version = version
        if not self._renew():
            raise in_use(self._what, self._file.read_version()[0] or b"")
        # Nothing has the version of an object that was not there.
        if (self._file.write_if(self._text(), version)) is not None:
            self._version = self._file.read_version()[1]
            warn_user(
                f"{self.path} can't be locked, because this object store ignores the conditions of "
                f"writes: nothing keeps a second run from writing to {self._what}."
            )
        self._changed, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lock", daemon=True)
        self._thread.start()

    def _version_of_dead(self, value: bytes, version: bytes) -> bytes:
        """The version of a lock whose holder has died.

        Raises:
            CheckpointError: If the holder lives.
        """
        if _has_ended(value):
            return version
        warn_user(
            f"{self._what} is locked, and its holder may have died: waiting {_DEAD_SECONDS:.0f} s "
            "to see whether it has."
        )
        until = time.monotonic() + _DEAD_SECONDS
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            now, other = self._file.read_version()
            if now is None:
                return other
            if other != version:
                raise in_use(self._what, now)
        return version

    def _text(self) -> bytes:
        # Different each time: some stores derive an object's version from its contents.
        return json.dumps({**self._facts, "renewed": self._renewals}).encode()

    def _renew(self) -> bool:
        """Writes the lock anew; returns False if another process has it."""
        self._renewals += 1
        text = self._text()
        version = self._file.write_if(text, self._version)
        if version is None:
            # A write that was repeated because no answer came may have been the first to succeed.
            value, version = self._file.read_version()
            if value != text:
                return False
        self._version = version
        return True

    def _keep(self) -> None:
        while not self._is_over.wait(_RENEWED_SECONDS):
            # `check` tells if the lock is lost.
            with suppress(OSError), self._changed:
                if not self._renew():
                    return

    def _unlock(self) -> None:
        self._is_over.set()
        with suppress(OSError), self._changed:
            self._file.write_if(None, self._version)

    def check(self) -> None:
        """Checks that no other run has taken the lock over; see `Workspace`."""
        with self._changed:
            if not self._renew():
                raise in_use(self._what, self._file.read_version()[0] or b"")

    def prepare(self, path: AnyPath) -> None:
        """Marks a checkpoint as unfinished, and deletes what is there; see `Workspace`."""
        place = cast(ObjectPath, path)
        if place.exists():
            discard(place, self.path, MANIFEST)
        mark_of(self.path, place.name).touch()

    def publish(self, path: AnyPath, *, replaces: bool) -> None:
        """Removes the mark of a checkpoint, which has its manifest; see `Workspace`."""
        mark_of(self.path, path.name).unlink()

    def rename(self, path: AnyPath, new: AnyPath) -> None:
        """Copies a checkpoint through this machine's memory, object by object, and deletes it."""
        old, copy = cast(ObjectPath, path), cast(ObjectPath, new)
        mark_of(self.path, copy.name).touch()
        for name in sorted(old.files(), key=lambda name: name == MANIFEST):
            (copy / name).write_bytes((old / name).read_bytes())
        mark_of(self.path, copy.name).unlink()
        self.discard(old)

    def discard(self, path: AnyPath) -> None:
        """Deletes a checkpoint, its manifest first; see `Workspace`."""
        discard(cast(ObjectPath, path), self.path, MANIFEST)

    def clear(self) -> None:
        """Deletes unfinished checkpoints, and what processes have left for the first one."""
        for path in marked(self.path):
            try:
                if (path / MANIFEST).is_file():
                    mark_of(self.path, path.name).unlink()
                else:
                    self.discard(path)
            except OSError as error:
                warn_user(f"{path}, left by a run that has ended, can't be deleted: {error}")
        for name in self.path.files():
            if name.startswith(("pieces-", "checksums-")):
                (self.path / name).unlink()


def _machine() -> str:
    """This boot of this machine and its numbers of processes, or "" if they are not known."""
    try:
        with open(_BOOT) as file:
            return f"{file.read().strip()} {os.readlink(_PROCESSES)}"
    except OSError:
        return ""


def _has_ended(value: bytes) -> bool:
    """Whether a lock is of a process of this machine that has ended."""
    try:
        facts: dict[str, Any] = parsed_json(value)
        is_near = facts["machine"] != "" and facts["machine"] == _machine()
        return is_near and not os.path.exists(f"/proc/{int(facts['pid'])}")
    except (ValueError, KeyError, TypeError):
        return False
