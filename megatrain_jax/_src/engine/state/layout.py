"""Layouts: the place of each leaf in a slab, and the arrays that hold a slab at rest.

A slab is one flat array of a group's leaves with one dtype. One array per group needs one transfer,
and freed arrays of equal size are reused exactly. Unpacking happens inside a kernel, where it is a
slice and a reshape.

Over several devices, a slab and each leaf in it are divided evenly. A device's shard has a share of
every leaf, so that an update needs no data from its peers.

A layout also defines the arrays that store a slab between kernels (`at_rest`): the slab itself, or
the output of its segments' codecs, such as a narrower dtype. Kernels `decode` their inputs and
`encode` their outputs; the rest of the program treats the arrays as opaque.

Example: leaves of shapes (3, 2), (5,) and (70,) over two shards, aligned to 64 elements::

    shares     3, 3 and 35 elements of each shard; the second leaf has one element of padding
    offsets    0, 64 and 128, in both shards
    size       2 * 192

Leaves with several dtypes, such as optimizer state, have a sequence of slabs.

Leaves that are copied together form a group, with a layout of its masters and its state.

Example: leaves 0 to 3 are an embedding, one matrix in each of two blocks, and a norm. The stages
read leaves [0], [1], [2] and, in a head tied to the embedding, [3, 0]. Groups are numbered in the
order of their first use::

    names  = ("embed", "layers.0", "layers.1", "norm")
    leaves = ((0,), (1,), (2,), (3,))

The embedding is read by stages 0 and 3, the norm by stage 3 alone: they are two groups, so that
stage 0 doesn't fetch the norm.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import accumulate, groupby, islice

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.program.jaxpr import num_bytes
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.state.codec import Array, Draw, Part, Plain, derived_draw, draw_of

Spread = Callable[[jax.Array], jax.Array]
"""A function that applies a sharding to an array, inside jit."""
Leaves = Sequence[jax.Array | None]

PLAIN = Plain()
ALIGNMENT = 64  # elements; a leaf then starts at a multiple of 128 bytes or more


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of each shard of a slab with its own arrays at rest, and one codec for its leaves.

    Leaves with one codec share a segment, unless they are large and apart; see `large_leaves`.

    Attributes:
        codec: The codec of its leaves.
        start: Its first element in every shard.
        stop: The element after its last.
    """

    codec: Plain
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one slab: shapes and offsets of its leaves.

    It has no paths, so that equal blocks share it.

    Example: leaves of shapes (3, 2) and (5,) in fp32, each aligned to 64 elements::

        layout_of([(3, 2), (5,)], "float32")
        # offsets (0, 64), size 128, 512 bytes: elements 6 to 63 and 69 to 127 are padding
        layout.pack([None, bias])   # zeros, with the bias at 64, in elements 64 to 68

    Over two devices, each device has two of four rows and three of five elements::

        layout_of([(4, 2), (5,)], "float32", num_shards=2)
        # shares (4, 3), offsets (0, 64), size 256: slab[:128] is the first device's shard, and the
        # second leaf is slab[64:67] and slab[192:194]; slab[194] is padding

    Attributes:
        dtype: Name of the compute dtype of slabs.
        shapes: Shape of each leaf.
        shares: Elements of each leaf in every shard; in the last shards, some may be padding.
        offsets: First element of each leaf in every shard.
        size: Elements of the slab, padding included.
        num_shards: Number of equal parts that the slab is divided into, one per device.
        segments: The ranges of its shards with one codec each, in order.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    num_shards: int = 1
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab as stored and sent, over all shards."""
        return sum(aval.size * aval.dtype.itemsize for aval in self.at_rest)

    @functools.cached_property
    def at_rest(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that store a slab."""
        return tuple(
            jax.ShapeDtypeStruct(
                ((segment.stop - segment.start) // part.per * self.num_shards,),
                jnp.dtype(part.dtype),
            )
            for segment in self.segments
            for part in segment.codec.parts(self.dtype)
        )

    @property
    def draws(self) -> bool:
        """Whether encoding an update draws random bits."""
        return any(segment.codec.draws for segment in self.segments)

    def encode(self, slab: Array, draw: Draw | None = None) -> tuple[Array, ...]:
        """The arrays at rest that encode a slab; for use inside jit.

        Args:
            slab: The slab.
            draw: Draw of the random bits for rounding; None rounds to nearest.
        """
        # One row per shard. Segments are ranges of every shard, so each device encodes its own row.
        rows = slab.reshape(self.num_shards, -1)
        found: list[Array] = []
        for number, segment in enumerate(self.segments):
            if segment.codec.by_leaf:
                found += self._encode_leaves(rows, segment)
                continue
            columns = rows[:, segment.start : segment.stop]
            found += self.encode_columns(columns, number, 0, draw)
        return tuple(found)

    def _encode_leaves(self, rows: Array, segment: Segment) -> list[Array]:
        """The arrays at rest of a segment with leaves that are encoded as a whole."""
        parts = segment.codec.parts(self.dtype)
        leaves = [i for i, at in enumerate(self.offsets) if segment.start <= at < segment.stop]
        leaves.sort(key=self.offsets.__getitem__)
        starts = [self.offsets[i] for i in leaves]
        columns: list[list[Array]] = [[] for _ in parts]
        for i, start, end in zip(leaves, starts, [*starts[1:], segment.stop], strict=True):
            leaf = self._leaf(rows, i, start).reshape(-1)
            for row, part, x in zip(columns, parts, segment.codec.encode_leaf(leaf), strict=True):
                x = jnp.pad(x, (0, (end - start) * self.num_shards // part.per - x.size))
                row.append(x.reshape(self.num_shards, -1))
        return [jnp.concatenate(row, axis=1).reshape(-1) for row in columns]

    def encode_columns(
        self, rows: jax.Array, number: int, start: int | jax.Array, draw: Draw | None
    ) -> tuple[Array, ...]:
        """The arrays at rest of a part of a segment; for use inside jit.

        Args:
            rows: The part's numbers, (shards, columns).
            number: Number of the segment.
            start: The part's first column within the segment; a multiple of its codec's block.
            draw: Draw of the slab's random bits for rounding; None rounds to nearest.
        """
        segment, draws = self.segments[number], None
        if segment.codec.block > 1:
            shard, at = (jax.lax.broadcasted_iota(jnp.int32, rows.shape, axis) for axis in (0, 1))
            rows = self.without_padding(rows, segment, shard, at + start)
        if draw is not None:
            # Each run of segments with one codec numbers its elements from 0, so each run needs its
            # own draw. The bits don't depend on the segments that a run is divided into.
            runs = [list(run) for _, run in groupby(self.segments, key=lambda s: s.codec)]
            at, run = next((n, run) for n, run in enumerate(runs) if segment in run)
            own = draw if len(runs) == 1 else derived_draw(draw, at)
            shard, at = (jax.lax.broadcasted_iota(jnp.uint32, rows.shape, axis) for axis in (0, 1))
            first = segment.start - run[0].start + jnp.asarray(start, jnp.uint32)
            numbers = shard * jnp.uint32((run[-1].stop - run[0].start) & 0xFFFFFFFF) + first + at
            draws = own, numbers.reshape(-1)
        return segment.codec.encode(rows.reshape(-1), draws)

    def decode(self, arrays: Sequence[Array], dtype: jax.typing.DTypeLike | None = None) -> Array:
        """The slab decoded from its arrays at rest; for use inside jit.

        Args:
            arrays: The arrays at rest.
            dtype: Dtype of the slab; None for the layout's.
        """
        dtype = self.dtype if dtype is None else dtype
        return self.joined([x.astype(dtype) for x in self.decode_segments(arrays, dtype)])

    def decode_segments(
        self, arrays: Sequence[Array], dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[Array, ...]:
        """The segments decoded from a slab's arrays at rest, one array each; see `decode`."""
        dtype = self.dtype if dtype is None else dtype
        # A plain segment is not cast here, because `unpack_whole` casts leaf by leaf.
        return tuple(
            own[0] if type(segment.codec) is Plain else segment.codec.decode(own, dtype)
            for segment, own in zip(self.segments, self.by_segment(arrays), strict=True)
        )

    def parts(self, i: int) -> tuple[Part, ...]:
        """The arrays at rest that encode leaf `i`."""
        return self.segment_of(i)[0].codec.parts(self.dtype)

    def gradient_avals(self, dtype: jax.typing.DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of a gradient: an array per segment, with the leaves' offsets."""
        sizes = (self.num_shards * (s.stop - s.start) for s in self.segments)
        return tuple(jax.ShapeDtypeStruct((size,), jnp.dtype(dtype)) for size in sizes)

    def joined(self, segments: Sequence[jax.Array]) -> jax.Array:
        """The slab of these segments, such as a gradient's; for use inside jit."""
        rows = [x.reshape(self.num_shards, -1) for x in segments]
        return jnp.concatenate(rows, axis=1).reshape(-1) if rows[1:] else segments[0]

    def unpack_from(self, segments: Sequence[jax.Array], i: int) -> jax.Array:
        """Leaf `i` of a slab that is given by segment, such as a gradient; for use inside jit."""
        array, at = self.place_of(i, segments)
        return self._leaf(array.reshape(*self._rows, -1), i, at)

    def place_of(self, i: int, segments: Sequence[jax.Array]) -> tuple[jax.Array, int]:
        """The array, of a slab given by segment, that has leaf `i`, and the leaf's first column."""
        segment, number = self.segment_of(i)
        return segments[number], self.offsets[i] - segment.start

    def unpack_whole(
        self,
        arrays: Sequence[jax.Array],
        leaves: Sequence[int],
        dtype: jax.typing.DTypeLike,
        whole: Spread,
    ) -> list[jax.Array]:
        """Some leaves of a slab, whole on every device; for use inside jit.

        The slab is cast first, so that devices exchange the narrower dtype, and the leaves are
        gathered together, in one collective.

        Args:
            arrays: The slab's arrays at rest.
            leaves: Numbers of the leaves.
            dtype: Dtype of the leaves.
            whole: Makes an array whole on every device.
        """
        if self.num_shards == 1:
            segments = self.decode_segments(arrays, dtype)
            return [self.unpack_from(segments, i).astype(dtype) for i in leaves]
        rows = self.decode(arrays, dtype).reshape(self.num_shards, -1)
        parts = [rows[:, self.offsets[i] : self.offsets[i] + self.shares[i]] for i in leaves]
        starts = accumulate((part.shape[1] for part in parts), initial=0)
        gathered = whole(jnp.concatenate(parts, axis=1))
        return [self._leaf(gathered, i, at) for i, at in zip(leaves, starts, strict=False)]

    def pack(self, leaves: Leaves) -> jax.Array:
        """The slab of these leaves, cast to its dtype; None stands for zeros."""
        return self._packed(leaves, _as_it_is, None, 0, self.size // self.num_shards)

    def pack_segments(
        self, leaves: Leaves, spread: Spread = _as_it_is, order: Sequence[int] | None = None
    ) -> tuple[jax.Array, ...]:
        """The segments of the slab of these leaves, one array each; see `pack`.

        Args:
            leaves: The leaves.
            spread: Divides an array over the devices along its first axis.
            order: Numbers of the leaves in the order of writing; None for the order of offsets. The
                best order is that of their computation, because a write waits for all earlier ones.
        """
        return tuple(self._packed(leaves, spread, order, s.start, s.stop) for s in self.segments)

    def _packed(
        self, leaves: Leaves, spread: Spread, order: Sequence[int] | None, start: int, stop: int
    ) -> jax.Array:
        """The columns from `start` to `stop` of the slab of these leaves; see `pack_segments`."""
        slab, size = None, stop - start
        # Leaves are written one by one, as copies. In a concatenation, a GPU computes the source of
        # each element, which takes several times as long.
        for offset, part in self._parts(leaves, spread, start, stop, order):
            if slab is None:
                # Padding is zero, so that it does not change reductions over whole slabs.
                behind = size - offset - part.shape[-1]
                slab = jnp.pad(part, [(0, 0)] * len(self._rows) + [(offset, behind)])
            else:
                slab = jax.lax.dynamic_update_slice_in_dim(slab, part, offset, axis=-1)
        return jnp.zeros(size * self.num_shards, self.dtype) if slab is None else slab.reshape(-1)

    def add(
        self, segments: Sequence[jax.Array], leaves: Leaves, spread: Spread = _as_it_is
    ) -> tuple[jax.Array, ...]:
        """The sums of a slab's segments and the segments of the slab of these leaves."""
        return tuple(
            x + self._joined(leaves, spread, segment.start, segment.stop)
            for x, segment in zip(segments, self.segments, strict=True)
        )

    def _joined(self, leaves: Leaves, spread: Spread, start: int, stop: int) -> jax.Array:
        """The same columns as of `_packed`, as an operand of a sum."""
        rows, end = [], 0
        for offset, part in (*self._parts(leaves, spread, start, stop), (stop - start, None)):
            if offset > end:
                rows.append(jnp.zeros((*self._rows, offset - end), self.dtype))
            if part is not None:
                rows.append(part)
                end = offset + part.shape[-1]
        # XLA fuses a concatenation into the sum, so that it allocates no array.
        return jnp.concatenate(rows, axis=-1).reshape(-1) if rows[1:] else rows[0].reshape(-1)

    def _parts(
        self,
        leaves: Leaves,
        spread: Spread,
        start: int,
        stop: int,
        order: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, jax.Array]]:
        """The leaves between two columns as rows of shards, by `order`, each with its column."""
        if order is None:  # by offset: leaves are placed by codec, not by number
            order = sorted(range(len(leaves)), key=lambda i: (self.offsets[i], self.shares[i]))
        for i in order:
            leaf, share, offset = leaves[i], self.shares[i], self.offsets[i]
            if leaf is not None and start <= offset < stop:
                flat = leaf.reshape(-1).astype(self.dtype)
                if missing := self.num_shards * share - math.prod(self.shapes[i]):
                    flat = jnp.pad(flat, (0, missing))
                # Each leaf is divided where its gradient is computed. So a device sums only its own
                # share, and needs no whole slab.
                yield offset - start, spread(flat.reshape(*self._rows, share))

    @property
    def _rows(self) -> tuple[int, ...]:
        """Leading axes of a slab with its shards as rows; one shard needs none."""
        return (self.num_shards,) if self.num_shards > 1 else ()

    def _leaf(self, rows: Array, i: int, start: int) -> Array:
        """Leaf `i`, with shares that begin at column `start` of each row."""
        shape, share = self.shapes[i], self.shares[i]
        flat = jax.lax.slice_in_dim(rows, start, start + share, axis=-1).reshape(-1)
        return flat[: math.prod(shape)].reshape(shape)

    def by_segment(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The arrays at rest of each segment."""
        row = iter(arrays)
        # The order of `at_rest`: for each segment, the parts of its codec.
        return [tuple(islice(row, len(s.codec.parts(self.dtype)))) for s in self.segments]

    def segment_of(self, i: int) -> tuple[Segment, int]:
        """The segment that contains leaf `i`, and the segment's number."""
        number = self.segment_at(self.offsets[i])
        return self.segments[number], number

    def segment_at(self, column: int) -> int:
        """The number of the segment that contains a column of each shard."""
        return next(n for n, s in enumerate(self.segments) if column < s.stop)

    def without_padding(
        self, rows: jax.Array, segment: Segment, shard: jax.Array | int, at: jax.Array
    ) -> jax.Array:
        """Elements of a segment with padding set to zero, so that it does not affect scales.

        Args:
            rows: The elements, of any shape.
            segment: The segment.
            shard: The shard of each element.
            at: The column of each element within the segment.
        """
        for offset, share, shape in zip(self.offsets, self.shares, self.shapes, strict=True):
            size, block = math.prod(shape), segment.codec.block
            # Only padding in the same block as a leaf affects a scale that is read. Blocks behind
            # the leaf's last block are never read.
            whole = share * self.num_shards == size and share % block == 0
            if segment.start <= offset < segment.stop and not whole:
                inside = at - (offset - segment.start)
                is_leaf = (inside >= 0) & (inside < -(-share // block) * block)
                is_padding = (inside >= share) | (shard * share + inside >= size)
                rows = jnp.where(is_leaf & is_padding, 0, rows)
        return rows


# ---- orders, shares and offsets

# The maximum padding that a leaf's shares may add, as a fraction of its size.
_PADDING = 1 / 16
# A leaf gets its own segment if it has at least LEAST_APART elements, and at least 1/_MOST_APART of
# its slab's elements.
LEAST_APART = 1 << 20
_MOST_APART = 32


def layout_of(
    shapes: Sequence[tuple[int, ...]],
    dtype: jax.typing.DTypeLike,
    num_shards: int = 1,
    codecs: Sequence[Plain] | None = None,
    order: Sequence[int] | None = None,
    unit: int = 1,
    apart: Collection[int] = (),
) -> Layout:
    """Lays out leaves of one dtype back to back, each aligned, in each shard.

    Args:
        shapes: Shape of each leaf.
        dtype: Compute dtype of the leaves.
        num_shards: Number of equal parts that the slab is divided into.
        codecs: Codec of each leaf; None for plain ones.
        order: The leaves in the order of their offsets; None puts leaves of one codec together.
        unit: Number of elements that are encoded together: leaves and their shares begin at
            multiples of it.
        apart: Leaves with their own segments; see `large_leaves`.
    """
    # Leaves of one codec are adjacent, so that a slab has few segments and few arrays at rest.
    codecs = codecs or [PLAIN] * len(shapes)
    order = in_order(codecs) if order is None else order
    shares = tuple(_share(tuple(shape), num_shards, unit) for shape in shapes)
    offsets, end, step = [0] * len(shapes), 0, max(ALIGNMENT, unit)
    segments: list[Segment] = []
    before = None
    for i in order:
        offsets[i] = start = end
        # A leaf without elements also takes space, so that no slab and no segment is empty.
        end += max(1, -(-shares[i] // step)) * step
        # Neighbours with one codec form one segment, including the padding between them.
        is_alike = segments and segments[-1].codec == codecs[i]
        if is_alike and i not in apart and before not in apart:
            start = segments.pop().start
        segments.append(Segment(codec=codecs[i], start=start, stop=end))
        before = i
    return Layout(
        dtype=jnp.dtype(dtype).name,
        shapes=tuple(tuple(s) for s in shapes),
        shares=shares,
        offsets=tuple(offsets),
        size=end * num_shards,
        num_shards=num_shards,
        segments=tuple(segments),
    )


def large_leaves(shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The leaves that are worth their own arrays, if many microbatches read and add to them.

    A matrix product can read weights in place, and add to the sum of their gradients in place, if
    they have their own array. A part of an array would be copied first. But each array takes time
    to dispatch.
    """
    sizes = [math.prod(shape) for shape in shapes]
    least = max(LEAST_APART, sum(sizes) / _MOST_APART)
    return frozenset(i for i, size in enumerate(sizes) if size >= least)


def in_order(kinds: Sequence[Hashable]) -> list[int]:
    """Positions of leaves, sorted so that equal kinds are adjacent: [a, b, a] gives [0, 2, 1]."""
    first = {kind: n for n, kind in reversed(list(enumerate(kinds)))}
    return sorted(range(len(kinds)), key=lambda i: first[kinds[i]])


def _share(shape: tuple[int, ...], num_shards: int, unit: int) -> int:
    """Elements of a leaf in each shard.

    A share consists of whole rows along the leaf's first axis. If that adds too much padding, more
    leading axes are merged. For example, (8, 3, 64) over 4 shards gives each shard two rows of 192
    elements. But (3, 3, 64) has three rows for four shards, and nine rows of 64 elements are no
    better, so each shard gets 144 of the 576 elements. A `unit` of elements that are encoded
    together is never divided, so that units are the same for any number of shards.
    """
    size = inner = math.prod(shape)
    share = size
    for axis in shape:
        inner //= max(axis, 1)
        share = -(-size // (inner * num_shards)) * inner if inner else 0
        if share * num_shards <= size * (1 + _PADDING):
            break
    return share if num_shards == 1 else -(-share // unit) * unit


# ---- several dtypes


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

    @functools.cached_property
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


# ---- groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """The partition of a model's leaves into groups.

    Attributes:
        names: Name of each group in tables and messages.
        leaves: For each group, the numbers of its leaves, ascending.
        frozen: Numbers of the groups that are only read.
    """

    names: tuple[str, ...]
    leaves: tuple[tuple[int, ...], ...]
    frozen: frozenset[int] = frozenset()

    @property
    def group_of(self) -> tuple[int, ...]:
        """The number of each leaf's group."""
        owner = {leaf: g for g, leaves in enumerate(self.leaves) for leaf in leaves}
        return tuple(owner[leaf] for leaf in range(len(owner)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The layout of a group's state in slabs.

    Attributes:
        master: Layout of the masters; gradients have the same offsets and their own dtype.
        state: Layout of the optimizer state, in one or more slabs.
    """

    master: Layout
    state: MixedLayout

    @property
    def slabs(self) -> tuple[Layout, ...]:
        """Layouts of the slabs that outlast a step: masters, then optimizer state."""
        return (self.master, *self.state.layouts)

    @property
    def averages(self) -> Layout:
        """Layout of the averages of parameters; only of a group that begins its state with them."""
        layout = self.state.layouts[0]
        assert layout.shapes == self.master.shapes
        return layout

    @property
    def draws(self) -> bool:
        """Whether encoding an update draws random bits."""
        return self.master.draws or self.state.draws

    @property
    def num_coded(self) -> int:
        """Count of a shard's numbers that are stored as codes with shared scales."""
        segments = (segment for slab in self.slabs for segment in slab.segments)
        return sum(s.stop - s.start for s in segments if s.codec.block > 1)

    def slab_draws(self, draw: tuple | None) -> list[Draw | None]:
        """The draws of all slabs, masters first; each slab has its own, as all count from 0.

        Args:
            draw: Arguments of `draw_of` for an update's random bits; None for no bits.
        """
        if draw is None:
            return [None] * len(self.slabs)
        masters, state = (derived_draw(draw_of(*draw), number) for number in range(2))
        return [
            masters,
            *(derived_draw(state, number) for number in range(len(self.state.layouts))),
        ]

    def leaf(self, kind: Kind, position: int) -> tuple[Layout, int]:
        """The layout of the slab with a leaf of masters or state, and the leaf's number there."""
        if kind is Kind.MASTERS:
            return self.master, position
        slab, i = self.state.places[position]
        return self.state.layouts[slab], i

    def arrays(self, gradient: jax.typing.DTypeLike | None) -> dict[Kind, list[int]]:
        """Bytes per device of the arrays of each kind of part that is transferred.

        Args:
            gradient: Dtype of the gradient; None if the group has none.

        Returns:
            Bytes by kind: masters and optimizer state in their stored form, and the gradient.
        """
        kinds, shards = (Kind.MASTERS, Kind.OPTIMIZER_STATE, Kind.GRADIENT), self.master.num_shards
        return {k: [num_bytes(x) // shards for x in self.avals(k, gradient)] for k in kinds}

    def avals(
        self, kind: Kind, gradient: jax.typing.DTypeLike | None
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays of a part; see `arrays`."""
        if kind is Kind.MASTERS:
            return self.master.at_rest
        if kind is Kind.OPTIMIZER_STATE:
            return self.state.at_rest
        return () if gradient is None else self.master.gradient_avals(gradient)

    def sizes(self, gradient: jax.typing.DTypeLike | None) -> dict[Kind, int]:
        """The sums of `arrays`."""
        return {kind: sum(row) for kind, row in self.arrays(gradient).items()}


def group_leaves(leaves: Sequence[Leaf], stages: Sequence[Sequence[int]]) -> Grouping:
    """Groups leaves by block, and leaves outside blocks by the stages that read them.

    So fetching a tied embedding, read by two stages, does not fetch leaves that only one of them
    needs. Frozen leaves have their own groups, because they travel in one direction only.

    Args:
        leaves: All leaves of the model.
        stages: For each stage, the numbers of the leaves that it reads.
    """
    uses: dict[int, list[int]] = {i: [] for i in range(len(leaves))}
    for s, read in enumerate(stages):
        for i in read:
            uses[i].append(s)
    members: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        # A block travels whole, even if several stages read it. Outside blocks, leaves that the
        # same stages read travel together.
        place = (leaf.block,) if leaf.block else (None, *uses[i])
        members.setdefault((leaf.is_trainable, *place), []).append(i)

    def first_use(item):
        return min((uses[i][0] for i in item[1] if uses[i]), default=len(stages)), item[1][0]

    # Groups are numbered in the order of their first use: ties between fetches are broken by the
    # smaller number, and tables read like the model.
    ordered = sorted(members.items(), key=first_use)
    names = [
        (".".join(map(str, key[1] or ())) or _name(leaves, rows)) + ("" if key[0] else " (frozen)")
        for key, rows in ordered
    ]
    return Grouping(
        names=tuple(names),
        leaves=tuple(tuple(rows) for _, rows in ordered),
        frozen=frozenset(g for g, (key, _) in enumerate(ordered) if not key[0]),
    )


def _name(leaves: Sequence[Leaf], rows: Sequence[int]) -> str:
    """The name of a group outside blocks: its leaves' modules, at most three of them."""
    blocks = {leaf.block for leaf in leaves}
    paths = [leaves[i].modules for i in rows]
    # A parameter directly in a block's container gets its own name, not its parent's.
    modules = dict.fromkeys(
        ".".join(map(str, p if len(p) == 1 or p[:-1] in blocks else p[:-1])) for p in paths
    )
    return ", ".join(list(modules)[:3]) + (", …" if len(modules) > 3 else "")


def layout_group(
    leaves: Sequence[Leaf],
    rows: Sequence[int],
    state: Sequence[jax.ShapeDtypeStruct],
    master: jax.typing.DTypeLike,
    num_shards: int = 1,
    master_codecs: Sequence[Plain] | None = None,
    state_codecs: Sequence[Plain] | None = None,
    *,
    apart: bool = False,
) -> GroupLayout:
    """Lays out one group's leaves and its optimizer state.

    Leaves that have the same codecs, for the master and for each moment, are placed together.

    Args:
        leaves: All leaves of the model.
        rows: Numbers of the group's leaves.
        state: Shapes and dtypes of the leaves of its optimizer state.
        master: Compute dtype of the masters.
        num_shards: Number of equal parts that slabs are divided into, one per device.
        master_codecs: Codec of each leaf's master; None for plain ones.
        state_codecs: Codec of each leaf of the state; None for plain ones.
        apart: Whether the masters of large leaves, and their gradients, have their own arrays.
    """
    shapes = [leaves[i].shape for i in rows]
    masters = list(master_codecs or [PLAIN] * len(rows))
    states = list(state_codecs or [PLAIN] * len(state))
    mirrors = [states[at : at + n] for at, n in rows_like(state, shapes) if n]
    # Masters and state share one order and one unit, so that each leaf has the same offset in both.
    # This lets an elementwise update compute on whole slabs.
    order = in_order(list(zip(masters, *mirrors, strict=True)))
    large = large_leaves(shapes) if apart else frozenset()
    order = sorted(order, key=large.__contains__)  # small leaves share an array
    unit = max((codec.block for codec in (*masters, *states)), default=1)
    # Updates of plain numbers run segment by segment, updates of codes in pieces of any length.
    alike = large if unit == 1 else ()
    return GroupLayout(
        master=layout_of(shapes, master, num_shards, masters, order, unit, large),
        state=mixed_layout_of(state, shapes, num_shards, states, order, unit, alike),
    )
