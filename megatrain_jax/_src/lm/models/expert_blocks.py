"""A mixture of gated MLPs: each token passes through a few of many experts.

With the extra `kernels` a Hopper GPU computes grouped products (`grouped_products.py`). Elsewhere
`jax.lax.ragged_dot` may become a masked product with every expert, so tokens are sorted by expert
into blocks of one expert each, and a loop runs over the blocks, several per turn. So only the
chosen experts are computed, however many there are, in few large products.

A turn computes several blocks with copies of their experts' weights, and adds their gradients to
the sums of their experts.

A mixture of experts in groups of experts: each group reads its own part of the weights.

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

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax import trace_target
from megatrain_jax._src.common.kernel_primitives import float0_cotangents
from megatrain_jax._src.lm.models import grouped_products, kernel_checks
from megatrain_jax._src.lm.models.moe import (
    Chosen,
    Expert,
    LowRank,
    Matrix,
    Shares,
    Tokens,
    Weights,
    with_low_rank,
)

Blocks = Float[Array, "turns blocks rows width"]
Rows = Float[Array, "blocks rows width"]
Numbers = Int[Array, "turns blocks"]
Owned = Bool[Array, "turns blocks"]
Turn = Int[Array, ""]


class BlockAssignments(NamedTuple):
    """The places of tokens' assignments to experts, in blocks.

    Attributes:
        slots: The row of each assignment.
        assignments: The assignment of each row; a number past the end if it has none.
        experts: The expert of each block of rows, ascending.
    """

    slots: Int[Array, " assignments"]
    assignments: Int[Array, " rows"]
    experts: Numbers

    def blocks(self, values: Float[Array, "..."], each: int) -> Float[Array, "turns blocks ..."]:
        """Gives each row of the blocks its token's value; a token has `each` assignments.

        Rows without an assignment get zeros.
        """
        rows = values.at[self.assignments // each].get(mode="fill", fill_value=0)
        return rows.reshape(*self.experts.shape, -1, *values.shape[1:])

    def collected(self, blocks: Float[Array, "turns blocks ..."], each: int) -> Float[Array, "..."]:
        """Gives each token the values of its `each` assignments."""
        rows = blocks.reshape(-1, *blocks.shape[3:])
        return rows[self.slots].reshape(-1, each, *rows.shape[1:])


def vmapped_expert(expert: Expert) -> Callable[..., Rows]:
    """Returns the function of blocks of rows, each with its own matrices."""
    return jax.vmap(lambda rows, weights: expert(rows, weights, _product).by(_product))


def _product(
    x: Float[Array, "rows in"], matrix: Matrix, bias: Array | None = None, *, out_first: bool = True
) -> Float[Array, "rows out"]:
    if isinstance(matrix, LowRank):
        return with_low_rank(x, matrix, _product)
    y = x @ (matrix.T if out_first else matrix)
    return y if bias is None else y + bias


def weights_of(weights: Weights, numbers: Int[Array, " blocks"]) -> Weights:
    """Copies the weights of each block's expert."""

    def one(array):
        # A model's parameters may be NumPy arrays outside a run.
        return jnp.asarray(array).at[numbers].get(mode="promise_in_bounds")

    return jax.tree.map(one, weights)


def add_by_expert(
    numbers: Int[Array, " blocks"], sums: Float[Array, "num ..."], terms: Float[Array, "blocks ..."]
) -> Float[Array, "num ..."]:
    """Adds each block's term to its expert's sum, in a deterministic order.

    A scatter of terms with equal numbers would add them in any order on a GPU. So an expert's terms
    are first summed by a product with zeros and ones, in the place of the first of them. For
    numbers [3, 3, 4] the rows of zeros and ones are [1, 1, 0], [0, 0, 0] and [0, 0, 1]. A term that
    is not finite turns all sums of its turn into NaN. Numbers out of bounds are not added.
    """
    place, first = jnp.arange(numbers.size), jnp.searchsorted(numbers, numbers)
    of_first = (first == place[:, None]).astype(terms.dtype)
    totals = jax.lax.dot_general(
        of_first,
        terms,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=sums.dtype,
    )
    # All later places point past the last expert, so nothing is added there.
    num = sums.shape[0]
    at = jnp.where((first == place) & (0 <= numbers) & (numbers < num), numbers, num + place)
    return sums.at[at].add(totals, mode="drop", unique_indices=True)


_Carry = TypeVar("_Carry")


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
def _weighted(dtype: Any, out: Blocks, shares: Shares, places: BlockAssignments) -> Tokens:
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
    rows: Blocks,
    rows_shares: Float[Array, "turns blocks rows"],
    weights: Weights,
    experts: Numbers,
) -> Blocks:
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


