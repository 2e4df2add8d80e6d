"""Makes the spec of a run: cuts model and optimizer, lays out their state, schedules a step."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax

from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.common.repeated_model import RepeatedModel
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel
from megatrain_jax._src.engine.options.batch_checks import naming_first_batch
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.block_parts import ExpertsIndivisibleError
from megatrain_jax._src.engine.program.loss.trace import TracedLoss
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.block_splits import (
    BLOCK_SPLITS,
    BlockSplit,
    ends_blocks_of_codes,
    finer_splits,
)
from megatrain_jax._src.engine.spec.bound_step import bind_step
from megatrain_jax._src.engine.spec.codecs import check_paths, master_codecs, state_codecs
from megatrain_jax._src.engine.spec.cut_run import Cut, cut_run
from megatrain_jax._src.engine.spec.indivisible_arrays import indivisible_arrays
from megatrain_jax._src.engine.spec.repeated_cut import repeated_cut
from megatrain_jax._src.engine.spec.run_spec import RunSpec, batch_key, trace_microbatch
from megatrain_jax._src.engine.state.layout import GroupLayout, layout_group

# Number of cuts to keep for reuse: plans that are compared have a few numbers of microbatches each,
# for a model and for its first layers.
_MOST_CUTS = 12


def make_run_spec(
    adapted: AdaptedModel,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    options: Options,
    repeated: RepeatedModel | None = None,
) -> RunSpec:
    """Cuts model and optimizer and lays everything out, on shapes alone.

    Blocks are in as few parts as the budget allows, and experts are divided only if no parts fit.
    An automatic budget is the minimum here, because free memory is known only after compilation;
    see `fit_to_machine`.

    Raises:
        ValueError: If model, loss, optimizer, batch and options don't fit together.
        BudgetError: If the device budget is too small, however blocks are cut.
    """
    arguments = adapted, loss_fn, optimizer, sample_batch, options, repeated
    found = _first_of(arguments, BLOCK_SPLITS)
    assert found is not None, "blocks can always stay whole"
    return found


def _first_of(arguments: Any, ways: Sequence[BlockSplit]) -> RunSpec | None:
    """The run with blocks cut in the first way that the budget allows; None if no way is possible.

    Raises:
        BudgetError: Some ways are possible, but the budget is too small for them.
    """
    least: list[BudgetError] = []
    for at, way in enumerate(ways):
        try:
            spec = _make(*arguments, way=way)
        except BudgetError as error:
            least.append(error)
            continue
        except ExpertsIndivisibleError:
            break  # then there are no more groups either
        left = finer_splits(way, ways[at + 1 :], spec.leaves, spec.has_smaller_parts)
        finer = functools.partial(_first_of, arguments)
        return dataclasses.replace(spec, finer_ways=left, finer=finer)
    if not least:
        return None
    raise min(least, key=lambda error: error.smallest)


def _make(
    adapted: AdaptedModel,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    options: Options,
    repeated: RepeatedModel | None,
    way: BlockSplit,
) -> RunSpec:
    """The run with blocks cut in one way; see `make_run_spec`."""
    num_parts, num_groups = way
    microbatches = options.microbatches
    assert not isinstance(microbatches, str), "chosen before; see `microbatches.py`"
    # The only string is "minimum".
    budget = None if isinstance(options.device_budget, str) else options.device_budget

    # Only these options affect the trace or the cut; storage in the host is laid out later.
    precision = options.dtypes

    def key_of_trace() -> Hashable:
        objects = map(IdentityKey, (adapted, loss_fn, sample_batch))
        return *objects, str(precision.compute), microbatches, options.num_devices, num_groups

    def trace() -> TracedLoss:
        with naming_first_batch(sample_batch, microbatches):
            return trace_microbatch(
                adapted, loss_fn, options, sample_batch, microbatches, num_groups, train=True
            )

    # Other optimizers, and blocks in any number of parts, share the trace.
    traced = remembered("traced loss", key_of_trace, trace, _MOST_CUTS)

    def key() -> Hashable:
        objects = map(IdentityKey, (traced, optimizer, options.trainable))
        dtypes = str(precision.update), str(precision.products)
        numbers = options.state_per_process, options.on_nonfinite, options.ema_decay
        return *objects, *dtypes, *numbers, way

    def anew() -> Cut:
        return cut_run(adapted, traced, optimizer, options, num_parts, num_groups)

    cut = remembered("cut", key, anew, _MOST_CUTS)
    if repeated is not None:
        cut = repeated_cut(cut, repeated)
    layouts = _layouts(cut, options)
    if not ends_blocks_of_codes(cut, layouts):
        raise ExpertsIndivisibleError
    try:
        first = bind_step(
            (batch_key(sample_batch), True, loss_fn),
            cut,
            layouts,
            options,
            microbatches=microbatches,
            device_budget=budget,
            waves=options.waves or 1,
        )
    except BudgetError as error:
        raise BudgetError(budget, error.smallest, indivisible_arrays(cut, layouts)) from None
    return RunSpec(
        adapted=adapted,
        loss_fn=loss_fn,
        options=options,
        traced=traced,
        budget_bytes=budget,
        leaves=cut.leaves,
        grouping=cut.grouping,
        layouts=layouts,
        optimizer=cut.optimizer,
        first=first,
        num_parts=num_parts,
        num_groups=num_groups,
        has_smaller_parts=cut.has_smaller_parts,
    )


def _layouts(cut: Cut, options: Options) -> tuple[GroupLayout, ...]:
    """The layout of each group's masters and optimizer state in slabs."""
    precision = options.dtypes
    check_paths(precision, cut.leaves, cut.optimizer)
    # Large leaves have their own arrays (`apart`) if this saves copies. Several devices copy leaves
    # anyway when they gather them in one collective. A single microbatch reads and writes a part of
    # a slab once, without a copy, unless a library's kernels read it.
    several = options.microbatches != 1
    jaxprs = {id(s.jaxpr): s.jaxpr for s in cut.program.stages}  # like stages share one
    kernels = [k for jaxpr in jaxprs.values() for k in jx.kernels_of(jaxpr)]
    by_kernels = any(kernel.reads_weights for kernel in kernels)
    found: list[GroupLayout] = []
    known: dict[Hashable, GroupLayout] = {}  # equal blocks are laid out once
    for g, rows in enumerate(cut.grouping.leaves):
        dtype, masters = master_codecs(precision, [cut.leaves[i] for i in rows])
        state = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in cut.optimizer.state[g]]
        codecs = state_codecs(precision, cut.optimizer, g, len(rows))
        shapes = tuple(cut.leaves[i].shape for i in rows)
        like = shapes, str(dtype), tuple(masters), tuple(state), tuple(codecs)
        if like not in known:
            known[like] = layout_group(
                cut.leaves,
                rows,
                state,
                dtype,
                options.num_devices,
                masters,
                codecs,
                apart=options.num_devices == 1 and (several or by_kernels),
            )
        found.append(known[like])
    return tuple(found)
