"""Evaluates jaxprs with other computations in place of some of their equations.

Matrix products give fp32 where their results are added to fp32 sums.

A gradient of weights is a product. If its result is bfloat16, a GPU writes it to memory, and reads
it again to add it to the sum. A product in fp32 adds to the sum while it computes: the gradient is
never in memory, and is not rounded before it is added.

Example: the gradient of `w` in `y = x @ w`, with bfloat16 arrays::

    t = dot_general dy x        # bfloat16; with fp32 asked for: float32
    dw = transpose t            # likewise
    sum + dw

Lookups of few rows by many indices have a matrix product as their gradient.

JAX's gradient of a lookup adds the cotangents of all indices to the rows of a table. On a GPU,
threads that add to the same row wait for each other. If thousands of indices share a row, that
takes seconds.

Example: the bias of a T5's attention by relative position, 32 rows of 32 numbers that 512 x 512
pairs of tokens look up, in bfloat16 on an H100::

    scatter-add zeros indices cotangents          # 3 s
    dot_general (one_hot indices) cotangents      # 537 MFLOP and 34 MB: less than 0.1 ms

Attention with too many elements for cuDNN is computed for a few heads at a time.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import heads_axis, is_attention, masked_pairs
from megatrain_jax._src.engine.program.primitives import REMAT

_FP32 = jnp.dtype("float32")
# Primitives that only reorder elements, so that their result has the dtype of their operand.
_REORDERING = ("reshape", "transpose")


def with_fp32_products(
    function: Callable | jx.Traced, are_wide: Sequence[bool], *, casts_operands: bool = False
) -> Callable:
    """A function with some of its results in fp32, if they come from narrower products.

    Args:
        function: The function, of trees of arrays, without effects; it may be traced.
        are_wide: For each array that it returns, whether it should be in fp32 if possible.
        casts_operands: Whether operands are cast to fp32 first, because the platform has no
            products of narrow numbers that give fp32. The results are the same.
    """

    def evaluate(jaxpr: Any, ins: Sequence[Any]) -> list[Any]:
        wide = [*are_wide, *[False] * (len(jaxpr.outvars) - len(are_wide))]
        return _with_wide_results(jaxpr, ins, wide, casts_operands)

    return jx.rewritten(function, evaluate)


def _with_wide_results(
    jaxpr: Any, args: Sequence[Any], are_wide: Sequence[bool], casts_operands: bool
) -> list[Any]:
    """Evaluates an open jaxpr, with the flagged results in fp32 where `with_fp32_products` can."""
    sources = _sources(jaxpr, are_wide)

    def results_of(eqn: Any, ins: list[Any]) -> list[Any]:
        wide = [v in sources for v in eqn.outvars]
        if not any(wide):
            return jx.bind(eqn, ins)
        if (inner := jx.called(eqn)) is not None:
            return _with_wide_results(inner.jaxpr, [*inner.consts, *ins], wide, casts_operands)
        ins = [x.astype(_FP32) for x in ins] if casts_operands else ins
        params = {**eqn.params, "preferred_element_type": _FP32}
        return jx.bind(eqn.replace(params=params), ins)

    return jx.interpret(jaxpr, args, results_of)


def _sources(jaxpr: Any, are_wide: Sequence[bool]) -> set[Any]:
    """The variables that products, or calls, give in fp32 so that the flagged results are fp32."""
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    num_readers = jx.num_readers(jaxpr)
    found = set()
    for v, wide in zip(jaxpr.outvars, are_wide, strict=True):
        if not wide or jx.is_literal(v):
            continue
        # Other readers would get a different dtype than they expect.
        while (eqn := producer.get(v)) is not None and num_readers[v] == 1:
            if eqn.primitive.name in _REORDERING:
                v = eqn.invars[0]
                continue
            if _is_narrow_product(eqn) or is_open(eqn):
                found.add(v)
            break
    return found


def _is_narrow_product(eqn: Any) -> bool:
    dtype = eqn.outvars[0].aval.dtype
    is_narrow = dtype in (jnp.bfloat16, jnp.float16)
    is_product = eqn.primitive.name == "dot_general"
    return is_product and is_narrow and all(a.aval.dtype == dtype for a in eqn.invars)


def is_open(eqn: Any) -> bool:
    """Whether a call's equations may be evaluated one by one."""
    # With `prevent_cse`, a compiler must not merge equations of a remat with equal ones outside.
    closed = eqn.primitive.name in REMAT and eqn.params.get("prevent_cse")
    return jx.called(eqn) is not None and not closed


