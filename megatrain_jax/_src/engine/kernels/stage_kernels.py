"""The kernels of stages: functions that all stages with equal equations share.

Such a template is stateless: it takes slabs of parameters and live values, and returns live values,
or gradients and cotangents. It is the paper's layer template (MegaTrain, arXiv 2604.05091), cut
from a trace instead of written by hand.

Example: a block `y = sin(x @ up) @ down` with its own group, its two leaves in one slab::

    forward([masters], [x])                     -> [y]
    backward([masters], [x], [dy], [], [])      -> [], [gradient], [dx]
    backward([masters], [x], [dy], [sum], [])   -> [], [sum + gradient], [dx]    # accumulates

`masters` are the slab's arrays at rest. `gradient` has an array for each segment of the slab, with
`d_up` and `d_down` at the same offsets as `up` and `down`.

Gradients may be stored in bfloat16: a backward adds in fp32, and rounds the result.

Example: a wave of three microbatches with the gradients `a`, `b` and `c`. Its backwards leave the
first two in fp32, and the last one reads and writes the stored sum `s`::

    first       a
    second      a + b
    third       round(((a + b) + c) + s)

Rounding to nearest would lose every gradient that is smaller than half of the last bit of `s`, so
sums are rounded up or down at random, unless the user wants otherwise.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from megatrain_jax._src.engine.kernels.bound_stage import BoundStage, Residuals
from megatrain_jax._src.engine.kernels.kernel import Kernel, placed
from megatrain_jax._src.engine.kernels.rewrites import looks_up_inputs, with_scattered_sums
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import firing_once, has_side_effects
from megatrain_jax._src.engine.program.loss.gradients import pullback, traced_pullback
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.program.rewriting import with_fp32_products
from megatrain_jax._src.engine.state import codec
from megatrain_jax._src.engine.state.layout import Layout
from megatrain_jax._src.engine.state.placement import Placement

# Index of the random draws for sums in a group; masters and optimizer state have 0 and 1.
_SUMS = 2
_STEP = jax.ShapeDtypeStruct((), jnp.int32)
_NUMBER = jax.ShapeDtypeStruct((), jnp.uint32)

Segments = Sequence[jax.Array]
"""The segments of a gradient; see `Layout.gradient_avals`."""


class NarrowSums:
    """The sums of one backward, added to and rounded one after another; for use inside jit."""

    def __init__(self, placement: Placement, made: Sequence[Segments], draws: Sequence[Any]):
        """Starts before the first sum.

        Args:
            placement: Placement of the sums.
            made: For each sum, its gradient in fp32 from the wave's earlier microbatches; empty if
                there are none.
            draws: The run's key, the number of the step, the numbers of the sums' groups, and the
                number of sums that the step has rounded so far. Each number gives other bits.
        """
        self._key, self._step, groups, self._count = draws
        self._placement, self._made, self._groups = placement, iter(made), iter(groups)
        self._complete: list[Segments] = []

    @property
    def results(self) -> tuple[list[Segments], jax.Array]:
        """The wave's gradients in fp32, if there were earlier ones, and the new count."""
        # Returned to reuse the memory of the earlier gradients: products add to them in place.
        return self._complete, self._count

    def add(
        self,
        stored: Segments | None,
        layout: Layout,
        leaves: Sequence[jax.Array | None],
        order: Sequence[int],
        rounding: str,
    ) -> tuple[jax.Array, ...]:
        """The next sum: the stored one and a microbatch's gradients, in bfloat16.

        Args:
            stored: The stored sum; None if there is none.
            layout: Layout of the sum, in fp32.
            leaves: The gradients; None stands for zeros.
            order: Numbers of the leaves in the order of their gradients' computation.
            rounding: "stochastic" or "nearest".
        """
        spread = self._placement.spread
        stored = stored and [x.astype(jnp.float32) for x in stored]
        if (made := next(self._made, None)) is not None:
            total = layout.add(made, leaves, spread)
            self._complete.append(total)
            if stored:
                total = [x + y for x, y in zip(total, stored, strict=True)]
        elif stored:
            total = layout.add(stored, self._apart(leaves), spread)
        else:
            total = layout.pack_segments(leaves, spread, order)
        return self._rounded(total, rounding)

    def _apart(self, leaves: Sequence[jax.Array | None]) -> Sequence[jax.Array | None]:
        """The gradients behind barriers, so that their products are not fused with the sums."""
        # A product that adds to the stored sum needs the sum in memory in fp32 before it, and its
        # result is read again after it. Several devices exchange gradients in between anyway.
        if self._placement.num_devices > 1:
            return leaves
        return [x if x is None else jax.lax.optimization_barrier(x) for x in leaves]

    def _rounded(self, total: Segments, rounding: str) -> tuple[jax.Array, ...]:
        draw = codec.derived_draw(codec.draw_of(self._key, self._step, next(self._groups)), _SUMS)
        draw = codec.derived_draw(draw, self._count)
        self._count += 1
        if rounding == "nearest":
            return tuple(x.astype(jnp.bfloat16) for x in total)
        found, first = [], 0
        for x in total:  # elements are numbered through all segments, and from 0 again after 2**32
            start = jnp.uint32(first % 2**32)
            bits = codec.random_bits(draw, start + jnp.arange(x.size, dtype=jnp.uint32))
            found.append(codec.round_stochastically(x, bits))
            first += x.size
        return tuple(found)


