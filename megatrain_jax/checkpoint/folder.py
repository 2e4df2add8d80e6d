"""A folder of checkpoints, one subfolder a step, and what makes one of them whole.

A checkpoint appears under its own name by a rename, and leaves by one: whatever moment a process
dies at, what is there under a step's number is whole.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "megatrain.json"
_SAVING, _DELETING = ".saving", ".deleting"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read.

    Attributes:
        result: Of a run of `fit` that this ended, the `FitResult` of the steps done.
    """

    result: Any = None


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.with_name(path.name + _SAVING)


def steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if (entry / MANIFEST).is_file()]
    return sorted(int(name) for name in names if name.isdecimal())


def remove_leftovers(path: Path) -> None:
    """Removes what a process that died has left of a checkpoint of this name."""
    for entry in path.parent.glob(f"{path.name}.*"):
        if entry.name.startswith((path.name + _SAVING, path.name + _DELETING)):
            shutil.rmtree(entry)


def remove_all_leftovers(folder: Path) -> None:
    """Removes what processes that died have left in a folder of steps."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        name, _, _ = entry.name.partition(".")
        if name.isdecimal():
            remove_leftovers(folder / name)


def remove_oldest(folder: Path, keep: int) -> None:
    """Removes all but the newest checkpoints."""
    for step in steps(folder)[:-keep]:
        remove(folder / str(step))


def remove(path: Path) -> None:
    """Removes a checkpoint; it loses its name first."""
    dying = path.with_name(path.name + _DELETING)
    path.rename(dying)
    shutil.rmtree(dying)


def publish(path: Path, facts: Mapping[str, Any]) -> None:
    """Gives a checkpoint that Orbax has finished its name.

    Args:
        path: The name.
        facts: What to keep beside the arrays, as JSON.
    """
    written = temporary(path)
    files = {str(p.relative_to(written)): p.stat().st_size for p in _files(written)}
    text = json.dumps({"format": 1, **facts, "files": files}, indent=1)
    with open(written / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.rename(path)


def facts_of(path: Path) -> dict[str, Any]:
    """What was kept beside the arrays of a checkpoint.

    Raises:
        CheckpointError: If it is none of this library's, or files of it are missing or have
            other sizes than when they were written.
    """
    try:
        facts = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = facts["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint of megatrain_jax: {MANIFEST} can't be read ({error})"
        ) from error
    sizes = {str(p.relative_to(path)): p.stat().st_size for p in _files(path)}
    wrong = [name for name, size in files.items() if sizes.get(name) != size]
    if wrong:
        raise CheckpointError(
            f"{path} is damaged: {len(wrong)} of its {len(files)} files are missing or have "
            f"another size than when they were written, the first {wrong[0]}. Use another "
            "checkpoint."
        )
    return facts


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
