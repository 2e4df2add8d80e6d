"""The kernels around the stages of a step: begin, zero gradients, metrics, end; and initial state.

A run that computes in float16 scales its loss. float16 has no numbers below 6e-8, where many
gradients lie. So the cotangent of the loss is the scale instead of 1, and updates divide gradients
by it. A scale that is too large shows as a gradient that is not finite: the step is skipped and the
scale halved. After many good steps it is doubled, since gradients become smaller during training.
These are the rule and the numbers of `jmp.DynamicLossScale`, with an upper bound.

Example: a gradient overflows in the first step. The last row counts good steps since a change::

    step           1        2        3        ...   2001     2002
    scale          2**15    2**14    2**14          2**14    2**15
    skipped        yes      no       no             no       no
    count after    0        1        2              0        1
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from megatrain_jax._src.engine.kernels.kernel import Kernel, placed
from megatrain_jax._src.engine.kernels.stage_kernels import shardings
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.optimizer.cut import Fragment
from megatrain_jax._src.engine.state.layout import GroupLayout, Layout
from megatrain_jax._src.engine.state.placement import Placement


def begin(key: Hashable, program: Program, microbatches: int, placement: Placement) -> Kernel:
    """The kernel `(variables, batch, key, step, *more) -> (values, seed, new variables)`.

    Splits the batch and runs the prologue for each microbatch. Microbatch m of step t draws from
    `fold_in(fold_in(key, t), m)`, and in batch n of an evaluation, `fold_in(key, n)` is the key;
    `more` is the scale, if there is one, or `evaluated=n`. If each process holds all state,
    microbatches are numbered over all processes. State that random numbers are drawn from passes
    from microbatch to microbatch; the remaining state changes once per step, as in the first
    microbatch.

    Args:
        key: Key of the program.
        program: The cut loss. `values` are its prologue's values for each microbatch, and `seed` is
            the cotangent of each microbatch's loss, multiplied by the scale if there is one.
        microbatches: Number of parts that the batch is split along its first axis.
        placement: Placement of its arrays.
    """
    row = shardings(program, placement, program.prologue_values)
    small = placement.small_on_device
    place = {v: i for i, v in enumerate(program.prologue_values)}
    new_ids = program.new_variables
    drawn = program.state.drawn
    loss = program.values[program.outputs[0]]
    number, first = placement.num_copies * microbatches, placement.copy * microbatches

    # Keys are folded with the step's number, not split step by step, so that a restored run draws
    # the same numbers.
    def begin_step(variables, batch, key, step, scale=1.0, evaluated=None):
        key = key if evaluated is None else jax.random.fold_in(key, evaluated)
        step_key = jax.random.fold_in(key, step)
        rows, once = [], None
        for m in range(number):
            # The other processes' microbatches only advance the state that numbers are drawn from.
            part = [_slice(x, m % microbatches, microbatches) for x in batch]
            rng = jax.random.fold_in(step_key, m)
            data = [*program.prologue_consts, *variables, *part, rng]
            values = jx.evaluate(program.prologue, data)
            if first <= m < first + microbatches:
                rows.append(values)
            new = [
                values[place[i]] if i in place else v
                for i, v in zip(new_ids, variables, strict=True)
            ]
            # A counter increases once per step, as in one call on the whole batch. But microbatches
            # must not draw from the same keys.
            once = new if once is None else once
            variables = _chosen(drawn, new, variables)
        # The loss is the mean over microbatches, so with these seeds gradients sum to its gradient.
        seed = jnp.full((), scale / number, loss.dtype)
        return rows, seed, _chosen(drawn, new, once)

    out_shardings = [row] * microbatches, small, small
    return Kernel(name="begin", key=key, build=lambda: begin_step, out_shardings=out_shardings)


def _chosen(mask, yes, no):
    return [y if m else n for m, y, n in zip(mask, yes, no, strict=True)]


def _slice(x, m, microbatches):
    # The division is exact, because indivisible batches were refused.
    size = x.shape[0] // microbatches
    return x if microbatches == 1 else jax.lax.slice_in_dim(x, m * size, (m + 1) * size)


def zeros(layout: Layout, placement: Placement, dtype: DTypeLike) -> Kernel:
    """The kernel `() -> gradient` of one group's masters: zeros, to be added to.

    Args:
        layout: Layout of the masters.
        placement: Placement of the gradient.
        dtype: Dtype of the gradient.
    """
    avals = layout.gradient_avals(dtype)

    def build() -> Callable:
        return lambda: tuple(jnp.zeros(aval.shape, aval.dtype) for aval in avals)

    # The key has only sizes and dtype, so that groups of the same sizes share the function.
    return Kernel(name="zeros", key=avals, build=build, out_shardings=placement.slabs_on_device)


def means(names: Sequence[str], *, weighted: bool = False) -> Kernel:
    """The kernel `rows of loss and metrics, one per microbatch -> dict of means`.

    The metric "weight" is summed; it is the number of examples or tokens in a row's mean loss.

    Args:
        names: Names of the metrics.
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

    return Kernel(name="means", key=(names, weighted), build=lambda: means)


