"""Reads rows from files one at a time, each with its origin, without loading whole files.

JSON Lines are read line by line, a JSON array value by value, CSV row by row, Parquet a few rows at
a time, and so is Arrow. All but Parquet and Arrow may be compressed.
"""

import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from megatrain_jax._src.lm.data.columnar import batch_rows, check_batch
from megatrain_jax._src.lm.data.report import (
    NO_JSON,
    DataError,
    InvalidRow,
    Report,
    RowOrigin,
    invalid_utf8,
)

_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r'[\[\]{},]|"[^"\\]*(?:\\.[^"\\]*)*"|[^\[\]{},"]+', re.DOTALL)
# The characters that `surrogateescape` makes from bytes that are not UTF-8.
_ESCAPED = re.compile("[\udc80-\udcff]")


def checked_utf8(text: str, value: Any) -> Any:
    """Returns a value, or a fault if the text it was read from is not UTF-8."""
    if not text.isascii() and (escaped := _ESCAPED.search(text)):
        return invalid_utf8(ord(escaped[0]) - 0xDC00)
    return value


def unusable_json(error: ValueError | RecursionError) -> InvalidRow:
    """The fault of JSON that Python refuses: its numbers are too long, or it is too deep."""
    deep = isinstance(error, RecursionError)
    return InvalidRow(NO_JSON, "it is nested too deeply" if deep else str(error))


class Scanner:
    """Reads JSON values from a stream, holding at most one value and a chunk."""

    def __init__(self, path: str, stream: TextIO, chunk: int):
        """Begins at the stream's position.

        Args:
            path: The file's name in errors.
            stream: The characters.
            chunk: Number of them read at a time.
        """
        self._path = path
        self._stream = stream
        self._chunk = chunk
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
            except (ValueError, RecursionError) as caught:
                self._skip()
                return origin, unusable_json(caught)
            # A number may continue in the next chunk.
            if end < len(self._text) or not self._more():
                break
        text = self._text[self._at : end]
        self._move(end)
        return origin, checked_utf8(text, value)

    def _skip(self) -> None:
        """Goes behind a value, by its brackets, without making it."""
        depth = 0
        while token := self._token():
            depth += (token in ("[", "{")) - (token in ("]", "}"))
            if not depth:
                return
        raise self._broken("a value without an end")

    def _token(self) -> str:
        """The next bracket, comma, text, or run of other characters; empty at the end."""
        self.peek()
        while True:
            found = _TOKEN.match(self._text, self._at)
            # It may continue in the next chunk.
            if (found is not None and found.end() < len(self._text)) or not self._more():
                break
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            return ""
        self._move(found.end())
        return found[0]

    def peek(self) -> str:
        """The next character that is not whitespace; empty at the end."""
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
        # The chunk grows with the held text, so that a huge value is parsed only a few times.
        chunk = self._stream.read(max(self._chunk, len(self._text) - self._at))
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _broken(self, message: str, at: int | None = None) -> DataError:
        lines = self._text.count("\n", self._at, self._at if at is None else at)
        return DataError(
            f"{RowOrigin(self._path, self._line + lines)}: {NO_JSON}: {message}; the rest can't be "
            "read (JSON Lines, in a file named .jsonl, can be read around a broken line)"
        )


Row = Mapping[str, Any]

_CHUNK = 1 << 18
# Rows of Parquet and Arrow read at a time, or fewer if they are long.
_MOST_ROWS = 256
_MOST_BYTES = 1 << 24
# The first bytes of an Arrow file; an Arrow stream has others.
_ARROW_FILE = b"ARROW1"
# Cells of CSV may be documents; the largest C long on every platform.
_MOST_OF_A_CELL = 2**31 - 1
_EMPTY = "the file is empty"


def kind_of(path: str | os.PathLike[str]) -> str:
    """A file's suffix in lower case, without that of a compression; it identifies the format."""
    name = Path(Path(path).name.lower())
    if name.suffix not in _COMPRESSIONS:
        return name.suffix
    # Columnar files are read at many places, which a compressed file doesn't allow.
    return name.suffix if (inner := Path(name.stem).suffix) in _COLUMNAR else inner


def given_rows(name: str, items: Iterable[Any], report: Report) -> Iterator[tuple[RowOrigin, Row]]:
    """Reads given rows, as `rows` does with a file's rows.

    Args:
        name: Their name in errors.
        items: The rows.
        report: See `rows`.
    """
    yield from _objects(_numbered(name, items), RowOrigin(name), "there is no row", report)


def _numbered(path: str, items: Iterable[Any]) -> Iterator[tuple[RowOrigin, Any]]:
    return ((RowOrigin(path, number, "row"), item) for number, item in enumerate(items, 1))


def rows(path: str, report: Report) -> Iterator[tuple[RowOrigin, Row]]:
    """Reads the rows of a file of one of `KINDS`.

    Args:
        path: The file.
        report: The report that counts rows and lists unreadable ones.

    Yields:
        The origin of each row, and the row.

    Raises:
        DataError: If the file can't be read further.
    """
    reader = _READERS.get(kind_of(path))
    if reader is None:
        raise ValueError(f"{path} is plain text, which has no rows: use `data.text`")
    yield from _objects(reader(path), RowOrigin(path), _EMPTY, report)


