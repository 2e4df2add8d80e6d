"""Layouts: where each leaf lies in a slab, and the arrays that stand for it at rest and on its way.

A slab is one flat array of a group's leaves of one dtype. One array per group is one transfer, and
arrays of one size recycle exactly. Unpacking happens inside a kernel, where it is a slice and a
reshape.

Over several devices a slab is divided evenly, and so is each leaf in it: a device's shard holds its
share of every leaf, so that updates need nobody else's.

A layout also says what arrays stand for a slab wherever no kernel computes on it (`at_rest`), as a
narrower dtype or codes with scales would: kernels `decode` what they take and `encode` what they
give, and nobody else looks inside. Today it is the slab itself.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
"""An array of numpy's or JAX's, traced or not."""

Spread = Callable[[jax.Array], jax.Array]
"""Lays an array over the devices in some way, inside jit."""

ALIGNMENT = 64  # elements; a leaf then starts at a multiple of 128 bytes or more
# Most padding of a leaf's shares, of its size.
_PADDING = 1 / 16


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one slab: shapes and offsets of its leaves.

    It holds no paths, so that equal blocks share it.

    A worked example: leaves of shapes (3, 2) and (5,) in fp32, each aligned to 64 elements::

        layout_of([(3, 2), (5,)], "float32")
        # offsets (0, 64), size 128, 512 bytes: elements 6 to 63 and 69 to 127 are padding
        layout.unpack(slab, 1)      # slab[64:69]
        layout.pack([None, bias])   # zeros, with the bias at 64

    and over two devices, each with two of four rows and three of five elements::

        layout_of([(4, 2), (5,)], "float32", num_shards=2)
        # shares (4, 3), offsets (0, 64), size 256: slab[:128] is the first device's shard
        layout.unpack(slab, 1)      # slab[64:67] and slab[192:194]; slab[194] is padding

    Attributes:
        dtype: Name of the slab's dtype.
        shapes: Shape of each leaf.
        shares: Elements of each leaf in every shard; the last shards' may be padding.
        offsets: First element of each leaf in every shard.
        size: Elements of the slab, padding included.
        num_shards: Number of equal parts that the slab is divided into, one a device.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    num_shards: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab at rest, all shards together: what is stored and sent."""
        return sum(aval.size * aval.dtype.itemsize for aval in self.at_rest)

    @property
    def at_rest(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that a slab is stored and sent as."""
        return (jax.ShapeDtypeStruct((self.size,), jnp.dtype(self.dtype)),)

    def encode(self, slab: Array) -> tuple[Array, ...]:
        """The arrays at rest that stand for a slab or a shard, traced in a kernel or of numpy's."""
        return (slab,)

    def decode(self, arrays: Sequence[Array]) -> Array:
        """The slab or shard that these arrays at rest stand for; see `encode`."""
        (slab,) = arrays
        return slab

    def gradient_aval(self, dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a slab of gradients, in which they lie as the leaves do."""
        return jax.ShapeDtypeStruct((self.size,), jnp.dtype(dtype))

    def unpack(self, slab: jax.Array, i: int) -> jax.Array:
        """Leaf `i` of a slab, in the slab's dtype; for use inside jit."""
        return self._leaf(slab.reshape(*self._rows, -1), i, self.offsets[i])

    def unpack_whole(
        self, slab: jax.Array, leaves: Sequence[int], dtype: jax.typing.DTypeLike, whole: Spread
    ) -> list[jax.Array]:
        """Some leaves of a slab, whole on every device; for use inside jit.

        Cast first, so that devices send each other no more than is computed on, and all together,
        so that they do it once.

        Args:
            slab: The slab.
            leaves: Which leaves.
            dtype: Dtype of the leaves.
            whole: Makes an array whole on every device.
        """
        if self.num_shards == 1:
            return [self.unpack(slab, i).astype(dtype) for i in leaves]
        rows = slab.astype(dtype).reshape(self.num_shards, -1)
        parts = [rows[:, self.offsets[i] : self.offsets[i] + self.shares[i]] for i in leaves]
        starts = accumulate((part.shape[1] for part in parts), initial=0)
        gathered = whole(jnp.concatenate(parts, axis=1))
        return [self._leaf(gathered, i, at) for i, at in zip(leaves, starts, strict=False)]

    def pack(self, leaves: Sequence[jax.Array | None], spread: Spread = _as_it_is) -> jax.Array:
        """The slab of these leaves, cast to its dtype; None stands for zeros.

        Args:
            leaves: The leaves.
            spread: Divides an array over the devices along its first axis.
        """
        shards, end = self._rows, 0
        dtype = jnp.dtype(self.dtype)
        parts = []
        rows = zip(leaves, self.shapes, self.shares, self.offsets, strict=True)
        for leaf, shape, share, offset in rows:
            if offset > end:
                parts.append(jnp.zeros((*shards, offset - end), dtype))
            if leaf is None:
                parts.append(jnp.zeros((*shards, share), dtype))
            else:
                flat = leaf.reshape(-1).astype(dtype)
                if missing := self.num_shards * share - math.prod(shape):
                    flat = jnp.pad(flat, (0, missing))
                parts.append(spread(flat.reshape(*shards, share)))
            end = offset + share
        if left := self.size // self.num_shards - end:
            parts.append(jnp.zeros((*shards, left), dtype))
        return jnp.concatenate(parts, axis=-1).reshape(-1)

    def read(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """The leaves of arrays at rest in host memory; read-only, and views where they can be."""
        shards = self._shards(arrays)
        return [self._read(shards, i) for i in range(len(self.shapes))]

    def read_leaf(self, arrays: Sequence[Array], i: int) -> np.ndarray:
        """Leaf `i` of arrays at rest in host memory; see `read`."""
        return self._read(self._shards(arrays), i)

    def fill(self, slab: np.ndarray, i: int, leaf: np.ndarray) -> None:
        """Writes leaf `i` into a slab of numpy's."""
        start, share = self.offsets[i], self.shares[i]
        for shard, part in zip(
            slab.reshape(self.num_shards, -1), _cut(leaf.reshape(-1), share), strict=False
        ):
            shard[start : start + part.size] = part

    @property
    def _rows(self) -> tuple[int, ...]:
        """Leading axes of a slab whose shards are rows; one shard needs none."""
        return (self.num_shards,) if self.num_shards > 1 else ()

    def _leaf(self, rows: Array, i: int, start: int) -> Array:
        """Leaf `i`, whose shares begin at `start` of each row."""
        shape, share = self.shapes[i], self.shares[i]
        flat = jax.lax.slice_in_dim(rows, start, start + share, axis=-1).reshape(-1)
        return flat[: math.prod(shape)].reshape(shape)

    def _shards(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """The shards of a slab, in order."""
        rows = (_shards_of(array, self.num_shards) for array in arrays)
        return [self.decode(shard) for shard in zip(*rows, strict=True)]

    def _read(self, shards: Sequence[np.ndarray], i: int) -> np.ndarray:
        shape, start = self.shapes[i], self.offsets[i]
        parts = [shard[start : start + self.shares[i]] for shard in shards]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return flat[: math.prod(shape)].reshape(shape)


def _shards_of(array: Array, num_shards: int) -> list[np.ndarray]:
    """What each device has of an array in host memory, in order and without copies."""
    if isinstance(array, np.ndarray) or num_shards == 1:
        return list(np.asarray(array).reshape(num_shards, -1))
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def _cut(flat: np.ndarray, share: int) -> list[np.ndarray]:
    return [flat[start : start + share] for start in range(0, flat.size, max(share, 1))]


def layout_of(
    shapes: Sequence[tuple[int, ...]], dtype: jax.typing.DTypeLike, num_shards: int = 1
) -> Layout:
    """Lays leaves of one dtype back to back, each aligned, in each of so many shards."""
    shares = tuple(_share(tuple(shape), num_shards) for shape in shapes)
    offsets, end = [], 0
    for share in shares:
        offsets.append(end)
        end += -(-share // ALIGNMENT) * ALIGNMENT
    return Layout(
        dtype=jnp.dtype(dtype).name,
        shapes=tuple(tuple(s) for s in shapes),
        shares=shares,
        offsets=tuple(offsets),
        size=end * num_shards,
        num_shards=num_shards,
    )


def _share(shape: tuple[int, ...], num_shards: int) -> int:
    """Elements of a leaf in each of so many shards.

    They are whole rows along its first axis, so that a shard of the leaf is a box of it. Where too
    much of that would be padding, more leading axes count as one: (8, 3, 64) over 4 shards gives
    each two rows of 192 elements, but (3, 3, 64) would have three rows for four shards, and nine of
    64 elements are no better; so each gets 144 of its 576 elements.
    """
    size = inner = math.prod(shape)
    share = size
    for axis in shape:
        inner //= max(axis, 1)
        share = -(-size // (inner * num_shards)) * inner if inner else 0
        if share * num_shards <= size * (1 + _PADDING):
            break
    return share


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedLayout:
    """The layout of leaves of several dtypes: several slabs, whose arrays at rest stand in a row.

    Attributes:
        layouts: Layout of each slab.
        places: For each leaf, the number of its slab and its position there.
    """

    layouts: tuple[Layout, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs at rest."""
        return sum(layout.num_bytes for layout in self.layouts)

    @property
    def at_rest(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays at rest, slab by slab."""
        return tuple(aval for layout in self.layouts for aval in layout.at_rest)

    def encode(self, slabs: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays at rest of all slabs; see `Layout.encode`."""
        rows = zip(self.layouts, slabs, strict=True)
        return tuple(x for layout, slab in rows for x in layout.encode(slab))

    def decode(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The slabs that these arrays at rest stand for; see `Layout.decode`."""
        rows = zip(self.layouts, self.by_slab(arrays), strict=True)
        return tuple(layout.decode(own) for layout, own in rows)

    def by_slab(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The arrays at rest of each slab."""
        row = iter(arrays)
        return [tuple(islice(row, len(layout.at_rest))) for layout in self.layouts]

    def unpack(self, slabs: Sequence[jax.Array]) -> list[jax.Array]:
        """All leaves, in order; for use inside jit."""
        return [self.layouts[s].unpack(slabs[s], i) for s, i in self.places]

    def pack(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The slabs of all leaves."""
        rows: list[list] = [[] for _ in self.layouts]
        for (s, _), leaf in zip(self.places, leaves, strict=True):
            rows[s].append(leaf)
        return tuple(layout.pack(row) for layout, row in zip(self.layouts, rows, strict=True))

    def read(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """All leaves of arrays at rest in host memory; see `Layout.read`."""
        pairs = zip(self.layouts, self.by_slab(arrays), strict=True)
        rows = [layout.read(own) for layout, own in pairs]
        return [rows[s][i] for s, i in self.places]


def mixed_layout_of(
    avals: Sequence[jax.ShapeDtypeStruct],
    mirrored: Sequence[tuple[int, ...]],
    num_shards: int = 1,
) -> MixedLayout:
    """Lays leaves of any dtypes out: AdamW's moments as the masters lie, other state together.

    Leaves in a row whose shapes are `mirrored`, as a moment of each parameter has them, get a slab
    of their own, in which they lie as the parameters do. The others share one for each dtype.

    A worked example: AdamW's state for parameters of shapes (3, 2) and (5,), which are `mirrored`::

        leaf     count   mu 0     mu 1   nu 0     nu 1
        shape    ()      (3, 2)   (5,)   (3, 2)   (5,)
        place    (0, 0)  (1, 0)   (1, 1) (2, 0)   (2, 1)     # slabs: int32[64], fp32[128] twice

    Args:
        avals: Shape and dtype of each leaf.
        mirrored: Shapes of the parameters, in the order of their slab.
        num_shards: Number of equal parts that each slab is divided into.
    """
    kinds: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    places, at, shapes = [], 0, [tuple(shape) for shape in mirrored]
    # A moment that lies as the masters do can be updated without taking slabs apart.
    while at < len(avals):
        row = avals[at : at + len(shapes)]
        alike = [tuple(a.shape) for a in row] == shapes and len({a.dtype for a in row}) == 1
        row = row if alike else row[:1]
        for aval in row:
            kind = jnp.dtype(aval.dtype).name, at if alike else -1
            rows = kinds.setdefault(kind, [])
            places.append((list(kinds).index(kind), len(rows)))
            rows.append(tuple(aval.shape))
        at += len(row)
    layouts = tuple(layout_of(shapes, dtype, num_shards) for (dtype, _), shapes in kinds.items())
    return MixedLayout(layouts=layouts, places=tuple(places))
