"""The kernels of stages: functions that all stages with equal equations share.

Such a template is stateless: slabs of parameters and live values go in, live values or gradients
and cotangents come out. It is the paper's layer template (MegaTrain, arXiv 2604.05091), cut from a
trace instead of written by hand.

A worked example: a block `y = sin(x @ up) @ down` in a group of its own, its two leaves one slab::

    forward([masters], [x])                     -> [y]
    backward([masters], [x], [dy], [], [])      -> [], [gradient], [dx]
    backward([masters], [x], [dy], [sum], [])   -> [], [sum + gradient], [dx]    # accumulates

`masters` are the arrays at rest of the slab, `gradient` is a slab in which `d_up` and `d_down` lie
as `up` and `down` do in the masters.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from megatrain_jax._src.kernels.bound_stage import Backward, Binding, BoundStage, Slot
from megatrain_jax._src.kernels.kernel import Kernel, placed
from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.effects import fires, firing_once
from megatrain_jax._src.program.loss.gradients import differentiated
from megatrain_jax._src.program.loss.stages import Program, Stage
from megatrain_jax._src.state.placement import Placement


def forward(bound: BoundStage, program: Program, placement: Placement) -> Kernel:
    """The kernel `(masters, inputs) -> outputs`.

    Args:
        bound: The stage. `masters` are its groups' arrays at rest, `inputs` the values it takes.
        program: The program that the stage is of.
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
        gives=shardings(program, placement, stage.outputs),
    )


def forward_keeping(bound: BoundStage, program: Program, placement: Placement) -> Kernel:
    """The kernel `(masters, inputs) -> (outputs, residuals)`; see `forward`."""
    stage, binding, residuals = bound.stage, bound.binding, bound.residuals
    assert residuals is not None

    def forward_stage(masters, inputs):
        return residuals.forward([*_unpack(bound, placement, masters), *inputs])

    return Kernel(
        name=keeping_names(residuals.lean)[0],
        # Which residuals exist follows from what is differentiated: these say so, beside the name.
        key=(bound.key, stage.is_trainable, stage.active, stage.has_cotangent),
        build=lambda: forward_stage,
        takes=(_masters(binding, placement), _values(program, placement, stage.inputs)),
        gives=(
            shardings(program, placement, stage.outputs),
            [x.sharding for x in _residuals(residuals, program, placement)],
        ),
    )


def backward(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> Kernel:
    """The kernel `(masters, inputs, cotangents, gradients, sent) -> (outputs, gradients, back)`.

    It computes the stage again and differentiates it.

    Args:
        bound: The stage. The kernel takes the cotangents of `bound.arriving`, the gradients of
            `bound.accumulated` and the cotangents of `bound.sent` that exist already; it gives the
            gradients of `bound.trained`, laid out like the masters, and the cotangents of
            `bound.leaving`, with what existed added. Outputs are empty unless its mode gives them.
        program: The program that the stage is of.
        placement: Placement of its arrays.
        microbatches: Number of cotangents of each output that wait beside it.
    """
    stage, binding, mode = bound.stage, bound.binding, bound.mode
    assert mode is not None

    def backward_stage(masters, inputs, cotangents, gradients, sent):
        leaves = _unpack(bound, placement, masters)
        outputs, pull = differentiated(stage, mode.arriving, leaves, inputs)
        new, summed = _finish(
            stage, binding, placement, mode, pull(list(cotangents)), gradients, sent
        )
        return (outputs if mode.give_outputs else []), new, summed

    def build() -> Callable:
        # What the recomputed forward prints has been printed by the forward's own kernel, if there
        # is one.
        if fires(stage.jaxpr):
            return firing_once(backward_stage, position=2, has_forward=mode.give_outputs)
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
        ),
        gives=(
            shardings(program, placement, stage.outputs if mode.give_outputs else ()),
            placement.slabs_on_device,
            shardings(program, placement, bound.leaving),
        ),
        # Gradients and cotangents that it adds to become the sums. Masters and inputs stay: other
        # microbatches, and other stages, read them after this call.
        donated=(3, 4),
        beside_bytes=_cotangent_bytes(bound, program, placement, microbatches),
    )


