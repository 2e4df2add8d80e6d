"""Resolves the user's sources to files and iterables of rows, in a fixed order."""

import glob
import importlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import needing
from megatrain_jax._src.lm.common.hub import HubRows, failure, hub_rows
from megatrain_jax._src.lm.data.columnar import is_columnar, restored_rows, table_rows
from megatrain_jax._src.lm.data.reading import COMPRESSIONS, KINDS, TEXT_KINDS, kind_of
from megatrain_jax._src.lm.data.report import DataError
from megatrain_jax._src.lm.data.row_formats import FIELDS

Source = str | PathLike[str] | Iterable[Any]

_ALLOWED = "a path, an iterable of rows, or a list of these"
# Files that describe a dataset, as `datasets` and others write them; they have no rows.
_SAVED = "state.json"
_METADATA = f"""
    {_SAVED} dataset_info.json dataset_infos.json dataset_dict.json dataset-metadata.json
    croissant.json
""".split()
# Tokenizers with 250,000 tokens have files of about 30 MB.
_MOST_OF_SETTINGS = 2**26
# Words in the paths of files, with the separators that end words; digits are separators, too.
_SPLIT_WORD = r"(?<![a-z])({})(s|sets?|data|splits?)?(?![a-z])"
_TRAIN = re.compile(_SPLIT_WORD.format(r"(pre)?train(ing)?"))
_HELD_OUT = re.compile(
    _SPLIT_WORD.format(
        r"test(ing)?|val(id|idate|idation)?|dev(el|elopment)?|eval(uate|uation)?"
        r"|(held|hold)[\W_]?out"
    )
)


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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The files and the given rows of a source, in order.

    Attributes:
        items: The paths of files, and rows.
        columns: For names of fields that the formats have, the user's own.
    """

    items: Sequence[str | GivenRows]
    columns: Mapping[str, str]

    def __iter__(self) -> Iterator[str | GivenRows]:
        """Iterates over the files and the rows."""
        return iter(self.items)


def resolve(source: Source, texts: bool, columns: Any = None) -> Parts:
    """Finds the files and the given rows of a source, in order.

    For example, ``["chats", "more/*.jsonl", [{"messages": [...]}]]`` becomes the sorted paths of
    the files below the folder, the sorted matches of the pattern, and rows named `source[2]` in
    errors.

    Args:
        source: The argument `source`: a file, a folder, a pattern with ``*``, a dataset on the
            Hugging Face Hub, an iterable of rows such as a `datasets.Dataset`, or a list of these.
        texts: Whether to include a folder's plain text files.
        columns: The argument `columns`: a mapping from names of fields to the rows' own, or None.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is empty, a file is not regular or of an unknown kind, a folder has data
            for training and for evaluation or an object that is no row, or a name in `columns` is
            unknown.
        FileNotFoundError: If a file does not exist, a pattern has no match, or a dataset can't be
            downloaded.
    """
    return Parts(items=_items(source, texts), columns=_checked_columns(columns))


def _checked_columns(columns: Any) -> Mapping[str, str]:
    if columns is None:
        return {}
    if not isinstance(columns, Mapping) or not all(
        isinstance(name, str) for pair in columns.items() for name in pair
    ):
        allowed = "a mapping from names of fields to names of columns"
        raise TypeError(checks.refused("columns", allowed, columns))
    for name in columns:
        if name not in FIELDS:
            raise ValueError(f"`columns` names the field {name!r}; known are {', '.join(FIELDS)}")
    if len(set(columns.values())) < len(columns):
        raise ValueError(f"`columns` names one column for two fields: {dict(columns)}")
    return dict(columns)


def _items(source: Source, texts: bool) -> list[str | GivenRows]:
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
    if (rows := table_rows(name, given)) is not None:
        return True, rows
    checks.instance(name, given, Iterable, _ALLOWED)
    # A re-iterable can simply be peeked at; for an iterator the first item is put back.
    if iter(given) is not given:
        is_rows = isinstance(next(iter(given), None), Mapping)
        return is_rows, restored_rows(given) if is_columnar(given) else given
    items = iter(given)
    first = list(itertools.islice(items, 1))
    return bool(first) and isinstance(first[0], Mapping), itertools.chain(first, items)


def _named(given: Any, texts: bool) -> list[str | GivenRows]:
    found = hub_rows(given)
    return [*find_files(given, texts)] if found is None else [_downloaded(given, found)]


def _downloaded(given: str, found: HubRows) -> GivenRows:
    """The rows of a dataset on the Hub, mapped from the cache of the library `datasets`."""
    absent = f"there is no file {given}, which `source` names"
    needed = f"{absent}; a dataset of the Hugging Face Hub needs `pip install datasets`"
    with needing(needed, FileNotFoundError):  # only the Hub's datasets need it
        datasets = importlib.import_module("datasets")
    try:
        rows = datasets.load_dataset(
            found.name, found.config, split=found.split, revision=found.revision
        )
    except Exception as caught:  # HTTP, cache, format and disk errors have no common type
        raise FileNotFoundError(
            f"{absent}, and it can't be loaded from the Hugging Face Hub as NAME:SPLIT or "
            f"NAME:CONFIG:SPLIT: {failure(caught)}. "
            f"`hf download {found.name} --repo-type dataset --local-dir FOLDER` downloads its files"
        ) from caught
    return GivenRows(given, restored_rows(rows), rows._fingerprint)


def find_files(given: Any, texts: bool) -> list[str]:
    """The files of data that a path, a folder or a pattern names; see `resolve`."""
    path = checks.path("source", given)
    if os.path.isdir(path):
        files = [file for file in Path(path).rglob("*") if _is_data(file, path, texts)]
        if not files:
            known = ", ".join(KINDS + TEXT_KINDS * texts)
            raise ValueError(f"the folder {path}, of `source`, has no file of the kinds {known}")
        _check_splits(path, files)
        _check_objects(path, files)
        return sorted(map(str, files))
    # A file with brackets in its name is a file, not a pattern.
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(
            file
            for file in glob.glob(path, recursive=True)
            if os.path.isfile(file) and not _is_about_data(Path(file))
        )
        if not found:
            raise FileNotFoundError(f"no file is found by the pattern {path}, of `source`")
        return [_checked(file) for file in found]
    return [_checked(path)]


def _is_data(file: Path, folder: str, texts: bool) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    is_known = not hidden and file.is_file() and kind_of(file) in KINDS + TEXT_KINDS * texts
    return is_known and not _is_about_data(file)


def _is_about_data(file: Path) -> bool:
    """Whether a file describes a dataset, or is one that its folder's description leaves out."""
    if file.name in _METADATA:
        return True
    state = file.parent / _SAVED
    if kind_of(file) != ".arrow" or not state.is_file():
        return False
    # Beside a dataset that was saved, there may be results of `map`, and files of an earlier one.
    try:
        listed = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return all(entry["filename"] != file.name for entry in listed)
    except Exception as error:  # it may have anything in any place
        why = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{state}, which lists the files of a dataset, is damaged: {why}"
        ) from error


