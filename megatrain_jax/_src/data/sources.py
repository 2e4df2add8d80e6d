"""Resolves the user's sources to files and iterables of rows, in a fixed order."""

import glob
import importlib
import itertools
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.hub import HubRows, failure, hub_rows
from megatrain_jax._src.data.columnar import is_columnar, restored_rows
from megatrain_jax._src.data.reading import KINDS, TEXT_KINDS, kind_of

Source = str | PathLike[str] | Iterable[Any]

_ALLOWED = "a path, an iterable of rows, or a list of these"


class GivenRows(NamedTuple):
    """Rows that are passed directly, not read from a file.

    Attributes:
        name: Their name in errors.
        rows: The rows.
        fingerprint: A text that changes with the rows, if there is one.
    """

    name: str
    rows: Iterable[Any]
    fingerprint: str | None = None


def resolve(source: Source, texts: bool) -> list[str | GivenRows]:
    """Returns the files and the given rows of a source, in order.

    For example, ``["chats", "more/*.jsonl", [{"messages": [...]}]]`` becomes the sorted paths of
    the files below the folder, the sorted matches of the pattern, and rows named `source[2]` in
    errors.

    Args:
        source: The argument `source`: a file, a folder, a pattern with ``*``, a dataset on the
            Hugging Face Hub, an iterable of rows such as a `datasets.Dataset`, or a list of these.
        texts: Whether to include a folder's plain text files.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is empty, or a file is not regular or of an unknown kind.
        FileNotFoundError: If a file does not exist, a pattern has no match, or a dataset can't be
            downloaded.
    """
    if isinstance(source, str | bytes | PathLike):
        return _named(source, texts)
    is_rows, items = _peek("source", source)
    if is_rows:
        return [GivenRows("`source`", items)]
    parts: list[str | GivenRows] = []
    for number, item in enumerate(items):
        name = f"source[{number}]"
        if isinstance(item, str | bytes | PathLike):
            parts += _named(item, texts)
            continue
        is_rows, rows = _peek(name, item)
        if not is_rows:
            raise TypeError(checks.refused(name, "a path or an iterable of rows", item))
        parts.append(GivenRows(f"`{name}`", rows))
    if not parts:
        raise ValueError("`source` is empty: it names no file and has no row")
    return parts


def _peek(name: str, given: Any) -> tuple[bool, Iterable[Any]]:
    """Whether an iterable yields rows, and the iterable including its first item."""
    if isinstance(given, Mapping):
        keys = ", ".join(repr(key) for key in itertools.islice(given, 8))
        raise TypeError(
            f"`{name}` is a mapping with the keys {keys}: pass one of its values, such as the "
            "split to train on, or a list of them"
        )
    if not isinstance(given, Iterable):
        raise TypeError(checks.refused(name, _ALLOWED, given))
    # A re-iterable can simply be peeked at; for an iterator the first item is put back.
    if iter(given) is not given:
        is_rows = isinstance(next(iter(given), None), Mapping)
        return is_rows, restored_rows(given) if is_columnar(given) else given
    items = iter(given)
    first = list(itertools.islice(items, 1))
    return bool(first) and isinstance(first[0], Mapping), itertools.chain(first, items)


def _named(given: Any, texts: bool) -> list[str | GivenRows]:
    found = hub_rows(given)
    return [*_files(given, texts)] if found is None else [_downloaded(given, found)]


def _downloaded(given: str, found: HubRows) -> GivenRows:
    """The rows of a dataset on the Hub, mapped from the cache of the library `datasets`."""
    try:
        # An optional dependency: only the Hub's datasets need it.
        datasets = importlib.import_module("datasets")
    except ImportError as caught:
        raise FileNotFoundError(
            f"there is no file {given}, which `source` names; a dataset of the Hugging Face Hub "
            "needs `pip install datasets`"
        ) from caught
    try:
        rows = datasets.load_dataset(
            found.name, found.config, split=found.split, revision=found.revision
        )
    except Exception as caught:  # HTTP, cache, format and disk errors have no common type
        raise FileNotFoundError(
            f"there is no file {given}, which `source` names, and it can't be loaded from the "
            f"Hugging Face Hub as NAME:SPLIT or NAME:CONFIG:SPLIT: {failure(caught)}. "
            f"`hf download {found.name} --repo-type dataset --local-dir FOLDER` downloads its files"
        ) from caught
    return GivenRows(given, restored_rows(rows), rows._fingerprint)


def _files(given: Any, texts: bool) -> list[str]:
    path = os.path.expanduser(checks.path("source", given))
    if os.path.isdir(path):
        found = sorted(str(file) for file in Path(path).rglob("*") if _is_data(file, path, texts))
        if not found:
            known = ", ".join(KINDS + TEXT_KINDS * texts)
            raise ValueError(f"the folder {path}, of `source`, has no file of the kinds {known}")
        return found
    # A file with brackets in its name is a file, not a pattern.
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if not found:
            raise FileNotFoundError(f"no file is found by the pattern {path}, of `source`")
        return [_checked(file) for file in found]
    return [_checked(path)]


def _is_data(file: Path, folder: str, texts: bool) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.is_file() and kind_of(file) in KINDS + TEXT_KINDS * texts


def _checked(path: str) -> str:
    if not os.path.exists(path):
        hint = ""
        if path.count("/") == 1 and not Path(path).suffix:
            hint = f". A dataset of the Hub is named with its split, such as {path}:train"
        raise FileNotFoundError(f"there is no file {path}, which `source` names{hint}")
    if not os.path.isfile(path):
        raise ValueError(f"{path}, of `source`, is no regular file")
    if kind_of(path) not in KINDS + TEXT_KINDS:
        raise ValueError(
            f"{path}, of `source`, ends in none of {', '.join(KINDS + TEXT_KINDS)} (the text kinds "
            "also with .gz), by which formats are recognised"
        )
    return path
