"""Computes attention for a few heads at a time if it has too many elements for cuDNN.

cuDNN's kernels index elements with 32 bits. Beyond 2^31 of them (602,112 queries with 28 heads of
width 128, or 64 rows of 16,384), the gradient of the last queries is written to wrong places
without an error (seen with cuDNN 9 on an H200). Heads are independent, so computing a few at a time
gives the same results with smaller arrays.

Example: the forward of 1,048,576 queries with 28 heads, and as many keys with 4 heads::

    out, statistics = fwd(q, k, v)                         # 3.76e9 elements of q

    o0, s0 = fwd(q[:, :, :14], k[:, :, :2], v[:, :, :2])   # 1.88e9
    o1, s1 = fwd(q[:, :, 14:], k[:, :, 2:], v[:, :, 2:])
    out, statistics = concatenate([o0, o1], 2), concatenate([s0, s1], 1)
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.attention import heads_axis, is_attention

_MOST_ELEMENTS = 2**31 - 1


def is_wide(jaxpr: Any, num_devices: int = 1) -> bool:
    """Whether a jaxpr or an inner one has attention with more elements than cuDNN can index.

    Args:
        jaxpr: An open jaxpr.
        num_devices: Number of devices that divide its rows.
    """
    return are_wide(attention_shapes(jaxpr), num_devices)


def attention_shapes(jaxpr: Any) -> frozenset[tuple[int, ...]]:
    """The shapes of queries, keys and values of all attention in a jaxpr, also inside equations."""
    found: set[tuple[int, ...]] = set()
    for eqn in jaxpr.eqns:
        if is_attention(eqn):
            found.update(v.aval.shape for v in eqn.invars[:3])
        for inner in jx.inner_jaxprs(eqn):
            found |= attention_shapes(inner)
    return frozenset(found)


def are_wide(shapes: Iterable[tuple[int, ...]], num_devices: int = 1) -> bool:
    """Whether queries, keys or values have more elements than cuDNN can index.

    Args:
        shapes: Their shapes.
        num_devices: Number of devices that divide their rows.
    """
    return any(_num_elements(shape, num_devices) > _MOST_ELEMENTS for shape in shapes)


def in_pieces(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], num_devices: int) -> list:
    """Evaluates an open jaxpr under a trace, with wide attention for a few heads at a time.

    Args:
        jaxpr: The jaxpr.
        consts: Values of its constants.
        args: Values of its inputs.
        num_devices: Number of devices that divide its rows.

    Raises:
        ValueError: If attention can't be divided in this way.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if jx.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if _is_wide(eqn, num_devices):
            out = _divided(eqn, values, num_devices)
        else:
            out = jx.bind(_with_pieces_within(eqn, num_devices), values)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _with_pieces_within(eqn: Any, num_devices: int) -> Any:
    """An equation with wide attention in its inner jaxprs, such as a loop's body, in pieces."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(rewritten, value))
        if not jx.is_jaxpr(value) or not is_wide(body := jx.opened(value), num_devices):
            return value
        # Weak types stay weak, because a loop's carry must keep its type.
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
            for v in body.invars
        ]
        closed = jax.make_jaxpr(
            lambda *args: in_pieces(body, jx.constants(value), args, num_devices)
        )(*shapes)
        return jx.opened(closed) if body is value else closed

    if not any(is_wide(inner, num_devices) for inner in jx.inner_jaxprs(eqn)):
        return eqn
    return eqn.replace(params={name: rewritten(value) for name, value in eqn.params.items()})


def _is_wide(eqn: Any, num_devices: int) -> bool:
    return is_attention(eqn) and are_wide((v.aval.shape for v in eqn.invars[:3]), num_devices)


def _num_elements(shape: tuple[int, ...], num_devices: int) -> int:
    """Number of elements of queries, keys or values on each device."""
    rows, *others = shape
    return -(-rows // num_devices) * math.prod(others)


def _divided(eqn: Any, operands: Sequence[Any], num_devices: int) -> list[jax.Array]:
    """The results of attention, computed for a few key heads with their queries at a time.

    If even one head is too large, it is computed for some rows at a time.
    """
    query = eqn.invars[0].aval
    rows = query.shape[0]
    num_queries, num_keys = (v.aval.shape[heads_axis(eqn)] for v in eqn.invars[:2])
    size = max(_num_elements(v.aval.shape, num_devices) for v in eqn.invars[:3])
    # Heads first: devices divide the rows, and a slice of all rows would have to travel between
    # them. So several devices divide heads or nothing.
    by_heads = size <= num_keys * _MOST_ELEMENTS
    count = num_keys if by_heads else rows
    fitting = count * _MOST_ELEMENTS // size
    _check(eqn, fitting if by_heads or num_devices == 1 else 0)

    def axis_of(x: Any) -> int:
        """The divided axis: statistics, (rows, heads, length), have one axis less."""
        if not by_heads:
            return 0
        return heads_axis(eqn) if x.ndim == query.ndim else -2

    def part(x: Any, first: int, last: int) -> Any:
        if not x.size or (by_heads and x.ndim < query.ndim - 1):  # absent, or lengths of rows
            return x
        # The queries of one key head are contiguous, so a piece of keys goes with its own.
        each = num_queries // num_keys if by_heads and x.shape[axis_of(x)] == num_queries else 1
        return jax.lax.slice_in_dim(x, first * each, last * each, axis=axis_of(x))

    parts = []
    for first in range(0, count, fitting):
        piece = functools.partial(part, first=first, last=min(first + fitting, count))
        parts.append(jx.bind(_of_shapes(eqn, piece), list(map(piece, operands))))
    return [jnp.concatenate(row, axis=axis_of(row[0])) for row in zip(*parts, strict=True)]


def _of_shapes(eqn: Any, piece: Callable[[Any], Any]) -> Any:
    """The equation of a piece; if it states its results' shapes, they are the piece's."""
    results = eqn.params.get("result_avals")
    # An equation that isn't lowered yet derives its results' shapes from its operands.
    if results is None:
        return eqn
    new = tuple(a.update(shape=jax.eval_shape(piece, jx.shape_of(a)).shape) for a in results)
    return eqn.replace(params={**eqn.params, "result_avals": new})


def _check(eqn: Any, fitting: int) -> None:
    problem = None
    if not fitting:
        problem = "so has one head of keys with its queries in one row: use shorter sequences"
    elif eqn.params.get("dropout_rate"):
        problem = (
            "with dropout it can't be computed for some heads at a time: use none, or shorter "
            "sequences"
        )
    elif any(eqn.params.get("variadic_args", ())):
        problem = (
            "with a bias or a mask it can't be computed for some heads at a time: leave it out, or "
            "use shorter sequences"
        )
    if problem:
        raise ValueError(
            f"attention over queries of shape {eqn.invars[0].aval.shape} has more elements than "
            f"cuDNN counts ({_MOST_ELEMENTS:,}), and {problem}"
        )
