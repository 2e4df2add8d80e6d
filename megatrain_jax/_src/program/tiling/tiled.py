"""A jaxpr that is computed tile by tile, so that most of its values never exist whole."""

import dataclasses
import math
from typing import Any

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.tiling.axes import Label
from megatrain_jax._src.program.tiling.flow import Flow, Op, flow_of
from megatrain_jax._src.program.tiling.labels import Carried, Carrier, Labels, chosen
from megatrain_jax._src.program.tiling.loop import run_loop
from megatrain_jax._src.program.tiling.memory import peak_bytes
from megatrain_jax._src.program.tiling.order import Loop, ordered

_SEEDS = 8  # shapes of values whose axes are tried: those of most bytes
_TRIED = 3  # ways to divide that are compared by the memory they need


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tiled:
    """A jaxpr divided into tiles: a function that computes the same, tile by tile.

    Attributes:
        jaxpr: The jaxpr, closed.
        num_tiles: Number of tiles.
        num_rows: Entries of the axis that is divided: tokens, as a rule.
        flow: The jaxpr as operations on numbered values.
        labels: How its operations are divided.
        steps: The loops over tiles, and the operations on whole values between them, in order.
    """

    jaxpr: Any
    num_tiles: int
    num_rows: int
    flow: Flow
    labels: Labels
    steps: tuple[Loop | Op, ...]

    @property
    def rows_per_tile(self) -> int:
        """Entries of the divided axis in one tile."""
        return self.num_rows // self.num_tiles

    def __call__(self, *args: Any) -> list[Any]:
        """Computes the jaxpr's results from its arguments, flat; traceable."""
        flow = self.flow
        values: dict[int, Any] = dict(flow.constants)
        values.update(zip(flow.inputs, args, strict=True))
        for step in self.steps:
            if isinstance(step, Op):
                made = jx.bind(step.eqn, [values[v] for v in step.reads])
                values.update(zip(step.makes, made, strict=True))
            else:
                values.update(run_loop(step, flow, self.labels, self.num_tiles, values))
        return [values[v] for v in flow.outputs]


def tiled(jaxpr: Any, num_tiles: int) -> Tiled | None:
    """Divides a jaxpr into tiles along the axis along which that spares the most memory.

    Args:
        jaxpr: A closed jaxpr.
        num_tiles: Number of tiles, above 1.

    Returns:
        The division; None if no axis can be divided so, or nothing would be gained.
    """
    flow = flow_of(jaxpr)
    return _best(jaxpr, flow, num_tiles, num_tiles)


def tile_counts(jaxpr: Any) -> tuple[int, ...]:
    """Numbers of tiles worth trying for a closed jaxpr, ascending; empty if it can't be divided.

    They are the divisors of the number of rows that are multiples of its first prime factor.
    """
    flow = flow_of(jaxpr)
    for prime in (2, 3, 5, 7):
        # With as many tiles as can be: what they spare is all that can be spared.
        found = _best(jaxpr, flow, prime, many=2**20)
        if found is not None:
            counts = range(prime, found.num_rows + 1, prime)
            return tuple(k for k in counts if not found.num_rows % k)
    return ()


def _seeds(flow: Flow) -> list[int]:
    """The values with the most bytes that a flow makes, one of each shape."""
    made = sorted((v for op in flow.ops for v in op.makes), key=flow.num_bytes, reverse=True)
    shapes = {getattr(flow.avals[v], "shape", ()): v for v in reversed(made)}
    return sorted(shapes.values(), key=flow.num_bytes, reverse=True)[:_SEEDS]


def _best(jaxpr: Any, flow: Flow, num_tiles: int, many: int) -> Tiled | None:
    """The division into tiles that needs the least memory if there were so many tiles."""
    best, least = None, peak_bytes(flow, flow.ops, many)
    for carried in _candidates(flow, num_tiles):
        for last in (False, True):
            labels = chosen(flow, carried, last=last)
            steps = ordered(flow, labels)
            peak = peak_bytes(flow, steps, many)
            if peak < least:
                best, least = (labels, steps), peak
    if best is None:
        return None
    labels, steps = best
    rows = math.gcd(*(x.inner for x in labels.made.values())) * num_tiles
    return Tiled(
        jaxpr=jaxpr,
        num_tiles=num_tiles,
        num_rows=rows,
        flow=flow,
        labels=labels,
        steps=steps,
    )


def _candidates(flow: Flow, num_tiles: int) -> list[Carried]:
    """The ways to divide a flow that reach the most bytes."""
    carrier, found = Carrier(flow), []
    for v in _seeds(flow):
        for axis, size in enumerate(getattr(flow.avals[v], "shape", ())):
            label = Label(axis, 1, size // num_tiles)
            if size % num_tiles or any((v, label) in other.labels for other in found):
                continue
            found.append(carrier.carry(v, label, num_tiles))

    def reached(carried: Carried) -> int:
        return sum(map(flow.num_bytes, {v for v, _ in carried.labels}))

    return sorted(found, key=reached, reverse=True)[:_TRIED]
