"""Files become rows, one at a time, each with its origin; no file is held as a whole.

JSON Lines are read line by line, a JSON array value by value, Parquet some rows at a time.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatrain_jax._src.common import checks
from megatrain_jax._src.data.report import DataError, InvalidRow, Report, RowOrigin

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]
Row = dict[str, Any]

_PARQUET_ROWS = 256
_CHUNK = 1 << 18
_SPACE = re.compile(r"[ \t\r\n]*")
# The characters that `surrogateescape` makes of bytes that are no UTF-8.
_ESCAPED = re.compile("[\udc80-\udcff]")
_NO_JSON = "no valid JSON"
_NO_UTF8 = "invalid UTF-8"


def as_paths(paths: Paths) -> list[str]:
    """Returns the paths as strings.

    Raises:
        TypeError: If they are no paths.
        ValueError: If there are none, or one is no regular file or of an unknown kind.
        FileNotFoundError: If one does not exist.
    """
    many = [paths] if isinstance(paths, str | bytes | PathLike) else paths
    if isinstance(many, Mapping) or not isinstance(many, Iterable):
        raise TypeError(checks.refused("paths", "a path or a list of them", paths))
    result = [checks.path("paths", path) for path in many]
    if not result:
        raise ValueError("`paths` names no file")
    for path in result:
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {path}, which `paths` names")
        if Path(path).is_dir():
            raise ValueError(
                f"{path} is a folder, and `paths` names files: sorted(Path(...).glob('*.jsonl'))"
            )
        if not Path(path).is_file():
            raise ValueError(f"{path}, of `paths`, is no regular file")
        if Path(path).suffix.lower() not in {*_READERS, ".txt"}:
            raise ValueError(
                f"{path} is none of {', '.join(_READERS)} or .txt, which tell what a file holds"
            )
    return result


def rows(path: str, report: Report, error: bool) -> Iterator[tuple[RowOrigin, Row]]:
    """Reads the rows of a .json, .jsonl, .ndjson or .parquet file.

    Args:
        path: The file.
        report: The report that counts rows and lists the unreadable ones.
        error: Whether those are errors.

    Yields:
        The origin of each row, and the row.

    Raises:
        DataError: If the file can't be read further.
    """
    reader = _READERS.get(Path(path).suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is plain text, which has no rows: use `data.text`")
    empty = True
    for origin, row in reader(path):
        empty = False
        report.num_rows += 1
        if not isinstance(row, InvalidRow) and not isinstance(row, dict):
            row = InvalidRow("a row is no object of fields", f"it is of type {type(row).__name__}")
        if isinstance(row, InvalidRow):
            report.leave_out(origin, row, error)
        else:
            yield origin, row
    if empty:
        report.leave_out(RowOrigin(path), InvalidRow("the file is empty"), error)


def blocks(path: str, report: Report, error: bool) -> Iterator[str]:
    """Reads a plain text file in blocks of about `_CHUNK` characters that end with a line.

    Tokenisers that split words at line ends, as byte-level ones do, give the same tokens for the
    blocks as for the whole. Nothing is yielded of a file that is empty or no UTF-8.
    """
    fault = _text_fault(path)
    if fault is not None:
        origin, what = fault
        report.num_rows += bool(origin.number)
        report.leave_out(origin, what, error)
        return
    report.num_rows += 1
    kept = ""
    with open(path, encoding="utf-8-sig", newline="") as stream:
        while chunk := stream.read(_CHUNK):
            kept += chunk
            end = _line_start(kept)
            if end:
                yield kept[:end]
                kept = kept[end:]
    if kept:
        yield kept


def _line_start(text: str) -> int:
    """The start of the last line that begins with something but space; 0 if none does."""
    end = text.rfind("\n")
    while end >= 0:
        if end + 1 < len(text) and not text[end + 1].isspace():
            return end + 1
        end = text.rfind("\n", 0, end)
    return 0


def _text_fault(path: str) -> tuple[RowOrigin, InvalidRow] | None:
    some = False
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            some = some or bool(line.strip())
            try:
                line.decode()
            except UnicodeDecodeError as caught:
                return RowOrigin(path, number), InvalidRow(
                    _NO_UTF8, f"byte 0x{line[caught.start]:02x}"
                )
    return None if some else (RowOrigin(path), InvalidRow("the file is empty"))


def _json_lines(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            if line.strip():
                yield RowOrigin(path, number), _loads(line)


def _loads(line: str) -> Any:
    """Returns what a line of JSON says, or what is wrong with it as an `InvalidRow`."""
    try:
        return _checked(line, json.loads(line))
    except json.JSONDecodeError as caught:
        return InvalidRow(_NO_JSON, f"{caught.msg} at column {caught.colno}")
    except RecursionError:
        return InvalidRow(_NO_JSON, "it is nested too deeply")


def _checked(text: str, value: Any) -> Any:
    """Returns a value, or what is wrong if the text it was read from is no UTF-8."""
    if not text.isascii() and (escaped := _ESCAPED.search(text)):
        return InvalidRow(_NO_UTF8, f"byte 0x{ord(escaped[0]) - 0xDC00:02x}")
    return value


def _json(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    """Reads an array of objects, or objects one after the other (JSON Lines are a case of it)."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        scanner = _Scanner(path, stream)
        if scanner.peek() == "[":
            yield from scanner.array()
            return
    if _is_json(_first_line(path)):
        # Then one broken line does not make the rest unreadable.
        yield from _json_lines(path)
        return
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        scanner = _Scanner(path, stream)
        while scanner.peek():
            yield scanner.value()


