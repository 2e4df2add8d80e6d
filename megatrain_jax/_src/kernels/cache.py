"""Compiled functions by what they compute: what stages, groups and steps share, and their memory.

Stages and groups that are alike share one function, so a model of any depth compiles a handful.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.build.bound_step import BoundStage, BoundStep
from megatrain_jax._src.kernels import stages as template
from megatrain_jax._src.kernels import updates as functions
from megatrain_jax._src.kernels.liveness import temporary_bytes
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.placement import Placement


class Templates:
    """Jitted functions by key; each is traced and compiled once."""

    def __init__(self):
        """Starts with none."""
        self._functions: dict[Hashable, Callable] = {}

    def get(self, key: Hashable, build: Callable[[], Callable], **options: Any) -> Callable:
        """The jitted function of this key, built if it is new."""
        if key not in self._functions:
            self._functions[key] = jax.jit(build(), **options)
        return self._functions[key]

    def __len__(self) -> int:
        """How many different functions there are."""
        return len(self._functions)

    def forward(self, bound: BoundStage) -> Callable:
        """See `template.forward`."""
        return self.get(
            ("forward", bound.key), lambda: template.forward(bound.stage, bound.binding)
        )

    def forward_keeping(self, bound: BoundStage) -> Callable:
        """See `template.forward_keeping`."""
        stage, binding, residuals = bound.stage, bound.binding, bound.residuals
        assert residuals is not None
        return self.get(
            ("forward keeping", bound.key, stage.is_trainable, stage.active, stage.has_cotangent),
            lambda: template.forward_keeping(stage, binding, residuals),
        )

    def backward(self, bound: BoundStage) -> Callable:
        """See `template.backward`."""
        stage, binding, mode = bound.stage, bound.binding, bound.mode
        assert mode is not None
        return self.get(
            ("backward", bound.key, stage.active, mode),
            lambda: template.backward(stage, binding, mode),
            donate_argnums=(3, 4),
        )

    def backward_of_kept(self, bound: BoundStage) -> Callable:
        """See `template.backward_of_kept`."""
        stage, binding, mode, residuals = bound.stage, bound.binding, bound.mode, bound.residuals
        assert mode is not None and residuals is not None
        return self.get(
            ("backward of kept", bound.key, stage.active, mode),
            lambda: template.backward_of_kept(stage, binding, mode, residuals),
            donate_argnums=(4, 5),
        )

    def reduce(self, cut: OptimizerCut, layout: GroupLayout, group: int) -> Callable:
        """See `functions.reduce`."""
        part, reads = cut.reduce[group], cut.reduce_reads
        return self.get(
            ("reduce", part.key, layout),
            lambda: functions.reduce(part, layout, reads, cut.guarded),
        )

    def update(self, cut: OptimizerCut, layout: GroupLayout, group: int) -> Callable:
        """See `functions.update`, and `functions.update_at_once` unless updates are deferred."""
        part = cut.apply[group]
        build = functions.update if cut.deferred else functions.update_at_once
        return self.get(
            ("update", part.key, layout),
            lambda: build(part, layout, cut.guarded),
            donate_argnums=(0, 1),
        )


def compile_ahead(
    templates: Templates,
    plan: BoundStep,
    layouts: Sequence[GroupLayout],
    cut: OptimizerCut,
    placement: Placement,
) -> int:
    """Compiles what a step runs and asks how much memory that needs besides state and activations.

    The device runs one function after another, so the largest counts: what it needs within, and
    for a backward the cotangents it takes and gives. Steps find the functions compiled.
    """
    calls = dict(_calls(templates, plan, layouts, cut, placement.slabs_on_device))
    lowered = [(function.lower(*args), beside) for function, args, beside in calls.values()]
    with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        stats = pool.map(lambda row: row[0].compile().memory_analysis(), lowered)
        return max(
            s.temp_size_in_bytes + beside for s, (_, beside) in zip(stats, lowered, strict=True)
        )


def estimate_ahead(
    templates: Templates, plan: BoundStep, layouts: Sequence[GroupLayout], cut: OptimizerCut
) -> int:
    """Estimates what `compile_ahead` would say, on shapes alone: for a device that isn't here."""
    calls = dict(_calls(templates, plan, layouts, cut, None))
    return max(
        temporary_bytes(function.trace(*args).jaxpr) + beside
        for function, args, beside in calls.values()
    )


