"""The kernels of the optimizer: a group's *reduce* and update, and the *combine* between them.

They wrap jaxprs, cut by `program.optimizer`, in packing, unpacking and the guard against non-finite
numbers. Masters and state are passed as arrays at rest (see `state.layout`).

Example: clipping by a global norm of 1, with two groups that have gradients (3, 0) and (0, 4).
*reduce* gives 9 and 16. *combine* computes the global norm, 5, and sends it to each group's update.
The updates then use the gradients (0.6, 0) and (0, 0.8).

Large leaves and slabs are read in pieces. Otherwise a compiler may convert a whole bfloat16
gradient to an fp32 array, twice as large, only to reduce it to one number.

Example: a leaf of 40M elements in pieces of 16M, which take 64 MiB in fp32::

    reduced(0, 16M)                    # the first piece, converted, squared and summed
    + reduced(16M, 16M)                # a loop over further whole pieces
    + reduced(32M, 8M)                 # the rest

With several devices, each reduces pieces of its own shard, and their results are combined last.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.kernels.fused_updates import update_in_one_pass
from megatrain_jax._src.engine.kernels.kernel import Kernel, placed
from megatrain_jax._src.engine.kernels.update_pieces import (
    Compute,
    InOnePass,
    update_by_leaf,
    update_in_pieces,
)
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.cut import Fragment, OptimizerCut
from megatrain_jax._src.engine.program.optimizer.elementwise import (
    Reduction,
    find_elementwise_functions,
    find_reductions,
)
from megatrain_jax._src.engine.state.layout import GroupLayout, Layout
from megatrain_jax._src.engine.state.placement import Placement

# Elements per piece. A leaf or slab with a larger share per device is read in pieces.
_PIECE = 1 << 24
# The start of a piece is an unsigned 32-bit number.
_LONGEST = 1 << 32
# The most numbers of a shard whose places an update counts in 32 bits.
_MOST_COLUMNS = (1 << 31) - 1

_Sums = tuple[jax.Array, jax.Array]
_Numbers = TypeVar("_Numbers", jax.Array, _Sums)

Place = tuple[int, Layout, int]
"""A leaf's slab by its number, the slab's layout, and the leaf's number in it."""


