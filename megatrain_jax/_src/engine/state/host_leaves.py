"""Reads and writes single leaves in the host arrays that store their slab.

Example: the first moment of a (6, 50) matrix, leaf 0 of its slab, as 8-bit codes::

    layout.at_rest              int8[384], float32[3]
    runs_of(…, 0, 0)            codes, [(0, int8[300])]: the first 300, as a view
    runs_of(…, 0, 1)            scales, [(0, float32[3])]
    read_leaf(…, 0)             the decoded numbers, float32[6, 50]

Over several devices, each result is joined from all devices' shares. A single process has only its
own devices' shares, as runs of the flat part: with two processes, the second process has the run
`[(150, int8[150])]` of the codes above.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.state.codec import Array
from megatrain_jax._src.engine.state.layout import Layout, MixedLayout

Run = tuple[int, np.ndarray]
"""Consecutive elements of a flat array: the number of the first element, and the elements."""
Held = Array | Mapping[int, Any]
"""An array at rest: whole, or as a process's shards by number, each an array or a `Resting`."""


class Resting(Protocol):
    """A flat array that is read whenever it is converted to a NumPy array; a slice is another."""

    @property
    def size(self) -> int:
        """The number of elements."""
        ...

    def __getitem__(self, part: slice) -> "Resting":
        """A part, which is not read yet."""
        ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads it."""
        ...


def read_leaves(layout: Layout | MixedLayout, arrays: Sequence[Held]) -> list[np.ndarray]:
    """All leaves of arrays at rest; read-only, and views where they can be."""
    if isinstance(layout, MixedLayout):
        pairs = zip(layout.layouts, layout.by_slab(arrays), strict=True)
        rows = [read_leaves(own, held) for own, held in pairs]
        return [rows[slab][i] for slab, i in layout.places]
    return [read_leaf(layout, arrays, i) for i in range(len(layout.shapes))]


def read_leaf(layout: Layout, arrays: Sequence[Held], i: int) -> np.ndarray:
    """Leaf `i` of arrays at rest; see `read_leaves`."""
    # No block of codes reaches from one shard into the next, so each share is decoded by itself.
    codec, dtype = layout.segment_of(i)[0].codec, leaf_dtype(layout, i)
    pieces = [_pieces(layout, arrays, i, p).values() for p in range(len(layout.parts(i)))]
    rows = (tuple(map(np.asarray, share)) for share in zip(*pieces, strict=True))
    return _joined([codec.decode(share, dtype) for share in rows], layout.shapes[i])


def leaf_dtype(layout: Layout, i: int) -> np.dtype:
    """The dtype in which leaf `i` is read."""
    return jnp.dtype(layout.segment_of(i)[0].codec.read_dtype(layout.dtype))


def part_shape(layout: Layout, i: int, p: int) -> tuple[int, ...]:
    """Shape of part `p` of leaf `i`: the leaf's own if it has an element for each number."""
    shape, per = layout.shapes[i], layout.parts(i)[p].per
    return shape if per == 1 else (-(-math.prod(shape) // per),)


def runs_of(layout: Layout, arrays: Sequence[Held], i: int, p: int) -> list[Run]:
    """This process's runs of part `p` of leaf `i`, one per shard, as views or not read yet."""
    size = math.prod(part_shape(layout, i, p))
    share = -(-layout.shares[i] // layout.parts(i)[p].per)
    pieces = _pieces(layout, arrays, i, p).items()
    runs = [(n * share, piece[: max(size - n * share, 0)]) for n, piece in pieces]
    return [run for run in runs if run[1].size]


def cut(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The parts of runs between elements `start` and `stop`, as views."""
    found = [(max(at, start), run[max(start - at, 0) : max(stop - at, 0)]) for at, run in runs]
    return [run for run in found if run[1].size]


def joined_run(runs: Sequence[Run], start: int, stop: int) -> np.ndarray | None:
    """The elements from `start` to `stop`; None if some are missing.

    They are a part of a run if one run has all, and are not read yet if that isn't.

    Args:
        runs: Runs in ascending order.
        start: Number of the first element.
        stop: Number of the element after the last.
    """
    pieces = [piece for _, piece in cut(runs, start, stop)]
    if sum(piece.size for piece in pieces) < stop - start:
        return None
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def write_part(layout: Layout, arrays: Sequence[Held], i: int, p: int, runs: Sequence[Run]) -> None:
    """Writes runs of part `p` of leaf `i` into NumPy arrays, where the arrays have them."""
    for at, own in runs_of(layout, arrays, i, p):
        # A run of NumPy's arrays is a view of them.
        for start, piece in cut(runs, at, at + own.size):
            own[start - at : start - at + piece.size] = piece


def encoded(layout: Layout, leaf: np.ndarray, i: int) -> tuple[np.ndarray, ...]:
    """The parts that encode leaf `i`, in their shapes, rounded to nearest."""
    codec = layout.segment_of(i)[0].codec
    parts = codec.encode_leaf(leaf.reshape(-1))
    shapes = [part_shape(layout, i, p) for p in range(len(parts))]
    return tuple(_joined([x], shape) for x, shape in zip(parts, shapes, strict=True))


def _pieces(layout: Layout, arrays: Sequence[Held], i: int, p: int) -> dict[int, np.ndarray]:
    """Part `p` of leaf `i`: its elements in each shard of arrays at rest, as views."""
    # Offsets are multiples of a block, so they divide by `per` without a remainder.
    segment, number = layout.segment_of(i)
    per = layout.parts(i)[p].per
    start = (layout.offsets[i] - segment.start) // per
    stop = start + -(-layout.shares[i] // per)
    shards = _shards_of(layout.by_segment(arrays)[number][p], layout.num_shards)
    return {n: shard[start:stop] for n, shard in shards.items()}


def _joined(pieces: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """An array joined from its shares, in the order of shards, without padding."""
    flat = np.asarray(pieces[0]) if len(pieces) == 1 else np.concatenate(pieces)
    return flat[: math.prod(shape)].reshape(shape)


def _shards_of(array: Held, num_shards: int) -> dict[int, np.ndarray]:
    """The shards of an array in host memory, in the order of devices and without copies."""
    if isinstance(array, Mapping):
        return dict(sorted(array.items()))
    if isinstance(array, np.ndarray) or num_shards == 1:
        return dict(enumerate(np.asarray(array).reshape(num_shards, -1)))
    return {n: np.asarray(shard) for n, shard in shards_here(array, num_shards).items()}


def shards_here(array: jax.Array, num_shards: int) -> dict[int, jax.Array]:
    """This process's shards of an array, divided along its first axis, by number, in order."""
    size = max(1, array.shape[0] // num_shards)
    shards = {(s.index[0].start or 0) // size: s.data for s in array.addressable_shards}
    return {n: shards[n] for n in sorted(shards)}
