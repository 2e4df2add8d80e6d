"""The workspace: a folder for unfinished checkpoints, owned by one process at a time.

On a disk, checkpoints are written there and renamed when complete; old ones are renamed into it
before they are deleted. So whenever a process dies, a folder with a step's name is complete, and
only files in the workspace are ever deleted. A lock on a file in it shows whether its contents are
still being written; the kernel releases the lock when the process dies in any way.

Example: a run's folder while step 8 is saved and step 5 is about to be removed::

    megatrain-unfinished/lock            locked by the run
    megatrain-unfinished/checkpoint      step 8, until it is complete and renamed to 8
    megatrain-unfinished/5.deleting-0    step 5, being deleted after 8 has its name
    6, 7                                 complete

Object stores have other means to the same end; see `object_workspace.py`.
"""

import fcntl
import json
import os
import shutil
import socket
import stat
import threading
from abc import ABC, abstractmethod
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.common.unfinished import is_still, sync, sync_tree
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
from megatrain_jax._src.engine.runtime.interrupt import SECONDS_AT_A_TIME

LOCK = "lock"
# Name of the unfinished checkpoint in the workspace; only one is written at a time.
WRITTEN = "checkpoint"

# The workspaces that this process holds, by real path; locks belong to a process too.
_held: dict[str, "Workspace"] = {}
_changed = threading.Condition()


class Workspace(ABC):
    """A folder of unfinished checkpoints, while this process holds it.

    Attributes:
        path: The folder.
    """

    path: AnyPath

    def __init__(self, path: AnyPath, what: str):
        """Takes the folder, creates it if necessary, and empties it.

        If a thread of this process still writes there after its run has ended, this waits for it.

        Args:
            path: The folder; its parents are created too.
            what: The name in messages: of the run's folder, or of one checkpoint.

        Raises:
            CheckpointError: If it is in use, can't be written, or is not of this library.
        """
        self.path, self._what = path, what
        self._real = os.path.realpath(path) if isinstance(path, Path) else str(path)
        # Held by the run, and by the thread of each checkpoint being written, which may outlive the
        # run.
        self._is_run, self._num_holders = True, 1
        with _changed:
            while (other := _held.get(self._real)) is not None:
                if other._is_run:
                    raise CheckpointError(
                        f"{what} is in use by another run in this process, or by the one that "
                        "this call is made in. One at a time can write there."
                    )
                warn_user(f"Waiting for what is still being written to {what}.")
                while _held.get(self._real) is other:
                    _changed.wait(SECONDS_AT_A_TIME)
            try:
                self._lock()
            except OSError as error:
                raise CheckpointError(
                    f"{what} can't be written: {type(error).__name__}: {error}"
                ) from error
            _held[self._real] = self
        try:
            self.clear()
        except BaseException:
            self.release(run=True)
            raise

    def share(self) -> None:
        """Keeps the folder until one more `release`, for a thread that may outlive its run."""
        with _changed:
            self._num_holders += 1

    def release(self, *, run: bool) -> None:
        """Releases the folder; it is removed if it is empty.

        Args:
            run: Whether the run releases it, not a thread that shares the folder.
        """
        with _changed:
            if _held.get(self._real) is not self:
                return  # in a forked child, which no longer holds its parent's workspaces
            self._num_holders -= 1
            self._is_run = self._is_run and not run
            # The last release counts: a thread may still be writing when its run is over.
            if not self._num_holders:
                self._unlock()
                del _held[self._real]
                _changed.notify_all()

    @abstractmethod
    def _lock(self) -> None:
        """Creates the folder and locks it; see `__init__` for the errors."""

    @abstractmethod
    def _unlock(self) -> None:
        """Unlocks the folder, and removes it if it is empty."""

    def close_in_child(self) -> None:  # noqa: B027  # not every kind has something to close
        """Closes what a forked child has of the lock."""

    @abstractmethod
    def clear(self) -> None:
        """Deletes what is unfinished; warns of anything that can't be deleted."""

    @abstractmethod
    def prepare(self, path: AnyPath) -> None:
        """Prepares for the writing of a checkpoint, before any process writes.

        Args:
            path: The checkpoint's future folder.
        """

    @abstractmethod
    def check(self) -> None:
        """Checks that this process still holds the folder.

        Raises:
            CheckpointError: If not.
        """

    @abstractmethod
    def publish(self, path: AnyPath, *, replaces: bool) -> None:
        """Finishes a checkpoint that has been written, with its manifest.

        Args:
            path: The checkpoint's folder.
            replaces: Whether what is at the path may be replaced.
        """

    @abstractmethod
    def rename(self, path: AnyPath, new: AnyPath) -> None:
        """Renames a checkpoint."""

    @abstractmethod
    def discard(self, path: AnyPath) -> None:
        """Deletes a checkpoint, so that at no time a part of it passes for a whole one.

        Raises:
            OSError: If it can't be deleted; then it may no longer count as one.
        """


