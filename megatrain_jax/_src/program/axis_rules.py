"""The axes that go together in an operation, by its primitive.

A rule gives groups of axes, each with its array's position among the operands, then results. If
one axis of a group is divided, into tiles or into the slices of a stack, so are the others, and
arrays outside the group are read whole.

A worked example, `dot_general x w` of x f32[8, 6] and w f32[6, 5]::

    [(0, 0), (2, 0)]    mapped      rows of x are rows of the result
    [(1, 1), (2, 1)]    mapped      columns of w are columns of the result
    [(0, 1), (1, 0)]    folded      tiles of both make a term of the sum that the result is
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.primitives import (
    ARG_REDUCTIONS,
    BARRIER,
    CUMULATIVE,
    MATRICES,
    REDUCTIONS,
    is_elementwise,
)

# How tiles make a result: each a tile of it; or all of them together, by the operation's own
# reduction, or by adding into its first operand.
MAPPED, FOLDED, ADDED_INTO = "mapped", "folded", "added into"

# A group of axes, and how tiles along them make the result.
Together = tuple[list[tuple[int, int]], str]


def shape_of(eqn: Any, at: int) -> tuple[int, ...]:
    """The shape of an equation's operand or result, by its position among both."""
    count = len(eqn.invars)
    atom = eqn.invars[at] if at < count else eqn.outvars[at - count]
    return getattr(atom.aval, "shape", ())


def together(eqn: Any) -> Iterator[Together]:
    """The axes of an equation's arrays that go together; a reshape has a rule of its own."""
    name = eqn.primitive.name
    if rule := _RULES.get(name):
        yield from rule(eqn)
    elif name == BARRIER or is_elementwise(eqn):
        yield from _elementwise(eqn)


def is_placed(eqn: Any, name: str = "sharding") -> bool:
    """Whether an equation has a sharding in a parameter that says how devices divide its result."""
    sharding = eqn.params.get(name)
    return sharding is not None and not jx.is_automatic(sharding)


def _elementwise(eqn: Any) -> Iterator[Together]:
    count = len(eqn.invars)
    # Operands of fewer axes, scalars as a rule, and those with 1 where the result has more are read
    # whole by each tile.
    for axis, size in enumerate(shape_of(eqn, count)):
        places = [(at, axis) for at in range(count) if axis < len(s := shape_of(eqn, at))
                  and s[axis] == size]  # fmt: skip
        yield [*places, (count, axis)], MAPPED


def _constrained(eqn: Any) -> Iterator[Together]:
    """A constraint on how devices divide an array, along axes that it leaves whole."""
    sharding = eqn.params["sharding"]
    spec = () if sharding.is_fully_replicated else getattr(sharding, "spec", None)
    if spec is not None:
        for axis in range(len(shape_of(eqn, 0))):
            if axis >= len(spec) or spec[axis] is None:
                yield [(0, axis), (1, axis)], MAPPED


def _along(name: str) -> Callable[[Any], Iterator[Together]]:
    """The rule of what goes along the axes in a parameter and leaves shapes' other axes alone."""

    def rule(eqn: Any) -> Iterator[Together]:
        taken = eqn.params[name]
        taken = set(taken) if isinstance(taken, (tuple, list)) else {taken}
        positions = range(len(eqn.invars) + len(eqn.outvars))
        for axis in range(len(shape_of(eqn, 0))):
            if axis not in taken:
                yield [(at, axis) for at in positions if shape_of(eqn, at)], MAPPED

    return rule


def _reduction(eqn: Any) -> Iterator[Together]:
    reduced = set(eqn.params["axes"])
    is_position = eqn.primitive.name in ARG_REDUCTIONS
    for axis in range(len(shape_of(eqn, 0))):
        if axis not in reduced:
            yield [(0, axis), (1, axis - sum(r < axis for r in reduced))], MAPPED
        elif not is_position:
            yield [(0, axis)], FOLDED


def _squeeze(eqn: Any) -> Iterator[Together]:
    gone = eqn.params["dimensions"]
    for axis in range(len(shape_of(eqn, 0))):
        if axis not in gone:
            yield [(0, axis), (1, axis - sum(d < axis for d in gone))], MAPPED


