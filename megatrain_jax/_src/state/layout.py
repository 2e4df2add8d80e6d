"""Where each leaf lies in a slab: one flat array that holds a group's leaves of one dtype.

One array per group is one transfer, and arrays of one size recycle exactly. Unpacking happens
inside jit, where it is a slice and a reshape.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # elements; a leaf then starts at a multiple of 128 bytes or more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Shapes and offsets of the leaves of one slab. Holds no paths, so that equal blocks share it.

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
        """Bytes of the slab."""
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the slab."""
        return jax.ShapeDtypeStruct((self.size,), jnp.dtype(self.dtype))

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

    def views(self, slab: jax.Array | np.ndarray) -> list[np.ndarray]:
        """The leaves of a slab in host memory, as arrays that share its memory.

        Those of a JAX array are read-only.
        """
        flat = np.asarray(slab)
        return [
            flat[start : start + math.prod(shape)].reshape(shape)
            for shape, start in zip(self.shapes, self.offsets, strict=True)
        ]


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
    """Leaves of several dtypes: one slab for each dtype.

    Attributes:
        layouts: Layout of each slab.
        places: For each leaf its slab and its position there.
    """

    layouts: tuple[Layout, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(layout.num_bytes for layout in self.layouts)

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each slab."""
        return tuple(layout.aval for layout in self.layouts)

    def unpack(self, slabs: Sequence[jax.Array]) -> list[jax.Array]:
        """All leaves, in order; for use inside jit."""
        return [self.layouts[s].unpack(slabs[s], i) for s, i in self.places]

    def pack(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The slabs of all leaves."""
        rows: list[list] = [[] for _ in self.layouts]
        for (s, _), leaf in zip(self.places, leaves, strict=True):
            rows[s].append(leaf)
        return tuple(layout.pack(row) for layout, row in zip(self.layouts, rows, strict=True))

    def views(self, slabs: Sequence[jax.Array]) -> list[np.ndarray]:
        """All leaves of slabs in host memory, without a copy."""
        rows = [layout.views(slab) for layout, slab in zip(self.layouts, slabs, strict=True)]
        return [rows[s][i] for s, i in self.places]


def mixed_layout_of(
    avals: Sequence[jax.ShapeDtypeStruct], mirrored: Sequence[tuple[int, ...]]
) -> MixedLayout:
    """Lays leaves of any dtypes out.

    Leaves in a row whose shapes are `mirrored`, as a moment of each parameter has them, get a slab
    of their own, in which they lie as the parameters do. The others share one for each dtype.
    """
    kinds: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    places, at, shapes = [], 0, [tuple(shape) for shape in mirrored]
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
