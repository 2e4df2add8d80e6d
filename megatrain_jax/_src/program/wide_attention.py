"""Attention of more elements than cuDNN counts, in pieces of its heads.

cuDNN's kernels number the elements of an array in 32 bits. Past 2^31 of them, as in 602,112 queries
of 28 heads of width 128 or in 64 rows of 16,384, the gradient of the last queries is written to
other places (seen with cuDNN 9 on an H200), and no error says so. Heads don't know of each other:
queries, keys and values of some of them at a time give the same results, in smaller arrays.

A worked example, the forward of 1,048,576 queries of 28 heads and as many keys of 4::

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

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.attention import heads_axis, is_attention

_MOST_ELEMENTS = 2**31 - 1


def is_wide(jaxpr: Any, num_devices: int = 1) -> bool:
    """Whether a jaxpr has attention of more elements than its kernel counts, also within equations.

    Args:
        jaxpr: An open jaxpr.
        num_devices: Number of devices that divide its rows.
    """
    return are_wide(attention_shapes(jaxpr), num_devices)


def attention_shapes(jaxpr: Any) -> frozenset[tuple[int, ...]]:
    """The shapes of queries, keys and values of a jaxpr's attention, also within equations."""
    found: set[tuple[int, ...]] = set()
    for eqn in jaxpr.eqns:
        if is_attention(eqn):
            found.update(v.aval.shape for v in eqn.invars[:3])
        for inner in jx.inner_jaxprs(eqn):
            found |= attention_shapes(inner)
    return frozenset(found)


def are_wide(shapes: Iterable[tuple[int, ...]], num_devices: int = 1) -> bool:
    """Whether one of queries, keys and values has more elements than their kernel counts.

    Args:
        shapes: Their shapes.
        num_devices: Number of devices that divide their rows.
    """
    return any(_num_elements(shape, num_devices) > _MOST_ELEMENTS for shape in shapes)


def in_pieces(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], num_devices: int) -> list:
    """Evaluates an open jaxpr under a trace, with wide attention in pieces of its heads.

    Args:
        jaxpr: The jaxpr.
        consts: Values of its constants.
        args: Values of its inputs.
        num_devices: Number of devices that divide its rows.

    Raises:
        ValueError: If attention can't be divided so.
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
    """An equation whose own jaxprs, as a loop's body, have their wide attention in pieces."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(rewritten, value))
        if not jx.is_jaxpr(value) or not is_wide(body := jx.opened(value), num_devices):
            return value
        # Weak types stay weak: what a loop carries has to come out as it went in.
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
    """Elements of queries, keys or values on each device."""
    rows, *others = shape
    return -(-rows // num_devices) * math.prod(others)


def _divided(eqn: Any, operands: Sequence[Any], num_devices: int) -> list[jax.Array]:
    """The results of attention, computed for some heads of keys, and their queries, at a time.

    If one of them is too many, some rows are computed at a time.
    """
    query = eqn.invars[0].aval
    rows = query.shape[0]
    num_queries, num_keys = (v.aval.shape[heads_axis(eqn)] for v in eqn.invars[:2])
    size = max(_num_elements(v.aval.shape, num_devices) for v in eqn.invars[:3])
    # Heads first: rows are what devices divide, and a slice of some of all rows would have to
    # travel between them. So several devices divide heads or nothing.
    by_heads = size <= num_keys * _MOST_ELEMENTS
    count = num_keys if by_heads else rows
    fitting = count * _MOST_ELEMENTS // size
    _check(eqn, fitting if by_heads or num_devices == 1 else 0)

    def axis_of(x: Any) -> int:
        """The axis that is divided: statistics, (rows, heads, length), have an axis less."""
        if not by_heads:
            return 0
        return heads_axis(eqn) if x.ndim == query.ndim else -2

    def part(x: Any, first: int, last: int) -> Any:
        if not x.size or (by_heads and x.ndim < query.ndim - 1):  # absent, or lengths of rows
            return x
        # The queries of one head of keys are neighbours, so that a piece of keys goes with its own.
        each = num_queries // num_keys if by_heads and x.shape[axis_of(x)] == num_queries else 1
        return jax.lax.slice_in_dim(x, first * each, last * each, axis=axis_of(x))

    parts = []
    for first in range(0, count, fitting):
        piece = functools.partial(part, first=first, last=min(first + fitting, count))
        parts.append(jx.bind(_of_shapes(eqn, piece), list(map(piece, operands))))
    return [jnp.concatenate(row, axis=axis_of(row[0])) for row in zip(*parts, strict=True)]


def _of_shapes(eqn: Any, piece: Callable[[Any], Any]) -> Any:
    """The equation of a piece: a call that says what its results are says it of the piece's."""
    results = eqn.params.get("result_avals")
    # What isn't lowered yet has its results' shapes from its operands.
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
