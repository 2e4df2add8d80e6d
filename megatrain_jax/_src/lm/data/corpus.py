"""All tokens of a dataset in flat host arrays: five bytes per token, and a few per document."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from megatrain_jax._src.common.unfinished import UnfinishedFolder
from megatrain_jax._src.lm.data.image_files import Media
from megatrain_jax._src.lm.data.image_processors import ImageProcessor
from megatrain_jax._src.lm.data.report import InvalidRow, Report, RowOrigin, TooLong

WhenTooLong = Literal["error", "cut", "split", "drop"]
# Tokens that are collected in memory before they are written to files.
_SPILLED = 2**22
# Begins the names of arrays with numbers of each token.
_ENTRIES = "token_values-"
_NO_VALUES: Mapping[str, float] = MappingProxyType({})
_NO_ENTRIES: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents; a document that is too long for a row may have become several pieces.

    Pieces that must share a row form a unit: the two of a pair. Otherwise each piece is a unit.

    Attributes:
        tokens: The documents one after the other, and a zero.
        learned: Whether the loss counts a token as a label. False for the first token of each
            document, so that ``learned[i + 1]`` is also right at a document's end.
        starts: The place of each piece's first token in `tokens`.
        lengths: The number of tokens of each piece.
        goes_on: Whether the token after a piece's last one belongs to the same document.
        documents: The number of each piece's document, from 0.
        digest: A hash of all tokens and their `learned` flags.
        pieces_per_unit: 2 if documents are pairs, 1 otherwise.
        unit_values: Numbers of each unit by name, such as labels; only of documents that are pairs.
        token_values: Numbers of each token by name, such as a teacher's log-probabilities.
        images: The images of each document, if they may have some.
        processor: The processor of images, if documents may have some.
    """

    tokens: Int32[np.ndarray, " tokens+1"]
    learned: Bool[np.ndarray, " tokens+1"]
    starts: Int64[np.ndarray, " pieces"]
    lengths: Int32[np.ndarray, " pieces"]
    goes_on: Bool[np.ndarray, " pieces"]
    documents: Int32[np.ndarray, " pieces"]
    digest: bytes
    pieces_per_unit: int = 1
    unit_values: Mapping[str, Shaped[np.ndarray, " units"]] = field(default_factory=dict)
    token_values: Mapping[str, Shaped[np.ndarray, "tokens+1 k"]] = field(default_factory=dict)
    images: Sequence[Sequence[Media]] = ()
    processor: ImageProcessor | None = None

    @property
    def unit_lengths(self) -> Int32[np.ndarray, " units"]:
        """The number of tokens of each unit."""
        return self.lengths.reshape(-1, self.pieces_per_unit).sum(axis=1, dtype=np.int32)

    @property
    def unit_starts(self) -> Int64[np.ndarray, " units"]:
        """The place of each unit's first token in `tokens`; its remaining tokens follow."""
        return self.starts[:: self.pieces_per_unit]

    @property
    def unit_documents(self) -> Int32[np.ndarray, " units"]:
        """The number of each unit's document."""
        return self.documents[:: self.pieces_per_unit]

    def pieces_of(self, units: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " pieces"]:
        """The pieces of some units, unit after unit."""
        of_first = units[:, None] * self.pieces_per_unit
        return (of_first + np.arange(self.pieces_per_unit, dtype=np.int32)).reshape(-1)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return int(self.documents[-1]) + 1 if len(self.documents) else 0

    @property
    def num_bytes(self) -> int:
        """Host memory of the arrays."""
        arrays = (self.tokens, self.learned, self.starts, self.lengths)
        arrays += tuple(self.token_values.values())
        kept = sum(image.num_bytes for images in self.images for image in images)
        return kept + sum(array.nbytes for array in (*arrays, self.goes_on, self.documents))


class GrowingFiles:
    """Flat arrays in a new folder, extended piece by piece; deleted if a `with` statement fails.

    Attributes:
        folder: The folder.
    """

    def __init__(self, unfinished: UnfinishedFolder):
        """Writes to a folder, which `discard` deletes."""
        self._unfinished, self.folder = unfinished, unfinished.path
        self._open: dict[str, tuple[Any, np.dtype[Any], tuple[int, ...]]] = {}

    def __enter__(self) -> "GrowingFiles":
        """Returns the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Deletes them after an error."""
        if kind is not None:
            self.discard()

    def append(self, name: str, items: np.ndarray) -> None:
        """Writes further items of an array; the first ones determine its dtype and its rows."""
        if name not in self._open:
            file = (self.folder / f"{name}.npy").open("w+b")
            self._open[name] = (file, items.dtype, items.shape[1:])
            _write_header(file, items.dtype, (0, *items.shape[1:]))
        with naming_cache(self.folder):
            self._open[name][0].write(np.ascontiguousarray(items).data.cast("B"))

    def mapped(self, name: str, count: int) -> np.ndarray:
        """Ends an array with this number of items, and maps it."""
        file, dtype, rest = self._open.pop(name)
        # The header leaves space for the largest number of items, so its size stays the same.
        with naming_cache(self.folder), file:
            file.seek(0)
            _write_header(file, dtype, (count, *rest))
        return mapped(self.folder, name)

    def discard(self) -> None:
        """Deletes the folder, unless it has its final name by now."""
        for file, _, _ in self._open.values():
            with suppress(OSError):  # of a full disk
                file.close()
        self._unfinished.discard()


