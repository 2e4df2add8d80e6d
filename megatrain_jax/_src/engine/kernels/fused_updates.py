"""Updates of coded slabs in one pass over a GPU's memory.

A block's scale is known only after all its numbers are, so XLA computes an update of codes in five
kernels, with decoded moments between them in memory. For a bfloat16 master, codes of both of Adam's
moments and an fp32 gradient these kernels move 49 bytes per parameter and execute 400 instructions.
A pass reads a tile of whole blocks, updates it, finds the scales and writes it: 12 bytes, and 150
instructions.

The update is the user's own: it is traced on a tile. Numbers that all parameters share, such as a
learning rate from a schedule, are computed before. An update with operations that a kernel lacks
stays as it is.

Example: Adam's update of 3 blocks that begin at block 2 of their slabs, in tiles of 2 blocks::

    tile      master 2-3, gradient 2-3, codes 2-3, scales 2-3
    the rest  block 4, by a call with tiles of 1 block

A tile has one block of 128 numbers per row. The results are those of the codecs (`state.codec`)
with two differences for the sake of speed. The place of a number among the levels is found by
scaling it to one decade, in a quarter of the operations. It differs in the last bits, but is as far
from a rounding border as the codecs' own, so unchanged numbers keep their codes. And a number
halfway between two levels is rounded up, unless rounding is random.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from megatrain_jax._src.engine.kernels.tiles import evaluate_on_tile, fits_tile, pallas
from megatrain_jax._src.engine.kernels.update_pieces import Columns, Compute
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.state.codec import (
    Array,
    Blockwise,
    Draw,
    Plain,
    Rounded,
    halves_of_bits,
    round_stochastically,
)
from megatrain_jax._src.engine.state.layout import PLAIN

BLOCK = Blockwise.block
# Bits of the smallest normal number of fp32, and of infinity. Bits of positive numbers have the
# order of the numbers.
_SMALLEST, _INFINITY = np.int32(0x00800000), np.int32(0x7F800000)


def has_tiles(codec: Plain) -> bool:
    """Whether this file encodes and decodes a codec's numbers."""
    return type(codec) in (Plain, Rounded, Blockwise) and codec.block in (1, BLOCK)


def levels_of(codec: Plain) -> np.ndarray | None:
    """The level of each code without its sign, as an unsigned integer; None without codes."""
    if not isinstance(codec, Blockwise):
        return None
    return np.roll(codec.levels(), 2 ** (codec.bits - 1)) if codec.signed else codec.levels()


