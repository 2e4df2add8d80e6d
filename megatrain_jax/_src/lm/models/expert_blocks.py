"""A mixture of gated MLPs: each token passes through a few of many experts.

With the extra `kernels` a Hopper GPU computes grouped products (`expert_rows.py`). Elsewhere
`jax.lax.ragged_dot` may become a masked product with every expert, so tokens are sorted by expert
into blocks of one expert each, and a loop runs over the blocks, several per turn. So only the
chosen experts are computed, however many there are, in few large products.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from megatrain_jax import trace_target
from megatrain_jax._src.common.kernel_primitives import float0_cotangents
from megatrain_jax._src.lm.models import expert_rows, kernel_checks
from megatrain_jax._src.lm.models.expert_functions import Expert, Weights
from megatrain_jax._src.lm.models.expert_groups import mixed_in_groups
from megatrain_jax._src.lm.models.expert_turns import (
    BlockAssignments,
    add_by_expert,
    vmapped_expert,
    weights_of,
)

_MAX_BLOCK = 1024
# Bytes of fp32 gradient sums that one turn makes for its blocks. In bf16, the copied expert weights
# and the gradients themselves take as much again.
_TURN_BYTES = 2**30


def mix(
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens per_token"],
    shares: Float[Array, "tokens per_token"],
    weights: Weights,
    expert: Expert,
) -> Float[Array, "tokens width"]:
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
        and expert_rows.fits(x, chosen.size, weights)
        and kernel_checks.has_grouped_products()
    ):
        weights = jax.tree.map(jnp.asarray, weights)
        return expert_rows.mixed(expert, x, shares, weights, expert_rows.sort(chosen, num))
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
        return mixed_in_groups(expert, x, shares, weights, places, num_groups)
    # Blocks after the last used one hold zeros, so any expert may compute them.
    places = BlockAssignments(slots, assignments, jnp.minimum(experts, num - 1))
    return _mixed(expert, x, shares, weights, places)


# JAX's own derivative would add a gradient for all experts in every turn. It would also scatter
# rows, which on a GPU takes several times longer than gathering and adds in arbitrary order.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(
    expert: Expert,
    x: Float[Array, "tokens width"],
    shares: Float[Array, "tokens per_token"],
    weights: Weights,
    places: BlockAssignments,
) -> Float[Array, "tokens width"]:
    """Passes tokens through their experts and adds the results, weighted by shares."""

    def turn(item):
        rows, numbers = item
        return vmapped_expert(expert)(rows, weights_of(weights, numbers))

    each = shares.shape[1]
    out = jax.lax.map(turn, (places.blocks(x, each), places.experts))
    results = places.collected(out, each).astype(jnp.float32)
    return (results * shares[..., None]).sum(1).astype(x.dtype)


def _forward(expert, x, shares, weights, places):
    return _mixed(expert, x, shares, weights, places), (x, shares, weights, places)


def _backward(expert, saved, cotangents):
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
    return dx, dshares, dweights, float0_cotangents(places)


_mixed.defvjp(_forward, _backward)


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