# ---- stage kernels


def forward(
    bound: BoundStage, program: Program, placement: Placement, *, keeps: bool = False
) -> Kernel:
    """The kernel `(masters, inputs) -> outputs`, or `-> (outputs, residuals)`.

    Args:
        bound: The stage. `masters` are its groups' arrays at rest, `inputs` its input values.
        program: The program of the stage.
        placement: Placement of its arrays.
        keeps: Whether it saves residuals for the backward.
    """
    stage, residuals = bound.stage, bound.residuals if keeps else None

    def forward_stage(masters, inputs):
        values = [*_unpack(bound, placement, masters), *inputs]
        if residuals is not None:
            return residuals.forward(values)
        return jx.evaluate(stage.jaxpr, [*stage.consts, *values])

    name, key = "forward", bound.key
    out_shardings: Any = shardings(program, placement, stage.outputs)
    if residuals is not None:
        name, _ = residual_kernel_names(residuals.selective)
        # The residuals depend on the differentiated values, so the key includes these flags.
        key = key, stage.is_trainable, stage.active, stage.has_cotangent
        kept = [x.sharding for x in _residuals(residuals, program, placement)]
        out_shardings = out_shardings, kept
    return Kernel(
        name=name,
        key=key,
        build=lambda: forward_stage,
        takes=(_masters(bound, placement), _values(program, placement, stage.inputs)),
        out_shardings=out_shardings,
    )


