"""Checkpoint folders, on disks or in object stores: valid paths, the steps in one, and errors."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax._src.common.object_paths import AnyPath, ObjectPath, path_of
from megatrain_jax._src.engine.checkpoint import places
from megatrain_jax._src.engine.state.processes import Processes

MANIFEST = "megatrain.json"
# Orbax and TensorStore treat these as remote storage, even inside a path; also what `pathlib` makes
# of a URL.
_URL = re.compile(r"(^|/)[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
# Names that Orbax uses for unfinished checkpoints.
_UNFINISHED = (".orbax-checkpoint-tmp", ".partial_save")


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read.

    Attributes:
        result: The `FitResult` of the completed steps, if this ended a run of `fit`; else None.
    """

    result: Any = None


class UnreadError(CheckpointError):
    """A checkpoint that could not be read because the machine failed; it may be intact."""


class OtherFormatError(CheckpointError):
    """A checkpoint that another version of megatrain_jax wrote in a different format."""


# If processes fail for different reasons, all raise the error that comes last here: a damaged
# checkpoint is not read again, and one of another format must keep its name.
_BY_WEIGHT = UnreadError, CheckpointError, OtherFormatError
_NAMES = [kind.__name__ for kind in _BY_WEIGHT]


# System errors about a missing file, which retrying does not help.
_MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError
# Parts of messages about failures of the machine: from Python if it can't start a thread, and from
# TensorStore.
_OF_MACHINE = (
    *("can't start new thread", "os_error_code=", "RESOURCE_EXHAUSTED"),
    # An object store that gave no answer, or not to this user.
    *("ABORTED: ", "UNAVAILABLE: ", "DEADLINE_EXCEEDED: ", "PERMISSION_DENIED: "),
    "UNAUTHENTICATED: ",
)


def read_error(message: str, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that could not be read.

    Args:
        message: Its message.
        error: The cause. A system error, or a lack of memory or threads, says nothing about the
            checkpoint.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_missing = isinstance(cause, _MISSING) or "os_error_code='2'" in str(cause)
        of_machine = isinstance(cause, OSError | MemoryError | UnreadError)
        if not is_missing and (of_machine or any(text in str(cause) for text in _OF_MACHINE)):
            return UnreadError(message)
        cause = cause.__cause__ or cause.__context__
    return CheckpointError(message)


def parsed_path(path: str | PathLike[str], argument: str) -> AnyPath:
    """The absolute path of a checkpoint or a folder of them, ``~`` expanded.

    Args:
        path: The user's path, or the URL of an object store.
        argument: The name of the user's argument.

    Raises:
        TypeError: If it is not a path.
        ValueError: If Orbax could not read its own files there.
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"`{argument}` must be a path, but is of type {type(path).__name__}")
    named = f"`{argument}`={text!r}"
    if not text or "\0" in text:
        raise ValueError(f"{named} is no path")
    if "\\" in text:
        raise ValueError(f"{named} has a backslash in it, which Orbax takes for a slash")
    try:
        found = path_of(text)
    except ValueError as error:
        raise ValueError(f"`{argument}`={error}") from None
    except RuntimeError as error:
        raise ValueError(f"{named} names a home folder that is not known: {error}") from None
    if isinstance(found, Path) and _URL.search(text):
        raise ValueError(
            f"{named} is a URL, or was one: checkpoints are on local or mounted disks, or in "
            "object stores, given as a string such as 'gs://bucket/folder' or 's3://bucket/folder'"
        )
    if any(part in found.name for part in _UNFINISHED):
        raise ValueError(f"{named} is a name that Orbax keeps for unfinished checkpoints")
    return found


@contextmanager
def reading_folder(folder: AnyPath) -> Iterator[None]:
    """Raises system errors as those of the user's argument."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"`checkpoint_dir`={folder} can't be read: {error}") from error


def in_first_process(processes: Processes, where: str, action: Callable[[], Any]) -> Any:
    """Calls a file operation in the first process only, and returns its result in all of them.

    Args:
        processes: The processes that share a run; all must call this.
        where: See `Processes.gather`.
        action: The function; its result is a JSON value.

    Raises:
        CheckpointError: If it raises a CheckpointError or an `OSError`; the first process raises
            the original.
    """
    value = error = None
    if processes.is_first:
        try:
            value = action()
        except (CheckpointError, OSError) as raised:
            error = raised
    value, text = processes.gather(where, (value, error and str(error)))[0]
    if error is not None:
        raise error
    if text is not None:
        raise CheckpointError(text)
    return value


def in_all_processes(processes: Processes, where: str, action: Callable[[], Any]) -> Any:
    """Calls a function in each process; an error in one is raised in all of them.

    Args:
        processes: The processes that share a run; all must call this.
        where: See `Processes.gather`.
        action: The function, which must not communicate with other processes.

    Raises:
        CheckpointError: If it raises one in any process; an `UnreadError` if all errors are, an
            `OtherFormatError` if one is.
    """
    value = error = None
    try:
        value = action()
    except CheckpointError as raised:
        error = raised
    row = error and [str(error), type(error).__name__]
    rows = enumerate(processes.gather(where, row))
    if not (failed := [(i, *row) for i, row in rows if row is not None]):
        return value
    kind = _BY_WEIGHT[max(_NAMES.index(name) for *_, name in failed)]
    if type(error) is kind:
        raise error
    first, text, _ = next(row for row in failed if row[2] == kind.__name__)
    raise kind(f"process {first}: {text}") from error


def numbered(folder: AnyPath) -> list[int]:
    """The numbers that are names of files and subfolders in a folder, as steps are; ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def has_manifest(path: AnyPath) -> bool:
    """Whether a path is a checkpoint that this library has finished writing."""
    return places.is_file(path / MANIFEST)


def steps(folder: AnyPath) -> list[int]:
    """The steps of the checkpoints in a folder, ascending."""
    return [step for step in numbered(folder) if has_manifest(folder / str(step))]


def checkpoint_at(path: str | PathLike[str], argument: str) -> AnyPath:
    """The checkpoint that the user names: a run's folder stands for its newest one.

    Raises:
        TypeError, ValueError: See `parsed_path`.
    """
    folder = parsed_path(path, argument)
    found = steps(folder)
    return folder / str(found[-1]) if found else folder
