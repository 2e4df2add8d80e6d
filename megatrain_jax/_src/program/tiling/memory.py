"""An estimate of the memory that a divided flow needs, by which ways to divide it are compared.

A value takes its bytes from the step that makes it to the last one that reads it. An elementwise
result that one elementwise operation or reduction reads is never in memory: the values that it is
made from stay instead. Within a loop, a value made in tiles takes those of one tile.

A worked example, x f32[8, 2] in memory before, 4 tiles::

    h = x w       f32[8, 100]    in a loop with what follows: 800 bytes of one tile
    y = exp h                    read by a product: 800 bytes of one tile
    z = y v       f32[8, 2]      stored: 64 bytes. At most 800 + 800 + 64 bytes, else 6464
"""

import dataclasses
from collections.abc import Sequence

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.primitives import FREE, FUSED, FUSING
from megatrain_jax._src.program.tiling.flow import Flow, Operation
from megatrain_jax._src.program.tiling.order import TileLoop


@dataclasses.dataclass(frozen=True)
class _Event:
    """A step: the values it reads and makes, its primitive, the bytes it needs within itself."""

    reads: Sequence[int]
    makes: Sequence[int]
    name: str
    within: int = 0


def peak_bytes(flow: Flow, steps: Sequence[TileLoop | Operation], num_tiles: int) -> int:
    """Estimates the most bytes that a flow's own values take at one time, without its results."""
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
    """Estimates the most bytes within a loop if it had one tile."""
    events = [_Event(op.reads, op.makes, op.name) for op, _ in loop.ops]
    given = {*loop.stored, *loop.summed}
    return _peak(events, {v: flow.num_bytes(v) for e in events for v in e.makes if v not in given})


def _peak(events: Sequence[_Event], sizes: dict[int, int]) -> int:
    """Goes through events in order and adds up what lives."""
    readers: dict[int, list[bool]] = {}
    for event in events:
        for v in set(event.reads):
            readers.setdefault(v, []).append(event.name in FUSING)
    # The values in memory that each value is read from.
    roots: dict[int, frozenset[int]] = {}
    for event in events:
        behind = frozenset().union(*(roots.get(v, ()) for v in event.reads))
        for v in event.makes:
            read = readers.get(v, [])
            # Fused into its only reader, a result is never written; with two readers a compiler may
            # compute it twice or keep it, and this counts it as kept.
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
        # A step's results and its operands are there at once: operands end after the step.
        most = max(most, live + event.within)
        live -= ends.pop(number, 0)
    return most