def _calls(
    templates: Templates,
    plan: BoundStep,
    layouts: Sequence[GroupLayout],
    cut: OptimizerCut,
    sharding: Any,
) -> Iterable[tuple[Hashable, tuple[Any, list[Any], int]]]:
    """The arguments of every function's calls, as shapes, and bytes that live beside its own."""
    gradients = {
        g: dtype
        for bound in plan.stages
        if bound.mode is not None
        for g, dtype in zip(bound.groups, bound.mode.gradients, strict=True)
        if dtype is not None
    }

    def shape(aval: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        weak = getattr(aval, "weak_type", False)
        dtype = dtype or aval.dtype
        return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding, weak_type=weak)

    def values(ids: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
        return [shape(plan.program.values[i]) for i in ids]

    def gradient(g: int) -> jax.ShapeDtypeStruct:
        return shape(layouts[g].master.aval, gradients.get(g, "float32"))

    for number, bound in enumerate(plan.stages):
        stage, mode = bound.stage, bound.mode
        masters = [shape(layouts[g].master.aval) for g in bound.groups]
        inputs = values(stage.inputs)
        kept = None
        if number in plan.schedule.kept and bound.residuals is not None:
            kept = [shape(aval) for aval in bound.residuals.avals]
            key = (
                "forward keeping",
                bound.key,
                stage.is_trainable,
                stage.active,
                stage.has_cotangent,
            )
            yield key, (templates.forward_keeping(bound), [masters, inputs], 0)
        elif mode is None or not mode.give_outputs:
            yield ("forward", bound.key), (templates.forward(bound), [masters, inputs], 0)
        if mode is None:
            continue
        arriving = values(o for o, a in zip(stage.outputs, mode.arriving, strict=True) if a)
        existing = [g for g, a in zip(bound.groups, mode.accumulate, strict=True) if a]
        args = [masters, inputs, arriving, [gradient(g) for g in existing], values(bound.sent)]
        leaving = [v for v, a in zip(inputs, stage.active, strict=True) if a]
        beside = sum(map(jx.num_bytes, (*arriving * plan.microbatches, *leaving)))
        key = "backward", kept is None, bound.key, stage.active, mode
        if kept is None:
            yield key, (templates.backward(bound), args, beside)
        else:
            args.insert(2, kept)
            yield key, (templates.backward_of_kept(bound), args, beside)
    loss = shape(jax.ShapeDtypeStruct((), jnp.float32))
    ok = shape(jax.ShapeDtypeStruct((), jnp.bool_))
    small = [shape(leaf) for leaf in cut.globals]
    messages = [shape(v.aval) for v in cut.combine.jaxpr.outvars[: cut.num_messages]]
    for g, layout in enumerate(layouts):
        if g in plan.workload.frozen:
            continue
        masters = shape(layout.master.aval)
        state = tuple(shape(slab.aval) for slab in layout.state.layouts)
        if cut.deferred:
            reads = [
                masters if "P" in cut.reduce_reads else None,
                state if "O" in cut.reduce_reads else None,
            ]
            key = "reduce", cut.reduce[g].key, layout, gradient(g).dtype
            args = [gradient(g), *reads, loss, small, ok]
            yield key, (templates.reduce(cut, layout, g), args, 0)
        key = "update", cut.apply[g].key, layout, gradient(g).dtype
        args = [masters, state, gradient(g), [messages[i] for i in cut.messages[g]], ok]
        yield key, (templates.update(cut, layout, g), args, 0)