# A product takes over from so many indices per row on, if the table has at most so many rows for
# each number of a row. Its zeros and ones then take at most a few times the cotangents' memory.
_INDICES_PER_ROW, _MOST_ROWS = 64, 4
# Several products are added if each of them still sums at least so many numbers per row.
_SHORT = 4


def evaluate_for_derivatives(
    jaxpr: Any, args: Sequence[Any], differentiated: Collection[Any]
) -> list[Any]:
    """Evaluates an open jaxpr, for derivatives with products in place of contended scatters.

    Args:
        jaxpr: The jaxpr.
        args: Values of its constants and inputs.
        differentiated: The inputs that it will be differentiated by.
    """
    if not any(map(is_contended, jx.equations(jaxpr))):
        return jx.evaluate(jaxpr, args)
    active = jx.dependent(jaxpr, differentiated)

    def results_of(eqn: Any, ins: list[Any]) -> list[Any]:
        if is_contended(eqn) and eqn.invars[0] in active:
            return [_looked_up(eqn, *ins)]
        if is_open(eqn) and jx.contains(eqn, is_contended):
            inner = jx.called(eqn)
            assert inner is not None
            pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
            own = [v for v, atom in pairs if not jx.is_literal(atom) and atom in active]
            return evaluate_for_derivatives(inner.jaxpr, [*inner.consts, *ins], own)
        return jx.bind(eqn, ins)

    return jx.interpret(jaxpr, args, results_of)


def is_contended(eqn: Any) -> bool:
    """Whether an equation looks up whole rows of a small table, each by many indices."""
    if eqn.primitive.name != "gather":
        return False
    (table, indices), out = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    numbers, rank = eqn.params["dimension_numbers"], len(table.shape)
    if (
        not jx.is_float(table)
        or numbers.collapsed_slice_dims != (0,)
        or numbers.start_index_map != (0,)
        or numbers.operand_batching_dims
        or eqn.params["slice_sizes"] != (1, *table.shape[1:])
        or numbers.offset_dims != tuple(range(len(out.shape) - rank + 1, len(out.shape)))
    ):
        return False
    rows, count = table.shape[0], math.prod(indices.shape[:-1])
    width = math.prod(table.shape[1:])
    return _INDICES_PER_ROW * rows <= count and rows <= _MOST_ROWS * width


def _looked_up(eqn: Any, table: Any, indices: Any) -> jax.Array:
    """The rows of a table, with a product as the gradient of the table."""
    shape, dtype = table.shape, table.dtype
    clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP

    @jax.custom_vjp
    def look_up(table, indices):
        return jx.bind(eqn, [table, indices])[0]

    def forward(table, indices):
        return look_up(table, indices), indices

    def backward(indices, cotangent):
        places = jnp.clip(indices, 0, shape[0] - 1) if clips else indices
        # An index out of bounds has no row, as in a scatter that drops it.
        ones = (places == jnp.arange(shape[0], dtype=places.dtype)).astype(dtype)
        # float32 products would be rounded to TF32.
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
        axes = tuple(range(indices.ndim - 1))
        # Products of few rows and columns with a long sum would keep most of a GPU idle, so there
        # is one for each index of the first axis.
        apart = 1 if len(axes) > 1 and _SHORT * shape[0] * len(indices) <= indices.size else 0
        numbers = (axes[apart:], axes[apart:]), (axes[:apart], axes[:apart])
        sums = jax.lax.dot_general(ones, cotangent, numbers, precision=precision)
        sums = jnp.sum(sums, axis=0) if apart else sums
        return sums, np.zeros(indices.shape, jax.dtypes.float0)

    look_up.defvjp(forward, backward)
    return look_up(table, indices)


