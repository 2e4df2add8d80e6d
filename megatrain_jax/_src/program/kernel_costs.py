"""Operations and workspace of the primitives that kernels of this library's models compute.

The primitives are recognised by name, since models are built on top of the library. Operands of
grouped products are rows, matrices and sizes of groups; the delta rule's are queries, keys, values,
decays, rates and perhaps documents, after the cotangent in backward.

Example: 1,024 rows of 64 numbers, each multiplied by one of 8 matrices of 32 x 64::

    grouped_product    2 * 1024 * 64 * 32 operations, however rows and matrices are paired
    grouped_outer      the same: each row adds an outer product of 32 x 64
"""

import math
from typing import Any

from megatrain_jax._src.program.jaxpr import contains

PRODUCT, OUTER = "grouped_product", "grouped_outer"
DELTA_FORWARD, DELTA_BACKWARD = "delta_rule_forward", "delta_rule_backward"
EXPERTS, DELTA_RULE = "experts", "the gated delta rule"
PURPOSES = {EXPERTS: (PRODUCT, OUTER), DELTA_RULE: (DELTA_FORWARD, DELTA_BACKWARD)}

_CHUNK = 64  # tokens that the delta rule's kernels process at a time


def computed_by_kernels(jaxpr: Any) -> tuple[str, ...]:
    """Returns the words in `PURPOSES` for the kernels in a jaxpr and in jaxprs inside it."""

    def found(names: tuple[str, ...]) -> bool:
        return any(contains(eqn, lambda eqn: eqn.primitive.name in names) for eqn in jaxpr.eqns)

    return tuple(purpose for purpose, names in PURPOSES.items() if found(names))


def product_flops(eqn: Any) -> int:
    """Counts the operations of rows with one matrix each."""
    rows, matrices = (v.aval.shape for v in eqn.invars[:2])
    return 2 * rows[0] * math.prod(matrices[1:])


def outer_flops(eqn: Any) -> int:
    """Counts the operations of outer products of pairs of rows."""
    left, right = (v.aval.shape for v in eqn.invars[:2])
    return 2 * left[0] * left[1] * right[1]


def delta_rule_flops(eqn: Any) -> int:
    """Counts the operations of the gated delta rule in chunks, forward or backward.

    Within a chunk, keys meet keys and queries, and weights meet values twice; the state is read by
    keys and by queries and written once. The gradient takes about three times as many.
    """
    keys, values, times = _delta_shapes(eqn)
    width, value_width = keys[-1], values[-1]
    of_token = 4 * _CHUNK * (width + value_width) + 6 * width * value_width
    return times * math.prod(values[:3]) * of_token


def workspace_bytes(eqn: Any) -> int:
    """Returns the bytes that a kernel needs beside its operands and results."""
    if eqn.primitive.name not in (DELTA_FORWARD, DELTA_BACKWARD):
        return 0
    keys, values, times = _delta_shapes(eqn)
    itemsize = eqn.outvars[0].aval.dtype.itemsize
    tokens = math.prod(values[:3])  # times heads of values
    # Normalised queries and keys, and the inverse of each chunk's corrections. XLA's figure on an
    # H200, for 8,192 tokens, 16 heads of keys and 32 of values of width 128, is 98 MiB; this, 96.
    forward = 2 * math.prod(keys) * itemsize + tokens * _CHUNK * itemsize
    if times == 1:
        return forward
    # Also the states before all chunks and their gradients: 389 MiB; this, 384.
    states = 2 * tokens * keys[-1] * values[-1] * itemsize // _CHUNK
    return forward + states + tokens * _CHUNK * itemsize


def _delta_shapes(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shapes of keys and values, and how often forward's operations are computed."""
    first = int(eqn.primitive.name == DELTA_BACKWARD)
    keys, values = (eqn.invars[at].aval.shape for at in (first + 1, first + 2))
    return keys, values, 3 if first else 1


FLOPS = {
    PRODUCT: product_flops,
    OUTER: outer_flops,
    DELTA_FORWARD: delta_rule_flops,
    DELTA_BACKWARD: delta_rule_flops,
}
