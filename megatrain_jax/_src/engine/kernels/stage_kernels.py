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
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from megatrain_jax._src.engine.kernels import narrow_sums
from megatrain_jax._src.engine.kernels.bound_stage import BackwardMode, Binding, BoundStage
from megatrain_jax._src.engine.kernels.kernel import Kernel, placed
from megatrain_jax._src.engine.kernels.residuals import Residuals
from megatrain_jax._src.engine.kernels.scattered_sums import looks_up_inputs, with_scattered_sums
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import firing_once, has_side_effects
from megatrain_jax._src.engine.program.loss.gradients import differentiated
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.program.rewriting import with_fp32_products
from megatrain_jax._src.engine.state.placement import Placement


def forward(bound: BoundStage, program: Program, placement: Placement) -> Kernel:
    """The kernel `(masters, inputs) -> outputs`.

    Args:
        bound: The stage. `masters` are its groups' arrays at rest, `inputs` its input values.
        program: The program of the stage.
        placement: Placement of its arrays.
    """
    stage, binding = bound.stage, bound.binding

    def forward_stage(masters, inputs):
        leaves = _unpack(bound, placement, masters)
        return jx.evaluate(stage.jaxpr, [*stage.consts, *leaves, *inputs])

    return Kernel(
        name="forward",
        key=bound.key,
        build=lambda: forward_stage,
        takes=(_masters(binding, placement), _values(program, placement, stage.inputs)),
        out_shardings=shardings(program, placement, stage.outputs),
    )


def forward_saving_residuals(bound: BoundStage, program: Program, placement: Placement) -> Kernel:
    """The kernel `(masters, inputs) -> (outputs, residuals)`; see `forward`."""
    stage, binding, residuals = bound.stage, bound.binding, bound.residuals
    assert residuals is not None

    def forward_stage(masters, inputs):
        return residuals.forward([*_unpack(bound, placement, masters), *inputs])

    return Kernel(
        name=residual_kernel_names(residuals.selective)[0],
        # The residuals depend on the differentiated values, so the key includes these flags.
        key=(bound.key, stage.is_trainable, stage.active, stage.has_cotangent),
        build=lambda: forward_stage,
        takes=(_masters(binding, placement), _values(program, placement, stage.inputs)),
        out_shardings=(
            shardings(program, placement, stage.outputs),
            [x.sharding for x in _residuals(residuals, program, placement)],
        ),
    )


