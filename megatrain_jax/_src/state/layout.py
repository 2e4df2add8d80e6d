"""Layouts: where each leaf lies in a slab, and the arrays that stand for it at rest and on its way.

A slab is one flat array of a group's leaves of one dtype. One array per group is one transfer, and
arrays of one size recycle exactly. Unpacking happens inside a kernel, where it is a slice and a
reshape.

A layout also says what arrays stand for a slab wherever no kernel computes on it (`at_rest`), as a
narrower dtype or codes with scales would: kernels `decode` what they take and `encode` what they
give, and nobody else looks inside. Today it is the slab itself.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
"""An array of numpy's or JAX's, traced or not."""

ALIGNMENT = 64  # elements; a leaf then starts at a multiple of 128 bytes or more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one slab: shapes and offsets of its leaves.

    It holds no paths, so that equal blocks share it.

    A worked example: leaves of shapes (3, 2) and (5,) in fp32, each aligned to 64 elements::

        layout_of([(3, 2), (5,)], "float32")
        # offsets (0, 64), size 128, 512 bytes: elements 6 to 63 and 69 to 127 are padding
        layout.unpack(slab, 1)      # slab[64:69]
        layout.pack([None, bias])   # zeros, with the bias at 64

    Attributes:
        dtype: Name of the slab's dtype.
        shapes: Shape of each leaf.
        offsets: First element of each leaf.
        size: Elements of the slab, padding included.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab at rest: what is stored and sent."""
        return sum(aval.size * aval.dtype.itemsize for aval in self.at_rest)

    @property
    def at_rest(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that a slab is stored and sent as."""
        return (jax.ShapeDtypeStruct((self.size,), jnp.dtype(self.dtype)),)

    def encode(self, slab: Array) -> tuple[Array, ...]:
        """The arrays at rest that stand for a slab, traced in a kernel or of numpy's."""
        return (slab,)

    def decode(self, arrays: Sequence[Array]) -> Array:
        """The slab that these arrays at rest stand for; see `encode`."""
        (slab,) = arrays
        return slab

    def gradient_aval(self, dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a slab of gradients, in which they lie as the leaves do."""
        return jax.ShapeDtypeStruct((self.size,), jnp.dtype(dtype))

    def unpack(self, slab: jax.Array, i: int) -> jax.Array:
        """Leaf `i` of a slab, in the slab's dtype; for use inside jit."""
        start = self.offsets[i]
        flat = jax.lax.slice_in_dim(slab, start, start + math.prod(self.shapes[i]))
        return flat.reshape(self.shapes[i])

    def pack(self, leaves: Sequence[jax.Array | None]) -> jax.Array:
        """The slab of these leaves, cast to its dtype; None stands for zeros."""
        parts, end = [], 0
        dtype = jnp.dtype(self.dtype)
        for leaf, shape, offset in zip(leaves, self.shapes, self.offsets, strict=True):
            if offset > end:
                parts.append(jnp.zeros(offset - end, dtype))
            size = math.prod(shape)
            parts.append(jnp.zeros(size, dtype) if leaf is None else leaf.reshape(-1).astype(dtype))
            end = offset + size
        if self.size > end:
            parts.append(jnp.zeros(self.size - end, dtype))
        return jnp.concatenate(parts)

    def view(self, slab: np.ndarray, i: int) -> np.ndarray:
        """Leaf `i` of a slab, as an array that shares its memory."""
        shape, start = self.shapes[i], self.offsets[i]
        return slab[start : start + math.prod(shape)].reshape(shape)

    def views(self, slab: np.ndarray) -> list[np.ndarray]:
        """All leaves of a slab; see `view`."""
        return [self.view(slab, i) for i in range(len(self.shapes))]

    def read(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """The leaves of arrays at rest in host memory; read-only, and views where they can be."""
        return self.views(self.decode([np.asarray(x) for x in arrays]))

    def read_leaf(self, arrays: Sequence[jax.Array], i: int) -> np.ndarray:
        """Leaf `i` of arrays at rest in host memory; see `read`."""
        return self.view(self.decode([np.asarray(x) for x in arrays]), i)


def layout_of(shapes: Sequence[tuple[int, ...]], dtype: jax.typing.DTypeLike) -> Layout:
    """Lays leaves of one dtype back to back, each aligned."""
    offsets, end = [], 0
    for shape in shapes:
        offsets.append(end)
        end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return Layout(
        dtype=jnp.dtype(dtype).name,
        shapes=tuple(tuple(s) for s in shapes),
        offsets=tuple(offsets),
        size=end,
    )


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
        slabs = self.decode([np.asarray(x) for x in arrays])
        rows = [layout.views(slab) for layout, slab in zip(self.layouts, slabs, strict=True)]
        return [rows[s][i] for s, i in self.places]


def mixed_layout_of(
    avals: Sequence[jax.ShapeDtypeStruct], mirrored: Sequence[tuple[int, ...]]
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
    layouts = tuple(layout_of(shapes, dtype) for (dtype, _), shapes in kinds.items())
    return MixedLayout(layouts=layouts, places=tuple(places))
