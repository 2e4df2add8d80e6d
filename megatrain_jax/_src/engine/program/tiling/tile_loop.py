"""Runs a loop over tiles: slices of whole values go in; whole values and sums come out.

The stored arrays and sums are the loop's carry, which the compiler updates in place. A stored array
has a separate axis for the number of the tile until the loop ends; so does a whole array that is
read in tiles.

Example: `d = dy * cos(x w)`, `dx = d w.T`, `dw = x.T d` with x f32[64, 6], in 4 tiles with 16 rows.
Only one tile of `d`, f32[64, 20], exists at a time::

    before   x as f32[1, 4, 16, 6], dy as f32[1, 4, 16, 20]; zeros f32[1, 4, 16, 6] and f32[6, 20]
    tile i   x[0, i], dy[0, i], all of w  ->  d, of (16, 20)
             dx: d w.T is stored in the first zeros at [0, i];  dw: x[0, i].T d is added
    after    dx as f32[64, 6]; dw
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from megatrain_jax._src.engine.program.axes import MAPPED, Division, Label
from megatrain_jax._src.engine.program.tiling.flow import Flow, Operation
from megatrain_jax._src.engine.program.tiling.labels import Labels
from megatrain_jax._src.engine.program.tiling.loop_order import TileLoop
from megatrain_jax._src.engine.program.tiling.tile import (
    add_tile,
    on_tile,
    put,
    start_of_sum,
    take,
)


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
    inside = {v for op, division in loop.ops if division.kind == MAPPED for v in op.makes}

    def is_inside(v: int, label: Label) -> bool:
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
    summing = {v: (op, way) for op, way in loop.ops if way.kind != MAPPED for v in op.makes}
    totals = [_start(*summing[v], values) for v in loop.summed]

    def body(tile: Any, carry: tuple[Sequence[Any], Sequence[Any]]) -> tuple[list, list]:
        own: dict[int, Any] = {}
        sums = dict(zip(loop.summed, carry[1], strict=True))

        def operand(v: int, label: Label | None) -> Any:
            if label is None:
                return values[v]
            return own[v] if is_inside(v, label) else take(sliced[v, label], label, tile)

        for op, way in loop.ops:
            operands = [operand(v, x) for v, x in zip(op.reads, way.operands, strict=True)]
            if way.kind == MAPPED:
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


def _start(op: Operation, division: Division, values: Mapping[int, Any]) -> Any:
    return start_of_sum(op.eqn, division, [values.get(v) for v in op.reads])
