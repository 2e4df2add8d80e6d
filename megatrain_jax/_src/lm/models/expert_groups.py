"""A mixture of experts in groups of experts: each group reads its own part of the weights.

A run divides experts where those of one layer don't fit on its device (`TraceTarget`). Rows
are sorted by expert, so a group computes only the turns with blocks of its experts, and leaves the
rows of all remaining experts zero. Sums over groups add zeros, without rounding. Turns are
smaller, so that they take less memory beside a group's weights. So products have other sizes, which
may round differently, and the terms of an expert's gradients are added in another order.

Example: four experts in two groups, turns of three blocks, and the expert of each block::

    turn            0          1          2
    experts         0, 0, 1    1, 1, 2    3, 3, none
    group 0 (0, 1)  computes   2 of 3     zeros
    group 1 (2, 3)  zeros      1 of 3     computes
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.common.kernel_primitives import float0_cotangents
from megatrain_jax._src.lm.models.expert_functions import Expert, Weights
from megatrain_jax._src.lm.models.expert_turns import (
    BlockAssignments,
    add_by_expert,
    vmapped_expert,
    weights_of,
)

_Carry = TypeVar("_Carry")


def mixed_in_groups(
    expert: Expert,
    x: Float[Array, "tokens width"],
    shares: Float[Array, "tokens per_token"],
    weights: Weights,
    places: BlockAssignments,
    num_groups: int,
) -> Float[Array, "tokens width"]:
    """Passes tokens through their experts, group by group, and adds the results.

    Args:
        expert: The function of one expert.
        x: The tokens.
        shares: Factor of each expert's result.
        weights: The weights of all experts; the number of groups divides their number.
        places: The places of tokens' assignments; unused blocks have an expert past the last one.
        num_groups: Number of groups.
    """
    each = shares.shape[1]
    size = jax.tree.leaves(weights)[0].shape[0] // num_groups
    rows, rows_shares = _spread(each, x, places), _spread(1, shares.reshape(-1), places)
    out = None
    for start in range(0, num_groups * size, size):
        own = jax.tree.map(
            lambda w, start=start: jax.lax.slice_in_dim(jnp.asarray(w), start, start + size),
            weights,
        )
        given = rows, rows_shares, own, places.experts - start
        of_group: Any = _of_group(expert, num_groups, *given)
        # Each row belongs to one group, and is zero in all remaining groups.
        out = of_group if out is None else out + of_group
    return _weighted(x.dtype, out, shares, places)


# JAX's own derivatives of gathered rows would scatter.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(
    each: int, values: Float[Array, "..."], places: BlockAssignments
) -> Float[Array, "turns blocks ..."]:
    """Gives each row of the blocks its token's value; see `BlockAssignments.blocks`."""
    return places.blocks(values, each)


def _spread_forward(each, values, places):
    # The array without elements keeps the dtype.
    return _spread(each, values, places), (values[:0], places)


def _spread_backward(each, saved, cotangent):
    like, places = saved
    dvalues = places.collected(cotangent, each).sum(1, dtype=jnp.float32)
    return dvalues.astype(like.dtype), float0_cotangents(places)