def backward(
    bound: BoundStage,
    program: Program,
    placement: Placement,
    microbatches: int,
    *,
    keeps: bool = False,
) -> Kernel:
    """The kernel `(masters, inputs, cotangents, gradients, sent) -> (outputs, gradients, back)`.

    It recomputes the stage and differentiates it. If the forward has saved residuals, it takes them
    after the inputs, and recomputes only elementwise operations. If it rounds gradients to
    bfloat16, it also takes `made` and `draws` of `NarrowSums`, and also returns
    `NarrowSums.results`.

    Args:
        bound: The stage. The kernel takes the cotangents of `bound.arriving`, and the existing
            gradients of `bound.accumulated` and cotangents of `bound.sent`. It returns the
            gradients of `bound.trained`, laid out like the masters, and the cotangents of
            `bound.leaving`, with existing values added. Outputs are empty if a forward gives them.
        program: The program of the stage.
        placement: Placement of its arrays.
        microbatches: Number of cotangents per output that are on the device during the kernel.
        keeps: Whether the forward has saved residuals.
    """
    stage, mode, residuals = bound.stage, bound.mode, bound.residuals if keeps else None
    assert mode is not None and not (keeps and mode.give_outputs)
    taken = () if residuals is None else (_residuals(residuals, program, placement),)
    at = 2 + len(taken)  # the position of the cotangents

    def backward_stage(masters, inputs, *others):
        kept, (cotangents, gradients, sent, *narrow) = others[: at - 2], others[at - 2 :]

        leaves = _unpack(bound, placement, masters)
        if residuals is None:
            what = stage, mode.arriving, mode.give_outputs
            # With effects, it would be traced in one place and evaluated in a second one.
            if has_side_effects(stage.jaxpr):
                pull = pullback(*what)
            else:
                pull = _adding_wide(bound, placement, traced_pullback(*what))
            *found, outputs = pull(list(cotangents), leaves, list(inputs))
        else:
            pull = _adding_wide(bound, placement, residuals.backward)
            found, outputs = pull([*leaves, *inputs], *kept, list(cotangents)), []
        return outputs, *_finish(bound, placement, found, gradients, sent, *narrow)

    def build() -> Callable:
        # If the stage has a forward kernel, that has printed already, and the recomputation must
        # not print again.
        if has_side_effects(stage.jaxpr):
            return firing_once(backward_stage, stage.jaxpr, at, has_forward=mode.give_outputs)
        # Over several devices, each one has rows for the shares of all.
        if residuals is None and any(mode.accumulate) and placement.num_devices == 1:
            if looks_up_inputs(stage.jaxpr):
                return with_scattered_sums(backward_stage)
        return backward_stage

    slabs = placement.slabs_on_device
    rows = zip(bound.binding.layouts, mode.gradients, mode.accumulate, mode.rounding, strict=True)
    existing = [
        layout.gradient_avals("bfloat16" if rounding else dtype)
        for layout, dtype, adds, rounding in rows
        if adds and dtype
    ]
    # The schedule doesn't count cotangents: incoming ones exist for all microbatches, outgoing ones
    # for one.
    cotangents = *bound.arriving * microbatches, *bound.leaving
    return Kernel(
        name="backward" if residuals is None else residual_kernel_names(residuals.selective)[1],
        key=(bound.key, stage.active, mode),
        build=build,
        takes=(
            _masters(bound, placement),
            _values(program, placement, stage.inputs),
            *taken,
            _values(program, placement, bound.arriving),
            placed(existing, slabs),
            _values(program, placement, bound.sent),
            *(_narrow_takes(bound, placement) if bound.rounded else ()),
        ),
        out_shardings=(
            shardings(program, placement, stage.outputs if mode.give_outputs else ()),
            slabs,
            shardings(program, placement, bound.leaving),
            *((slabs, placement.small_on_device) if bound.rounded else ()),
        ),
        # The sums reuse the memory of the existing gradients and cotangents. Masters and inputs are
        # not donated, because later microbatches and stages read them.
        donated=(at + 1, at + 2, at + 3) if bound.rounded else (at + 1, at + 2),
        beside_bytes=sum(program.num_bytes(i, placement.num_devices) for i in cotangents),
    )


def residual_kernel_names(selective: bool) -> tuple[str, str]:
    """Names of forward and backward of a stage that saves residuals: all, or the costliest."""
    if selective:
        return "forward keeping the costliest", "backward of the costliest"
    return "forward keeping", "backward of kept"


def shardings(program: Program, placement: Placement, ids: Iterable[int]) -> list[Sharding]:
    """Shardings of values, by their ids."""
    return [placement.values(i in program.examples.values) for i in ids]


