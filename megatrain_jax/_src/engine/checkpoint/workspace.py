"""The workspace: a folder for unfinished checkpoints, owned by one process at a time.

Checkpoints are written there and renamed when complete; old ones are renamed into it before they
are deleted. So whenever a process dies, a folder with a step's name is complete, and only files in
the workspace are ever deleted. A lock on a file in it shows whether its contents are still being
written; the kernel releases the lock when the process dies in any way.

Example: a run's folder while step 8 is saved and step 5 is about to be removed::

    megatrain-unfinished/lock            locked by the run
    megatrain-unfinished/checkpoint      step 8, until it is complete and renamed to 8
    megatrain-unfinished/5.deleting-0    step 5, being deleted after 8 has its name
    6, 7                                 complete
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import threading
from datetime import datetime
from pathlib import Path

from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.common.unfinished import is_still
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError, in_first_process
from megatrain_jax._src.engine.runtime.interrupt import SECONDS_AT_A_TIME
from megatrain_jax._src.engine.state.processes import Processes

NAME = "megatrain-unfinished"
_LOCK = "lock"

# The workspaces that this process holds, by real path; locks belong to a process too.
_held: dict[str, "Workspace"] = {}
_changed = threading.Condition()


class UnownedWorkspace:
    """A run's workspace in a process that does not own it and must not change the folder.

    The run's first process owns it, or nobody does, because the folder can't be written.

    Attributes:
        path: The folder.
        unwritable: The reason why nobody can write there; None if the first process holds it.
    """

    def __init__(self, path: Path, unwritable: str | None = None):
        """Records the folder."""
        self.path, self.unwritable = path, unwritable

    def share(self) -> None:
        """Does nothing, because only the owner changes the folder."""

    def release(self, *, run: bool) -> None:
        """See `share`."""

    def clear(self) -> None:
        """See `share`."""


class Workspace:
    """A folder of unfinished checkpoints, while this process holds it.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, what: Path):
        """Takes the folder, creates it if necessary, and empties it.

        If a thread of this process still writes there after its run has ended, this waits for it.

        Args:
            path: The folder; its parents are created too.
            what: The path for messages: the run's folder, or one checkpoint.

        Raises:
            CheckpointError: If it is in use, can't be written, or is not of this library.
        """
        self.path = path
        self._real = os.path.realpath(path)
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
                self._lock: int | None = _take(path, what)
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
                self._unlock_folder()
                del _held[self._real]
                _changed.notify_all()

    def take(self, path: Path) -> Path:
        """Moves a file or folder into the workspace, to be deleted, and returns its new path."""
        number = 0
        while os.path.lexists(here := self.path / f"{path.name}.deleting-{number}"):
            number += 1
        os.rename(path, here)
        return here

    def discard(self, path: Path) -> None:
        """Deletes a file or folder, after moving it into the workspace.

        Raises:
            OSError: If it can't be deleted; it may still have been moved.
        """
        _delete(self.take(path))

    def clear(self) -> None:
        """Deletes everything but the lock file; warns of anything that can't be deleted."""
        for entry in self.path.iterdir():
            if entry.name != _LOCK:
                try:
                    _delete(entry)
                except OSError as error:
                    warn_user(
                        f"{entry}, left by a run that has ended, can't be deleted: {error}",
                    )

    def _unlock_folder(self) -> None:
        try:
            # While the lock is held: a process that locks the file afterwards finds that its name
            # is gone, and starts over.
            if os.listdir(self.path) == [_LOCK]:
                os.unlink(self.path / _LOCK)
                os.rmdir(self.path)
        except OSError:
            pass  # another process waits for it already, or it is gone
        if self._lock is not None:
            os.close(self._lock)


def claim_workspace(
    path: Path, what: Path, processes: Processes, *, only_read: bool = False
) -> "Workspace | UnownedWorkspace":
    """The workspace of a run; its first process takes it for all of them.

    Args:
        path: See `Workspace`.
        what: See `Workspace`.
        processes: The processes that share the run.
        only_read: Whether the run may only need to read, so that a folder that can't be written is
            allowed.

    Raises:
        CheckpointError: See `Workspace`; also if a process doesn't see the folder.
    """
    found: list[Workspace | UnownedWorkspace] = [UnownedWorkspace(path)]

    def claim() -> str | None:
        try:
            found[0] = Workspace(path, what)
        except CheckpointError as error:
            reason = getattr(error.__cause__, "errno", None)
            if not only_read or reason not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return str(error)
        return None

    unwritable = in_first_process(processes, f"the claim of {what.name}", claim)
    if unwritable is not None:
        return UnownedWorkspace(path, unwritable)
    sees = processes.gather(f"a look at {what.name}", path.is_dir())
    if not all(sees):
        found[0].release(run=True)
        raise CheckpointError(
            f"process {sees.index(False)} does not see {what}, which process 0 has made: "
            "checkpoints of several processes need a folder that all of them share"
        )
    return found[0]


def _take(path: Path, what: Path) -> int | None:
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
        if names and _LOCK not in names:
            raise CheckpointError(
                f"{path} was not made by megatrain_jax, and saving here would delete its contents: "
                "move it"
            )
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(path / _LOCK, flags, 0o666)
        except FileNotFoundError:
            continue  # its last holder has just removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(_in_use(what, lock)) from None
        except OSError as error:
            os.close(lock)
            warn_user(
                f"{path} can't be locked ({error}), so nothing keeps a second run from writing to "
                f"{what}.",
            )
            return None
        # Between opening and locking, the last holder may have removed the file; a lock on that
        # file would protect nothing.
        if is_still(path / _LOCK, lock):
            os.ftruncate(lock, 0)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.pwrite(lock, json.dumps(facts).encode(), 0)
            return lock
        os.close(lock)


def _in_use(what: Path, lock: int) -> str:
    text = os.pread(lock, 1000, 0)
    os.close(lock)
    try:
        facts = parsed_json(text)
        who = f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return (
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
        if workspace._lock is not None:
            os.close(workspace._lock)
    _held.clear()
    _changed = threading.Condition()


os.register_at_fork(after_in_child=_close_inherited_locks)
