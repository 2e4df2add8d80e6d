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
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from megatrain_jax._src.engine.kernels.tile_codecs import (
    BLOCK,
    by_block,
    encode_tile,
    has_tiles,
    iotas,
    levels_of,
    read_tile,
    write_tile,
)
from megatrain_jax._src.engine.kernels.tiles import evaluate_on_tile, fits_tile, pallas
from megatrain_jax._src.engine.kernels.update_pieces import Columns, Compute
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.state.codec import Array, Draw, halves_of_bits
from megatrain_jax._src.engine.state.layout import PLAIN

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
