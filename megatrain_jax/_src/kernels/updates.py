"""The kernels of the optimizer: a group's *reduce* and update, and the *combine* between them.

They only wrap jaxprs that were cut elsewhere in packing, unpacking and the guard against
non-finite numbers. Masters and state come and go as arrays at rest (see `state.layout`).

A worked example, clipping by a global norm of 1 with two groups, whose gradients are (3, 0) and
(0, 4): *reduce* gives 9 and 16; *combine* makes of them the global norm, 5, and sends each group
what its update reads of that; the updates then take (0.6, 0) and (0, 0.8) for gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.kernels.kernel import Kernel, placed
from megatrain_jax._src.kernels.leaf_updates import update_by_leaf
from megatrain_jax._src.kernels.pieces import Compute, update_in_pieces
from megatrain_jax._src.kernels.reducing import measured, reduction
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.program.optimizer.elementwise import line_up
from megatrain_jax._src.program.optimizer.slicing import Fragment
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout
from megatrain_jax._src.state.placement import Placement

_LOSS = jax.ShapeDtypeStruct((), jnp.float32)
_OK = jax.ShapeDtypeStruct((), jnp.bool_)
_STEP = jax.ShapeDtypeStruct((), jnp.int32)
_GROUP = jax.ShapeDtypeStruct((), jnp.uint32)


def reduce(
    cut: OptimizerCut,
    layout: GroupLayout,
    group: int,
    gradient: DTypeLike,
    placement: Placement,
) -> Kernel:
    """The kernel `(gradient, masters, state, loss, globals, ok) -> (scalars, squared norm, ok)`.

    Scalars of one dtype come as one array, since each array that a function returns takes time to
    dispatch.

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

        # A fragment takes all arrays of its group, read or not, so that those of equal groups are
        # equal. Nothing is in the place of what it doesn't read, and no schedule has fetched.
        def reduce_group(gradient, masters, state, loss, small, ok):
            square, ok = measured(gradient, ok, cut.guarded, layout.master.num_shards)
            masters = layout.master.decode(masters) if Kind.MASTERS in reads else None
            state = layout.state.decode(state) if Kind.OPTIMIZER_STATE in reads else ()
            return _stacked(reduced(gradient, masters, state, [loss, *small])), square, ok

        return reduce_group

    return Kernel(
        name="reduce",
        key=(fragment.key, layout, jnp.dtype(gradient)),
        build=build,
        takes=(
            placed(layout.master.gradient_aval(gradient), slabs),
            placed(layout.master.at_rest, slabs) if Kind.MASTERS in reads else None,
            placed(layout.state.at_rest, slabs) if Kind.OPTIMIZER_STATE in reads else None,
            placed(_LOSS, small),
            placed(list(cut.globals), small),
            placed(_OK, small),
        ),
        gives=small,
    )