def squared_norm_and_ok(
    gradient: Sequence[Float[Array, " size"]],
    ok: Bool[Array, ""],
    guarded: bool,
    num_shards: int,
    scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The squared norm of a gradient in fp32, and `ok`; if guarded, false for non-finite elements.

    The elements are checked, because the squared norm of finite elements above 1.8e19 is infinite.
    The gradient has an array for each segment of its slab, and is divided by the scale, if any.
    """
    inverse = None if scale is None else 1 / scale

    # Two sums of one shape, so that a GPU computes both in one pass, and devices exchange them
    # together. Padding in a gradient's slab is zero and adds nothing.
    def sums(x: jax.Array, axis: int | None) -> _Sums:
        wide = x.astype(jnp.float32)
        wide = wide if inverse is None else wide * inverse
        return jnp.sum(wide * wide, axis), jnp.sum(~jnp.isfinite(x), axis, jnp.float32)

    def add(x: _Sums, y: _Sums) -> _Sums:
        return x[0] + y[0], x[1] + y[1]

    def of_segment(x: jax.Array) -> _Sums:
        rows = x.reshape(num_shards, -1)
        if not _is_large(rows.shape[1]):
            return sums(x, None)
        by_shard = _in_pieces(lambda start, n: sums(_piece(rows, start, n), 1), rows.shape[1], add)
        return jnp.sum(by_shard[0]), jnp.sum(by_shard[1])

    square, not_finite = functools.reduce(add, map(of_segment, gradient))
    # The count would suffice. But XLA fuses values with at most one reader into the update's kernel
    # (the norm on a GPU, the count on a CPU), and that changes how updates are rounded.
    spoiled = jnp.where(not_finite == 0, 0.0, square + not_finite)
    return square, ok & jnp.isfinite(spoiled) if guarded else ok


def reduction(fragment: Fragment, layout: GroupLayout) -> Callable[..., list[jax.Array]]:
    """The function `(gradient, masters, state slabs, others) -> scalars` of a fragment.

    Gradient, masters and each slab of the state have an array for each segment. Masters and state
    may be None if the fragment doesn't read them.

    Args:
        fragment: The group's part of the optimizer's *reduce*.
        layout: Layout of the group.
    """
    first, leaves = len(fragment.consts), range(len(layout.master.shapes))
    # The fragment takes constants, gradients, masters, state and scalars, in this order.
    places: list[Place] = [
        *((0, layout.master, i) for i in leaves),
        *((1, layout.master, i) for i in leaves),
        *((2 + s, layout.state.layouts[s], i) for s, i in layout.state.places),
    ]
    large = {
        first + at: (slab.shapes[i], slab.shares[i])
        for at, (_, slab, i) in enumerate(places)
        if _is_divisible(slab, i)
    }
    split = find_reductions(fragment.jaxpr, large)

    def reduce_leaves(gradient, masters, state, others) -> list[jax.Array]:
        slabs = [gradient, masters, *state]
        given: dict[int, Any] = dict(enumerate(fragment.consts))
        given.update(enumerate(others, first + len(places)))

        def leaf(at: int) -> jax.Array:
            number, slab, i = places[at - first]
            return slab.unpack_from(slabs[number], i).astype(slab.dtype)

        numbers = [
            _reduced(found, [places[at - first] for at in found.arrays], slabs, given)
            for found in split.found
        ]
        given.update(enumerate(numbers, len(fragment.jaxpr.invars)))
        args = [given[at] if at in given else leaf(at) for at in split.inputs]
        return jx.evaluate(split.rest, args)

    return reduce_leaves


def _reduced(
    found: Reduction, places: Sequence[Place], slabs: Sequence[Any], others: Mapping[int, Any]
) -> jax.Array:
    """A reduction of leaves with equal layouts, in pieces."""
    _, layout, i = places[0]

    def piece(place: Place, start: Any, size: int) -> jax.Array:
        number, slab, i = place
        array, first = slab.place_of(i, slabs[number])
        rows = array.reshape(slab.num_shards, -1)
        return _piece(rows, start + first, size).astype(slab.dtype)

    def of_piece(start: Any, size: int) -> jax.Array:
        (row,) = found.function([piece(place, start, size) for place in places], others)
        return found.reduced(row)

    return found.reduced(_in_pieces(of_piece, layout.shares[i], found.together))


def _in_pieces(
    reduced: Callable[[Any, int], _Numbers],
    size: int,
    together: Callable[[_Numbers, _Numbers], _Numbers],
) -> _Numbers:
    """Reduces each shard's elements from 0 to `size`, a piece at a time.

    Args:
        reduced: Reduces a piece, given its first element and its length, to one number per shard,
            or to two.
        size: Number of elements of a shard, at least one piece.
        together: Joins the results of two pieces.
    """

    def add(total: _Numbers, start: jax.Array) -> tuple[_Numbers, None]:
        return together(total, reduced(start, _PIECE)), None

    total = reduced(0, _PIECE)
    starts = jnp.asarray(np.arange(_PIECE, size - _PIECE + 1, _PIECE, dtype=np.uint32))
    total, _ = jax.lax.scan(add, total, starts)
    if left := size % _PIECE:
        total = together(total, reduced(size - left, left))
    return total


def _piece(rows: jax.Array, start: Any, size: int) -> jax.Array:
    """`size` elements of each row, from a start that may be a loop's variable."""
    # Without the barrier a compiler may convert all rows once, before the loop.
    rows, start = jax.lax.optimization_barrier((rows, jnp.uint32(start)))
    return jax.lax.dynamic_slice_in_dim(rows, start, size, axis=1)


def _is_large(size: int) -> bool:
    """Whether a shard of this size is read in pieces."""
    return _PIECE < size < _LONGEST


def _is_divisible(layout: Layout, i: int) -> bool:
    """Whether a leaf is read in pieces: it is large, and no shard of it is padded."""
    share, shards = layout.shares[i], layout.num_shards
    longest = layout.size // shards < _LONGEST
    return longest and _is_large(share) and share * shards == math.prod(layout.shapes[i])


# ---- updates

_NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
_OK = jax.ShapeDtypeStruct((), jnp.bool_)
_STEP = jax.ShapeDtypeStruct((), jnp.int32)
_GROUP = jax.ShapeDtypeStruct((), jnp.uint32)


def reduce(
    cut: OptimizerCut, layout: GroupLayout, group: int, gradient: DTypeLike, placement: Placement
) -> Kernel:
    """The kernel `(gradient, masters, state, numbers, globals, ok) -> (scalars, squared norm, ok)`.

    The numbers are the loss and, if gradients are scaled, the scale. Scalars of one dtype are
    returned as one array, because each result takes time to dispatch.

    Args:
        cut: The optimizer. Masters and state are None unless its reduction reads them.
        layout: Layout of the group.
        group: Number of the group.
        gradient: Dtype of the group's gradient.
        placement: Placement of its arrays.
    """
    fragment, reads = cut.reduce[group], cut.reduce_reads
    slabs, small = placement.slabs_on_device, placement.small_on_device

    def build() -> Callable:
        reduced = reduction(fragment, layout)

        # A fragment takes all arrays of its group, so that equal groups have equal fragments.
        # Arrays that it doesn't read were not fetched and are passed as None.
        def reduce_group(gradient, masters, state, numbers, small, ok):
            shards, scale = layout.master.num_shards, numbers[1:]
            square, ok = squared_norm_and_ok(gradient, ok, cut.guarded, shards, *scale)
            masters = layout.master.decode_segments(masters) if Kind.MASTERS in reads else None
            state = layout.state.decode_segments(state) if Kind.OPTIMIZER_STATE in reads else ()
            return _stacked(reduced(gradient, masters, state, [*numbers, *small])), square, ok

        return reduce_group

    return Kernel(
        name="reduce",
        key=(fragment.key, layout, jnp.dtype(gradient)),
        build=build,
        takes=(
            placed(layout.master.gradient_avals(gradient), slabs),
            placed(layout.master.at_rest, slabs) if Kind.MASTERS in reads else None,
            placed(layout.state.at_rest, slabs) if Kind.OPTIMIZER_STATE in reads else None,
            placed([_NUMBER] * (1 + cut.is_scaled), small),
            placed(list(cut.globals), small),
            placed(_OK, small),
        ),
        out_shardings=small,
    )


def _stacked(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Concatenates small values into one array per dtype."""
    rows: dict[Any, list[jax.Array]] = {}
    for x in values:
        rows.setdefault(x.dtype, []).append(x.reshape(-1))
    return [jnp.concatenate(row) for row in rows.values()]


def _unstacked(stacked: Sequence[jax.Array], like: Sequence[Any]) -> list[jax.Array]:
    """Undoes `_stacked`; `like` has variables with the values' shapes and dtypes, in order."""
    rows = {row.dtype: row for row in stacked}
    taken = dict.fromkeys(rows, 0)
    values = []
    # Only the order within each dtype matters; it is the order of `_stacked`.
    for aval in (v.aval for v in like):
        start = taken[aval.dtype]
        taken[aval.dtype] = end = start + aval.size
        values.append(rows[aval.dtype][start:end].reshape(aval.shape))
    return values


def combine(cut: OptimizerCut, placement: Placement) -> Kernel:
    """The kernel `(numbers, globals, scalars of each group, ok) -> (messages, globals, ok)`.

    The numbers are the loss and, if gradients are scaled, the scale. If the optimizer is guarded, a
    loss that is not finite changes nothing.
    """
    fragment, num_messages, guarded = cut.combine, cut.num_messages, cut.guarded

    def combine_groups(numbers, state, stacked, ok):
        loss = numbers[0]
        ok = ok & jnp.isfinite(loss) if guarded else ok
        scalars = [
            x
            for row, reduced in zip(stacked, cut.reduce, strict=True)
            for x in _unstacked(row, reduced.jaxpr.outvars)
        ]
        out = jx.evaluate(fragment.jaxpr, [*fragment.consts, *numbers, *state, *scalars])
        new = [jnp.where(ok, n, o) for n, o in zip(out[num_messages:], state, strict=True)]
        return out[:num_messages], new if guarded else out[num_messages:], ok

    # It needs no key, because a cache serves one optimizer, which has one combine.
    return Kernel(
        name="combine", build=lambda: combine_groups, out_shardings=placement.small_on_device
    )


def update(
    cut: OptimizerCut, layout: GroupLayout, group: int, gradient: DTypeLike, placement: Placement
) -> Kernel:
    """The kernel `(masters, state, gradient, messages, ok, draw) -> (masters, state)` of one group.

    `draw` seeds random bits: the run's key, the number of the gradient's step, and the group's
    number; None if the layout draws no bits.

    If `ok` is false, nothing changes. An immediate update also measures its gradient, and returns
    `(masters, state, squared norm, ok)`.

    Args:
        cut: The optimizer.
        layout: Layout of the group.
        group: Number of the group.
        gradient: Dtype of the group's gradient.
        placement: Placement of its arrays.
    """
    fragment = cut.apply[group]
    slabs, small = placement.slabs_on_device, placement.small_on_device

    def build(in_one_pass: InOnePass | None = None) -> Callable:
        apply = _update(fragment, layout, cut.guarded, in_one_pass)
        # A deferred update follows a REDUCE, which has already measured the gradient.
        return apply if cut.deferred else _measuring(apply, layout, cut.guarded)

    return Kernel(
        name="update",
        key=(fragment.key, layout, jnp.dtype(gradient)),
        build=build,
        build_for_triton=lambda: build(partial(update_in_one_pass, sharding=slabs)),
        takes=(
            placed(layout.master.at_rest, slabs),
            placed(layout.state.at_rest, slabs),
            placed(layout.master.gradient_avals(gradient), slabs),
            placed([cut.combine.jaxpr.outvars[i].aval for i in cut.messages[group]], small),
            placed(_OK, small),
            placed((_key(), _STEP, _GROUP), small) if layout.draws else None,
        ),
        out_shardings=(slabs, slabs) if cut.deferred else (slabs, slabs, small, small),
        donated=(0, 1),
    )


def is_updated_in_one_pass(fragment: Fragment, layout: GroupLayout) -> bool:
    """Whether a GPU goes through memory once to update a group's codes."""
    return layout.num_coded > 0 and _update_of_elements(fragment, layout) is not None


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _update(
    fragment: Fragment, layout: GroupLayout, guarded: bool, in_one_pass: InOnePass | None = None
) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`."""
    elements = _update_of_elements(fragment, layout)
    if elements is None:
        return update_by_leaf(fragment, layout, guarded)
    if (length := layout.master.size // layout.master.num_shards) > _MOST_COLUMNS:
        raise OverflowError(
            f"a block has {length:,} numbers on each device, which are counted in 32 bits: train "
            "on more devices"
        )
    edges = {tuple((s.start, s.stop) for s in slab.segments) for slab in layout.slabs}
    if layout.num_coded or len(edges) == 1:
        return update_in_pieces(elements, layout, guarded, in_one_pass)
    return _update_at_once(elements, layout, guarded)


def _update_at_once(elements: Compute, layout: GroupLayout, guarded: bool) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)` of slabs.

    They have different segments, such as those of masters in two dtypes beside state in one.
    """
    size, shards = layout.master.size, layout.master.num_shards

    def update_group(masters, state, gradient, messages, ok, draw=None):
        slabs = layout.master.decode(masters), *layout.state.decode(state)
        gradient = layout.master.joined(gradient).astype(layout.master.dtype)
        columns = jnp.arange(size) % (size // shards) if shards > 1 else jnp.arange(size)
        own, *others = elements([gradient, *slabs], columns, messages)
        draw, *draws = layout.slab_draws(draw)
        new = layout.master.encode(own, draw), layout.state.encode(others, draws)
        if not guarded:
            return new
        # Selects among arrays at rest, so that unchanged state is not rounded again.
        old = tuple(masters), tuple(state)
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)

    return update_group


def _measuring(apply: Callable, layout: GroupLayout, guarded: bool) -> Callable:
    """An immediate update, which measures its gradient as well; see `update`."""

    def update_group(masters, state, gradient, messages, ok, draw=None):
        # Only its own gradient can be checked; gradients of earlier stages don't exist yet.
        square, ok = squared_norm_and_ok(gradient, ok, guarded, layout.master.num_shards)
        return *apply(masters, state, gradient, messages, ok, draw), square, ok

    return update_group


def _update_of_elements(fragment: Fragment, layout: GroupLayout) -> Compute | None:
    """The update of any elements of the slabs; None if the optimizer is not elementwise."""
    # Updating leaf by leaf would cut each leaf out of three slabs and put it back. One pass over
    # whole slabs updates in place, which is faster and has a lower peak (docs/performance.md).
    count, first = len(layout.master.shapes), len(fragment.consts)
    slabs = layout.state.layouts
    # State with different offsets than the masters' can't be updated element by element.
    if any(slab.offsets != layout.master.offsets for slab in slabs):
        return None
    state = [
        [i for i, (slab, _) in enumerate(layout.state.places) if slab == s]
        for s in range(len(slabs))
    ]
    leaves = list(range(count))
    # The fragment takes constants, gradients, masters, state and messages, in this order, and
    # gives masters and state.
    starts = [[first + i for i in leaves], [first + count + i for i in leaves]]
    inputs = [*starts, *([first + 2 * count + i for i in row] for row in state)]
    outputs = [leaves, *([count + i for i in row] for row in state)]
    found = find_elementwise_functions(fragment.jaxpr, layout.master.shapes, inputs, outputs)
    if found is None:
        return None
    kind_of, functions = found

    def compute(rows, columns, messages):
        others = dict(enumerate(fragment.consts))
        others.update(enumerate(messages, first + sum(map(len, inputs))))
        # Padding is updated like its neighbours. Its values don't matter: they are never read, and
        # encoding excludes them from scales.
        results = zip(*(function(rows, others) for function in functions), strict=True)
        return [
            _by_leaf(layout.master, kind_of, columns, [row.astype(slab.dtype) for row in kinds])
            for slab, kinds in zip(layout.slabs, results, strict=True)
        ]

    return compute


def _by_leaf(
    layout: Layout, kind_of: Sequence[int], columns: jax.Array, kinds: Sequence[jax.Array]
) -> jax.Array:
    """Elements of a slab, where each leaf's elements come from the array of its kind.

    For example, with leaves of kinds 0, 1 and 0 at offsets 0, 64 and 128, the elements of leaf 1
    come from `kinds[1]`, and all remaining elements from `kinds[0]`.

    Args:
        layout: Layout of the slab.
        kind_of: For each leaf, the number of the function that computes it.
        columns: Column of each element in its shard.
        kinds: The results of each function for all elements.
    """
    chosen = kinds[0]
    for kind, values in enumerate(kinds[1:], 1):
        inside = jnp.zeros(columns.shape, bool)
        for leaf, other in enumerate(kind_of):
            if other == kind:
                start = layout.offsets[leaf]
                inside |= (columns >= start) & (columns < start + layout.shares[leaf])
        chosen = jnp.where(inside, values, chosen)
    return chosen