@contextmanager
def naming_cache(folder: Path) -> Iterator[None]:
    """Names the cache in errors of writing a folder there."""
    try:
        yield
    except OSError as error:
        # Keeps the subclass of OSError, such as PermissionError.
        raise type(error)(
            f"tokens can't be written to `cache` = {folder.parent}: {error.strerror or error}. "
            "Choose another one, or none"
        ) from error


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)


def mapped(folder: Path, name: str) -> np.ndarray:
    """An array in a folder, mapped from its file."""
    return np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)


class _Flat:
    """An array that grows at its end in host memory; items have a dtype and a shape."""

    def __init__(self, dtype: Any, shape: tuple[int, ...] = ()):
        self.dtype, self.shape = np.dtype(dtype), shape
        self.width = self.dtype.itemsize * math.prod(shape)
        self.bytes = bytearray()

    def extend(self, items: np.ndarray) -> None:
        self.bytes += np.ascontiguousarray(items, self.dtype).tobytes()

    def array(self) -> np.ndarray:
        return np.frombuffer(self.bytes, self.dtype).reshape(-1, *self.shape)


class CorpusBuilder:
    """Builds a corpus: collects documents, and handles documents that don't fit a row.

    For example, with rows of 4 tokens, a document with 10 tokens is an error or skipped ("error",
    "drop"), loses all but its first 4 tokens ("cut"), or becomes pieces of 4, 4 and 2 ("split");
    pieces without a token to learn are dropped. A pair is two parts of one document, with one total
    length; it is never cut.

    The arrays grow in place: bytearrays are extended by an eighth at a time, by remapping pages
    instead of copying where the system can, so tokens are never stored twice.
    """

    def __init__(
        self,
        length: int,
        too_long: WhenTooLong,
        report: Report,
        fault_of: Callable[[Int32[np.ndarray, " n"]], InvalidRow | None],
        num_parts: int = 1,
        files: GrowingFiles | None = None,
    ):
        """Makes an empty corpus.

        Args:
            length: Tokens of a row.
            too_long: Treatment of longer documents.
            report: Report in which left-out documents are recorded.
            fault_of: Returns the fault of unusable tokens, or None.
            num_parts: Parts of each document: 2 if documents are pairs.
            files: Files to which finished documents are written; None for host memory.
        """
        self.files = files
        # Tokens in the files, which precede the ones in memory.
        self._num_written = 0
        self._length = length
        self._too_long = too_long
        self._report = report
        self._fault_of = fault_of
        self.num_parts = num_parts
        self._bounds: list[int] = []
        self._fault: InvalidRow | None = None
        # The arrays with an item per token, by name.
        self._flat = {"tokens": _Flat(np.int32), "learned": _Flat(np.bool_)}
        self._learned = self._flat["learned"].bytes
        self._hash = hashlib.blake2b(digest_size=16)
        self._begin = 0
        self._starts = array("q")
        self._lengths = array("i")
        self._goes_on = bytearray()
        self._documents = array("i")
        self._values: dict[str, list[float]] = {}
        self._num_documents = 0
        self.longest = 0
        # The processor of images, if documents may have some.
        self.processor: ImageProcessor | None = None
        self._images: list[Sequence[Media]] = []

    @property
    def num_tokens(self) -> int:
        """The number of tokens in memory so far."""
        return len(self._learned)

    def extend(
        self,
        tokens: Int32[np.ndarray, " n"],
        learned: Bool[np.ndarray, " n"],
        entries: Mapping[str, Shaped[np.ndarray, "n k"]] = _NO_ENTRIES,
    ) -> None:
        """Adds tokens to the current document.

        Args:
            tokens: The tokens.
            learned: Whether the loss counts each as a label.
            entries: Numbers of each token by name; all documents have the same names and shapes.
        """
        self._fault = self._fault or self._fault_of(tokens)
        self._flat["tokens"].extend(tokens)
        self._flat["learned"].extend(learned)
        for name, numbers in entries.items():
            kept = _Flat(numbers.dtype, numbers.shape[1:])
            self._flat.setdefault(f"{_ENTRIES}{name}", kept).extend(numbers)

    def refuse(self, fault: InvalidRow) -> None:
        """Gives the current document a fault, so that it is left out at its end."""
        self._fault = self._fault or fault

    def check_ids(self, ids: Int32[np.ndarray, "*n"]) -> None:
        """Checks further ids of the current document."""
        self._fault = self._fault or self._fault_of(ids.reshape(-1))

    def end_part(self) -> None:
        """Ends a part of the current document; not called for the last part."""
        self._bounds.append(self.num_tokens)

    def end(
        self,
        origin: RowOrigin,
        values: Mapping[str, float] = _NO_VALUES,
        images: Sequence[Media] = (),
        fault: InvalidRow | None = None,
    ) -> bool:
        """Ends the current document, and keeps it or records why not.

        Args:
            origin: Origin of the document's row.
            values: Numbers of the document by name; all documents have the same names.
            images: The document's images.
            fault: The reason to leave it out, if there is one.

        Returns:
            Whether it is kept.
        """
        begin, size = self._begin, self.num_tokens - self._begin
        self.longest = max(self.longest, size)
        bounds, self._bounds = [begin, *self._bounds], []
        fault, self._fault = self._fault or fault, None
        if fault is not None:
            self._leave_out(origin, fault)
            return False
        # The first token of each part is never a label: nothing precedes it.
        for bound in bounds:
            if bound < self.num_tokens:
                self._learned[bound] = 0
        too_long = size > self._length
        if too_long and self._too_long in ("error", "drop"):
            fault = TooLong(f"longer than `length`={self._length}", f"{size} tokens")
            self._leave_out(origin, fault, self._too_long == "error")
            return False
        if too_long and self._too_long == "cut":
            self._truncate(begin + self._length)
        parts = list(pairwise([*bounds, self.num_tokens]))
        pieces = [piece for part in parts for piece in self._pieces(*part)]
        if len(pieces) < self.num_parts:
            cut = " within `length`" if too_long else ""
            fault = InvalidRow(f"nothing to learn{cut}", f"{size} tokens")
            self._leave_out(origin, fault, self._report.is_strict and not too_long)
            return False
        self._report.num_cut += too_long and self._too_long == "cut"
        # The number of pieces if each had a token to learn.
        every = sum(-(-(end - start) // self._length) for start, end in parts)
        self._report.num_pieces_left_out += every - len(pieces)
        self._report.num_split += too_long and self._too_long == "split"
        self._keep(bounds, pieces, values)
        for image in images:
            self._hash.update(image.digest)
        if self.processor is not None:
            self._images.append(images)
        return True

    def _keep(
        self, bounds: list[int], pieces: list[tuple[int, int, bool]], values: Mapping[str, float]
    ) -> None:
        begin = self._begin
        for start, stop, goes_on in pieces:
            self._starts.append(self._num_written + start)
            self._lengths.append(stop - start)
            self._goes_on.append(goes_on)
            self._documents.append(self._num_documents)
        for kept in self._flat.values():
            # A live view would keep the bytearray from growing.
            with memoryview(kept.bytes) as view, view[kept.width * begin :] as new:
                self._hash.update(new)
        # Equal tokens with different document boundaries are different data.
        for bound in (*bounds[1:], self.num_tokens):
            self._hash.update((self._num_written + bound).to_bytes(8, "little"))
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
            self._hash.update(np.float32(value).tobytes())
        self._num_documents += 1
        self._begin = self.num_tokens
        if self.files is not None and self._begin >= _SPILLED:
            self._write()

    def _write(self) -> None:
        """Moves all tokens to the files."""
        assert self.files is not None
        for name, kept in self._flat.items():
            self.files.append(name, kept.array())
            kept.bytes.clear()
        self._num_written += self._begin
        self._begin = 0

    def finish(self) -> Corpus:
        """Returns the corpus; the builder must not be used afterwards."""
        # The zero after the last token is read as its label, and masked.
        for kept in self._flat.values():
            kept.extend(np.zeros((1, *kept.shape), kept.dtype))
        if self.files is None:
            flat = {name: kept.array() for name, kept in self._flat.items()}
        else:
            self._begin = self.num_tokens
            self._write()
            flat = {name: self.files.mapped(name, self._num_written) for name in self._flat}
        return Corpus(
            tokens=flat.pop("tokens"),
            learned=flat.pop("learned"),
            starts=np.frombuffer(self._starts, np.int64),
            lengths=np.frombuffer(self._lengths, np.int32),
            goes_on=np.frombuffer(self._goes_on, np.bool_),
            documents=np.frombuffer(self._documents, np.int32),
            digest=self._hash.digest(),
            pieces_per_unit=self.num_parts,
            unit_values={
                name: np.array(values, np.bool_ if isinstance(values[0], bool) else np.float32)
                for name, values in self._values.items()
            },
            token_values={name.removeprefix(_ENTRIES): array for name, array in flat.items()},
            images=self._images,
            processor=self.processor,
        )

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        """The pieces of a part that have a token to learn, and whether each continues."""
        pieces = []
        for start in range(begin, end, self._length):
            stop = min(start + self._length, end)
            # The label of a piece's last token is the first token of the next piece.
            if self._learned.find(1, start + 1, min(stop + 1, end)) >= 0:
                pieces.append((start, stop, stop < end))
        return pieces

    def _leave_out(self, origin: RowOrigin, fault: InvalidRow, error: bool | None = None) -> None:
        self._report.leave_out(origin, fault, error)
        self._truncate(self._begin)

    def _truncate(self, num_tokens: int) -> None:
        for kept in self._flat.values():
            del kept.bytes[kept.width * num_tokens :]
