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

import jax

from megatrain_jax._src.kernels.bound_stage import Backward, Binding, BoundStage, Slot
from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.effects import fires, firing_once
from megatrain_jax._src.program.loss.gradients import differentiated
from megatrain_jax._src.program.loss.stages import Stage

Values = Sequence[jax.ShapeDtypeStruct]
"""Shape and dtype of each value of a program, by its id."""


def forward(bound: BoundStage, values: Values) -> Kernel:
    """The kernel `(masters, inputs) -> outputs`.

    Args:
        bound: The stage. `masters` are its groups' arrays at rest, `inputs` the values it takes.
        values: Shapes of the program's values.
    """
    stage, binding = bound.stage, bound.binding

    def forward_stage(masters, inputs):
        leaves = _unpack(stage, binding, masters)
        return jx.evaluate(stage.jaxpr, [*stage.consts, *leaves, *inputs])

    return Kernel(
        name="forward",
        key=bound.key,
        build=lambda: forward_stage,
        takes=(_masters(binding), _avals(values, stage.inputs)),
    )


def forward_keeping(bound: BoundStage, values: Values) -> Kernel:
    """The kernel `(masters, inputs) -> (outputs, residuals)`; see `forward`."""
    stage, binding, residuals = bound.stage, bound.binding, bound.residuals
    assert residuals is not None

    def forward_stage(masters, inputs):
        return residuals.forward([*_unpack(stage, binding, masters), *inputs])

    return Kernel(
        name="forward keeping",
        key=(bound.key, stage.is_trainable, stage.active, stage.has_cotangent),
        build=lambda: forward_stage,
        takes=(_masters(binding), _avals(values, stage.inputs)),
    )


def backward(bound: BoundStage, values: Values, microbatches: int) -> Kernel:
    """The kernel `(masters, inputs, cotangents, gradients, sent) -> (outputs, gradients, back)`.

    It computes the stage again and differentiates it.

    Args:
        bound: The stage. The kernel takes the cotangents of `bound.arriving`, the gradients of
            `bound.accumulated` and the cotangents of `bound.sent` that exist already; it gives the
            gradients of `bound.trained`, laid out like the masters, and the cotangents of
            `bound.leaving`, with what existed added. Outputs are empty unless its mode gives them.
        values: Shapes of the program's values.
        microbatches: Number of cotangents of each output that wait beside it.
    """
    stage, binding, mode = bound.stage, bound.binding, bound.mode
    assert mode is not None

    def backward_stage(masters, inputs, cotangents, gradients, sent):
        leaves = _unpack(stage, binding, masters)
        outputs, pull = differentiated(stage, mode.arriving, leaves, inputs)
        new, summed = _finish(stage, binding, mode, pull(list(cotangents)), gradients, sent)
        return (outputs if mode.give_outputs else []), new, summed

    def build() -> Callable:
        if fires(stage.jaxpr):
            return firing_once(backward_stage, position=2, has_forward=mode.give_outputs)
        return backward_stage

    return Kernel(
        name="backward",
        key=(bound.key, stage.active, mode),
        build=build,
        takes=(
            _masters(binding),
            _avals(values, stage.inputs),
            _avals(values, bound.arriving),
            _accumulated(binding, mode),
            _avals(values, bound.sent),
        ),
        donated=(3, 4),
        beside_bytes=_cotangent_bytes(bound, values, microbatches),
    )


def backward_of_kept(bound: BoundStage, values: Values, microbatches: int) -> Kernel:
    """The kernel `(masters, inputs, residuals, cotangents, gradients, sent)`; see `backward`.

    The forward has kept its residuals, so only what is elementwise is computed again.
    """
    stage, binding, mode, residuals = bound.stage, bound.binding, bound.mode, bound.residuals
    assert mode is not None and residuals is not None and not mode.give_outputs

    def backward_stage(masters, inputs, kept, cotangents, gradients, sent):
        leaves = _unpack(stage, binding, masters)
        pulled = residuals.backward([*leaves, *inputs], kept, cotangents)
        return [], *_finish(stage, binding, mode, pulled, gradients, sent)

    return Kernel(
        name="backward of kept",
        key=(bound.key, stage.active, mode),
        build=lambda: backward_stage,
        takes=(
            _masters(binding),
            _avals(values, stage.inputs),
            list(residuals.avals),
            _avals(values, bound.arriving),
            _accumulated(binding, mode),
            _avals(values, bound.sent),
        ),
        donated=(4, 5),
        beside_bytes=_cotangent_bytes(bound, values, microbatches),
    )


def _avals(values: Values, ids: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
    return [values[i] for i in ids]


def _masters(binding: Binding) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    return [layout.at_rest for layout in binding.layouts]


def _accumulated(binding: Binding, mode: Backward) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the gradients that a backward takes: it adds to them."""
    rows = zip(binding.layouts, mode.gradients, mode.accumulate, strict=True)
    return [layout.gradient_aval(dtype) for layout, dtype, adds in rows if adds and dtype]


def _cotangent_bytes(bound: BoundStage, values: Values, microbatches: int) -> int:
    """Bytes of the cotangents beside a backward, which no schedule counts.

    Those it takes, for all microbatches, and those it gives for one.
    """
    avals = _avals(values, (*bound.arriving * microbatches, *bound.leaving))
    return sum(map(jx.num_bytes, avals))


def _finish(stage: Stage, binding: Binding, mode: Backward, pulled, gradients, sent):
    """Packs a stage's gradients, and adds what exists already of gradients and cotangents."""
    leaf_gradients, input_cotangents = pulled
    slots = [slot for slot, yes in zip(binding.slots, stage.is_trainable, strict=True) if yes]
    new = _pack_gradients(binding, slots, mode, leaf_gradients, gradients)
    earlier = iter(sent)
    flags = [e for e, a in zip(mode.existing, stage.active, strict=True) if a]
    summed = [
        c + next(earlier) if exists else c
        for c, exists in zip(input_cotangents, flags, strict=True)
    ]
    return new, summed


def _unpack(
    stage: Stage, binding: Binding, masters: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    """The leaves that a stage reads, in the dtypes that its equations were traced with."""
    first = len(stage.consts)
    dtypes = [v.aval.dtype for v in stage.jaxpr.invars[first : first + len(stage.leaves)]]
    slabs = [layout.decode(x) for layout, x in zip(binding.layouts, masters, strict=True)]
    return [
        binding.layouts[slot.slab].unpack(slabs[slot.slab], slot.leaf).astype(dtype)
        for slot, dtype in zip(binding.slots, dtypes, strict=True)
    ]


def _pack_gradients(
    binding: Binding, slots: Sequence[Slot], mode: Backward, leaf_gradients, gradients
) -> list[jax.Array]:
    """The slabs of a stage's gradients; a leaf that this stage does not read gets zeros."""
    rows: list[list] = [[None] * len(layout.shapes) for layout in binding.layouts]
    for slot, gradient in zip(slots, leaf_gradients, strict=True):
        rows[slot.slab][slot.leaf] = gradient
    earlier = iter(gradients)
    packed = []
    for layout, dtype, row, adds in zip(
        binding.layouts, mode.gradients, rows, mode.accumulate, strict=True
    ):
        if dtype is not None:
            slab = dataclasses.replace(layout, dtype=dtype).pack(row)
            packed.append(slab + next(earlier) if adds else slab)
    return packed