def _values(
    program: Program, placement: Placement, ids: Sequence[int]
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings of values, by their ids."""
    rows = zip(ids, shardings(program, placement, ids), strict=True)
    return [placed(program.values[i], sharding) for i, sharding in rows]


def _residuals(
    residuals: Residuals, program: Program, placement: Placement
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings of residuals."""
    return [placed(x, placement.values(program.examples.along(x))) for x in residuals.avals]


def _masters(bound: BoundStage, placement: Placement) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes and shardings of the masters that a stage takes, at rest."""
    sharding = placement.slabs_on_device
    return [placed(layout.at_rest, sharding) for layout in bound.binding.layouts]


def _narrow_takes(bound: BoundStage, placement: Placement) -> tuple[Any, Any]:
    """Shapes and shardings of `made` and `draws` of `NarrowSums`."""
    mode = bound.mode
    assert mode is not None
    rows = zip(bound.binding.layouts, mode.rounding, strict=True)
    layouts = [layout for layout, rounding in rows if rounding]
    # Empty unless earlier microbatches of the wave have made gradients.
    avals = [layout.gradient_avals("float32") for layout in layouts if mode.completes]
    key = jax.eval_shape(lambda: jax.random.key(0))
    draws = key, _STEP, [_NUMBER] * len(layouts), _NUMBER
    return placed(avals, placement.slabs_on_device), placed(draws, placement.small_on_device)


def _adding_wide(bound: BoundStage, placement: Placement, pulled: Callable | jx.Traced) -> Callable:
    """A pullback with gradients in fp32 where they enter fp32 sums; it returns gradients first."""
    stage, mode = bound.stage, bound.mode
    assert mode is not None
    rows = zip(bound.binding.slots, stage.is_trainable, strict=True)
    are_wide = [mode.is_partial or mode.accumulate[slot.slab] for slot, yes in rows if yes]
    # XLA's CPU runtime has no products of bfloat16 numbers that give fp32.
    return with_fp32_products(pulled, are_wide, casts_operands=placement.platform == "cpu")


def _finish(bound: BoundStage, placement: Placement, pulled, gradients, sent, *narrow):
    """Packs a stage's gradients, and adds existing gradients and cotangents; see `backward`."""
    stage, mode = bound.stage, bound.mode
    assert mode is not None
    leaf_gradients, input_cotangents = pulled
    sums = NarrowSums(placement, *narrow) if narrow else None
    new = _pack_gradients(bound, placement, leaf_gradients, gradients, sums)
    # Only active inputs get a cotangent; `sent` has their existing cotangents, in order.
    earlier = iter(sent)
    flags = [e for e, a in zip(mode.existing, stage.active, strict=True) if a]
    summed = [
        c + next(earlier) if exists else c
        for c, exists in zip(input_cotangents, flags, strict=True)
    ]
    return new, summed, *(sums.results if sums else ())


def _unpack(
    bound: BoundStage, placement: Placement, masters: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    """The leaves that a stage reads, whole, in the dtypes of its traced equations."""
    binding, dtypes = bound.binding, bound.stage.leaf_dtypes
    leaves: dict[int, jax.Array] = {}
    # All leaves of one slab and dtype are gathered from the devices in one collective.
    for positions in bound.alike:
        slab, dtype = binding.slots[positions[0]].slab, dtypes[positions[0]]
        layout, rows = binding.layouts[slab], [binding.slots[i].leaf for i in positions]
        values = layout.unpack_whole(masters[slab], rows, dtype, placement.whole)
        leaves.update(zip(positions, values, strict=True))
    return [leaves[i] for i in range(len(leaves))]


def _as_computed(stage: Stage) -> list[int]:
    """The stage's trainable leaves, in the order in which a backward completes their gradients."""
    first = len(stage.consts)
    leaves = stage.jaxpr.invars[first : first + len(stage.leaves)]
    # Backward goes through the equations in reverse, so a leaf's first reader completes its
    # gradient.
    first_read: dict[Any, int] = {}
    for at, eqn in enumerate(stage.jaxpr.eqns):
        for v in jx.variables(eqn.invars):
            first_read.setdefault(v, at)
    trained, _ = jx.split(stage.is_trainable, leaves)
    return sorted(range(len(trained)), key=lambda i: -first_read.get(trained[i], 0))


def _pack_gradients(
    bound: BoundStage, placement: Placement, leaf_gradients, gradients, sums: NarrowSums | None
) -> list[tuple[jax.Array, ...]]:
    """The segments of a stage's gradients, by slab; zeros for a leaf that it does not read."""
    stage, binding, mode = bound.stage, bound.binding, bound.mode
    assert mode is not None
    slots = [slot for slot, yes in zip(binding.slots, stage.is_trainable, strict=True) if yes]
    rows: list[list] = [[None] * len(layout.shapes) for layout in binding.layouts]
    for slot, gradient in zip(slots, leaf_gradients, strict=True):
        rows[slot.slab][slot.leaf] = gradient
    # In the order of computation, no gradient waits beside the slab for an earlier write.
    order = [slots[i] for i in _as_computed(stage)]
    written = [[slot.leaf for slot in order if slot.slab == i] for i in range(len(rows))]
    earlier = iter(gradients)
    packed = []
    for i, (layout, dtype) in enumerate(zip(binding.layouts, mode.gradients, strict=True)):
        if dtype is None:
            continue
        # Laid out like the masters in any dtype, because updates read both at the same offsets.
        lying, rounding = dataclasses.replace(layout, dtype=dtype), mode.rounding[i]
        existing = next(earlier) if mode.accumulate[i] else None
        if rounding is not None and sums is not None:
            packed.append(sums.add(existing, lying, rows[i], written[i], rounding))
        elif existing is not None:
            packed.append(lying.add(existing, rows[i], placement.spread))
        else:
            packed.append(lying.pack_segments(rows[i], placement.spread, written[i]))
    return packed
