"""Tokenised data on disk: a later start maps the tokens instead of computing them.

A cache is a folder with one folder per dataset. Its name is a hash of files, tokenizer, template
and options:

    CACHE/3f0c.../tokens.npy, learned.npy, starts.npy, ...
    CACHE/3f0c.../corpus.json    all else, with checksums of the files and of itself; written last

NumPy's files can be written piece by piece and mapped as flat arrays. A folder is written under a
temporary name, and renamed when it is complete and on disk, so parallel starts don't disturb each
other. Folders may be deleted at any time. One that can't be read, for any reason, is made anew.
"""

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import check_regular
from megatrain_jax._src.common.unfinished import UnfinishedFolder, sync, sync_tree
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.data.corpus import Corpus, GrowingFiles, mapped, naming_cache
from megatrain_jax._src.lm.data.report import Summary
from megatrain_jax._src.lm.data.sources import GivenRows, Parts
from megatrain_jax._src.lm.data.tokenizer import FastTokenizer

_ABOUT = "corpus.json"
# Changes with the format of the files and with the meaning of tokens and labels.
_VERSION = 2
# Arrays of a corpus besides values by name.
_ARRAYS = ("tokens", "learned", "starts", "lengths", "goes_on", "documents")


@dataclass(frozen=True)
class Cached:
    """A dataset's parts as they were found in a cache.

    Attributes:
        corpus: The tokens, mapped from files.
        summary: Summary of the rows that they were made from.
        chat_template: The Jinja template that rendered conversations.
    """

    corpus: Corpus
    summary: Summary
    chat_template: str | None


class TokenCache:
    """The place of one dataset in a cache.

    Attributes:
        path: The dataset's folder, which may not exist.
    """

    def __init__(self, path: Path):
        """Refers to a folder."""
        self.path = path

    def find(self) -> Cached | None:
        """Returns the dataset; None if it is absent, or, with a warning, if it is damaged."""
        if not os.path.lexists(self.path):
            return None
        try:
            return self._read()
        except Exception as error:  # damaged files fail in any way
            warn_user(
                f"the tokenised data in {self.path} is damaged and is made anew: "
                f"{type(error).__name__}: {error}",
            )
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink(missing_ok=True)
            return None

    def files(self) -> GrowingFiles:
        """Makes a folder for a new dataset, to be passed to `keep`.

        Raises:
            OSError: If it can't be made.
        """
        with naming_cache(self.path):
            return GrowingFiles(UnfinishedFolder(self.path, 0o700))

    def keep(self, files: GrowingFiles, made: Cached) -> None:
        """Completes a new dataset.

        Args:
            files: The files, with all arrays of tokens.
            made: The dataset.
        """
        arrays = _arrays_of(made.corpus)
        for name, array in arrays.items():
            if not (files.folder / f"{name}.npy").exists():
                with naming_cache(files.folder):
                    np.save(files.folder / f"{name}.npy", array)
        about = {
            "checksums": {name: _checksum(files.folder / f"{name}.npy") for name in arrays},
            "digest": made.corpus.digest.hex(),
            "pieces_per_unit": made.corpus.pieces_per_unit,
            "unit_values": list(made.corpus.unit_values),
            "token_values": list(made.corpus.token_values),
            "summary": asdict(made.summary),
            "chat_template": made.chat_template,
        }
        text = json.dumps({"content": about, "checksum": _hash(about)})
        with naming_cache(files.folder):
            (files.folder / _ABOUT).write_text(text, encoding="utf-8")
            # Before the name, or a machine that stops could leave a complete name with empty files.
            sync_tree(files.folder)
        # Another start may have completed the same dataset meanwhile; this one's files stay mapped.
        with suppress(OSError):
            files.folder.rename(self.path)
            sync(self.path.parent)
        files.discard()

    def _read(self) -> Cached:
        check_regular(self.path / _ABOUT)
        written = json.loads((self.path / _ABOUT).read_text(encoding="utf-8"))
        about = written["content"]
        if written["checksum"] != _hash(about):
            raise ValueError(f"{_ABOUT} has another checksum")
        arrays: dict[str, Any] = {}
        for name, checksum in about["checksums"].items():
            # Of the whole file: its header decides how its numbers are read.
            if _checksum(self.path / f"{name}.npy") != checksum:
                raise ValueError(f"{name}.npy has another checksum")
            arrays[name] = mapped(self.path, name)
        values: dict[str, Any] = {
            kind: {name: arrays[f"{kind}-{name}"] for name in about[kind]}
            for kind in ("unit_values", "token_values")
        }
        corpus = Corpus(
            **{name: arrays[name] for name in _ARRAYS},
            digest=bytes.fromhex(about["digest"]),
            pieces_per_unit=about["pieces_per_unit"],
            **values,
        )
        summary = Summary(**{**about["summary"], "examples": tuple(about["summary"]["examples"])})
        return Cached(corpus, replace(summary, is_reused=True), about["chat_template"])


def open_cache(
    cache: Any,
    kind: str,
    parts: Parts,
    tokens: FastTokenizer,
    options: Sequence[Any],
    template: str | None,
) -> TokenCache | None:
    """The place of a dataset in the user's cache; None without a cache, or for rows in memory.

    Args:
        cache: The argument `cache`: the folder, or None.
        kind: Name of the function that makes the documents.
        parts: The files and rows, with names of their columns.
        tokens: The tokenizer.
        options: All options that determine tokens, labels or documents.
        template: The Jinja template that renders conversations.

    Raises:
        TypeError: If `cache` is not a path.
    """
    if cache is None:
        return None
    folder = Path(checks.path("cache", cache))
    sources = [_identity(part) for part in parts]
    if None in sources:
        return None
    tokenizer = tokens.tokenizer
    content = {
        "version": _VERSION,
        "packages": [metadata.version(name) for name in ("tokenizers", "transformers", "jinja2")],
        "kind": kind,
        "sources": sources,
        "columns": parts.columns,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": [tokenizer.special_tokens_map, tokenizer("a").input_ids],
        "vocabulary": tokens.vocabulary,
        "template": template,
        "options": options,
    }
    if template is not None and "strftime_now" in template:
        content["date"] = str(datetime.date.today())
    text = json.dumps(content, sort_keys=True, default=repr)
    return TokenCache(folder / hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def _identity(part: str | GivenRows) -> list[Any] | None:
    """Values that change when a source changes; None if it has none."""
    if isinstance(part, GivenRows):
        return None if part.fingerprint is None else [part.name, part.fingerprint]
    status = os.stat(part)
    return [os.path.realpath(part), status.st_size, status.st_mtime_ns]


def _arrays_of(corpus: Corpus) -> dict[str, np.ndarray]:
    arrays = {name: getattr(corpus, name) for name in _ARRAYS}
    for kind in ("unit_values", "token_values"):
        arrays |= {f"{kind}-{name}": array for name, array in getattr(corpus, kind).items()}
    return arrays


def _checksum(path: Path) -> str:
    """A checksum of a file's bytes, read a part at a time."""
    check_regular(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _hash(about: Any) -> str:
    return xxhash.xxh3_128(json.dumps(about, sort_keys=True).encode()).hexdigest()