def _broadcast(eqn: Any) -> Iterator[Together]:
    if len(eqn.invars) != 1 or is_placed(eqn):
        return
    dims, old = tuple(eqn.params["broadcast_dimensions"]), shape_of(eqn, 0)
    for axis, size in enumerate(eqn.params["shape"]):
        places = [(0, dims.index(axis))] if axis in dims and old[dims.index(axis)] == size else []
        yield [*places, (1, axis)], MAPPED


def _made(eqn: Any) -> Iterator[Together]:
    """Arrays made of nothing that has axes: counters, and random bits of a key."""
    at = len(eqn.invars)
    # With a sharding asked for, the shape says how devices divide it: a tile's would be another.
    if not is_placed(eqn):
        yield from (([(at, axis)], MAPPED) for axis in range(len(shape_of(eqn, at))))


def _random_bits(eqn: Any) -> Iterator[Together]:
    """Bits of one key that are a function of an element's number alone."""
    key = eqn.invars[0].aval
    counted = getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    if counted and not key.shape and key.dtype == _threefry_dtype():
        yield from _made(eqn)


@functools.cache
def _threefry_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _transpose(eqn: Any) -> Iterator[Together]:
    for new, old in enumerate(eqn.params["permutation"]):
        yield [(0, old), (1, new)], MAPPED


def _dot_general(eqn: Any) -> Iterator[Together]:
    contracted, batch = eqn.params["dimension_numbers"]
    if is_placed(eqn, "out_sharding"):
        return
    for new, pair in enumerate(zip(*batch, strict=True)):
        yield [*enumerate(pair), (2, new)], MAPPED
    # The result's axes are the batch's, then the left operand's free ones, then the right one's.
    new = len(batch[0])
    for at in (0, 1):
        for axis in range(len(shape_of(eqn, at))):
            if axis not in (*contracted[at], *batch[at]):
                yield [(at, axis), (2, new)], MAPPED
                new += 1
    for pair in zip(*contracted, strict=True):
        yield [*enumerate(pair)], FOLDED


def _convolution(eqn: Any) -> Iterator[Together]:
    left, right, result = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1:
        return
    # Examples, the first entry of each layout, never mix; spatial axes do, through windows.
    yield [(0, left[0]), (2, result[0])], MAPPED
    if eqn.params["feature_group_count"] == 1:
        yield [(1, right[0]), (2, result[1])], MAPPED
        yield [(0, left[1]), (1, right[1])], FOLDED


def _pad(eqn: Any) -> Iterator[Together]:
    for axis, config in enumerate(eqn.params["padding_config"]):
        # Along an axis that is padded, entries of the result are none of the operand's.
        if tuple(config) == (0, 0, 0):
            yield [(0, axis), (2, axis)], MAPPED


def _slice(eqn: Any) -> Iterator[Together]:
    strides = eqn.params["strides"]
    for axis, (old, new) in enumerate(zip(shape_of(eqn, 0), shape_of(eqn, 1), strict=True)):
        if old == new and (strides is None or strides[axis] == 1):
            yield [(0, axis), (1, axis)], MAPPED


def _dynamic_slice(eqn: Any) -> Iterator[Together]:
    last = len(eqn.invars)
    for axis, (old, new) in enumerate(zip(shape_of(eqn, 0), shape_of(eqn, last), strict=True)):
        if old == new:  # then it starts at 0, as it would reach over the end otherwise
            yield [(0, axis), (last, axis)], MAPPED


def _dynamic_update_slice(eqn: Any) -> Iterator[Together]:
    last = len(eqn.invars)
    for axis, (old, new) in enumerate(zip(shape_of(eqn, 0), shape_of(eqn, 1), strict=True)):
        if old == new:
            yield [(0, axis), (1, axis), (last, axis)], MAPPED