def _first_line(path: str) -> bytes:
    with open(path, "rb") as stream:
        return next((line for line in stream if line.strip()), b"")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except ValueError:
        return False
    return True


class _Scanner:
    """Reads JSON values from a stream without holding more of it than one value and a chunk."""

    def __init__(self, path: str, stream: io.TextIOBase | Any):
        self._path = path
        self._stream = stream
        self._text = ""
        self._at = 0
        self._line = 1
        self._decoder = json.JSONDecoder()

    def array(self) -> Iterator[tuple[RowOrigin, Any]]:
        """Yields the values of an array, and checks that nothing follows it."""
        self._take("[")
        if self.peek() == "]":
            self._take("]")
        else:
            while True:
                yield self.value()
                if self.peek() == "]":
                    break
                self._take(",")
            self._take("]")
        if self.peek():
            raise self._broken("text after the end of the array")

    def value(self) -> tuple[RowOrigin, Any]:
        """Reads one value."""
        self.peek()
        origin = RowOrigin(self._path, self._line)
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as caught:
                if not self._more():
                    raise self._broken(caught.msg, caught.pos) from None
                continue
            except RecursionError:
                raise self._broken("it is nested too deeply") from None
            # A number may go on in the next chunk.
            if end < len(self._text) or not self._more():
                break
        text = self._text[self._at : end]
        self._move(end)
        return origin, _checked(text, value)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._move(match.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise self._broken(f"expected {wanted!r}")
        self._move(self._at + 1)

    def _move(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self) -> bool:
        # Growing with what is held, so that a huge value is parsed again a few times only.
        chunk = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _broken(self, message: str, at: int | None = None) -> DataError:
        lines = self._text.count("\n", self._at, self._at if at is None else at)
        return DataError(
            f"{RowOrigin(self._path, self._line + lines)}: {_NO_JSON}: {message}; what follows "
            "can't be read (JSON Lines, in a file named .jsonl, can be read around a broken line)"
        )


def _parquet(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as caught:
        raise DataError(f"{path} can't be read as Parquet: {caught}") from caught
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in _pylist(batch):
                number += 1
                yield RowOrigin(path, number, "row"), row


def _pylist(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                row = batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as caught:
                row = InvalidRow(_NO_UTF8, f"byte 0x{caught.object[caught.start]:02x}")
            yield row


_READERS = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
