"""Counts the short kernels of loops, which can cost a device more time than their arithmetic.

A device launches a loop's kernels one after another, at a few microseconds each, however little
they compute. A mixture of experts may process its tokens in blocks, each with one expert, and
linear attention works in chunks of a row: hundreds of short products per layer.
Example: a loop over 640 blocks of 512 rows with 2,048 numbers; each block passes through an expert
with three matrices of 2,048 x 768::

    kernels      3 slices of the weights, 3 products, a slice of the rows, a result written: 640 * 8
    operations   640 * 3 * 2 * 512 * 2048 * 768

At 6 microseconds per kernel they take 31 ms, and the operations at 700 TFLOP/s 4.4 ms. Done in 10
turns of 64 blocks, there are 80 kernels, each on the weights of 64 experts. They copy as many bytes
as before, and the device does nothing else meanwhile::

    copied       640 * 3 * 2048 * 768 numbers, 6 GB in bf16, read and written: 2.5 ms at 4.8 TB/s
"""

from typing import Any, NamedTuple

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import count_flops
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES, FUSED, REMAT

# Operations that copy parts of an array unchanged, such as one expert's weights.
_COPIES = ("dynamic_slice", "gather")


class Loops(NamedTuple):
    """Kernels, operations and copies of the loops in one evaluation.

    Attributes:
        kernels: Approximate number of kernels: elementwise operations fuse with their reader.
        flops: Their floating-point operations; see `count_flops`.
        copied: Bytes that they copy unchanged.
    """

    kernels: int
    flops: int
    copied: int

    def plus(self, other: "Loops", times: int = 1) -> "Loops":
        """The sum of these counts and `times` the given ones."""
        return Loops(*(own + times * more for own, more in zip(self, other, strict=True)))


def count_loops(jaxpr: Any) -> Loops:
    """Counts the kernels and operations of the loops in a jaxpr.

    The trip count of a `while` is unknown: the loops inside it count for one trip.

    Args:
        jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    """
    found = Loops(kernels=0, flops=0, copied=0)
    for eqn in jx.opened(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            kernels, copied = _trip(eqn)
            of_trip = Loops(kernels, count_flops(jx.loop_body(eqn).jaxpr), copied)
            found = found.plus(of_trip, eqn.params["length"])
        elif inner := _inner(eqn):
            found = found.plus(max(map(count_loops, inner)))  # for a `cond`, the costliest branch
    return found


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs that an equation calls: one, or all branches of a `cond`."""
    if eqn.primitive.name == "while":
        return [jx.loop_body(eqn).jaxpr]
    if eqn.primitive.name == "cond":
        return [body.jaxpr for body in jx.branches(eqn)]
    inner = jx.called(eqn, CALLS | REMAT | CUSTOM_RULES)
    return [inner.jaxpr] if inner else []


def _trip(scan: Any) -> tuple[int, int]:
    """Kernels and copied bytes of one trip; slicing inputs and writing results are kernels too."""
    num_consts, num_carry = jx.scan_parts(scan)
    taken = len(scan.invars) - num_consts - num_carry
    given = len(scan.outvars) - num_carry
    kernels, copied = _kernels_and_copies(jx.loop_body(scan).jaxpr)
    return max(1, kernels + (taken > 0) + (given > 0)), copied


def _kernels_and_copies(jaxpr: Any) -> tuple[int, int]:
    kernels, copied = 0, 0
    for eqn in jx.opened(jaxpr).eqns:
        name, times = eqn.primitive.name, 1
        if name == "scan":
            times, rows = eqn.params["length"], [_trip(eqn)]
        elif inner := _inner(eqn):
            rows = list(map(_kernels_and_copies, inner))
        else:
            num_bytes = sum(jx.num_bytes(v.aval) for v in eqn.outvars)
            rows = [(int(name not in FUSED), num_bytes if name in _COPIES else 0)]
        kernels += times * max(row[0] for row in rows)
        copied += times * max(row[1] for row in rows)
    return kernels, copied
