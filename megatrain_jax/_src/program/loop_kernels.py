"""Loops of a jaxpr, whose many short kernels take a device longer than their arithmetic.

A device gets the kernels of a loop one after another, which takes a few microseconds each, however
little they compute. A mixture of experts may go through its tokens in blocks of one expert each, a
linear attention goes through chunks of a row: hundreds of short products for each layer.

A worked example, a loop over 640 blocks of 512 rows of 2,048 numbers, one after the
other, each of which passes through an expert of three matrices of 2,048 x 768::

    kernels      3 slices of the weights, 3 products, a slice of the rows, a result written: 640 * 8
    operations   640 * 3 * 2 * 512 * 2048 * 768

At 6 microseconds a kernel they take 31 ms, and the operations at 700 TFLOP/s 4.4 ms. In 10 turns of
64 blocks there are 80 kernels, which slice the weights of 64 experts at a time. They copy as many
bytes as before, and meanwhile a device does nothing else::

    copied       640 * 3 * 2048 * 768 numbers, 6 GB in bf16, read and written: 2.5 ms at 4.8 TB/s
"""

from typing import Any, NamedTuple

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.program.primitives import CUSTOM_RULES, FUSED

# What takes parts of an array as they are, as a block's expert of all experts' weights.
_COPIES = ("dynamic_slice", "gather")


class Loops(NamedTuple):
    """Kernels, operations and copies of loops in one evaluation.

    Attributes:
        kernels: Number of kernels, about: elementwise operations are one with what reads them.
        flops: Their floating-point operations; see `count_flops`.
        copied: Bytes that they copy as they are.
    """

    kernels: int
    flops: int
    copied: int

    def plus(self, other: "Loops", times: int = 1) -> "Loops":
        """These and `times` others."""
        return Loops(*(own + times * more for own, more in zip(self, other, strict=True)))


def count_loops(jaxpr: Any) -> Loops:
    """Counts kernels and operations of the loops of a jaxpr.

    How often a `while` goes round isn't known: of one trip, the loops within it count.

    Args:
        jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    """
    found = Loops(kernels=0, flops=0, copied=0)
    for eqn in jx.opened(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            kernels, copied = _trip(eqn)
            of_trip = Loops(kernels, count_flops(eqn.params["jaxpr"]), copied)
            found = found.plus(of_trip, eqn.params["length"])
        elif inner := _inner(eqn):
            found = found.plus(max(map(count_loops, inner)))  # of a `cond` the most
    return found


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs that an equation calls: one, or the branches of a `cond`."""
    if eqn.primitive.name == "while":
        return [eqn.params["body_jaxpr"]]
    if eqn.primitive.name == "cond":
        return list(eqn.params["branches"])
    if eqn.primitive.name in CUSTOM_RULES:
        return jx.inner_jaxprs(eqn)[:1]
    inner = jx.called(eqn)
    return [] if inner is None else [inner]


def _trip(scan: Any) -> tuple[int, int]:
    """Kernels of one trip, also to slice what a scan goes through and to write results; copies."""
    num_consts, num_carry = jx.scan_parts(scan)
    taken = len(scan.invars) - num_consts - num_carry
    given = len(scan.outvars) - num_carry
    kernels, copied = _kernels_and_copies(scan.params["jaxpr"])
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