def joined(shardings: Sequence[Sharding]) -> Kernel:
    """The kernel `lists of arrays, one per microbatch -> arrays with the rows of all`."""

    def join(rows):
        return [jnp.concatenate(parts) for parts in zip(*rows, strict=True)]

    key = tuple(shardings)
    return Kernel(name="joined", key=key, build=lambda: join, out_shardings=list(shardings))


def _mean(column, weights):
    if weights is None:
        return sum(column) / len(column)
    # A row with weight 0 has the mean of nothing as its loss, which may be 0 / 0.
    parts = [jnp.where(w == 0, 0, w * x) for w, x in zip(weights, column, strict=True)]
    return sum(parts) / sum(weights)


def _end_step(metrics, squares, step):
    # The step counts on the device, so that a dispatch sends no number there.
    total = jnp.sum(jnp.stack(squares))
    return {**metrics, "grad_norm": jnp.sqrt(total)}, step + 1


END = Kernel(name="end", build=lambda: _end_step)
"""The kernel `(metrics, squared norms, step) -> (metrics with grad_norm, step + 1)`."""


def _keep_if_ok(new, old, ok):
    return [jnp.where(ok, n, o) for n, o in zip(new, old, strict=True)]


def keep(placement: Placement) -> Kernel:
    """The kernel `(new, old, ok) -> new where ok, else old`, of lists of small arrays.

    A stage may return them sharded over the devices, like values with a row for each example:
    statistics of 32 features look like such values to a batch of 8.
    """
    return Kernel(name="keep", build=lambda: _keep_if_ok, out_shardings=placement.small_on_device)


def summed(placement: Placement) -> Kernel:
    """The kernel `gradients -> their sums over processes`, of arrays with a part per process.

    Sums are sent in the gradients' own dtype.
    """

    def total(arrays):
        parts = [x.reshape(placement.num_copies, -1, *x.shape[1:]) for x in arrays]
        return [jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (0,)) for x in parts]

    place = placement.over_copies(divided=True)
    return Kernel(name="sum", build=lambda: total, donated=(0,), out_shardings=place)


def as_rows(placement: Placement) -> Kernel:
    """The kernel `dict of scalars -> dict of arrays with one element`."""

    def rows(values):
        return {name: x[None] for name, x in values.items()}

    return Kernel(name="rows", build=lambda: rows, out_shardings=placement.small_on_device)


def row_means(placement: Placement) -> Kernel:
    """The kernel `dict of rows -> dict of their means`, of rows with an element per process.

    The metric "weight" is summed, as in `means`.
    """

    def means(rows):
        return {n: jnp.sum(x) if n == "weight" else jnp.mean(x) for n, x in rows.items()}

    place = placement.over_copies(divided=False)
    return Kernel(name="row means", build=lambda: means, out_shardings=place)


ADD = Kernel(name="add", build=lambda: jnp.add)
"""The kernel `(cotangent, cotangent) -> their sum`."""


# ---- initial state