def _check_objects(folder: str, files: Sequence[Path]) -> None:
    """Checks that beside data of other kinds there are no settings, such as config.json."""
    singles = [file for file in files if file.suffix.lower() == ".json"]
    if len(singles) == len(files):
        return
    for file in singles:
        if file.stat().st_size > _MOST_OF_SETTINGS:
            continue
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError):  # such as JSON Lines; readers name what is wrong
            continue
        if isinstance(content, dict) and not set(content) & set(FIELDS):
            raise ValueError(
                f"{file}, in the folder {folder} of `source`, is one object that is no row, beside "
                "data of other kinds: move it elsewhere, or name the files of data, such as by a "
                "pattern with *"
            )


def _check_splits(folder: str, files: Sequence[Path]) -> None:
    """Checks that a folder doesn't have data for training beside data for evaluation."""
    found: dict[str, str] = {}
    for file in files:
        # As in train-00000-of-00002.parquet, data/gsm_test.jsonl.gz, myTrain1 or validation/0.csv.
        path = str(file.relative_to(folder))
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", path).lower()
        for kind, pattern in (("training", _TRAIN), ("evaluation", _HELD_OUT)):
            if pattern.search(words):
                found.setdefault(kind, path)
    if len(found) > 1 and len(files) > 1:
        raise ValueError(
            f"the folder {folder}, of `source`, has data for training beside data for evaluation, "
            f"by their names, such as {found['training']} and {found['evaluation']}: name the "
            "folder or the files of one, also by a pattern with *, or list all of them to read "
            "them all"
        )


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
            f"also with {', '.join(COMPRESSIONS)}), by which formats are recognised"
        )
    return path
