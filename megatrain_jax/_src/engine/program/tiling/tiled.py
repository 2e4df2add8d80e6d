"""Computes a jaxpr tile by tile, so that most of its values never exist whole.

Example: `tanh(x w) v` with x f32[4096, 8], w f32[8, 32] and v f32[32, 8]::

    coarsest(jaxpr)      # in 2 tiles; its `counts` are (2, 4, 8, ..., 4096), as the rows of x are
                         # divisible by them
    tiled(jaxpr, 4)      # 4,096 rows, 1,024 per tile; one step, a loop over both products
                         # and tanh: 256 KiB beside x and the result, not 1 MiB
    tiled(jaxpr, 3)      # None: neither 4096 nor 32 can be divided by 3

In a loop over tiles, slices of whole values go in; whole values and sums come out.

The stored arrays and sums are the loop's carry, which the compiler updates in place. A stored array
has a separate axis for the number of the tile until the loop ends; so does a whole array that is
read in tiles.

Example: `d = dy * cos(x w)`, `dx = d w.T`, `dw = x.T d` with x f32[64, 6], in 4 tiles with 16 rows.
Only one tile of `d`, f32[64, 20], exists at a time::

    before   x as f32[1, 4, 16, 6], dy as f32[1, 4, 16, 20]; zeros f32[1, 4, 16, 6] and f32[6, 20]
    tile i   x[0, i], dy[0, i], all of w  ->  d, of (16, 20)
             dx: d w.T is stored in the first zeros at [0, i];  dw: x[0, i].T d is added
    after    dx as f32[64, 6]; dw

Random bits of part of an array equal the bits drawn for the whole array.

JAX's partitionable Threefry computes an element's bits from its 64-bit index in the array alone:
`threefry2x32(key, high and low half of the index)`.

Example: bits of shape (4, 6) in 2 tiles along axis 0, hence of shape (2, 6): the elements of tile 1
have the indices 12 to 23 in the whole array, and get the bits of these.

One operation is computed on one tile, and the results of tiles are summed.

Example: tile i of 4 for `y = iota(0..7) + x`, x f32[8]::

    iota    dimension 0, shape (8,)  ->  shape (2,), then + 2 i
    add     of tiles with 2 entries: unchanged
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as jex_random

from megatrain_jax._src.common.sizes import divisors
from megatrain_jax._src.engine.program import axes
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import FOLDS
from megatrain_jax._src.engine.program.primitives import PRODUCTS
from megatrain_jax._src.engine.program.tiling.flow import (
    Flow,
    Labels,
    Operation,
    PropagatedLabels,
    TileLoop,
    chosen,
    flow_of,
    ordered,
    peak_bytes,
)


def tile_of_bits(eqn: Any, label: axes.Label, tile: Any, num_tiles: int, key: Any) -> Any:
    """One tile of the result of a `random_bits` equation.

    Args:
        eqn: The equation.
        label: Label of its result.
        tile: Number of the tile.
        num_tiles: Number of tiles.
        key: The key, of the implementation `threefry2x32`.
    """
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    high, low = _numbers(label.split(shape, num_tiles), label.axis + 1, tile)
    first, second = (lax.broadcast(x, low.shape) for x in jax.random.key_data(key))
    own = (*shape[: label.axis], label.outer * label.inner, *shape[label.axis + 1 :])
    bits = jex_random.threefry2x32_p.bind(first, second, high, low)
    high, low = (x.reshape(own) for x in bits)
    if width == 64:
        wide = [lax.convert_element_type(x, jnp.uint64) for x in (high, low)]
        return lax.shift_left(wide[0], jnp.uint64(32)) | wide[1]
    # As in JAX, both words of an element make its 32 bits, or fewer.
    return lax.convert_element_type(high ^ low, jnp.dtype(f"uint{width}"))


def _numbers(shape: Sequence[int], axis: int, at: Any) -> tuple[Any, Any]:
    """The indices of an array's elements at one place along an axis.

    Returns:
        The upper and lower 32 bits of each index, with the shape without that axis.
    """
    own = (*shape[:axis], *shape[axis + 1 :])
    high, low = (jnp.zeros(own, jnp.uint32) for _ in range(2))
    for d, size in enumerate(shape):
        if d == axis:
            entry = lax.convert_element_type(at, jnp.uint32)
        else:
            entry = lax.broadcasted_iota(jnp.uint32, own, d - (d > axis))
        carried, low = _wide_product(low, size)
        low = low + entry
        # Horner's rule in a mixed base; a sum smaller than its term has wrapped around.
        high = high * jnp.uint32(size) + carried + (low < entry).astype(jnp.uint32)
    return high, low


def _wide_product(x: Any, factor: int) -> tuple[Any, Any]:
    """The upper and lower 32 bits of the product of 32-bit numbers and a factor below 2**32."""
    # In halves of 16 bits, so that no product or sum here exceeds 32 bits: the device has no wider
    # integers unless JAX is told to use them.
    half, sixteen = jnp.uint32(0xFFFF), jnp.uint32(16)
    x0, x1 = x & half, x >> sixteen
    f0, f1 = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    middle = x1 * f0 + (x0 * f0 >> sixteen)
    carry = x0 * f1 + (middle & half)
    high = x1 * f1 + (middle >> sixteen) + (carry >> sixteen)
    return high, x * jnp.uint32(factor)


def take(split: Any, label: axes.Label, tile: Any) -> Any:
    """A tile of an array that has a separate axis for the tiles."""
    part = lax.dynamic_index_in_dim(split, tile, label.axis + 1, keepdims=False)
    before, after = part.shape[: label.axis], part.shape[label.axis + 2 :]
    return part.reshape(*before, label.outer * label.inner, *after)


def put(split: Any, part: Any, label: axes.Label, tile: Any) -> Any:
    """The array with a tile written into it."""
    part = part.reshape(label.split(part.shape, 1))
    return lax.dynamic_update_index_in_dim(split, part, tile, label.axis + 1)


def start_of_sum(eqn: Any, division: axes.Division, operands: Sequence[Any]) -> Any:
    """The initial value to which an operation's tiles are added."""
    aval = eqn.outvars[0].aval
    if division.kind == axes.ADDED_INTO:
        return lax.convert_element_type(operands[0], _summing_dtype(eqn))
    if eqn.primitive.name in PRODUCTS:
        return jnp.zeros(aval.shape, _summing_dtype(eqn))
    # Reducing an empty array gives the reduction's neutral element.
    shape = list(eqn.invars[0].aval.shape)
    for axis in eqn.params["axes"]:
        shape[axis] = 0
    return jx.bind(eqn, [jnp.zeros(shape, _summing_dtype(eqn))])[0]


