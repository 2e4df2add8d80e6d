"""Computes a jaxpr tile by tile, so that most of its values never exist whole.

Example: `tanh(x w) v` with x f32[4096, 8], w f32[8, 32] and v f32[32, 8]::

    tile_counts(jaxpr)   # (2, 4, 8, ..., 4096): the powers of 2 that divide the rows of x
    tiled(jaxpr, 4)      # 4,096 rows, 1,024 per tile; one step, a loop over both products
                         # and tanh: 256 KiB beside x and the result, not 1 MiB
    tiled(jaxpr, 3)      # None: neither 4096 nor 32 can be divided by 3
"""

import dataclasses
import math
from typing import Any

from megatrain_jax._src.common.sizes import divisors
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import Label
from megatrain_jax._src.engine.program.tiling.flow import (
    Flow,
    LabelPropagator,
    Labels,
    Operation,
    PropagatedLabels,
    chosen,
    flow_of,
)
from megatrain_jax._src.engine.program.tiling.loop_order import (
    TileLoop,
    loop_bytes,
    ordered,
    peak_bytes,
)
from megatrain_jax._src.engine.program.tiling.tile_loop import run_loop

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
        flow: The jaxpr as operations on numbered values.
        labels: How its operations are divided.
        steps: The loops over tiles and the operations on whole values between them, in order.
    """

    jaxpr: Any
    num_tiles: int
    num_rows: int
    flow: Flow
    labels: Labels
    steps: tuple[TileLoop | Operation, ...]

    @property
    def rows_per_tile(self) -> int:
        """Entries of the divided axis in one tile."""
        return self.num_rows // self.num_tiles

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


def tile_counts(jaxpr: Any, *, num_devices: int = 1, flow: Flow | None = None) -> tuple[int, ...]:
    """Numbers of tiles worth trying for a closed jaxpr, ascending; empty if it can't be divided.

    They are the divisors of the number of rows that are multiples of its first prime factor.
    """
    flow = flow or flow_of(jaxpr)
    for prime in FACTORS:
        found = _best(jaxpr, flow, prime, num_devices, at_least=_MANY)
        if found is not None:
            most = found.num_rows // num_devices
            return tuple(k for k in divisors(most) if k % prime == 0)
    return ()


def _best(jaxpr: Any, flow: Flow, num_tiles: int, num_devices: int, at_least: int) -> Tiled | None:
    """The division that covers the most bytes, or another one if that needs far less memory.

    They are compared with many tiles, so that the axis does not depend on `num_tiles`. Returns None
    if `at_least` tiles save too little.
    """
    found, least = None, math.inf
    for carried in _candidates(flow, num_tiles, num_devices):
        lasts = (False, True) if any(len(ways) > 1 for ways in carried.ways.values()) else (False,)
        ways = [_Way(flow, carried, num_tiles * num_devices, last) for last in lasts]
        # Candidates that cover the most bytes come first. A later one must be far better: memory
        # estimates are rough, and covering more means fewer whole arrays in between.
        best = min(ways, key=lambda way: way.peak)
        if best.peak < _FAR_LESS * least:
            found, least = best, best.peak
    if found is None:
        return None
    # Without any loop the number of tiles doesn't matter.
    whole = peak_bytes(flow, flow.ops, num_tiles)
    labels, steps = _without_small_loops(flow, found.labels, found.steps, whole // _SMALL)
    if peak_bytes(flow, steps, at_least) >= _WORTH * whole:
        return None
    return Tiled(
        jaxpr=jaxpr,
        num_tiles=num_tiles,
        num_rows=found.num_rows,
        flow=flow,
        labels=labels,
        steps=steps,
    )


class _Way:
    """A way to divide a flow: its labels, its steps, and the memory it needs with many tiles."""

    def __init__(self, flow: Flow, carried: PropagatedLabels, num_parts: int, last: bool) -> None:
        self.labels = chosen(flow, carried, last=last)
        self.steps = ordered(flow, self.labels)
        self.num_rows = math.gcd(*(x.inner for x in self.labels.all())) * num_parts
        self.peak = peak_bytes(flow, self.steps, min(self.num_rows, _COMPARED))


def _candidates(flow: Flow, num_tiles: int, num_devices: int) -> list[PropagatedLabels]:
    """The ways to divide a flow that cover the most bytes."""
    propagator, found = LabelPropagator(flow), []
    for v in _seeds(flow):
        for axis, size in enumerate(getattr(flow.avals[v], "shape", ())):
            # `outer` is the number of devices, so a tile has rows from each device's part, and no
            # device waits while another computes its part.
            label = Label(axis, num_devices, size // (num_tiles * num_devices))
            fits = size and size % (num_tiles * num_devices) == 0
            if not fits or any((v, label) in x.labels for x in found):
                continue
            found.append(propagator.carry(v, label, num_tiles))

    def reached(carried: PropagatedLabels) -> int:
        return sum(map(flow.num_bytes, {v for v, _ in carried.labels}))

    return sorted(found, key=reached, reverse=True)[:_TRIED]


def _seeds(flow: Flow) -> list[int]:
    """The values with the most bytes that a flow makes, one of each shape."""
    made = sorted((v for op in flow.ops for v in op.makes), key=flow.num_bytes, reverse=True)
    shapes = {getattr(flow.avals[v], "shape", ()): v for v in reversed(made)}
    return sorted(shapes.values(), key=flow.num_bytes, reverse=True)[:_SEEDS]


def _without_small_loops(
    flow: Flow, labels: Labels, steps: tuple[TileLoop | Operation, ...], limit: int
) -> tuple[Labels, tuple[TileLoop | Operation, ...]]:
    """Makes the values of small loops whole: such a loop costs time and saves nothing.

    An example is the sum of a mask, by which a mean divides.
    """
    loops = [step for step in steps if isinstance(step, TileLoop)]
    small = [loop for loop in loops if loop_bytes(flow, loop) <= limit]
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
