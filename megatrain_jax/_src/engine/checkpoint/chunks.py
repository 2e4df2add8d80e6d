"""Chunks: the pieces in which a checkpoint's arrays are written, verified and read.

Each chunk is contiguous in memory, even if the array is stacked over layers that the store keeps
separately. So a process writes and reads its devices' part as views, without the rest of the array,
and a run on a different number of devices can read its shares from the same chunks.

Example: float32[4, 300, 256], stacked over its first axis, each layer over two devices::

    chunk_of((300, 256), share=150 * 256, itemsize=4)      (150, 256)
    grid = Grid(shape=(4, 300, 256), chunk=(1, 150, 256))
    [(c.number, c.start, c.stop) for c in grid.cells((2,))]    [(4, 0, 38400), (5, 38400, 76800)]
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from megatrain_jax._src.engine.program.layers.sliced_values import (
    Index,
    Range,
    range_of,
    remaining,
    sliced_axes,
)

# Maximum bytes of a chunk; several are written in parallel.
MOST_BYTES = 512 << 20
# Chunks below _LEAST_BYTES are mostly overhead. If a leaf's shares are smaller, or are not whole
# rows, its chunks have about _ODD_BYTES, and ignore where shares end.
_LEAST_BYTES, _ODD_BYTES = 64 << 10, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One chunk of an array, with its position in a slice of the array.

    Attributes:
        number: Number of the chunk among all of the array, in row-major order.
        start: Its first element in the flattened slice.
        stop: The element after its last.
        box: Subscript that selects it in the array.
    """

    number: int
    start: int
    stop: int
    box: tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The chunks of an array.

    Attributes:
        shape: The array's shape.
        chunk: Shape of a chunk; the last ones may be smaller.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def num_cells(self) -> int:
        """The number of all chunks."""
        return math.prod(self.counts)

    def cell(self, number: int) -> Cell:
        """A chunk by its number, with elements counted from 0."""
        at = np.unravel_index(number, self.counts) if self.counts else ()
        box = self._box(tuple(map(int, at)))
        size = math.prod(part.stop - part.start for part in box)
        return Cell(number=number, start=0, stop=size, box=box)

    def boxes(self) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """All chunks: their numbers, and the subscripts that select them in the array."""
        return enumerate(self._box(at) for at in itertools.product(*map(range, self.counts)))

    def divides(self, index: Index) -> bool:
        """Whether each chunk is contiguous in the slice at an index, or outside it."""
        sliced = sliced_axes(index)
        if any(self.chunk[axis] != 1 for axis in sliced):
            return False
        shape, chunk = remaining(self.shape, sliced), remaining(self.chunk, sliced)
        # Before a divided axis, a contiguous chunk spans one position of each axis.
        last = max((a for a, n in enumerate(shape) if chunk[a] < n), default=0)
        return all(c == 1 for c in chunk[:last])

    def cells(self, index: Index) -> Iterator[Cell]:
        """The chunks of the slice at an index, in order; `divides` must hold.

        If the index is a range of axis 0, a chunk may begin before it and end after it. Elements
        are counted from the beginning of the range, so earlier ones have negative numbers.
        """
        rows: list[Sequence[int]] = [range(count) for count in self.counts]
        sliced, start = sliced_axes(index), 0
        if (part := range_of(index)) is not None:
            rows[0] = range(part.start // self.chunk[0], -(-part.stop // self.chunk[0]))
            start = (rows[0][0] * self.chunk[0] - part.start) * math.prod(self.shape[1:])
        else:
            for axis, number in enumerate(index):
                if number is not None and not isinstance(number, Range):
                    rows[axis] = (number,)
        for at in itertools.product(*rows):
            box = self._box(at)
            size = math.prod(part.stop - part.start for part in box)
            number = int(np.ravel_multi_index(at, self.counts)) if at else 0
            of_slice = tuple(at[a] if a in sliced else part for a, part in enumerate(box))
            yield Cell(number=number, start=start, stop=start + size, box=of_slice)
            start += size

    def _box(self, at: Sequence[int]) -> tuple[slice, ...]:
        """The subscript of the chunk at a position among the chunks."""
        rows = zip(at, self.shape, self.chunk, strict=True)
        return tuple(slice(k * c, min((k + 1) * c, n)) for k, n, c in rows)


def grid_of(shape: tuple[int, ...], index: Index, share: int, itemsize: int) -> Grid:
    """The chunks in which an array is written.

    Args:
        shape: The array's shape.
        index: Index of one of its slices in the store; all slices are alike.
        share: Elements of a slice per device.
        itemsize: Bytes per element.
    """
    if (part := range_of(index)) is not None:
        length = part.stop - part.start
        first, *rest = chunk_of((length, *shape[1:]), share, itemsize)
        # Chunks end where ranges end, so that each is written at once.
        first = next(n for n in range(first, 0, -1) if length % n == 0)
        return Grid(shape=tuple(shape), chunk=(first, *rest))
    sliced = sliced_axes(index)
    of_slice = iter(chunk_of(remaining(shape, sliced), share, itemsize))
    chunk = tuple(1 if axis in sliced else next(of_slice) for axis in range(len(shape)))
    return Grid(shape=tuple(shape), chunk=chunk)


def chunk_of(shape: tuple[int, ...], share: int, itemsize: int) -> tuple[int, ...]:
    """The shape of chunks that end where shares end, unless they would be too small or too large.

    Args:
        shape: Shape of a leaf in the store.
        share: Elements of the leaf per device.
        itemsize: Bytes per element.
    """
    size, most = math.prod(shape), MOST_BYTES // itemsize
    inner = size
    for axis, n in enumerate(shape):
        inner //= n
        if inner <= most and share % inner == 0:
            rows = min(n, share // inner) if axis == 0 else math.gcd(n, share // inner)
            count = _divided(rows, most // inner)
            if count * inner * itemsize >= min(_LEAST_BYTES, size * itemsize):
                return (*(1 for _ in shape[:axis]), count, *shape[axis + 1 :])
            break
    return _of_bytes(shape, min(_ODD_BYTES, MOST_BYTES) // itemsize)


def _divided(rows: int, limit: int) -> int:
    """The largest divisor of `rows` up to a limit; the limit if that divisor is far smaller."""
    pieces = -(-rows // limit)
    for count in range(pieces, 2 * pieces + 1):
        if rows % count == 0:
            return rows // count
    return limit


def _of_bytes(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The shape of chunks with at most `limit` elements, ignoring where shares end."""
    inner = math.prod(shape)
    for axis, n in enumerate(shape):
        inner //= n
        if inner <= limit:
            return (*(1 for _ in shape[:axis]), min(n, limit // inner), *shape[axis + 1 :])
    return ()