_spread.defvjp(_spread_forward, _spread_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(
    dtype: Any,
    out: Float[Array, "turns blocks rows width"],
    shares: Float[Array, "tokens per_token"],
    places: BlockAssignments,
) -> Float[Array, "tokens width"]:
    """Adds the experts' results of each token, weighted by shares.

    Its backward returns the cotangents of rows without their shares, and zeros for the shares: a
    group multiplies them, because it has the results that the shares' gradients need.
    """
    results = places.collected(out, shares.shape[1]).astype(jnp.float32)
    return (results * shares[..., None]).sum(1).astype(dtype)


def _weighted_forward(dtype, out, shares, places):
    return _weighted(dtype, out, shares, places), (out[:0], shares, places)


def _weighted_backward(dtype, saved, cotangents):
    like, shares, places = saved
    dout = places.blocks(cotangents, shares.shape[1]).astype(like.dtype)
    return dout, jnp.zeros_like(shares), float0_cotangents(places)


_weighted.defvjp(_weighted_forward, _weighted_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_group(
    expert: Expert,
    num_groups: int,
    rows: Float[Array, "turns blocks rows width"],
    rows_shares: Float[Array, "turns blocks rows"],
    weights: Weights,
    experts: Int[Array, "turns blocks"],
) -> Float[Array, "turns blocks rows width"]:
    """Passes a group's rows through their experts; all remaining rows are zero.

    Args:
        expert: The function of one expert.
        num_groups: Number of groups.
        rows: The rows of all groups.
        rows_shares: Factor of each row's result, which only backward uses; see `_weighted`.
        weights: The weights of the group's experts.
        experts: The expert of each block, ascending; out of bounds if it is not of the group.
    """
    del rows_shares
    own, numbers = _own(weights, experts)
    blocks = vmapped_expert(expert)

    def turn(t, out):
        found = blocks(_own_rows(rows, t, own), weights_of(weights, _at(numbers, t)))
        return _set(out, t, _where(_at(own, t), found))

    like = jax.eval_shape(blocks, rows[0], weights_of(weights, numbers[0]))
    zeros = jnp.zeros((len(rows), *like.shape), like.dtype)
    return _in_turns(own, num_groups, turn, zeros)


def _forward(expert, num_groups, rows, rows_shares, weights, experts):
    out = _of_group(expert, num_groups, rows, rows_shares, weights, experts)
    return out, (rows, rows_shares, weights, experts)


def _backward(expert, num_groups, saved, cotangents):
    rows, rows_shares, weights, experts = saved
    own, numbers = _own(weights, experts)
    blocks = vmapped_expert(expert)

    def turn(t, carry):
        sums, drows, dshares = carry
        copied = weights_of(weights, _at(numbers, t))
        out, transposed = jax.vjp(blocks, _own_rows(rows, t, own), copied)
        cotangent = _own_rows(cotangents, t, own).astype(jnp.float32)
        found = jnp.sum(out.astype(jnp.float32) * cotangent, -1)
        of_rows, dweights = transposed(
            (cotangent * _at(rows_shares, t)[..., None]).astype(out.dtype)
        )
        sums = jax.tree.map(partial(add_by_expert, _at(experts, t)), sums, dweights)
        return sums, _set(drows, t, of_rows), _set(dshares, t, found)

    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    start = sums, jnp.zeros_like(rows), jnp.zeros(rows.shape[:3], jnp.float32)
    sums, drows, dshares = _in_turns(own, num_groups, turn, start)
    dweights = jax.tree.map(lambda s, w: s.astype(w.dtype), sums, weights)
    return drows, dshares.astype(rows_shares.dtype), dweights, float0_cotangents(experts)


_of_group.defvjp(_forward, _backward)


def _own(
    weights: Weights, experts: Int[Array, "turns blocks"]
) -> tuple[Bool[Array, "turns blocks"], Int[Array, "turns blocks"]]:
    """Whether each block belongs to the group, and its expert's number within it, clipped."""
    size = jax.tree.leaves(weights)[0].shape[0]
    return (0 <= experts) & (experts < size), jnp.clip(experts, 0, size - 1)


def _at(values: Array, t: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(values, t, keepdims=False)


def _set(values: Array, t: Int[Array, ""], new: Array) -> Array:
    # In place within a loop, as a scatter may not be.
    return jax.lax.dynamic_update_index_in_dim(values, new, t, 0)


def _own_rows(
    values: Float[Array, "turns blocks rows width"],
    t: Int[Array, ""],
    own: Bool[Array, "turns blocks"],
) -> Float[Array, "blocks rows width"]:
    """The group's rows of one turn; all remaining ones are zero."""
    return _where(_at(own, t), _at(values, t))


def _where(
    own: Bool[Array, " blocks"], values: Float[Array, "blocks rows width"]
) -> Float[Array, "blocks rows width"]:
    return jnp.where(own[:, None, None], values, jnp.zeros((), values.dtype))


def _in_turns(
    own: Bool[Array, "turns blocks"],
    num_groups: int,
    turn: Callable[[Int[Array, ""], _Carry], _Carry],
    start: _Carry,
) -> _Carry:
    """Carries a value through the turns with blocks of the group.

    Their number depends on the routing, and no more than a loop's shape is known before a run. So
    the outer loop has the turns of an even load, which are counted in estimates, and each of its
    trips has an equal part of the turns that there are.
    """
    num_turns = len(own)
    has_own = own.any(1)
    begin, count = jnp.argmax(has_own).astype(jnp.int32), has_own.sum(dtype=jnp.int32)
    num_trips = -(-num_turns // num_groups)
    of_trip = -(-count // num_trips)

    def trip(carry, number):
        first = jnp.minimum(number * of_trip, count)
        last = jnp.minimum(first + of_trip, count)
        return jax.lax.fori_loop(begin + first, begin + last, turn, carry), None

    return jax.lax.scan(trip, start, jnp.arange(num_trips, dtype=jnp.int32))[0]