def _of_group_forward(expert, num_groups, rows, rows_shares, weights, experts):
    out = _of_group_once(expert, num_groups, rows, rows_shares, weights, experts)
    return out, (rows, rows_shares, weights, experts)


def _of_group_backward(expert, num_groups, saved, cotangents):
    gradients = _gradients_of_group(expert, num_groups, saved, cotangents)
    return *gradients, float0_cotangents(saved[-1])


@partial(jax.jit, static_argnums=(0, 1))
def _gradients_of_group(expert, num_groups, saved, cotangents):
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
    return drows, dshares.astype(rows_shares.dtype), dweights


_of_group.defvjp(_of_group_forward, _of_group_backward)
_of_group_once = jax.jit(_of_group, static_argnums=(0, 1))  # traced once for all groups and layers


def _own(weights: Weights, experts: Numbers) -> tuple[Owned, Numbers]:
    """Whether each block belongs to the group, and its expert's number within it, clipped."""
    size = jax.tree.leaves(weights)[0].shape[0]
    return (0 <= experts) & (experts < size), jnp.clip(experts, 0, size - 1)


def _at(values: Array, t: Turn) -> Array:
    return jax.lax.dynamic_index_in_dim(values, t, keepdims=False)


def _set(values: Array, t: Turn, new: Array) -> Array:
    # In place within a loop, as a scatter may not be.
    return jax.lax.dynamic_update_index_in_dim(values, new, t, 0)


def _own_rows(values: Blocks, t: Turn, own: Owned) -> Rows:
    """The group's rows of one turn; all remaining ones are zero."""
    return _where(_at(own, t), _at(values, t))


def _where(own: Bool[Array, " blocks"], values: Rows) -> Rows:
    return jnp.where(own[:, None, None], values, jnp.zeros((), values.dtype))


def _in_turns(
    own: Owned, num_groups: int, turn: Callable[[Turn, _Carry], _Carry], start: _Carry
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


_MAX_BLOCK = 1024
# Bytes of fp32 gradient sums that one turn makes for its blocks. In bf16, the copied expert weights
# and the gradients themselves take as much again.
_TURN_BYTES = 2**30


def mix(x: Tokens, chosen: Chosen, shares: Shares, weights: Weights, expert: Expert) -> Tokens:
    """Passes each token through its experts and adds their results.

    For example, five tokens with one expert each, [1, 0, 1, 1, 0], in blocks of two rows: expert 0
    has one block and expert 1 has two, so the tokens lie in rows [2, 0, 3, 4, 1]. Whatever the
    routing, five tokens and two experts need at most five blocks. With two blocks per turn there
    are three turns, and here the last three blocks are empty.

    Args:
        x: The tokens.
        chosen: The experts of each token.
        shares: Factor of each expert's result.
        weights: The weights of all experts.
        expert: The function of one expert; the same object for all layers, as from `gated`.

    Returns:
        An array with the dtype of `x`; shares and sums are in fp32.
    """
    num = jax.tree.leaves(weights)[0].shape[0]
    num_groups = trace_target().groups_of(num)
    is_whole = num_groups == 1  # the kernels need the rows of all experts
    if (
        is_whole
        and grouped_products.fits(x, chosen.size, weights)
        and kernel_checks.has_grouped_products()
    ):
        weights = jax.tree.map(jnp.asarray, weights)
        return grouped_products.mixed(
            expert, x, shares, weights, grouped_products.sort(chosen, num)
        )
    owner = chosen.reshape(-1)
    block = _block_size(owner.size, num)
    slots, experts = _slots(owner, num, block)
    at_once = _blocks_at_once(weights, experts.size, block, num_groups)
    experts = jnp.pad(experts, (0, -experts.size % at_once), mode="edge").reshape(-1, at_once)
    # Unused rows get the number of an assignment past the end.
    assignments = jnp.full(experts.size * block, owner.size, jnp.int32)
    assignments = assignments.at[slots].set(jnp.arange(owner.size, dtype=jnp.int32))
    if num_groups > 1:
        places = BlockAssignments(slots, assignments, experts)
        # Group by group, and added up.
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
            of_group: Any = _of_group_once(expert, num_groups, *given)
            # Each row belongs to one group, and is zero in all remaining groups.
            out = of_group if out is None else out + of_group
        return _weighted(x.dtype, out, shares, places)
    # Blocks after the last used one hold zeros, so any expert may compute them.
    places = BlockAssignments(slots, assignments, jnp.minimum(experts, num - 1))
    return _mixed_once(expert, x, shares, weights, places)


# JAX's own derivative would add a gradient for all experts in every turn. It would also scatter
# rows, which on a GPU takes several times longer than gathering and adds in arbitrary order.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(
    expert: Expert, x: Tokens, shares: Shares, weights: Weights, places: BlockAssignments
) -> Tokens:
    """Passes tokens through their experts and adds the results, weighted by shares."""

    def turn(item):
        rows, numbers = item
        return vmapped_expert(expert)(rows, weights_of(weights, numbers))

    each = shares.shape[1]
    out = jax.lax.map(turn, (places.blocks(x, each), places.experts))
    results = places.collected(out, each).astype(jnp.float32)
    return (results * shares[..., None]).sum(1).astype(x.dtype)


