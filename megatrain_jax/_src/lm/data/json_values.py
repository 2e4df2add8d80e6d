"""Reads JSON values one after another from a stream, each with its line number."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from megatrain_jax._src.lm.data.report import DataError, InvalidRow, RowOrigin

NO_JSON = "no valid JSON"

_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r'[\[\]{},]|"[^"\\]*(?:\\.[^"\\]*)*"|[^\[\]{},"]+', re.DOTALL)
# The characters that `surrogateescape` makes from bytes that are not UTF-8.
_ESCAPED = re.compile("[\udc80-\udcff]")


def invalid_utf8(byte: int) -> InvalidRow:
    """The fault of a row with a byte that is not UTF-8."""
    return InvalidRow("invalid UTF-8", f"byte 0x{byte:02x}")


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