def backward_of_kept(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> Kernel:
    """The kernel `(masters, inputs, residuals, cotangents, gradients, sent)`; see `backward`.

    The forward has kept its residuals, so only what is elementwise is computed again.
    """
    stage, binding, mode, residuals = bound.stage, bound.binding, bound.mode, bound.residuals
    assert mode is not None and residuals is not None and not mode.give_outputs

    def backward_stage(masters, inputs, kept, cotangents, gradients, sent):
        leaves = _unpack(bound, placement, masters)
        pulled = residuals.backward([*leaves, *inputs], kept, cotangents)
        return [], *_finish(stage, binding, placement, mode, pulled, gradients, sent)

    return Kernel(
        name=keeping_names(residuals.lean)[1],
        key=(bound.key, stage.active, mode),
        build=lambda: backward_stage,
        takes=(
            _masters(binding, placement),
            _values(program, placement, stage.inputs),
            _residuals(residuals, program, placement),
            _values(program, placement, bound.arriving),
            _accumulated(binding, mode, placement),
            _values(program, placement, bound.sent),
        ),
        gives=([], placement.slabs_on_device, shardings(program, placement, bound.leaving)),
        donated=(4, 5),
        beside_bytes=_cotangent_bytes(bound, program, placement, microbatches),
    )


def keeping_names(lean: bool) -> tuple[str, str]:
    """The names of the two kernels of a stage that keeps residuals: all, or the costliest."""
    if lean:
        return "forward keeping the costliest", "backward of the costliest"
    return "forward keeping", "backward of kept"


def shardings(program: Program, placement: Placement, ids: Iterable[int]) -> list[Sharding]:
    """Shardings of values, by their ids."""
    return [placement.values(i in program.examples.values) for i in ids]


def _values(
    program: Program, placement: Placement, ids: Sequence[int]
) -> list[jax.ShapeDtypeStruct]:
    """Values that a kernel takes, by their ids."""
    rows = zip(ids, shardings(program, placement, ids), strict=True)
    return [placed(program.values[i], sharding) for i, sharding in rows]


def _residuals(
    residuals: Residuals, program: Program, placement: Placement
) -> list[jax.ShapeDtypeStruct]:
    """Residuals that a kernel takes or gives."""
    return [placed(x, placement.values(program.examples.along(x))) for x in residuals.avals]


def _masters(binding: Binding, placement: Placement) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    sharding = placement.slabs_on_device
    return [placed(layout.at_rest, sharding) for layout in binding.layouts]


def _accumulated(
    binding: Binding, mode: Backward, placement: Placement
) -> list[jax.ShapeDtypeStruct]:
    """The gradients that a backward takes: it adds to them."""
    rows = zip(binding.layouts, mode.gradients, mode.accumulate, strict=True)
    avals = [layout.gradient_aval(dtype) for layout, dtype, adds in rows if adds and dtype]
    return placed(avals, placement.slabs_on_device)


def _cotangent_bytes(
    bound: BoundStage, program: Program, placement: Placement, microbatches: int
) -> int:
    """Bytes on each device of the cotangents beside a backward, which no schedule counts.

    Those it takes, for all microbatches, and those it gives for one.
    """
    ids = (*bound.arriving * microbatches, *bound.leaving)
    return sum(program.num_bytes(i, placement.num_devices) for i in ids)


def _finish(
    stage: Stage, binding: Binding, placement: Placement, mode: Backward, pulled, gradients, sent
):
    """Packs a stage's gradients, and adds what exists already of gradients and cotangents."""
    leaf_gradients, input_cotangents = pulled
    slots = [slot for slot, yes in zip(binding.slots, stage.is_trainable, strict=True) if yes]
    order = [slots[i] for i in _as_computed(stage)]
    new = _pack_gradients(binding, placement, slots, order, mode, leaf_gradients, gradients)
    # Only active inputs get a cotangent; `sent` has what existed of these, in their order.
    earlier = iter(sent)
    flags = [e for e, a in zip(mode.existing, stage.active, strict=True) if a]
    summed = [
        c + next(earlier) if exists else c
        for c, exists in zip(input_cotangents, flags, strict=True)
    ]
    return new, summed


def _unpack(
    bound: BoundStage, placement: Placement, masters: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    """The leaves that a stage reads, whole, in the dtypes that its equations were traced with."""
    binding, dtypes = bound.binding, bound.stage.leaf_dtypes
    leaves: dict[int, jax.Array] = {}
    # Leaves of one slab and dtype are gathered from all devices together: one collective, not one
    # for each leaf.
    for positions in bound.alike:
        slab, dtype = binding.slots[positions[0]].slab, dtypes[positions[0]]
        layout, rows = binding.layouts[slab], [binding.slots[i].leaf for i in positions]
        values = layout.unpack_whole(
            layout.decode(masters[slab], dtype), rows, dtype, placement.whole
        )
        leaves.update(zip(positions, values, strict=True))
    return [leaves[i] for i in range(len(leaves))]


def _as_computed(stage: Stage) -> list[int]:
    """The stage's trainable leaves, in the order in which a backward completes their gradients."""
    first = len(stage.consts)
    leaves = stage.jaxpr.invars[first : first + len(stage.leaves)]
    # Backward goes through the equations from the last to the first: what reads a leaf first is
    # the last to add to its gradient.
    first_read: dict[Any, int] = {}
    for at, eqn in enumerate(stage.jaxpr.eqns):
        for v in jx.variables(eqn.invars):
            first_read.setdefault(v, at)
    trained, _ = jx.split(stage.is_trainable, leaves)
    return sorted(range(len(trained)), key=lambda i: -first_read.get(trained[i], 0))


def _pack_gradients(
    binding: Binding,
    placement: Placement,
    slots: Sequence[Slot],
    order: Sequence[Slot],
    mode: Backward,
    leaf_gradients,
    gradients,
) -> list[jax.Array]:
    """The slabs of a stage's gradients; a leaf that this stage does not read gets zeros.

    `order` are the slots in the order in which the gradients are computed.
    """
    rows: list[list] = [[None] * len(layout.shapes) for layout in binding.layouts]
    for slot, gradient in zip(slots, leaf_gradients, strict=True):
        rows[slot.slab][slot.leaf] = gradient
    # A gradient that waited for others to be written would lie beside the slab until then.
    written = [[slot.leaf for slot in order if slot.slab == i] for i in range(len(rows))]
    earlier = iter(gradients)
    packed = []
    for layout, dtype, row, adds, leaves in zip(
        binding.layouts, mode.gradients, rows, mode.accumulate, written, strict=True
    ):
        if dtype is not None:
            # Laid out as the masters are, whatever its dtype: updates read both by the same
            # offsets.
            lying = dataclasses.replace(layout, dtype=dtype)
            if adds:
                packed.append(lying.add(next(earlier), row, placement.spread))
            else:
                packed.append(lying.pack(row, placement.spread, leaves))
    return packed