def _objects(
    items: Iterable[tuple[RowOrigin, Any]], whole: RowOrigin, if_empty: str, report: Report
) -> Iterator[tuple[RowOrigin, Row]]:
    last = whole
    for origin, row in _named_failures(items, whole):
        last = origin
        report.num_rows += 1
        if not isinstance(row, InvalidRow) and not isinstance(row, Mapping):
            row = InvalidRow("a row is no object of fields", f"it is of type {type(row).__name__}")
        # Readers yield a fault in place of its row, so that reading continues after it.
        if isinstance(row, InvalidRow):
            report.leave_out(origin, row)
        else:
            yield origin, row
    if last is whole:
        report.leave_out(whole, InvalidRow(if_empty))


def _named_failures(
    items: Iterable[tuple[RowOrigin, Any]], last: RowOrigin
) -> Iterator[tuple[RowOrigin, Any]]:
    """The items; if reading fails, the error names the file and the last row before."""
    try:
        for item in items:
            last = item[0]
            yield item
    except DataError:
        raise
    except Exception as caught:  # of decompression, Parquet, the disk, or the user's own code
        # The error of a file that can't be opened names it.
        if isinstance(caught, OSError) and caught.filename is not None:
            raise
        suffixes = {suffix.lower() for suffix in Path(last.path).suffixes[-2:]}
        form = next((f" as {_FORMS[suffix]}" for suffix in _FORMS if suffix in suffixes), "")
        after = f" after {last.unit} {last.number}" if last.number else ""
        why = f"{type(caught).__name__}: {caught}"
        raise DataError(f"{last.path} can't be read{form}{after}: {why}") from caught


def _bytes(path: str) -> BinaryIO:
    opener = _COMPRESSIONS.get(Path(path).suffix.lower())
    return open(path, "rb") if opener is None else opener(path)


def _by_arrow(compression: str) -> Callable[[str], BinaryIO]:
    def open_stream(path: str) -> BinaryIO:
        return io.BufferedReader(pyarrow.input_stream(path, compression=compression))  # type: ignore[arg-type]

    return open_stream


class _Xz(io.RawIOBase):
    """The bytes of a file of one or more streams of xz.

    `lzma.open` takes damage at the start of a later stream for the end of the file.
    """

    def __init__(self, path: str):
        super().__init__()
        self._parts, self._rest = self._decompressed(path), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = memoryview(part)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def close(self) -> None:
        self._parts.close()
        super().close()

    def _decompressed(self, path: str) -> Generator[bytes]:
        with open(path, "rb") as file:
            given = file.read(_CHUNK)
            while given:
                stream = lzma.LZMADecompressor()
                while not stream.eof:
                    if stream.needs_input and not given and not (given := file.read(_CHUNK)):
                        raise EOFError("the file ends within a stream")
                    yield stream.decompress(given, _CHUNK)
                    given = b""
                given = stream.unused_data or file.read(_CHUNK)
                # Zeros may follow a stream, in groups of four.
                padding = 0
                while given and not (rest := given.lstrip(b"\0")):
                    padding, given = padding + len(given), file.read(_CHUNK)
                if given:
                    padding, given = padding + len(given) - len(rest), rest
                if padding % 4:
                    raise lzma.LZMAError(f"{padding} bytes of zeros after a stream")


def _characters(path: str) -> TextIO:
    return io.TextIOWrapper(
        # A byte-order mark is dropped. Bytes that are not UTF-8 stay, to be reported with their
        # row; line ends stay unchanged, also within cells of CSV.
        _bytes(path),
        encoding="utf-8-sig",
        errors="surrogateescape",
        newline="",
    )


def blocks(path: str, report: Report) -> Iterator[str]:
    """Reads a plain text file in blocks of about `_CHUNK` characters that end with a line.

    Tokenizers that split words at line ends, such as byte-level ones, give the same tokens for the
    blocks as for the whole. Nothing is yielded for a file that is empty or not UTF-8.
    """
    for _, block in _named_failures(_blocks(path, report), RowOrigin(path)):
        yield block


def _blocks(path: str, report: Report) -> Iterator[tuple[RowOrigin, str]]:
    whole = RowOrigin(path)
    fault = _text_fault(path)
    if fault is not None:
        origin, what = fault
        report.num_rows += bool(origin.number)
        report.leave_out(origin, what)
        return
    report.num_rows += 1
    with _characters(path) as stream:
        for block in blocks_of(iter(lambda: stream.read(_CHUNK), "")):
            yield whole, block


def blocks_of(chunks: Iterable[str]) -> Iterator[str]:
    """Splits a text into blocks that end with a line, like `blocks`.

    Args:
        chunks: The text in parts of any length.
    """
    kept = ""
    for chunk in chunks:
        kept += chunk
        end = _line_start(kept)
        if end:
            yield kept[:end]
            kept = kept[end:]
    if kept:
        yield kept