def _stacked(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Puts small values end to end, in one array for each dtype."""
    rows: dict[Any, list[jax.Array]] = {}
    for x in values:
        rows.setdefault(x.dtype, []).append(x.reshape(-1))
    return [jnp.concatenate(row) for row in rows.values()]


def _unstacked(stacked: Sequence[jax.Array], like: Sequence[Any]) -> list[jax.Array]:
    """Undoes `_stacked`; `like` are variables of the values' shapes and dtypes, in order."""
    rows = {row.dtype: row for row in stacked}
    taken = dict.fromkeys(rows, 0)
    values = []
    # Within a dtype the order is that of `_stacked`; between dtypes none is needed.
    for aval in (v.aval for v in like):
        start = taken[aval.dtype]
        taken[aval.dtype] = end = start + aval.size
        values.append(rows[aval.dtype][start:end].reshape(aval.shape))
    return values


def combine(cut: OptimizerCut, placement: Placement) -> Kernel:
    """The kernel `(loss, globals, scalars of each group, ok) -> (messages, globals, ok)`.

    If the optimizer is guarded, a loss that is not finite changes nothing.
    """
    fragment, num_messages, guarded = cut.combine, cut.num_messages, cut.guarded

    def combine_groups(loss, state, stacked, ok):
        ok = ok & jnp.isfinite(loss) if guarded else ok
        scalars = [
            x
            for row, reduced in zip(stacked, cut.reduce, strict=True)
            for x in _unstacked(row, reduced.jaxpr.outvars)
        ]
        out = jx.evaluate(fragment.jaxpr, [*fragment.consts, loss, *state, *scalars])
        new = [jnp.where(ok, n, o) for n, o in zip(out[num_messages:], state, strict=True)]
        return out[:num_messages], new if guarded else out[num_messages:], ok

    # A cache serves one optimizer, of which there is one combine: it needs no key.
    return Kernel(name="combine", build=lambda: combine_groups, gives=placement.small_on_device)


def update(
    cut: OptimizerCut,
    layout: GroupLayout,
    group: int,
    gradient: DTypeLike,
    placement: Placement,
) -> Kernel:
    """The kernel `(masters, state, gradient, messages, ok, draw) -> (masters, state)` of one group.

    `draw` is what random bits are drawn from if the layout draws any, else None: the run's key, the
    number of the step that the gradient is of, and that of the group.

    Nothing changes where `ok` is false. Where updates are not deferred, so that one call can also
    measure the gradient it is given, it gives `(masters, state, squared norm, ok)`.

    Args:
        cut: The optimizer.
        layout: Layout of the group.
        group: Number of the group.
        gradient: Dtype of the group's gradient.
        placement: Placement of its arrays.
    """
    fragment = cut.apply[group]
    # A deferred update follows a REDUCE, which has measured the gradient.
    build = _update if cut.deferred else _update_at_once
    slabs, small = placement.slabs_on_device, placement.small_on_device
    return Kernel(
        name="update",
        key=(fragment.key, layout, jnp.dtype(gradient)),
        build=lambda: build(fragment, layout, cut.guarded),
        takes=(
            placed(layout.master.at_rest, slabs),
            placed(layout.state.at_rest, slabs),
            placed(layout.master.gradient_aval(gradient), slabs),
            placed([cut.combine.jaxpr.outvars[i].aval for i in cut.messages[group]], small),
            placed(_OK, small),
            placed((_key(), _STEP, _GROUP), small) if layout.draws else None,
        ),
        gives=(slabs, slabs) if cut.deferred else (slabs, slabs, small, small),
        donated=(0, 1),
    )


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _update(fragment: Fragment, layout: GroupLayout, guarded: bool) -> Callable:
    """The update `(masters, state, gradient, messages, ok, draw) -> (masters, state)`."""
    elements = _update_of_elements(fragment, layout)
    if elements is None:
        return update_by_leaf(fragment, layout, guarded)
    if layout.num_coded:
        return update_in_pieces(elements, layout, guarded)
    compute = _update_of_slabs(elements, layout)

    def update_group(masters, state, gradient, messages, ok, draw=None):
        old = tuple(masters), tuple(state)
        slabs = layout.master.decode(masters), layout.state.decode(state)
        masters, state = compute(*slabs, gradient.astype(layout.master.dtype), messages)
        own, *others = layout.slab_draws(draw)
        new = layout.master.encode(masters, own), layout.state.encode(state, others)
        # Chosen as they are at rest: where nothing is to change, nothing is rounded again either.
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old) if guarded else new

    return update_group


def _update_at_once(fragment: Fragment, layout: GroupLayout, guarded: bool) -> Callable:
    """The immediate update, which measures its gradient as well; see `update`."""
    apply = _update(fragment, layout, guarded)

    def update_group(masters, state, gradient, messages, ok, draw=None):
        # Its own gradient is all that can be asked here: those of earlier stages don't exist yet.
        square, ok = measured(gradient, ok, guarded, layout.master.num_shards)
        return *apply(masters, state, gradient, messages, ok, draw), square, ok

    return update_group


def _update_of_slabs(elements: Compute, layout: GroupLayout) -> Callable:
    """An update that leaves slabs whole: of all their elements at once."""
    size, shards = layout.master.size, layout.master.num_shards

    def compute(masters, state, gradient, messages):
        columns = jnp.arange(size)
        if shards > 1:
            columns = columns % (size // shards)
        masters, *state = elements([gradient, masters, *state], columns, messages)
        return masters, tuple(state)

    return compute


def _update_of_elements(fragment: Fragment, layout: GroupLayout) -> Compute | None:
    """The update of any elements of the slabs, if the optimizer treats those of a leaf alike."""
    # Each leaf by itself would be cut out of three slabs and put back; one pass over whole slabs
    # writes where it reads, which is faster and peaks lower (docs/performance.md).
    count, first = len(layout.master.shapes), len(fragment.consts)
    slabs = layout.state.layouts
    # A state that lies otherwise than the masters has no element in line with theirs.
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
    found = line_up(fragment.jaxpr, layout.master.shapes, inputs, outputs)
    if found is None:
        return None
    kind_of, functions = found

    def compute(rows, columns, messages):
        others = dict(enumerate(fragment.consts))
        others.update(enumerate(messages, first + sum(map(len, inputs))))
        # Padding is computed on like the leaves beside it. It may become anything: nobody reads it,
        # and codes with scales are made without it.
        results = zip(*(function(rows, others) for function in functions), strict=True)
        return [
            _by_leaf(layout.master, kind_of, columns, [row.astype(slab.dtype) for row in kinds])
            for slab, kinds in zip(layout.slabs, results, strict=True)
        ]

    return compute


def _by_leaf(
    layout: Layout, kind_of: Sequence[int], columns: jax.Array, kinds: Sequence[jax.Array]
) -> jax.Array:
    """Elements of a slab, those of each leaf from the array of its kind.

    With leaves at 0, 64 and 128 of kinds 0, 1 and 0, elements in columns 64 to 127 that leaf 1
    fills are those of `kinds[1]`, all others those of `kinds[0]`.

    Args:
        layout: Layout of the slab.
        kind_of: For each leaf, which function of those found computes it.
        columns: Place of each element in its shard.
        kinds: The elements as each of these functions computes them.
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