def by_block(x: jax.Array, per: int) -> jax.Array:
    """An array at rest with one block of numbers per row; `per` numbers share an element."""
    return x if per == BLOCK else x.reshape(-1, BLOCK // per)


def read_tile(
    codec: Plain, refs: Sequence[Any], first: jax.Array, shape: tuple[int, int], dtype: Any
) -> jax.Array:
    """The numbers of a tile.

    Args:
        codec: Their codec.
        refs: The arrays at rest, by block, and the levels of codes or None.
        first: The tile's first block.
        shape: Blocks of the tile, and numbers of a block.
        dtype: Dtype of the numbers.
    """
    pl, triton = pallas()
    rows = pl.ds(first, shape[0])
    if not isinstance(codec, Blockwise):
        return refs[0][rows, :].astype(dtype)
    codes, scales, levels = refs
    if codec.bits == 8:
        # Negative codes are the upper half of the levels.
        found = codes[rows, :].astype(jnp.uint8).astype(jnp.int32)
    else:
        row, lane = iotas(shape)
        pairs = triton.load(codes.at[first + row, lane >> 1]).astype(jnp.int32)
        found = pairs >> ((lane & 1) * 4) & 15
    numbers = triton.load(levels.at[found]) * scales[rows][:, None]
    return numbers.astype(dtype)


def write_tile(codec: Plain, refs: Sequence[Any], first: jax.Array, arrays: Sequence[Any]) -> None:
    """Writes the arrays of `encode_tile`; see `read_tile`."""
    pl, _ = pallas()
    for ref, x in zip(refs, arrays, strict=True):
        at = pl.ds(first, x.shape[0])
        if x.ndim == 1:
            ref[at] = x
            continue
        if isinstance(codec, Blockwise) and codec.bits == 4:
            _, lane = iotas(x.shape)
            halves = (x & 15) << ((lane & 1) * 4)
            x = jnp.sum(halves.reshape(x.shape[0], -1, 2), axis=2)
        ref[at, :] = x.astype(ref.dtype)


def iotas(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The row and the column of each number of a tile."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, lane


def encode_tile(codec: Plain, x: jax.Array, bits: jax.Array | None) -> tuple[jax.Array, ...]:
    """The tile of each array at rest that encodes numbers of shape (blocks, 128).

    Codes of 4 bits are not packed.

    Args:
        codec: The codec.
        x: The numbers.
        bits: Random uint32 of the same shape, or None to round to nearest.
    """
    if isinstance(codec, Blockwise):
        return _coded(codec, x.astype(jnp.float32), bits if codec.stochastic else None)
    if isinstance(codec, Rounded) and codec.stochastic and bits is not None:
        return (round_stochastically(x, bits),)
    (part,) = codec.parts(x.dtype.name)
    return (x.astype(part.dtype),)


def _coded(codec: Blockwise, x: jax.Array, bits: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Codes as int32, and scales; see `Blockwise.encode`, which has the reasons."""
    sizes = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)
    largest = jnp.max(sizes, axis=1)
    usual = (largest >= _SMALLEST) & (largest < _INFINITY)
    scales = jnp.where(usual, jax.lax.bitcast_convert_type(largest, jnp.float32), 0)
    shift = jnp.where(scales > 1, np.float32(2.0**-4), np.float32(1))
    # One division per block. Numbers of an unusual block become zeros.
    inverse = jnp.where(usual, 1 / jnp.where(usual, scales * shift, 1), 0)
    shares = jax.lax.bitcast_convert_type(sizes, jnp.float32) * shift[:, None] * inverse[:, None]
    place, excess = _place(codec, shares)
    if bits is None:
        part = np.float32(0.5)
    else:
        # A number from 1 to 2 by its bits; the same odd multiples of 2^-16 as in `encode`.
        part = jnp.uint32(0x3F800080) | bits >> 9 & 0x7FFF00
        part = jax.lax.bitcast_convert_type(part, jnp.float32)
        excess += 1
    # Places are larger than -1, so that this rounds down or to zero.
    codes = (place + (part - np.float32(excess))).astype(jnp.int32)
    if codec.code == "dynamic":
        codes = jnp.maximum(codes, jnp.minimum(sizes >> 23, 1))  # zero if subnormal
    codes = jnp.where(x < 0, -codes if codec.signed else 0, codes)
    # A block with an infinity has codes of zero with `encode`, and so decodes to NaN. Here it has a
    # scale of NaN.
    scales = jnp.where(largest < _INFINITY, scales, np.float32(np.nan))
    return codes, scales


def _place(codec: Blockwise, x: jax.Array) -> tuple[jax.Array, int]:
    """The fractional level number of values from 0 to 1, plus an integer; and that integer.

    Below the first level of a dynamic code, the number lies between -1 and 1.

    A dynamic code has half as many levels in each decade as in the one above. So a number x in the
    decade that ends at 10^-k has the place of 10^k x in the decade that ends at 1, plus 1, divided
    by 2^k, minus 1.
    """
    bits = codec.bits - codec.signed
    if codec.code == "linear":
        return x * np.float32(2**bits - 1), 0
    divisor = jnp.ones_like(x)
    for k in (4, 2, 1) if bits > 4 else (2, 1):
        below = x <= np.float32(10.0**-k)
        x = jnp.where(below, x * np.float32(10.0**k), x)
        divisor = jnp.where(below, divisor * np.float32(2.0**-k), divisor)
    # Computed from the upper end, so that the value there gets exactly a whole number.
    line = np.float32(2**bits) - (1 - x) * np.float32(2 ** (bits - 1) / 0.9)
    return line * divisor, 1


# ---- updates in one pass

# Blocks of a tile, and groups of 32 threads that compute it: 8 numbers per thread, so that each
# access to memory has at most 16 bytes per thread, and all arrays are divided alike.
_BLOCKS, _WARPS = 8, 4
# A kernel counts elements in int32.
_LONGEST = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """An update of one tile: what its kernel computes, and what is computed before.

    Attributes:
        shape: Blocks of the tile, and numbers of a block.
        before: A jaxpr of the numbers that all elements share.
        consts: Values of its first inputs; the remaining inputs are messages.
        shared: The variables of these numbers.
        rows: Variables of the gradient, the masters and the state.
        at: The variable of the elements' columns in their shard.
        eqns: The kernel's equations, in order.
        results: The new masters and state.
    """

    shape: tuple[int, int]
    before: Any
    consts: tuple[Any, ...]
    shared: tuple[Any, ...]
    rows: tuple[Any, ...]
    at: Any
    eqns: tuple[Any, ...]
    results: tuple[Any, ...]


def update_in_one_pass(
    compute: Compute,
    columns: Sequence[Columns],
    arrays: Sequence[tuple[Array, ...]],
    gradient: Sequence[Array],
    messages: Sequence[Array],
    ok: Array | None,
    draws: Sequence[Draw | None],
    *,
    sharding: Any = None,
    interpret: bool = False,
) -> list[tuple[Array, ...]] | None:
    """Updates columns of slabs; None if a pass can't compute this update.

    Args:
        compute: The update of some elements.
        columns: The columns in each slab, masters first.
        arrays: The arrays of each slab.
        gradient: The gradient's array for each segment of the masters.
        messages: Numbers that the update reads.
        ok: Whether anything changes; None if it does in any case.
        draws: The draw of each slab.
        sharding: The sharding of slabs, which names the devices if there are several shards.
        interpret: Whether kernels are interpreted, on any platform, instead of compiled for a GPU.
    """
    own = [c.own(slab) for c, slab in zip(columns, arrays, strict=True)]
    grads = gradient[columns[0].number]
    if not _is_possible(columns, [grads, *(x for slab in own for x in slab)]):
        return None
    first = _tile(compute, columns, messages, _BLOCKS)
    last = _tile(compute, columns, messages, 1)
    if first is None or last is None:
        return None
    shared = jx.evaluate(first.before, [*first.consts, *messages])
    draw = draws[0] if any(c.segment.codec.draws for c in columns) else None
    given = shared, draw, ok
    num_tiles, left = divmod(columns[0].length // BLOCK, _BLOCKS)
    calls = [
        (_Call(tile=tile, columns=columns, first=start, interpret=interpret), count)
        for tile, start, count in ((first, 0, num_tiles), (last, num_tiles * _BLOCKS, left))
        if count
    ]

    def update(shard: Array | None, grads: Array, slabs: Any, given: Any) -> Any:
        for call, count in calls:
            slabs = call.run(count, shard, grads, slabs, *given)
        return slabs

    if columns[0].layout.num_shards == 1:
        new = update(None, grads, own, given)
    else:
        new = _on_each_device(update, sharding)(grads, own, given)
    return [c.replaced(slab, x) for c, slab, x in zip(columns, arrays, new, strict=True)]


def _is_possible(columns: Sequence[Columns], arrays: Sequence[Array]) -> bool:
    """Whether tiles of whole blocks hold these columns."""
    return all(x.size < _LONGEST for x in arrays) and all(
        has_tiles(c.segment.codec)
        and jnp.dtype(c.layout.dtype).itemsize <= 4
        and c.length % BLOCK == c.inside % BLOCK == 0
        for c in columns
    )


def _tile(
    compute: Compute, columns: Sequence[Columns], messages: Sequence[Array], num_blocks: int
) -> _Tile | None:
    """The update of one tile; None if a kernel lacks one of its operations."""
    shape = num_blocks, BLOCK
    # The gradient has the masters' dtype.
    dtypes = [c.layout.dtype for c in (columns[0], *columns)]
    rows = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    at = jax.ShapeDtypeStruct(shape, jnp.int32)
    traced = jx.without_dead_code(jx.trace(compute, rows, at, [*map(jx.shape_of, messages)]))
    jaxpr, first = traced.jaxpr, len(traced.consts)
    wide = set(jaxpr.invars[first : first + len(rows) + 1])
    inside, before = [], []
    for eqn in jaxpr.eqns:
        fills = eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.shape == shape
        if fills or not wide.isdisjoint(jx.variables(eqn.invars)):
            inside.append(eqn)
            wide.update(eqn.outvars)
        else:
            before.append(eqn)
    read = jx.variables(a for eqn in inside for a in eqn.invars)
    shared = [v for v in dict.fromkeys(read) if v not in wide]
    if (
        jaxpr.effects
        or not all(fits_tile(eqn, shape) for eqn in inside)
        or not all(jx.is_literal(v) or v in wide for v in jaxpr.outvars)
    ):
        return None
    given = [*jaxpr.invars[:first], *jaxpr.invars[first + len(rows) + 1 :]]
    return _Tile(
        shape=shape,
        before=jx.sub_jaxpr(jaxpr, before, given, shared),
        consts=traced.consts,
        shared=tuple(shared),
        rows=tuple(jaxpr.invars[first : first + len(rows)]),
        at=jaxpr.invars[first + len(rows)],
        eqns=tuple(inside),
        results=tuple(jaxpr.outvars),
    )


def _on_each_device(update: Any, sharding: NamedSharding) -> Any:
    """An update of all shards, given the update of one."""
    (axis,) = sharding.spec

    def of_shard(*args: Any) -> Any:
        return update(jax.lax.axis_index(axis), *args)

    return jax.shard_map(
        of_shard,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, sharding.spec, PartitionSpec()),
        out_specs=sharding.spec,
        check_vma=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a kernel, which updates tiles in place.

    Attributes:
        tile: The update of a tile.
        columns: The columns in each slab, masters first.
        first: The block at which the call begins, among the blocks of these columns.
        interpret: Whether the kernel is interpreted.
    """

    tile: _Tile
    columns: Sequence[Columns]
    first: int
    interpret: bool

    def run(
        self,
        num_tiles: int,
        shard: Array | None,
        gradient: Array,
        slabs: Sequence[Sequence[Array]],
        shared: Sequence[Array],
        draw: Draw | None,
        ok: Array | None,
    ) -> list[tuple[Array, ...]]:
        """The arrays of each slab's segment, updated in one shard.

        Args:
            num_tiles: Number of tiles.
            shard: Number of the shard; None if there is only one.
            gradient: The gradient.
            slabs: The arrays of each slab's segment.
            shared: Numbers that all elements share.
            draw: The group's draw; None if no bits are drawn.
            ok: Whether anything changes; None if it does in any case.
        """
        pl, triton = pallas()
        parts = [part for c in self.columns for part in c.segment.codec.parts(c.layout.dtype)]
        rows = [by_block(x, p.per) for x, p in zip(chain(*slabs), parts, strict=True)]
        tables = [levels_of(c.segment.codec) for c in self.columns]
        numbers, structure = jax.tree.flatten((shared, draw, shard, ok))
        ins = [by_block(gradient, 1), *rows, *(jnp.asarray(x) for x in tables if x is not None)]
        num_arrays = len(ins)
        ins += map(_passed, numbers)

        def kernel(*refs: Any) -> None:
            own, results = refs[1 : 1 + len(rows)], refs[len(ins) :]
            levels = iter(refs[1 + len(rows) : num_arrays])
            self._update_tile(
                refs[0],
                [
                    (*arrays, None if table is None else next(levels))
                    for arrays, table in zip(self._by_slab(own), tables, strict=True)
                ],
                self._by_slab(results),
                *jax.tree.unflatten(structure, [ref[0] for ref in refs[num_arrays : len(ins)]]),
            )

        found = pl.pallas_call(
            kernel,
            grid=(num_tiles,),
            in_specs=[_whole(x) for x in ins],
            out_specs=[_whole(x) for x in rows],
            out_shape=[jx.shape_of(x) for x in rows],
            input_output_aliases={1 + n: n for n in range(len(rows))},
            compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=self.interpret,
            name="update_codes",
        )(*ins)
        return self._by_slab(x.reshape(-1) for x in found)

    def _by_slab(self, arrays: Iterable[Any]) -> list[tuple[Any, ...]]:
        flat = iter(arrays)
        counts = (len(c.segment.codec.parts(c.layout.dtype)) for c in self.columns)
        return [tuple(islice(flat, count)) for count in counts]

    def _update_tile(
        self,
        gradient: Any,
        slabs: Sequence[Sequence[Any]],
        results: Sequence[Sequence[Any]],
        shared: Sequence[Any],
        draw: Any,
        shard: Any,
        ok: Any,
    ) -> None:
        """Updates the tile of one instance of the kernel.

        Args:
            gradient: The gradient's array.
            slabs: For each slab its arrays, and the levels of its codes or None.
            results: The arrays of each slab's results.
            shared: See `run`; so are the following arguments.
            draw: The group's draw, or None.
            shard: Number of the shard, or None.
            ok: Whether anything changes, or None.
        """
        pl, _ = pallas()
        tile, shape = self.tile, self.tile.shape
        shard = 0 if shard is None else shard
        first = self.first + pl.program_id(0) * shape[0]
        row, lane = iotas(shape)
        at = (first + row) * BLOCK + lane
        starts = [first + c.inside // BLOCK for c in self.columns]
        values = {v: x.astype(v.aval.dtype) for v, x in zip(tile.shared, shared, strict=True)}
        masters = self.columns[0]
        values[tile.at] = at + masters.start
        read = [read_tile(PLAIN, (gradient, None), starts[0], shape, masters.layout.dtype)]
        read += [
            read_tile(c.segment.codec, arrays, start, shape, c.layout.dtype)
            for c, arrays, start in zip(self.columns, slabs, starts, strict=True)
        ]
        values.update(zip(tile.rows, read, strict=True))
        evaluate_on_tile(tile.eqns, values, shape)
        bits = iter(self._bits(draw, shard, values[tile.at]))
        new = []
        for c, v in zip(self.columns, tile.results, strict=True):
            codec = c.segment.codec
            x = jnp.broadcast_to(v.val if jx.is_literal(v) else values[v], shape)
            if codec.block > 1:
                x = c.layout.without_padding(x, c.segment, shard, at + c.inside)
            new.append(encode_tile(codec, x, next(bits, None) if codec.draws else None))

        def write() -> None:
            for c, refs, arrays, start in zip(self.columns, results, new, starts, strict=True):
                write_tile(c.segment.codec, refs, start, arrays)

        if ok is None:
            write()
        else:
            pl.when(ok != 0)(write)

    def _bits(self, draw: Draw | None, shard: Any, at: jax.Array) -> list[jax.Array]:
        """Random bits for each slab that needs them, of elements at these columns of a shard."""
        if draw is None:
            return []
        slab = self.columns[0].layout
        numbers = (at + shard * (slab.size // slab.num_shards)).astype(jnp.uint32)
        return halves_of_bits(draw, numbers, sum(c.segment.codec.draws for c in self.columns))


def _whole(x: Array) -> Any:
    """The block of an array that is passed whole."""
    pl, _ = pallas()
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _passed(x: Array) -> Array:
    """A number as a kernel takes it."""
    x = jnp.asarray(x)
    return (x.astype(jnp.int32) if x.dtype == jnp.bool_ else x).reshape(1)
