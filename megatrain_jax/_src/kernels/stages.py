"""Functions that all stages with equal equations share.

A template is stateless: slabs of parameters and live values go in, live values or gradients and
cotangents come out. It is the paper's layer template (MegaTrain, arXiv 2604.05091), cut from a
trace instead of written by hand.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.effects import fires, firing_once
from megatrain_jax._src.program.loss.gradients import differentiated
from megatrain_jax._src.program.loss.stages import Stage
from megatrain_jax._src.state.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a stage finds one of its leaves: which of its slabs, which leaf of that slab."""

    slab: int
    leaf: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """How the leaves of a stage lie in the slabs of the groups it reads.

    Attributes:
        layouts: Layout of each master slab it takes.
        slots: For each leaf of the stage, in the jaxpr's order, where it is.
    """

    layouts: tuple[Layout, ...]
    slots: tuple[Slot, ...]


def forward(stage: Stage, binding: Binding) -> Callable:
    """Builds `(slabs, inputs) -> outputs`."""

    def forward_stage(slabs, inputs):
        leaves = _unpack(stage, binding, slabs)
        return jx.evaluate(stage.jaxpr, [*stage.consts, *leaves, *inputs])

    return forward_stage


def forward_keeping(stage: Stage, binding: Binding, residuals: Residuals) -> Callable:
    """Builds `(slabs, inputs) -> (outputs, residuals)`."""

    def forward_stage(slabs, inputs):
        return residuals.forward([*_unpack(stage, binding, slabs), *inputs])

    return forward_stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward:
    """What one backward of a stage takes besides slabs and inputs.

    Attributes:
        gradients: For each slab, the dtype of its gradient; None if it is frozen.
        accumulate: For each slab, whether a gradient exists to be added to.
        arriving: For each output, whether a cotangent arrives.
        existing: For each input, whether another stage has already sent a cotangent to it.
        give_outputs: Whether to return the outputs, too: the stage has no separate forward.
    """

    gradients: tuple[str | None, ...]
    accumulate: tuple[bool, ...]
    arriving: tuple[bool, ...]
    existing: tuple[bool, ...]
    give_outputs: bool


def backward(stage: Stage, binding: Binding, mode: Backward) -> Callable:
    """Builds `(slabs, inputs, cotangents, gradients, sent) -> (outputs, gradients, cotangents)`.

    It computes the stage again and differentiates it. Gradients, of the slabs that are not frozen,
    lie in slabs laid out like the masters; `gradients` and `sent` hold what exists already, in
    order.
    """

    def backward_stage(slabs, inputs, cotangents, gradients, sent):
        leaves = _unpack(stage, binding, slabs)
        outputs, pull = differentiated(stage, mode.arriving, leaves, inputs)
        new, summed = _finish(stage, binding, mode, pull(list(cotangents)), gradients, sent)
        return (outputs if mode.give_outputs else []), new, summed

    if fires(stage.jaxpr):
        return firing_once(backward_stage, position=2, has_forward=mode.give_outputs)
    return backward_stage


def backward_of_kept(
    stage: Stage, binding: Binding, mode: Backward, residuals: Residuals
) -> Callable:
    """Builds `(slabs, inputs, kept, cotangents, gradients, sent)` to what `backward` gives.

    The forward has kept its residuals, so only what is elementwise is computed again.
    """
    assert not mode.give_outputs

    def backward_stage(slabs, inputs, kept, cotangents, gradients, sent):
        values = [*_unpack(stage, binding, slabs), *inputs]
        pulled = residuals.backward(values, kept, cotangents)
        return [], *_finish(stage, binding, mode, pulled, gradients, sent)

    return backward_stage


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


def _unpack(stage: Stage, binding: Binding, slabs: Sequence[jax.Array]) -> list[jax.Array]:
    first = len(stage.consts)
    dtypes = [v.aval.dtype for v in stage.jaxpr.invars[first : first + len(stage.leaves)]]
    return [
        binding.layouts[slot.slab].unpack(slabs[slot.slab], slot.leaf).astype(dtype)
        for slot, dtype in zip(binding.slots, dtypes, strict=True)
    ]


def _pack_gradients(
    binding: Binding, slots: Sequence[Slot], mode: Backward, leaf_gradients, gradients
) -> list[jax.Array]:
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
