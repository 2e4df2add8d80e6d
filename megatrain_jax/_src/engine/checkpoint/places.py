"""What differs between a checkpoint's folder on a disk and in an object store; nothing else does.

A disk has links, named pipes and folders that belong to others, and its files may be cut short. An
object store has none of these, and TensorStore doesn't tell the size of an object.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import unfinished
from megatrain_jax._src.common.object_paths import AnyPath, mark_of, workspace_of
from megatrain_jax._src.common.outside import check_regular


def is_there(path: AnyPath) -> bool:
    """Whether there is anything at a path, if only a dangling link, that no save would delete."""
    if isinstance(path, Path):
        return os.path.lexists(path)
    return path.exists() and not mark_of(workspace_of(path), path.name).is_file()


def is_file(path: AnyPath) -> bool:
    """Whether a path is a file; False also if a disk can't tell."""
    return os.path.isfile(path) if isinstance(path, Path) else path.is_file()


def read_file(path: AnyPath) -> bytes:
    """The contents of a regular file.

    Raises:
        OSError: If it can't be read; a `FileNotFoundError` if nothing has that name.
        ValueError: If it is not a regular file.
    """
    if isinstance(path, Path):
        check_regular(path)
    return path.read_bytes()


def sizes(folder: AnyPath) -> dict[str, int | None]:
    """The sizes in bytes of all files of a folder, None where they are not known."""
    if not isinstance(folder, Path):
        return dict.fromkeys(folder.files())
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def names(folder: AnyPath) -> list[tuple[str, bool]]:
    """The names of a folder's files and links, also of links to folders; True with a link."""
    if not isinstance(folder, Path):
        return [(name, False) for name in folder.files()]
    found = []
    for parent, folders, files in os.walk(folder):
        every = [*files, *(name for name in folders if os.path.islink(os.path.join(parent, name)))]
        paths = [Path(parent, name) for name in every]
        found += [(str(path.relative_to(folder)), path.is_symlink()) for path in paths]
    return found


def files_of_database(folder: AnyPath) -> dict[str, Any]:
    """TensorStore's description of the files of a database in a folder."""
    if not isinstance(folder, Path):
        return {"base": folder.kvstore()}
    files = {"driver": "file", "path": f"{folder}/"}
    # Only the manifest must be replaced atomically: Orbax's data files are written once.
    return {"base": files | {"file_io_locking": {"mode": "non_atomic"}}, "manifest": files}


def sync_tree(folder: AnyPath) -> None:
    """Waits until all files of a folder, and their names, are on disk; objects always are."""
    if isinstance(folder, Path):
        unfinished.sync_tree(folder)


def num_free_bytes(folder: AnyPath) -> int | None:
    """The bytes that can be written to a folder; None if there is no limit."""
    return shutil.disk_usage(folder).free if isinstance(folder, Path) else None