def _forward(expert, x, shares, weights, places):
    return _mixed_once(expert, x, shares, weights, places), (x, shares, weights, places)


def _backward(expert, saved, cotangents):
    return *_gradients(expert, saved, cotangents), float0_cotangents(saved[-1])


@partial(jax.jit, static_argnums=0)
def _gradients(expert, saved, cotangents):
    x, shares, weights, places = saved
    each, blocks = shares.shape[1], vmapped_expert(expert)

    def turn(sums, item):
        rows, rows_shares, cotangent, numbers = item
        out, transposed = jax.vjp(blocks, rows, weights_of(weights, numbers))
        # Computed here, a share's gradient does not need the forward's results, which would be
        # recomputed only for it.
        cotangent = cotangent.astype(jnp.float32)
        dshares = jnp.sum(out.astype(jnp.float32) * cotangent, -1)
        drows, dweights = transposed((cotangent * rows_shares[..., None]).astype(out.dtype))
        return jax.tree.map(partial(add_by_expert, numbers), sums, dweights), (drows, dshares)

    # Several blocks of one expert add up in fp32, as one long product would.
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    rows, rows_cotangents = places.blocks(x, each), places.blocks(cotangents, each)
    rows_shares = places.blocks(shares.reshape(-1), 1)
    items = rows, rows_shares, rows_cotangents, places.experts
    sums, (drows, dshares) = jax.lax.scan(turn, zeros, items)
    dx = places.collected(drows, each).sum(1, dtype=jnp.float32).astype(x.dtype)
    dshares = places.collected(dshares, 1).reshape(shares.shape).astype(shares.dtype)
    dweights = jax.tree.map(lambda s, w: s.astype(w.dtype), sums, weights)
    return dx, dshares, dweights


_mixed.defvjp(_forward, _backward)
_mixed_once = jax.jit(_mixed, static_argnums=0)  # traced once for all layers


def _block_size(assignments: int, num: int) -> int:
    # An eighth to a quarter of an expert's mean load: blocks have 1.125 to 1.25 times the rows.
    wanted = max(8, min(_MAX_BLOCK, assignments // (4 * num)))
    return 1 << (wanted.bit_length() - 1)


def _blocks_at_once(weights: Weights, num_blocks: int, block: int, num_groups: int = 1) -> int:
    of_one = sum(4 * math.prod(array.shape[1:]) for array in jax.tree.leaves(weights))
    # The work in `add_by_expert` grows with the square of this number: with half of a block's rows,
    # it is a sixth of backward's products.
    most = max(1, min(num_blocks, _TURN_BYTES // (num_groups * of_one), block // 2))
    # Equal turns; otherwise the last turn could consist mostly of empty blocks.
    turns = -(-num_blocks // most)
    return -(-num_blocks // turns)


def _slots(
    owner: Int[Array, " assignments"], num: int, block: int
) -> tuple[Int[Array, " assignments"], Int[Array, " blocks"]]:
    """Gives every assignment its own row in blocks that each belong to one expert.

    Args:
        owner: The expert of each assignment of a token to an expert.
        num: Number of experts.
        block: Rows of a block.

    Returns:
        The row of each assignment; the expert of each block, `num` for unused ones at the end.
    """
    n = owner.size
    # The maximum for any routing, because shapes are fixed when traced: each chosen expert leaves
    # at most one block partly empty.
    num_blocks = -(-n // block) + min(num, n)
    # Stable, so that results don't depend on how a device sorts equal numbers.
    order = jnp.argsort(owner, stable=True)
    load = jnp.bincount(owner, length=num)
    blocks = -(-load // block)
    first_block, first = jnp.cumsum(blocks) - blocks, jnp.cumsum(load) - load
    sorted_owner = owner[order]
    rank = jnp.arange(n) - first[sorted_owner]
    rows = first_block[sorted_owner] * block + rank
    slots = jnp.zeros(n, jnp.int32).at[order].set(rows.astype(jnp.int32), unique_indices=True)
    ends = jnp.cumsum(blocks)
    experts = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right")
    return slots, experts.astype(jnp.int32)
