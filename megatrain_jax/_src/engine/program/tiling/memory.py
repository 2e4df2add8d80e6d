"""Estimates the memory that a divided flow needs, to compare ways to divide it.

A value takes its bytes from the step that makes it to the last step that reads it. An elementwise
result that only one elementwise operation or reduction reads is fused and never in memory: its
operands live on instead. Within a loop, a value made in tiles takes the bytes of one tile.

Example: x f32[8, 2] is in memory before, 4 tiles::

    h = x w       f32[8, 100]    in a loop with its readers: 800 bytes for one tile
    y = exp h                    read by a product: 800 bytes for one tile
    z = y v       f32[8, 2]      stored: 64 bytes. At most 800 + 800 + 64 bytes, else 6464
"""

import dataclasses
from collections.abc import Sequence

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import FREE, FUSED, FUSING
from megatrain_jax._src.engine.program.tiling.flow import Flow, Operation
from megatrain_jax._src.engine.program.tiling.loop_order import TileLoop


@dataclasses.dataclass(frozen=True)
class _Event:
    """A step: the values it reads and makes, its primitive, and the bytes it needs internally."""

    reads: Sequence[int]
    makes: Sequence[int]
    name: str
    within: int = 0


def peak_bytes(flow: Flow, steps: Sequence[TileLoop | Operation], num_tiles: int) -> int:
    """Estimates the peak bytes of a flow's own values, not counting its results."""
    outputs = set(flow.outputs)
    sizes = {v: flow.num_bytes(v) for op in flow.ops for v in op.makes if v not in outputs}
    events = []
    for step in steps:
        if isinstance(step, Operation):
            events.append(_Event(step.reads, step.makes, step.name))
            continue
        for v in step.summed:  # in fp32
            aval = flow.avals[v]
            if jx.is_float(aval) and aval.dtype.itemsize < 4:
                sizes[v] = 4 * jx.num_elements(aval)
        inside = {v for op, _ in step.ops for v in op.makes}
        reads = {v for op, _ in step.ops for v in op.reads} - inside
        reads |= {v for op, _ in step.ops for v in op.reads if v in step.stored}
        makes = (*step.stored, *step.summed)
        within = loop_bytes(flow, step) // num_tiles
        events.append(_Event(sorted(reads), makes, "loop", within))
    return _peak(events, sizes)


def loop_bytes(flow: Flow, loop: TileLoop) -> int:
    """Estimates the peak bytes within a loop if it had one tile."""
    events = [_Event(op.reads, op.makes, op.name) for op, _ in loop.ops]
    given = {*loop.stored, *loop.summed}
    return _peak(events, {v: flow.num_bytes(v) for e in events for v in e.makes if v not in given})


def _peak(events: Sequence[_Event], sizes: dict[int, int]) -> int:
    """The peak bytes over a sequence of events."""
    readers: dict[int, list[bool]] = {}
    for event in events:
        for v in set(event.reads):
            readers.setdefault(v, []).append(event.name in FUSING)
    # The values in memory that each value is computed from.
    roots: dict[int, frozenset[int]] = {}
    for event in events:
        behind = frozenset().union(*(roots.get(v, ()) for v in event.reads))
        for v in event.makes:
            read = readers.get(v, [])
            # Fused into its only reader, a result is never written. With two readers a compiler may
            # compute it twice or keep it; this counts it as kept.
            free = event.name in FREE or (event.name in FUSED and len(read) <= 1)
            roots[v] = behind if free and all(read) else frozenset((v,))
    last: dict[int, int] = {}
    for number, event in enumerate(events):
        for v in event.reads:
            last.update(dict.fromkeys(roots.get(v, ()), number))
    live = most = 0
    ends: dict[int, int] = {}
    for number, event in enumerate(events):
        for v in event.makes:
            if v in roots[v]:
                live += sizes.get(v, 0)
                end = last.get(v, number)
                ends[end] = ends.get(end, 0) + sizes.get(v, 0)
        # A step's results and operands exist at the same time, so operands end after the step.
        most = max(most, live + event.within)
        live -= ends.pop(number, 0)
    return most