_MOST_ELEMENTS = 2**31 - 1


def is_oversized(jaxpr: Any, num_devices: int = 1) -> bool:
    """Whether a jaxpr or an inner one has attention with more elements than cuDNN can index.

    Args:
        jaxpr: An open jaxpr.
        num_devices: Number of devices that divide its rows.
    """
    return are_oversized(attention_shapes(jaxpr), num_devices)


# Like stages share their jaxpr, and a plan asks for its shapes hundreds of times.
_attention_shapes: WeakKeyDictionary[Any, frozenset[tuple[int, ...]]] = WeakKeyDictionary()


def attention_shapes(jaxpr: Any) -> frozenset[tuple[int, ...]]:
    """The shapes of queries, keys and values of all attention in a jaxpr, also inside equations."""
    if (known := _attention_shapes.get(jaxpr)) is not None:
        return known
    found = filter(is_attention, jx.equations(jaxpr))
    shapes = frozenset(v.aval.shape for eqn in found for v in eqn.invars[:3])
    return _attention_shapes.setdefault(jaxpr, shapes)


def are_oversized(shapes: Iterable[tuple[int, ...]], num_devices: int) -> bool:
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

    def results_of(eqn: Any, ins: list[Any]) -> list[Any]:
        shapes = (v.aval.shape for v in eqn.invars[:3])
        if is_attention(eqn) and are_oversized(shapes, num_devices):
            return _divided(eqn, ins, num_devices)
        return jx.bind(_with_pieces_within(eqn, num_devices), ins)

    return jx.interpret(jaxpr, (*consts, *args), results_of)


def _with_pieces_within(eqn: Any, num_devices: int) -> Any:
    """An equation with wide attention in its inner jaxprs, such as a loop's body, in pieces."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(rewritten, value))
        if not jx.is_jaxpr(value) or not is_oversized(body := jx.opened(value), num_devices):
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

    if not any(is_oversized(inner, num_devices) for inner in jx.inner_jaxprs(eqn)):
        return eqn
    return eqn.replace(params={name: rewritten(value) for name, value in eqn.params.items()})


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
    has_gradient = eqn.params.get("variadic_args", (False, False))[1]
    is_masked = not has_gradient and masked_pairs(eqn) and eqn.invars[3].aval.shape[1] == 1
    problem = None
    if not fitting or not by_heads and num_devices > 1:
        problem = "so has one head of keys with its queries in one row: use shorter sequences"
    elif eqn.params.get("dropout_rate"):
        problem = (
            "with dropout it can't be computed for some heads at a time: use none, or shorter "
            "sequences"
        )
    elif any(eqn.params.get("variadic_args", ())) and not is_masked:
        problem = (
            "with a bias of several heads or with a gradient it can't be computed for some heads "
            "at a time: leave it out, or use shorter sequences"
        )
    if problem:
        raise ValueError(
            f"attention over queries of shape {query.shape} has more elements than cuDNN counts "
            f"({_MOST_ELEMENTS:,}), and {problem}"
        )

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
        ins = list(map(piece, operands))
        if is_masked and (by_heads or operands[3].shape[0] == 1):  # that of all heads, or rows
            ins[3] = operands[3]
        parts.append(jx.bind(_of_shapes(eqn, piece), ins))
    return [jnp.concatenate(row, axis=axis_of(row[0])) for row in zip(*parts, strict=True)]


def _of_shapes(eqn: Any, piece: Callable[[Any], Any]) -> Any:
    """The equation of a piece; if it states its results' shapes, they are the piece's."""
    results = eqn.params.get("result_avals")
    # An equation that isn't lowered yet derives its results' shapes from its operands.
    if results is None:
        return eqn
    new = tuple(a.update(shape=jax.eval_shape(piece, jx.shape_of(a)).shape) for a in results)
    return eqn.replace(params={**eqn.params, "result_avals": new})