def backward(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> Kernel:
    """The kernel `(masters, inputs, cotangents, gradients, sent) -> (outputs, gradients, back)`.

    It recomputes the stage and differentiates it. If it rounds gradients to bfloat16, it also takes
    `made` and `draws` of `NarrowSums`, and also returns `NarrowSums.results`.

    Args:
        bound: The stage. The kernel takes the cotangents of `bound.arriving`, and the existing
            gradients of `bound.accumulated` and cotangents of `bound.sent`. It returns the
            gradients of `bound.trained`, laid out like the masters, and the cotangents of
            `bound.leaving`, with existing values added. Outputs are empty if a forward gives them.
        program: The program of the stage.
        placement: Placement of its arrays.
        microbatches: Number of cotangents per output that are on the device during the kernel.
    """
    stage, binding, mode = bound.stage, bound.binding, bound.mode
    assert mode is not None

    def backward_stage(masters, inputs, cotangents, gradients, sent, *narrow):
        def pulled(leaves, inputs, cotangents):
            outputs, pull = differentiated(stage, mode.arriving, leaves, inputs)
            return *pull(list(cotangents)), outputs if mode.give_outputs else []

        leaves = _unpack(bound, placement, masters)
        *found, outputs = _adding_wide(bound, placement, pulled)(leaves, inputs, cotangents)
        return outputs, *_finish(bound, placement, found, gradients, sent, *narrow)

    def build() -> Callable:
        # If the stage has a forward kernel, that has printed already, and the recomputation must
        # not print again.
        if has_side_effects(stage.jaxpr):
            return firing_once(backward_stage, position=2, has_forward=mode.give_outputs)
        # Over several devices, each one has rows for the shares of all.
        if any(mode.accumulate) and placement.num_devices == 1 and looks_up_inputs(stage.jaxpr):
            return with_scattered_sums(backward_stage)
        return backward_stage

    return Kernel(
        name="backward",
        key=(bound.key, stage.active, mode),
        build=build,
        takes=(
            _masters(binding, placement),
            _values(program, placement, stage.inputs),
            _values(program, placement, bound.arriving),
            _accumulated(binding, mode, placement),
            _values(program, placement, bound.sent),
            *_narrow_takes(bound, placement),
        ),
        out_shardings=(
            shardings(program, placement, stage.outputs if mode.give_outputs else ()),
            placement.slabs_on_device,
            shardings(program, placement, bound.leaving),
            *(narrow_sums.out_shardings(placement) if bound.rounded else ()),
        ),
        # The sums reuse the memory of the existing gradients and cotangents. Masters and inputs are
        # not donated, because later microbatches and stages read them.
        donated=(3, 4, 5) if bound.rounded else (3, 4),
        beside_bytes=_cotangent_bytes(bound, program, placement, microbatches),
    )


def backward_from_residuals(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> Kernel:
    """The kernel `(masters, inputs, residuals, cotangents, gradients, sent, ...)`; see `backward`.

    The forward has saved residuals, so only elementwise operations are recomputed.
    """
    stage, binding, mode, residuals = bound.stage, bound.binding, bound.mode, bound.residuals
    assert mode is not None and residuals is not None and not mode.give_outputs

    def backward_stage(masters, inputs, kept, cotangents, gradients, sent, *narrow):
        leaves = _unpack(bound, placement, masters)
        pulled = _adding_wide(bound, placement, residuals.backward)
        found = pulled([*leaves, *inputs], kept, list(cotangents))
        return [], *_finish(bound, placement, found, gradients, sent, *narrow)

    return Kernel(
        name=residual_kernel_names(residuals.selective)[1],
        key=(bound.key, stage.active, mode),
        build=lambda: backward_stage,
        takes=(
            _masters(binding, placement),
            _values(program, placement, stage.inputs),
            _residuals(residuals, program, placement),
            _values(program, placement, bound.arriving),
            _accumulated(binding, mode, placement),
            _values(program, placement, bound.sent),
            *_narrow_takes(bound, placement),
        ),
        out_shardings=(
            [],
            placement.slabs_on_device,
            shardings(program, placement, bound.leaving),
            *(narrow_sums.out_shardings(placement) if bound.rounded else ()),
        ),
        donated=(4, 5, 6) if bound.rounded else (4, 5),
        beside_bytes=_cotangent_bytes(bound, program, placement, microbatches),
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


def _masters(binding: Binding, placement: Placement) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes and shardings of the masters that a stage takes, at rest."""
    sharding = placement.slabs_on_device
    return [placed(layout.at_rest, sharding) for layout in binding.layouts]


def _accumulated(
    binding: Binding, mode: BackwardMode, placement: Placement
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes and shardings of the existing gradients that a backward adds to."""
    rows = zip(binding.layouts, mode.gradients, mode.accumulate, mode.rounding, strict=True)
    avals = [
        layout.gradient_avals("bfloat16" if rounding else dtype)
        for layout, dtype, adds, rounding in rows
        if adds and dtype
    ]
    return placed(avals, placement.slabs_on_device)


def _narrow_takes(bound: BoundStage, placement: Placement) -> tuple[Any, ...]:
    """Shapes and shardings of the further arguments of a backward that rounds gradients."""
    mode = bound.mode
    if mode is None or not bound.rounded:
        return ()
    rows = zip(bound.binding.layouts, mode.rounding, strict=True)
    layouts = [layout for layout, rounding in rows if rounding]
    return narrow_sums.takes(layouts, placement, completes=mode.completes)


def _cotangent_bytes(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> int:
    """Bytes per device of a backward's cotangents, which the schedule does not count.

    Incoming cotangents count for all microbatches, outgoing ones for one microbatch.
    """
    ids = (*bound.arriving * microbatches, *bound.leaving)
    return sum(program.num_bytes(i, placement.num_devices) for i in ids)


def _adding_wide(bound: BoundStage, placement: Placement, pulled: Callable) -> Callable:
    """A pullback with gradients in fp32 where they enter fp32 sums; it returns gradients first."""
    stage, mode = bound.stage, bound.mode
    assert mode is not None
    # With effects, it would be traced and evaluated in a second place.
    if has_side_effects(stage.jaxpr):
        return pulled
    rows = zip(bound.binding.slots, stage.is_trainable, strict=True)
    are_wide = [mode.is_partial or mode.accumulate[slot.slab] for slot, yes in rows if yes]
    # XLA's CPU runtime has no products of bfloat16 numbers that give fp32.
    return with_fp32_products(pulled, are_wide, casts_operands=placement.platform == "cpu")


def _finish(bound: BoundStage, placement: Placement, pulled, gradients, sent, *narrow):
    """Packs a stage's gradients, and adds existing gradients and cotangents; see `backward`."""
    stage, mode = bound.stage, bound.mode
    assert mode is not None
    leaf_gradients, input_cotangents = pulled
    sums = narrow_sums.NarrowSums(placement, *narrow) if narrow else None
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
    bound: BoundStage,
    placement: Placement,
    leaf_gradients,
    gradients,
    sums: narrow_sums.NarrowSums | None,
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