def pack(layout: Layout, dtypes: Sequence[Any], placement: Placement) -> Kernel:
    """The kernel `leaves -> masters` of one group: arrays at rest.

    Args:
        layout: The layout of the group's masters.
        dtypes: The dtype of each leaf before it is packed.
        placement: Placement of the run.
    """

    # Without random bits, initial numbers are rounded to nearest. Stochastic rounding preserves
    # sums of small updates, and nothing has been added up yet.
    def pack(leaves):
        return layout.encode(layout.pack(leaves))

    rows = zip(layout.shapes, dtypes, strict=True)
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in rows]
    return Kernel(
        name="pack",
        key=layout,
        build=lambda: pack,
        takes=(placed(leaves, placement.small_on_device),),
        out_shardings=placement.slabs_on_device,
    )


def initial_state(fragment: Fragment, layout: GroupLayout, placement: Placement) -> Kernel:
    """The kernel `masters -> state` of one group, both as arrays at rest."""

    def init_group(masters):
        slab = layout.state.pack(_of_masters(fragment, layout, masters))
        return layout.state.encode(jax.tree.map(_hidden, slab))

    return Kernel(
        name="initial",
        key=(fragment.key, layout),
        build=lambda: init_group,
        takes=(_masters(layout, placement),),
        out_shardings=placement.slabs_on_device,
    )


def initial_scalars(fragment: Fragment, layout: GroupLayout, placement: Placement) -> Kernel:
    """The kernel `masters -> scalars` of one group, for the state that all groups share."""
    return Kernel(
        name="initial scalars",
        key=(fragment.key, layout),
        build=lambda: lambda masters: _of_masters(fragment, layout, masters),
        takes=(_masters(layout, placement),),
        out_shardings=placement.small_on_device,
    )


def _masters(layout: GroupLayout, placement: Placement) -> Any:
    """The shapes of a group's masters, as `pack` gives them."""
    return placed(layout.master.at_rest, placement.slabs_on_device)


def _hidden(x: jax.Array) -> jax.Array:
    """Returns an array with a value that XLA doesn't know when it compiles.

    Most initial state is zero. XLA would encode the zeros while it compiles, slowly, and keep the
    codes in the program.
    """
    return jnp.where(jax.lax.optimization_barrier(True), x, jnp.ones_like(x))


def _of_masters(fragment: Fragment, layout: GroupLayout, masters: Any) -> list[jax.Array]:
    """The results of a fragment on a group's parameters, from its masters at rest."""
    # Decoded from the stored masters, rounded or not, because every update starts from these.
    own = layout.master
    segments = own.decode_segments(masters)
    params = [own.unpack_from(segments, i).astype(own.dtype) for i in range(len(own.shapes))]
    return jx.evaluate(fragment.jaxpr, [*fragment.consts, *params])


# Powers of two, so that scaling changes only exponents.
_FIRST, _LEAST, _MOST = 2.0**15, 1.0, 2.0**24
# Good steps after which the scale is doubled.
_PERIOD = 2000

Scaling = tuple[jax.Array, jax.Array]
"""The scale of the next step's loss, fp32, and the good steps since it changed, int32."""


def scaling_of(facts: Mapping[str, Any] | None) -> Scaling:
    """The scale and its count of good steps from a checkpoint's facts, or their first values."""
    facts = facts or {"scale": _FIRST, "good_steps": 0}
    return jnp.float32(facts["scale"]), jnp.int32(facts["good_steps"])


def as_facts(scaling: Scaling) -> dict[str, Any]:
    """The scale and its count of good steps as facts of a checkpoint, from arrays at rest."""
    scale, good = jax.device_get(scaling)
    return {"scale": float(scale), "good_steps": int(good)}


def can_be_halved(scale: float) -> bool:
    """Whether a scale is above the least one."""
    return scale > _LEAST


def change() -> Kernel:
    """The kernel `(scale, good steps, ok) -> (scale, good steps)` at the end of a step."""

    def changed(scale: jax.Array, good: jax.Array, ok: jax.Array) -> Scaling:
        full = good + 1 >= _PERIOD
        grown = jnp.where(full, jnp.minimum(2 * scale, _MOST), scale)
        halved = jnp.maximum(scale / 2, _LEAST)
        return jnp.where(ok, grown, halved), jnp.where(ok & ~full, good + 1, 0)

    return Kernel(name="change scale", key=_PERIOD, build=lambda: changed)