class FolderWorkspace(Workspace):
    """A workspace on a disk; `path` is a `Path`."""

    path: Path

    def _lock(self) -> None:
        self._opened = _take(self.path, self._what)

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the lock, so that it doesn't outlive the parent's."""
        if self._opened is not None:
            os.close(self._opened)

    def prepare(self, path: AnyPath) -> None:
        """Does nothing: a checkpoint is written in the workspace."""

    def check(self) -> None:
        """Does nothing: the kernel holds the lock as long as the process lives."""

    def publish(self, path: AnyPath, *, replaces: bool) -> None:
        """Renames the written checkpoint to its own path; see `Workspace`."""
        assert isinstance(path, Path)
        written = self.path / WRITTEN
        sync_tree(written)
        # A callback may have saved this very step before.
        exists, old = os.path.lexists(path), None
        if exists and not replaces:
            raise FileExistsError(f"there is something at {path} by now")
        # Moved away first, because a folder can't be renamed onto one that isn't empty.
        if exists:
            old = self.take(path)
        written.rename(path)
        sync(path.parent)
        if old is not None:
            self.clear()

    def rename(self, path: AnyPath, new: AnyPath) -> None:
        """Renames a folder."""
        os.rename(cast(Path, path), cast(Path, new))

    def take(self, path: Path) -> Path:
        """Moves a file or folder into the workspace, to be deleted, and returns its new path."""
        number = 0
        while os.path.lexists(here := self.path / f"{path.name}.deleting-{number}"):
            number += 1
        os.rename(path, here)
        return here

    def discard(self, path: AnyPath) -> None:
        """Deletes a folder, after moving it into the workspace."""
        _delete(self.take(cast(Path, path)))

    def clear(self) -> None:
        """Deletes everything but the lock file; warns of anything that can't be deleted."""
        for entry in self.path.iterdir():
            if entry.name != LOCK:
                try:
                    _delete(entry)
                except OSError as error:
                    warn_user(
                        f"{entry}, left by a run that has ended, can't be deleted: {error}",
                    )

    def _unlock(self) -> None:
        try:
            # While the lock is held: a process that locks the file afterwards finds that its name
            # is gone, and starts over.
            if os.listdir(self.path) == [LOCK]:
                os.unlink(self.path / LOCK)
                os.rmdir(self.path)
        except OSError:
            pass  # another process waits for it already, or it is gone
        if self._opened is not None:
            os.close(self._opened)


def _take(path: Path, what: str) -> int | None:
    """Creates and locks a folder; returns None if the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            if path.is_symlink() or not path.is_dir():
                raise
        names = os.listdir(path)
        # Everything in here gets deleted, so a folder with this name that is not ours is left
        # alone.
        if names and LOCK not in names:
            raise CheckpointError(
                f"{path} was not made by megatrain_jax, and saving here would delete its contents: "
                "move it"
            )
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(path / LOCK, flags, 0o666)
        except FileNotFoundError:
            continue  # its last holder has just removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(lock, 1000, 0)
            os.close(lock)
            raise in_use(what, text) from None
        except OSError as error:
            os.close(lock)
            warn_user(
                f"{path} can't be locked ({error}), so nothing keeps a second run from writing to "
                f"{what}.",
            )
            return None
        # Between opening and locking, the last holder may have removed the file; a lock on that
        # file would protect nothing.
        if is_still(path / LOCK, lock):
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(holder()).encode(), 0)
            return lock
        os.close(lock)


def holder() -> dict[str, Any]:
    """What a lock says of its holder, this process."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def in_use(what: str, text: bytes) -> CheckpointError:
    """The error of a folder that another process holds, from what its lock says."""
    try:
        facts = parsed_json(text)
        who = f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return CheckpointError(
        f"{what} is in use by {who}. One run at a time can write there: wait for that one, "
        "end it, or choose another folder."
    )


def _delete(path: Path) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _close_inherited_locks() -> None:
    """Closes a forked child's copies of locks, so that they don't outlive the parent's."""
    global _changed
    for workspace in _held.values():
        workspace.close_in_child()
    _held.clear()
    _changed = threading.Condition()


os.register_at_fork(after_in_child=_close_inherited_locks)
