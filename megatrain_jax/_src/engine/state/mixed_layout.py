"""Layouts of leaves with several dtypes, such as optimizer state: a sequence of slabs."""

import dataclasses
from collections.abc import Collection, Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.state.codec import Array, Part, Plain
from megatrain_jax._src.engine.state.draws import Draw
from megatrain_jax._src.engine.state.layout import PLAIN, Layout
from megatrain_jax._src.engine.state.offsets import layout_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedLayout:
    """The layout of leaves with several dtypes: one or more slabs, with all their arrays at rest.

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

    @property
    def draws(self) -> bool:
        """Whether encoding an update draws random bits."""
        return any(layout.draws for layout in self.layouts)

    def encode(
        self, slabs: Sequence[Array], draws: Sequence[Draw | None] | None = None
    ) -> tuple[Array, ...]:
        """The arrays at rest of all slabs; `draws` has one entry per slab. See `Layout.encode`."""
        draws = [None] * len(self.layouts) if draws is None else draws
        rows = zip(self.layouts, slabs, draws, strict=True)
        return tuple(x for layout, slab, draw in rows for x in layout.encode(slab, draw))

    def decode(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The slabs decoded from their arrays at rest; see `Layout.decode`."""
        rows = zip(self.layouts, self.by_slab(arrays), strict=True)
        return tuple(layout.decode(own) for layout, own in rows)

    def decode_segments(self, arrays: Sequence[Array]) -> tuple[tuple[Array, ...], ...]:
        """The segments of each slab, decoded; see `Layout.decode_segments`."""
        rows = zip(self.layouts, self.by_slab(arrays), strict=True)
        return tuple(layout.decode_segments(own) for layout, own in rows)

    def by_slab(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The arrays at rest of each slab."""
        row = iter(arrays)
        return [tuple(islice(row, len(layout.at_rest))) for layout in self.layouts]

    def parts(self, i: int) -> tuple[Part, ...]:
        """The arrays at rest that encode leaf `i`."""
        slab, at = self.places[i]
        return self.layouts[slab].parts(at)

    def unpack(self, slabs: Sequence[jax.Array]) -> list[jax.Array]:
        """All leaves, in order; for use inside jit."""
        return [self.layouts[s].unpack(slabs[s], i) for s, i in self.places]

    def pack(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The slabs of all leaves."""
        rows: list[list] = [[] for _ in self.layouts]
        for (s, _), leaf in zip(self.places, leaves, strict=True):
            rows[s].append(leaf)
        return tuple(layout.pack(row) for layout, row in zip(self.layouts, rows, strict=True))


def mixed_layout_of(
    avals: Sequence[jax.ShapeDtypeStruct],
    mirrored: Sequence[tuple[int, ...]],
    num_shards: int = 1,
    codecs: Sequence[Plain] | None = None,
    order: Sequence[int] | None = None,
    unit: int = 1,
    apart: Collection[int] = (),
) -> MixedLayout:
    """Lays out leaves of any dtypes: moments like the masters, the rest of the state together.

    Consecutive leaves with the shapes in `mirrored`, such as one moment of all parameters, get
    their own slab, with the same offsets as the parameters. The remaining leaves share one slab per
    dtype.

    Example: AdamW's state for parameters of shapes (3, 2) and (5,), given as `mirrored`::

        leaf     count   mu 0     mu 1   nu 0     nu 1
        shape    ()      (3, 2)   (5,)   (3, 2)   (5,)
        place    (0, 0)  (1, 0)   (1, 1) (2, 0)   (2, 1)     # slabs: int32[64], fp32[128] twice

    Args:
        avals: Shape and dtype of each leaf.
        mirrored: Shapes of the parameters, in the order of their slab.
        num_shards: Number of equal parts that each slab is divided into.
        codecs: Codec of each leaf; None for plain ones.
        order: The order of the parameters in their slab; see `layout_of`.
        unit: Number of elements that are encoded together; see `layout_of`.
        apart: Parameters that have their own segments in their slab; see `layout_of`.
    """
    codecs = codecs or [PLAIN] * len(avals)
    kinds: dict[tuple[str, int], list[int]] = {}
    places = []
    for start, count in rows_like(avals, mirrored):
        for i in range(start, start + max(count, 1)):
            # A row's start identifies its slab; -1 is the slab of the remaining leaves.
            kind = jnp.dtype(avals[i].dtype).name, start if count else -1
            rows = kinds.setdefault(kind, [])
            places.append((list(kinds).index(kind), len(rows)))
            rows.append(i)
    layouts = tuple(
        layout_of(
            [tuple(avals[i].shape) for i in rows],
            dtype,
            num_shards,
            [codecs[i] for i in rows],
            # In the masters' order, so that an update can compute on whole slabs.
            order if start >= 0 else None,
            unit,
            apart if start >= 0 else (),
        )
        for (dtype, start), rows in kinds.items()
    )
    return MixedLayout(layouts=layouts, places=tuple(places))


def rows_like(
    avals: Sequence[jax.ShapeDtypeStruct], mirrored: Sequence[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Finds rows of consecutive leaves that have the parameters' shapes and one dtype.

    Returns:
        The first position of each row and the number of its leaves; 0 for a leaf outside all rows.
    """
    found, at, shapes = [], 0, [tuple(shape) for shape in mirrored]
    while at < len(avals):
        row = avals[at : at + len(shapes)]
        alike = [tuple(a.shape) for a in row] == shapes and len({a.dtype for a in row}) == 1
        found.append((at, len(row) if alike else 0))
        at += found[-1][1] or 1
    return found