def _line_start(text: str) -> int:
    """The start of the last line that does not begin with whitespace; 0 if there is none."""
    end = text.rfind("\n")
    while end >= 0:
        # Tokenizers may join line ends and the whitespace after them to one token.
        if end + 1 < len(text) and not text[end + 1].isspace():
            return end + 1
        end = text.rfind("\n", 0, end)
    return 0


def _text_fault(path: str) -> tuple[RowOrigin, InvalidRow] | None:
    some = False
    with _bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            some = some or bool(line.strip())
            try:
                line.decode()
            except UnicodeDecodeError as caught:
                return RowOrigin(path, number), invalid_utf8(line[caught.start])
    return None if some else (RowOrigin(path), InvalidRow(_EMPTY))


def _json_lines(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    with _bytes(path) as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            if line.strip():
                yield RowOrigin(path, number), _loads(line)


def _loads(line: str) -> Any:
    """Returns the value of a line of JSON, or its fault as an `InvalidRow`."""
    try:
        return checked_utf8(line, json.loads(line))
    except json.JSONDecodeError as caught:
        return InvalidRow(NO_JSON, f"{caught.msg} at column {caught.colno}")
    except (ValueError, RecursionError) as caught:
        return unusable_json(caught)


def _json(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    """Reads an array of objects, or objects one after the other, such as JSON Lines."""
    with _characters(path) as stream:
        scanner = Scanner(path, stream, _CHUNK)
        if scanner.peek() == "[":
            yield from scanner.array()
            return
    if _is_json(_first_line(path)):
        # Read line by line, so that a broken line does not make all later ones unreadable.
        yield from _json_lines(path)
        return
    with _characters(path) as stream:
        scanner = Scanner(path, stream, _CHUNK)
        while scanner.peek():
            yield scanner.value()


def _first_line(path: str) -> bytes:
    with _bytes(path) as stream:
        return next((line for line in stream if line.strip()), b"")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # JSON, but no value
        return True
    return True


def _parquet(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        batches = file.iter_batches(batch_size=_rows_at_once(file.metadata))
        yield from _numbered(path, chain.from_iterable(map(batch_rows, batches)))


def _rows_at_once(metadata: Any) -> int:
    # Rows may be documents of megabytes, so the largest mean row size of a group limits the batch.
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return _limited(
        max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    )


def _limited(bytes_per_row: int) -> int:
    return min(_MOST_ROWS, _MOST_BYTES // max(1, bytes_per_row) + 1)


def _arrow(path: str) -> Iterator[tuple[RowOrigin, Any]]:
    """Reads an Arrow file or stream, as `datasets` writes it, mapped from the disk."""
    with pyarrow.memory_map(path) as mapped:
        is_file = mapped.read(len(_ARROW_FILE)) == _ARROW_FILE
        mapped.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(mapped)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(mapped)
        yield from _numbered(path, chain.from_iterable(map(_checked_rows, batches)))


def _checked_rows(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    """The rows of a batch of any length, some at a time."""
    check_batch(batch)
    size = _limited(batch.nbytes // max(1, batch.num_rows))
    for at in range(0, batch.num_rows, size):
        yield from batch_rows(batch.slice(at, size))


def _delimited(delimiter: str) -> Callable[[str], Iterator[tuple[RowOrigin, Any]]]:
    def read(path: str) -> Iterator[tuple[RowOrigin, Any]]:
        with _characters(path) as stream:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            names = _cells(path, reader) or []
            if len(set(names)) < len(names):
                raise DataError(f"{path}, line 1: two columns have the same name: {names}")
            line = reader.line_num
            while (cells := _cells(path, reader)) is not None:
                if cells:  # an empty line has none
                    yield RowOrigin(path, line + 1), _named(names, cells)
                line = reader.line_num

    return read


def _cells(path: str, reader: Any) -> list[str] | None:
    """The next cells; the csv module's limit of 131,072 characters is raised for this read only."""
    before = csv.field_size_limit(_MOST_OF_A_CELL)
    try:
        return next(reader, None)
    except csv.Error as caught:
        raise DataError(
            f"{path}, line {reader.line_num}: no valid CSV: {caught}; the rest can't be read"
        ) from caught
    finally:
        csv.field_size_limit(before)


def _named(names: list[str], cells: list[str]) -> Any:
    if len(cells) != len(names):
        return InvalidRow(
            "a row with more or fewer cells than the first line names",
            f"{len(cells)} cells, {len(names)} names",
        )
    return checked_utf8("".join(cells), dict(zip(names, cells, strict=True)))


_READERS = {
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
# What damaged files with these suffixes can't be read as.
_FORMS = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "Zstandard",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
}
_COLUMNAR = (".parquet", ".arrow", ".feather")
_COMPRESSIONS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": _by_arrow("bz2"),
    ".xz": lambda path: io.BufferedReader(_Xz(path)),
    ".zst": _by_arrow("zstd"),
}
# Suffixes of files with rows, and of files with one text.
KINDS = tuple(_READERS)
TEXT_KINDS = (".txt",)
COMPRESSIONS = tuple(_COMPRESSIONS)
