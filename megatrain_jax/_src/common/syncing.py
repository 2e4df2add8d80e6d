"""Waits until files and names are on disk."""

import errno
import os
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
