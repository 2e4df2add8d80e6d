"""The small jitted functions around the stages: begin and end of a step, and an update's fragments.

They only wrap jaxprs that were cut elsewhere in packing, unpacking and the guard against
non-finite numbers.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.loss.stages import Program
from megatrain_jax._src.program.optimizer.elementwise import line_up
from megatrain_jax._src.program.optimizer.slicing import Fragment
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.layout import Layout


def begin(program: Program, microbatches: int, num_metrics: int) -> Callable:
    """Builds `(variables, batch, key, step) -> (values, seed, new variables)`.

    Splits the batch and runs the prologue for each microbatch. Microbatch m of step t draws from
    `fold_in(fold_in(key, t), m)`. State that random numbers are drawn from goes on from microbatch
    to microbatch; the rest changes once a step, as in the first of them.
    """
    place = {v: i for i, v in enumerate(program.prologue_values)}
    new_ids = program.outputs[1 + num_metrics :]
    drawn = program.state.drawn
    loss = program.values[program.outputs[0]]

    def begin_step(variables, batch, key, step):
        step_key = jax.random.fold_in(key, step)
        rows, once = [], None
        for m in range(microbatches):
            part = [_slice(x, m, microbatches) for x in batch]
            rng = jax.random.fold_in(step_key, m)
            data = [*program.prologue_consts, *variables, *part, rng]
            values = jx.evaluate(program.prologue, data)
            rows.append(values)
            new = [
                values[place[i]] if i in place else v
                for i, v in zip(new_ids, variables, strict=True)
            ]
            once = new if once is None else once
            variables = _chosen(drawn, new, variables)
        return rows, jnp.full(loss.shape, 1 / microbatches, loss.dtype), _chosen(drawn, new, once)

    return begin_step


def _chosen(mask, yes, no):
    return [y if m else n for m, y, n in zip(mask, yes, no, strict=True)]


def _slice(x, m, microbatches):
    size = x.shape[0] // microbatches
    return x if microbatches == 1 else jax.lax.slice_in_dim(x, m * size, (m + 1) * size)


def mean_metrics(names: Sequence[str], *, weighted: bool = False) -> Callable:
    """Builds `(rows of loss and metrics, one a microbatch) -> dict of means`.

    The metric "weight", which says how much a row's loss is the mean of, is summed.

    Args:
        names: Of the metrics.
        weighted: Whether rows count by their weights, if they have any, as in an evaluation.
            Otherwise they count alike, as they do in the gradient.
    """
    names = ("loss", *names)

    def means(rows):
        columns = [[x.astype(jnp.float32) for x in column] for column in zip(*rows, strict=True)]
        result = dict(zip(names, columns, strict=True))
        weights = result.get("weight") if weighted else None
        result = {name: _mean(column, weights) for name, column in result.items()}
        if "weight" in names:
            result["weight"] = sum(columns[names.index("weight")])
        return result

    return means


def _mean(column, weights):
    if weights is None:
        return sum(column) / len(column)
    # Without a weight, a row's loss is the mean of nothing: it may well be 0 / 0.
    parts = [jnp.where(w == 0, 0, w * x) for w, x in zip(weights, column, strict=True)]
    return sum(parts) / sum(weights)


def end() -> Callable:
    """Builds `(metrics, squared norms, step) -> (metrics with grad_norm, step + 1)`."""

    def end_step(metrics, squares, step):
        total = jnp.sum(jnp.stack(squares))
        return {**metrics, "grad_norm": jnp.sqrt(total)}, step + 1

    return end_step


def keep() -> Callable:
    """Builds `(new, old, ok) -> new where ok, else old`, of lists of arrays."""

    def keep_if_ok(new, old, ok):
        return [jnp.where(ok, n, o) for n, o in zip(new, old, strict=True)]

    return keep_if_ok


def reduce(
    fragment: Fragment, layout: GroupLayout, reads: frozenset[str], guarded: bool
) -> Callable:
    """Builds `(gradient, masters, state, loss, globals, ok) -> (scalars, squared norm, ok)`.

    Masters and state are None unless the optimizer's reduction reads them. Scalars of one dtype
    come as one array, since each array that a function returns takes time to dispatch.
    """

    def reduce_group(gradient, masters, state, loss, small, ok):
        gradient = gradient.astype(jnp.float32)
        shapes = layout.master.shapes
        masters = masters if "P" in reads else jnp.zeros(layout.master.size, layout.master.dtype)
        state = (
            state
            if "O" in reads
            else tuple(jnp.zeros(s.size, s.dtype) for s in layout.state.layouts)
        )
        args = [
            *(layout.master.unpack(gradient, i) for i in range(len(shapes))),
            *(layout.master.unpack(masters, i) for i in range(len(shapes))),
            *layout.state.unpack(state),
        ]
        scalars = jx.evaluate(fragment.jaxpr, [*fragment.consts, *args, loss, *small])
        return _stacked(scalars), *_measured(gradient, ok, guarded)

    return reduce_group


def _measured(gradient, ok, guarded):
    square = jnp.sum(gradient * gradient)
    return square, ok & jnp.isfinite(square) if guarded else ok


def _stacked(scalars):
    rows: dict = {}
    for x in scalars:
        rows.setdefault(x.dtype, []).append(x.reshape(()))
    return [jnp.stack(row) for row in rows.values()]


def _unstacked(stacked, like):
    rows = {row.dtype: iter(row) for row in stacked}
    return [next(rows[v.aval.dtype]).reshape(v.aval.shape) for v in like]


def combine(
    fragment: Fragment, reduced: Sequence[Fragment], num_messages: int, guarded: bool
) -> Callable:
    """Builds `(loss, globals, scalars of each group, ok) -> (messages, globals, ok)`.

    Args:
        fragment: What combines.
        reduced: For each group, what its scalars were computed by.
        num_messages: How many of the results are messages.
        guarded: Whether a loss that is not finite changes nothing.
    """

    def combine_groups(loss, state, stacked, ok):
        ok = ok & jnp.isfinite(loss) if guarded else ok
        scalars = [
            x
            for row, fragment in zip(stacked, reduced, strict=True)
            for x in _unstacked(row, fragment.jaxpr.outvars)
        ]
        out = jx.evaluate(fragment.jaxpr, [*fragment.consts, loss, *state, *scalars])
        new = [jnp.where(ok, n, o) for n, o in zip(out[num_messages:], state, strict=True)]
        return out[:num_messages], new if guarded else out[num_messages:], ok

    return combine_groups


def update(fragment: Fragment, layout: GroupLayout, guarded: bool) -> Callable:
    """Builds `(masters, state, gradient, messages, ok) -> (masters, state)` of one group.

    Nothing changes where `ok` is false.
    """
    compute = _update_of_slabs(fragment, layout) or _update_of_leaves(fragment, layout)

    def update_group(masters, state, gradient, messages, ok):
        old = (masters, tuple(state))
        new = compute(masters, state, gradient.astype(jnp.float32), messages)
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old) if guarded else new

    return update_group


def update_at_once(fragment: Fragment, layout: GroupLayout, guarded: bool) -> Callable:
    """Builds `(masters, state, gradient, messages, ok) -> (masters, state, squared norm, ok)`.

    `update` for gradients that need not wait: one call also measures what it is given.
    """
    apply = update(fragment, layout, guarded)

    def update_group(masters, state, gradient, messages, ok):
        square, ok = _measured(gradient.astype(jnp.float32), ok, guarded)
        return *apply(masters, state, gradient, messages, ok), square, ok

    return update_group


def _update_of_leaves(fragment: Fragment, layout: GroupLayout) -> Callable:
    count = len(layout.master.shapes)

    def compute(masters, state, gradient, messages):
        args = [
            *(layout.master.unpack(gradient, i) for i in range(count)),
            *(layout.master.unpack(masters, i) for i in range(count)),
            *layout.state.unpack(state),
        ]
        out = jx.evaluate(fragment.jaxpr, [*fragment.consts, *args, *messages])
        return layout.master.pack(out[:count]), layout.state.pack(out[count:])

    return compute


def _update_of_slabs(fragment: Fragment, layout: GroupLayout) -> Callable | None:
    """An update that leaves slabs whole, if the optimizer treats all elements of a leaf alike."""
    count, first = len(layout.master.shapes), len(fragment.consts)
    slabs = layout.state.layouts
    if any(slab.offsets != layout.master.offsets for slab in slabs):
        return None
    state = [
        [i for i, (slab, _) in enumerate(layout.state.places) if slab == s]
        for s in range(len(slabs))
    ]
    leaves = list(range(count))
    starts = [[first + i for i in leaves], [first + count + i for i in leaves]]
    inputs = [*starts, *([first + 2 * count + i for i in row] for row in state)]
    outputs = [leaves, *([count + i for i in row] for row in state)]
    found = line_up(fragment.jaxpr, layout.master.shapes, inputs, outputs)
    if found is None:
        return None
    kind_of, functions = found

    def compute(masters, state, gradient, messages):
        others = dict(enumerate(fragment.consts))
        others.update(enumerate(messages, first + sum(map(len, inputs))))
        rows = [gradient, masters, *state]
        results = [function(rows, others) for function in functions]
        new = [
            _by_leaf(layout.master, kind_of, [row.astype(slab.dtype) for row in column])
            for slab, column in zip(
                (layout.master, *slabs), zip(*results, strict=True), strict=True
            )
        ]
        return new[0], tuple(new[1:])

    return compute


def _by_leaf(layout: Layout, kind_of: Sequence[int], kinds: Sequence[jax.Array]) -> jax.Array:
    """A slab in which each leaf's elements come from the array of its kind."""
    chosen, at = kinds[0], jnp.arange(layout.size)
    for kind, values in enumerate(kinds[1:], 1):
        inside = jnp.zeros(layout.size, bool)
        for leaf, other in enumerate(kind_of):
            if other == kind:
                start = layout.offsets[leaf]
                inside |= (at >= start) & (at < start + math.prod(layout.shapes[leaf]))
        chosen = jnp.where(inside, values, chosen)
    return chosen


def initial_state(fragment: Fragment, layout: GroupLayout) -> Callable:
    """Builds `masters -> state` of one group."""

    def init_group(masters):
        params = [layout.master.unpack(masters, i) for i in range(len(layout.master.shapes))]
        return layout.state.pack(jx.evaluate(fragment.jaxpr, [*fragment.consts, *params]))

    return init_group