def add_tile(eqn: Any, division: axes.Division, total: Any, operands: Sequence[Any]) -> Any:
    """Adds one more tile to the sum, or another reduction, of the tiles so far.

    Narrow floats are summed in fp32.
    """
    name = eqn.primitive.name
    if division.kind == axes.ADDED_INTO:
        # Not bound, because the addition is a jaxpr among its parameters, in the operands' dtype.
        return lax.scatter_add(
            total,
            operands[1],
            lax.convert_element_type(operands[2], total.dtype),
            eqn.params["dimension_numbers"],
            indices_are_sorted=eqn.params["indices_are_sorted"],
            unique_indices=eqn.params["unique_indices"],
            mode=eqn.params["mode"],
        )
    if name in PRODUCTS:
        params = {**eqn.params, "preferred_element_type": total.dtype}
        return total + jx.bind(eqn.replace(params=params), operands)[0]
    operand = lax.convert_element_type(operands[0], total.dtype)
    return FOLDS[name](total, jx.bind(eqn, [operand])[0])


def _summing_dtype(eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    is_narrow = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    adds = eqn.primitive.name not in FOLDS or eqn.primitive.name == "reduce_sum"
    return jnp.dtype(jnp.float32) if is_narrow and adds else aval.dtype


def on_tile(
    eqn: Any, division: axes.Division, tile: Any, num_tiles: int, operands: Sequence[Any]
) -> list[Any]:
    """The results of an operation on one tile.

    Args:
        eqn: The equation.
        division: The operation's division, in which each tile makes a tile of the results.
        tile: Number of the tile.
        num_tiles: Number of tiles.
        operands: Tiles of the operands that have a label, and the remaining operands whole.
    """
    name, label = eqn.primitive.name, division.results[0]
    assert label is not None
    # Two primitives make an array without a divisible operand: their tiles depend on the tile's
    # number instead.
    if name == "random_bits":
        return [tile_of_bits(eqn, label, tile, num_tiles, operands[0])]
    if name == "iota":
        return [_counter(eqn, label, tile, num_tiles)]
    operand, length = division.operands[0], label.outer * label.inner
    params = axes.params_of_part(eqn, label.axis, operand and operand.axis, length)
    return jx.bind(eqn.replace(params=params), operands)


def _counter(eqn: Any, label: axes.Label, tile: Any, num_tiles: int) -> Any:
    params, length = eqn.params, label.outer * label.inner
    shape = tuple(length if a == label.axis else n for a, n in enumerate(params["shape"]))
    if params["dimension"] != label.axis:
        return jx.bind(eqn.replace(params={**params, "shape": shape}), [])[0]
    entry = lax.iota(jnp.int32, length)
    entry = entry // label.inner * (num_tiles * label.inner) + entry % label.inner
    entry = (entry + tile * label.inner).astype(params["dtype"])
    return lax.broadcast_in_dim(entry, shape, (label.axis,))


def run_loop(
    loop: TileLoop, flow: Flow, labels: Labels, num_tiles: int, values: Mapping[int, Any]
) -> dict[int, Any]:
    """Runs a loop over tiles.

    Args:
        loop: The loop.
        flow: The flow it belongs to.
        labels: How the flow is divided.
        num_tiles: Number of tiles.
        values: All values that are already whole, by number.

    Returns:
        The values that the loop stores or sums, whole.
    """
    avals, made = flow.avals, labels.made
    # A value that is made and read here with the same label passes from one operation to the next
    # within a tile; everything else comes from outside, whole or as slices of whole arrays.
    inside = {v for op, division in loop.ops if division.kind == axes.MAPPED for v in op.makes}

    def is_inside(v: int, label: axes.Label) -> bool:
        return v in inside and made[v] == label

    # Reshaped once, before the loop, so that each tile takes a slice with one index.
    sliced = {
        (v, label): lax.reshape(values[v], label.split(avals[v].shape, num_tiles))
        for op, division in loop.ops
        for v, label in zip(op.reads, division.operands, strict=True)
        if label is not None and not is_inside(v, label)
    }
    shapes = [made[v].split(avals[v].shape, num_tiles) for v in loop.stored]
    # Each tile overwrites its own part, so no zero remains.
    buffers = [
        jnp.zeros(shape, avals[v].dtype) for v, shape in zip(loop.stored, shapes, strict=True)
    ]
    summing = {v: (op, way) for op, way in loop.ops if way.kind != axes.MAPPED for v in op.makes}
    totals = [
        start_of_sum(op.eqn, way, [values.get(read) for read in op.reads])
        for op, way in (summing[v] for v in loop.summed)
    ]

    def body(tile: Any, carry: tuple[Sequence[Any], Sequence[Any]]) -> tuple[list, list]:
        own: dict[int, Any] = {}
        sums = dict(zip(loop.summed, carry[1], strict=True))

        def operand(v: int, label: axes.Label | None) -> Any:
            if label is None:
                return values[v]
            return own[v] if is_inside(v, label) else take(sliced[v, label], label, tile)

        for op, way in loop.ops:
            operands = [operand(v, x) for v, x in zip(op.reads, way.operands, strict=True)]
            if way.kind == axes.MAPPED:
                parts = on_tile(op.eqn, way, tile, num_tiles, operands)
                own.update(zip(op.makes, parts, strict=True))
            else:
                sums[op.makes[0]] = add_tile(op.eqn, way, sums[op.makes[0]], operands)
        pairs = zip(loop.stored, carry[0], strict=True)
        return [put(b, own[v], made[v], tile) for v, b in pairs], [sums[v] for v in loop.summed]

    buffers, totals = lax.fori_loop(0, num_tiles, body, (buffers, totals))
    pairs = zip((*loop.stored, *loop.summed), (*buffers, *totals), strict=True)
    # Narrow floats were summed in fp32; they are rounded once, here.
    return {
        v: lax.convert_element_type(lax.reshape(x, avals[v].shape), avals[v].dtype)
        for v, x in pairs
    }


_SEEDS = 8  # shapes of values whose axes are tried: those with the most bytes
_TRIED = 3  # ways to divide that are compared by memory
_COMPARED = 64  # number of tiles for the comparison, or the most possible
_FAR_LESS = 0.8  # a way that divides fewer bytes must need less than this fraction of memory
_MANY = 2**20  # so many tiles that one tile takes next to no memory
# The smallest numbers of tiles: a number of rows without any of these factors is not divided.
FACTORS = (2, 3, 5, 7)
_WORTH = 0.9  # fraction of the whole's memory above which tiles are not worth their time
_SMALL = 64  # loops with less than 1/64 of the whole's memory are dissolved


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tiled:
    """A jaxpr divided into tiles: a function that computes the same, tile by tile.

    Attributes:
        jaxpr: The closed jaxpr.
        num_tiles: Number of tiles.
        num_rows: Entries of the divided axis, usually tokens.
        num_devices: Number of devices that may divide the same axis.
        flow: The jaxpr as operations on numbered values.
        labels: How its operations are divided.
        steps: The loops over tiles and the operations on whole values between them, in order.
    """

    jaxpr: Any
    num_tiles: int
    num_rows: int
    num_devices: int = 1
    flow: Flow
    labels: Labels
    steps: tuple[TileLoop | Operation, ...]

    @property
    def rows_per_tile(self) -> int:
        """Entries of the divided axis in one tile."""
        return self.num_rows // self.num_tiles

    @property
    def counts(self) -> tuple[int, ...]:
        """The multiples of its number of tiles by which rows can be divided, ascending."""
        most = self.num_rows // self.num_devices
        return tuple(k for k in divisors(most) if k % self.num_tiles == 0)

    def expected_bytes(self, num_tiles: int) -> int:
        """Roughly the peak bytes of another number of tiles, if it is divided in the same way."""
        return peak_bytes(self.flow, self.steps, num_tiles)

    def into(self, num_tiles: int) -> "Tiled | None":
        """The same division into one of `counts`; None if less than a tenth would be saved."""
        if self.expected_bytes(num_tiles) >= _WORTH * self.flow.whole_bytes:
            return None

        def smaller(label: axes.Label) -> axes.Label:
            inner = label.inner * self.num_tiles // num_tiles
            return dataclasses.replace(label, inner=inner)

        @functools.cache
        def divided(way: axes.Division) -> axes.Division:
            operands, results = (
                tuple(label and smaller(label) for label in row)
                for row in (way.operands, way.results)
            )
            return dataclasses.replace(way, operands=operands, results=results)

        def step(step: TileLoop | Operation) -> TileLoop | Operation:
            if isinstance(step, Operation):
                return step
            return dataclasses.replace(step, ops=tuple((op, divided(way)) for op, way in step.ops))

        labels = Labels(
            divisions={n: divided(way) for n, way in self.labels.divisions.items()},
            made={v: smaller(label) for v, label in self.labels.made.items()},
        )
        steps = tuple(map(step, self.steps))
        return dataclasses.replace(self, num_tiles=num_tiles, labels=labels, steps=steps)

    def __call__(self, *args: Any) -> list[Any]:
        """Computes the jaxpr's results from its flat arguments; traceable."""
        flow = self.flow
        values: dict[int, Any] = dict(flow.constants)
        values.update(zip(flow.inputs, args, strict=True))
        for step in self.steps:
            if isinstance(step, Operation):
                made = jx.bind(step.eqn, [values[v] for v in step.reads])
                values.update(zip(step.makes, made, strict=True))
            else:
                values.update(run_loop(step, flow, self.labels, self.num_tiles, values))
        return [values[v] for v in flow.outputs]


def tiled(
    jaxpr: Any, num_tiles: int, *, num_devices: int = 1, flow: Flow | None = None
) -> Tiled | None:
    """Divides a jaxpr into tiles along the axis that saves the most memory.

    Args:
        jaxpr: A closed jaxpr.
        num_tiles: Number of tiles, above 1.
        num_devices: Number of devices that may divide the same axis: each tile takes equally many
            rows from the part of each device.
        flow: Its flow, if it is known.

    Returns:
        The division; None if no axis can be divided, or less than a tenth would be saved.
    """
    flow = flow or flow_of(jaxpr)
    return _best(jaxpr, flow, num_tiles, num_devices, at_least=num_tiles)


def coarsest(jaxpr: Any, *, num_devices: int = 1, flow: Flow | None = None) -> Tiled | None:
    """The division of a closed jaxpr into the fewest tiles; None if not even many save enough."""
    flow = flow or flow_of(jaxpr)
    divided = (_best(jaxpr, flow, prime, num_devices, at_least=_MANY) for prime in FACTORS)
    return next((found for found in divided if found is not None), None)


def _best(jaxpr: Any, flow: Flow, num_tiles: int, num_devices: int, at_least: int) -> Tiled | None:
    """The division that covers the most bytes, or another one if that needs far less memory.

    They are compared with many tiles, so that the axis does not depend on `num_tiles`. Returns None
    if `at_least` tiles save too little.
    """
    found, least = None, math.inf
    for ways, _ in _candidates(flow, num_tiles, num_devices):
        tried = []
        for last in (False, True) if any(len(some) > 1 for some in ways.values()) else (False,):
            labels = chosen(flow, ways, last=last)
            steps = ordered(flow, labels)
            num_rows = math.gcd(*(x.inner for x in labels.all())) * num_tiles * num_devices
            tried.append(
                (peak_bytes(flow, steps, min(num_rows, _COMPARED)), num_rows, labels, steps)
            )
        # Candidates that cover the most bytes come first. A later one must be far better: memory
        # estimates are rough, and covering more means fewer whole arrays in between.
        best = min(tried, key=operator.itemgetter(0))
        if best[0] < _FAR_LESS * least:
            found, least = best, best[0]
    if found is None:
        return None
    _, num_rows, labels, steps = found
    # Without any loop the number of tiles doesn't matter.
    whole = flow.whole_bytes
    labels, steps = _without_small_loops(flow, labels, steps, whole // _SMALL)
    if peak_bytes(flow, steps, at_least) >= _WORTH * whole:
        return None
    return Tiled(
        jaxpr=jaxpr,
        num_tiles=num_tiles,
        num_rows=num_rows,
        num_devices=num_devices,
        flow=flow,
        labels=labels,
        steps=steps,
    )


def _candidates(flow: Flow, num_tiles: int, num_devices: int) -> list[PropagatedLabels]:
    """The ways to divide a flow that cover the most bytes."""
    found: list[PropagatedLabels] = []
    # The values with the most bytes that a flow makes, one of each shape.
    made = sorted((v for op in flow.ops for v in op.makes), key=flow.num_bytes, reverse=True)
    shapes = {getattr(flow.avals[v], "shape", ()): v for v in reversed(made)}
    for v in sorted(shapes.values(), key=flow.num_bytes, reverse=True)[:_SEEDS]:
        for axis, size in enumerate(getattr(flow.avals[v], "shape", ())):
            # `outer` is the number of devices, so a tile has rows from each device's part, and no
            # device waits while another computes its part.
            label = axes.Label(axis, num_devices, size // (num_tiles * num_devices))
            fits = size and size % (num_tiles * num_devices) == 0
            if not fits or any((v, label) in labels for _, labels in found):
                continue
            found.append(flow.propagator.carry(v, label, num_tiles))

    def reached(carried: PropagatedLabels) -> int:
        return sum(map(flow.num_bytes, {v for v, _ in carried[1]}))

    return sorted(found, key=reached, reverse=True)[:_TRIED]


def _without_small_loops(
    flow: Flow, labels: Labels, steps: tuple[TileLoop | Operation, ...], limit: int
) -> tuple[Labels, tuple[TileLoop | Operation, ...]]:
    """Makes the values of small loops whole: such a loop costs time and saves nothing.

    An example is the sum of a mask, by which a mean divides.
    """
    loops = [step for step in steps if isinstance(step, TileLoop)]
    small = [loop for loop in loops if loop.num_bytes <= limit]
    kept = {op for loop in loops if loop not in small for op, _ in loop.ops}
    whole = {op for loop in small for op, _ in loop.ops} - kept
    if not whole:
        return labels, steps
    # Readers of these values may now have to wait for all of them, so loops are found anew.
    makes = {v for op in whole for v in op.makes}
    fewer = Labels(
        divisions={n: d for n, d in labels.divisions.items() if flow.ops[n] not in whole},
        made={v: x for v, x in labels.made.items() if v not in makes},
    )
    return _without_small_loops(flow, fewer, ordered(flow, fewer), limit)
