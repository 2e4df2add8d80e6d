"""Folders that an export writes, or in which it replaces an earlier export.

An export is written beside its folder and renamed when it is complete, so an interrupted one leaves
the earlier export intact:

    mine.unfinished-x7/    is written
    mine/                  exchanges names with it, in one system call
    mine.unfinished-x7/    is now the earlier export, and is deleted

What a killed process leaves is removed by a later export beside it (`common/unfinished.py`).
Each export lists its own files and their checksums in `megatrain_export.json`. A folder is only
replaced if it contains exactly these files, unchanged.
"""

import ctypes
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import xxhash

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.unfinished import UnfinishedFolder, naming_file, sync_tree
from megatrain_jax._src.lm.common.hf_folder import read_json

MARKER = "megatrain_export.json"
# Flags of Linux's renameat2: relative to the current folder; exchange names.
_CURRENT_FOLDER, _EXCHANGE = -100, 2


def new_folder(folder: str | PathLike[str], *, overwrite: bool = False) -> Path:
    """Returns the path of a folder to be written.

    Args:
        folder: The user's argument `folder`.
        overwrite: Whether an earlier export may be there.

    Raises:
        TypeError: If it is not a path, or `overwrite` is not a Boolean.
        FileExistsError: If it is not empty; with `overwrite`, if it is not an unchanged export.
    """
    path = Path(checks.path("folder", folder)).expanduser()
    overwrite = checks.boolean("overwrite", overwrite)
    is_empty = path.is_dir() and not any(path.iterdir())
    if not os.path.lexists(path) or (is_empty and not path.is_symlink()):
        return path
    if not overwrite:
        # The checksums are not compared here: that would read all weights.
        is_export = (path / MARKER).is_file()
        hint = ", or pass `overwrite=True` to replace an unchanged export" if is_export else ""
        raise FileExistsError(f"there is something at {path} already: choose a new `folder`{hint}")
    _check_replaceable(path)
    return path


def _check_replaceable(path: Path) -> None:
    if (stranger := _why_not_export(path)) is not None:
        raise FileExistsError(
            "`overwrite=True` replaces only the output of save_pretrained or save_lora, "
            f"and {path} {stranger}: move it, or choose another `folder`"
        )


def _why_not_export(path: Path) -> str | None:
    """The reason why a folder is not an unchanged export, as a sentence's end; None if it is."""
    if path.is_symlink() or not path.is_dir():
        return "is no folder of its own"
    try:
        known = read_json(path / MARKER).get("files")
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        return f"has no {MARKER} that lists its files"
    for name in _names(path):
        if name not in known:
            return f"also holds {name}"
        if known[name] != _checksum(path / name):
            return f"holds another {name} than was exported"
    return None


def _names(path: Path) -> list[str]:
    """The files, links and empty folders in a folder, except the list of them."""
    found = [
        Path(folder, name).relative_to(path)
        for folder, folders, files in os.walk(path)
        for name in [*files, *folders]
        if not _holds_something(Path(folder, name))
    ]
    return sorted(str(name) for name in found if str(name) != MARKER)


def _holds_something(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _checksum(path: Path) -> str | None:
    """The checksum of a file's bytes; None if it is not a regular file.

    Size or time are not enough: weights that were trained further have the same size, and a copied
    folder has new times.
    """
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@contextmanager
def atomic_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to write to; it gets its final name if the body succeeds, or is deleted.

    Args:
        folder: The final folder, as returned by `new_folder`.
        overwrite: Whether an export there is replaced.

    Raises:
        FileExistsError: If the final folder has been filled meanwhile.
    """
    unfinished = UnfinishedFolder(folder)
    at = unfinished.path
    try:
        with naming_file(at):
            yield at
            known = {name: _checksum(at / name) for name in _names(at)}
            (at / MARKER).write_text(json.dumps({"files": known}, indent=1) + "\n")
        # Hours may have passed since the first check.
        if new_folder(folder, overwrite=overwrite).is_dir() and any(folder.iterdir()):
            sync_tree(at)
            _exchange(at, folder)
        else:
            at.replace(folder)  # replaces an empty folder
    finally:
        # The unfinished folder, or the export that was replaced.
        unfinished.discard()


def _exchange(a: Path, b: Path) -> None:
    """Exchanges the names of two folders, atomically if the file system can."""
    paths = (os.fsencode(path.absolute()) for path in (a, b))
    arguments = [part for path in paths for part in (_CURRENT_FOLDER, path)]
    system = ctypes.CDLL(None, use_errno=True)
    if hasattr(system, "renameat2"):
        if system.renameat2(*arguments, _EXCHANGE) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(b))
    # Some network file systems can't. If the process dies between these lines, both folders are
    # complete, the earlier one as `mine.replaced-...`.
    aside = Path(tempfile.mkdtemp(prefix=f"{b.name}.replaced-", dir=b.parent))
    b.replace(aside)
    try:
        a.replace(b)
    except BaseException:
        aside.replace(b)
        raise
    aside.replace(a)
