"""Folders that are being written, and what is left of them if their writer is killed.

A folder gets its final name when it is complete. Until then its name is a temporary one, with a
file beside it that its writer locks:

    mine.unfinished-x7         is written, and renamed to `mine`
    mine.unfinished-x7.lock    is locked by the process that writes

The kernel releases the lock when the process ends in any way. Whoever writes beside such a pair
later deletes it, if that is safe: another machine, or another mount, may not see the lock. So the
file names the machine's boot and the mount. If both are this process's own, a free lock is proof
that the writer is gone. If not, the pair must also have been unchanged for a week.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Waits until all files of a folder, and their names, are on disk."""
    # From the inside out: a name must not be on disk before the contents it refers to.
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(path, name))
        sync(Path(path))


def sync(path: Path) -> None:
    """Waits until a file's contents, or the names in a folder, are on disk.

    Raises:
        OSError: If they can't be written, unless the file system just can't sync folders.
    """
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


# ---- unfinished folders

_MIDDLE, _LOCK = ".unfinished-", ".lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The first word of a lock file, so that no other file with such a name counts as one.
_OURS = "megatrain_jax"
_WEEK = 7 * 24 * 3600


class UnfinishedFolder:
    """A new folder with a temporary name, beside its final one.

    Attributes:
        path: The folder.
    """

    def __init__(self, final: Path, mode: int = 0o777):
        """Makes the folder and its parents, and removes what killed processes left beside it.

        Args:
            final: The path that the folder is going to have.
            mode: The folder's permissions, reduced by the process's own.

        Raises:
            OSError: If it can't be made.
        """
        final.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # of a folder that can't be listed
            remove_leftovers(final.parent)
        while not self._take(final):
            pass
        try:
            self.path.mkdir(mode)
        except BaseException:
            self._release()
            raise

    def _take(self, final: Path) -> bool:
        """Makes and locks the file of a new name; returns False if the name can't be used."""
        opened, name = tempfile.mkstemp(_LOCK, f"{final.name}{_MIDDLE}", final.parent)
        self._lock, self._opened = Path(name), opened
        self.path = self._lock.with_suffix("")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)  # taken for a leftover before it was locked
            return False
        except OSError:
            # Without locks, nobody could tell that this process is gone.
            self._release()
        else:
            if not is_still(self._lock, opened):
                os.close(opened)
                return False
            try:
                os.pwrite(opened, " ".join([_OURS, *_place(final.parent)]).encode(), 0)
            except OSError:
                self._release()
                raise
        if os.path.lexists(self.path):
            self._release()
            return False
        return True

    def _release(self) -> None:
        if self._opened is not None:
            self._lock.unlink(missing_ok=True)
            os.close(self._opened)
            self._opened = None

    def discard(self) -> None:
        """Deletes the folder, if it still has its temporary name, and the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._opened is not None and os.path.lexists(self.path):
            os.close(self._opened)  # a later process tries again
            self._opened = None
        self._release()


def remove_leftovers(folder: Path) -> None:
    """Deletes what killed processes left in a folder; never what may still be written."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.endswith(_LOCK) and _MIDDLE in e.name]
    for path in (folder / name for name in names):
        try:
            # Writable, because network file systems need it for a lock. A named pipe can't block.
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # it is gone, or another user's
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(path, opened) and _is_left(path, opened):
                # The lock comes last: this process may be killed, too.
                if os.path.lexists(path.with_suffix("")):
                    shutil.rmtree(path.with_suffix(""))
                path.unlink()
        os.close(opened)


def is_still(path: Path, opened: int) -> bool:
    """Whether an opened file is still the one with its name."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_left(path: Path, opened: int) -> bool:
    """Whether the writer of a pair is gone, given that this process has the lock."""
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        return False
    first, *place = os.pread(opened, 1000, 0).decode(errors="replace").split() or [""]
    # A process that was killed before it wrote this word has made no folder.
    if first != _OURS and (first or os.path.lexists(path.with_suffix(""))):
        return False
    if place and place == _place(path.parent):
        return True
    inside = path.with_suffix("").rglob("*")
    newest = max(p.lstat().st_mtime for p in (path, *inside))
    return time.time() - newest > _WEEK


def _place(folder: Path) -> list[str]:
    """This boot of this machine, and the mount: processes that share both see each other's locks.

    Containers of one machine share its boot, but may have mounts of their own.
    """
    try:
        return [_BOOT.read_text().strip(), str(folder.stat().st_dev)]
    except OSError:
        return []


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Adds the path to errors of writing that name no file, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which then replaces one: it is complete, or as it was."""
    new = path.with_name(f"{path.name}.unfinished")
    with naming_file(new):
        yield new
    os.replace(new, path)