def _gather(eqn: Any) -> Iterator[Together]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    rank, offsets = len(shape_of(eqn, 2)), numbers.offset_dims
    rows = [axis for axis in range(rank) if axis not in offsets]
    together = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims,
                        strict=True))  # fmt: skip
    # The axes of the indices, of which the last one is that of an index itself, come in order.
    for axis, new in enumerate(rows):
        places = [(0, together[axis])] if axis in together else []
        yield [*places, (1, axis), (2, new)], MAPPED
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape_of(eqn, 0))) if axis not in gone]
    for axis, new in zip(kept, offsets, strict=True):
        if sizes[axis] == shape_of(eqn, 0)[axis]:
            yield [(0, axis), (2, new)], MAPPED


def _scatter(eqn: Any) -> Iterator[Together]:
    numbers = eqn.params["dimension_numbers"]
    windows = numbers.update_window_dims
    rows = [axis for axis in range(len(shape_of(eqn, 2))) if axis not in windows]
    together = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims,
                        strict=True))  # fmt: skip
    for axis, update in enumerate(rows):
        if axis in together:
            own = together[axis]
            yield [(0, own), (1, axis), (2, update), (3, own)], MAPPED
        # Any order of additions will do; of other scatters, the last one to write wins.
        elif eqn.primitive.name in ADDING:
            yield [(1, axis), (2, update)], ADDED_INTO
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape_of(eqn, 0))) if axis not in gone]
    for axis, update in zip(kept, windows, strict=True):
        if shape_of(eqn, 0)[axis] == shape_of(eqn, 2)[update]:
            yield [(0, axis), (2, update), (3, axis)], MAPPED


def _unstack(eqn: Any) -> Iterator[Together]:
    gone = eqn.params["axis"]
    for axis in range(len(shape_of(eqn, 0))):
        if axis != gone:
            new = axis - (gone < axis)
            yield [(0, axis), *((at, new) for at in range(1, 1 + len(eqn.outvars)))], MAPPED


def _windows(eqn: Any) -> Iterator[Together]:
    params = eqn.params
    for axis, size in enumerate(params["window_dimensions"]):
        alone = size == 1 == params["window_strides"][axis] == params["base_dilation"][axis]
        if alone and tuple(params["padding"][axis]) == (0, 0):
            yield [(0, axis), (1, axis)], MAPPED


def _matrices(eqn: Any) -> Iterator[Together]:
    """Decompositions and solutions of many matrices, each by itself: all axes but the last two."""
    positions = range(len(eqn.invars) + len(eqn.outvars))
    for axis in range(len(shape_of(eqn, 0)) - 2):
        yield [(at, axis) for at in positions], MAPPED


# Parameters that are a shape: of the result, or of what is taken of the operand.
_SHAPES = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def params_of_part(
    eqn: Any, result_axis: int, operand_axis: int | None, length: int
) -> dict[str, Any]:
    """The parameters of an equation on a part of its arrays along axes that go together.

    Args:
        eqn: The equation.
        result_axis: The axis of its first result.
        operand_axis: The axis of its first operand; None if that is read whole.
        length: Length of the part along these axes.
    """
    name, params = eqn.primitive.name, eqn.params
    key, axis = _SHAPES.get(name), result_axis
    # Other primitives, products among them, take their shapes from their operands.
    if name == "gather" and operand_axis is not None:
        if params["slice_sizes"][operand_axis] > 1:  # an axis of windows, not of their numbers
            key, axis = "slice_sizes", operand_axis
    if key is None:
        return params
    return {**params, key: tuple(length if a == axis else n for a, n in enumerate(params[key]))}


# Versions of JAX spell these names with either sign.
ADDING = ("scatter-add", "scatter_add")
_OTHER_SCATTERS = [f"scatter{sign}{kind}" for sign in "-_" for kind in ("mul", "min", "max")]

_RULES: dict[str, Callable[[Any], Iterator[Together]]] = {
    **dict.fromkeys(REDUCTIONS | ARG_REDUCTIONS, _reduction),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _made,
    **dict.fromkeys(MATRICES, _matrices),
    "pad": _pad,
    "random_bits": _random_bits,
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum"], _windows),
    "rev": _along("dimensions"),
    **dict.fromkeys([*ADDING, "scatter", *_OTHER_SCATTERS], _scatter),
    "sharding_constraint": _constrained,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _squeeze,
    "top_k": _along("axis"),
    "transpose": _transpose,
    "unstack": _unstack,
}
