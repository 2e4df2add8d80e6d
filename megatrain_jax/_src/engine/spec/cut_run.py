"""Cuts loss and optimizer by the same groups: parameters that are copied together."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel, trainable_mask
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.stacks import Stack
from megatrain_jax._src.engine.program.loss import block_parts
from megatrain_jax._src.engine.program.loss.float8_stages import ProductChoice, with_float8_products
from megatrain_jax._src.engine.program.loss.gradients import refuse_no_gradient
from megatrain_jax._src.engine.program.loss.partition import without_block
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.loss.trace import TracedLoss, cut_loss, leaves_of
from megatrain_jax._src.engine.program.optimizer.cut import (
    CoupledGroupsError,
    OptimizerCut,
    cut_optimizer,
)
from megatrain_jax._src.engine.program.optimizer.hyperparameters import named_numbers
from megatrain_jax._src.engine.state.layout import Grouping, group_leaves

# Device bytes per byte of an expert's parameters. Experts are divided if their state doesn't fit:
# in fp32, parameters, gradients and two moments. A border between groups passes on the rows of all
# tokens, usually fewer bytes.
_WEIGHT_OF_EXPERTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A loss and an optimizer, cut by the same groups.

    Attributes:
        leaves: All leaves, in the store's order; a stacked parameter has one leaf per layer.
        program: The loss as stages.
        grouping: Groups of the leaves.
        optimizer: The optimizer's update, cut by group.
        has_smaller_parts: Whether the largest part of a block becomes smaller with more parts, or
            its experts in more groups.
    """

    leaves: tuple[Leaf, ...]
    program: Program
    grouping: Grouping
    optimizer: OptimizerCut
    has_smaller_parts: bool = True


def cut_run(
    adapted: AdaptedModel,
    traced: TracedLoss,
    optimizer: optax.GradientTransformation,
    options: Options,
    num_parts: int = 1,
    num_groups: int = 1,
) -> Cut:
    """Cuts loss and optimizer by the same groups.

    Layers stacked in one array become separate leaves. If the loss indexes the stack by hand, they
    stay in one array if the optimizer needs several of them together: Muon treats a stack of biases
    as a matrix.

    Args:
        adapted: The model.
        traced: The loss, traced for experts in `num_groups` groups.
        optimizer: The optimizer.
        options: Options of the run.
        num_parts: Number of parts that each block is cut into.
        num_groups: Number of groups that each block's experts are divided into.

    Raises:
        ExpertsIndivisibleError: No experts can be divided into groups.
        ValueError: If the loss has no gradient, or the options don't allow this model or optimizer.
    """
    trained = trainable_mask(options.trainable, adapted.params_tree(adapted.shapes))
    every, scanned = traced.stacks.stacks, traced.stacks.scanned
    try:
        return _cut(adapted, traced, optimizer, options, trained, every, num_parts, num_groups)
    except CoupledGroupsError as error:
        if num_groups > 1:
            # The optimizer needs several experts together, as factored statistics over them do.
            raise block_parts.ExpertsIndivisibleError from error
        # The second try cuts only the stacks of scans. If these are all stacks, it would fail too.
        if every == scanned:
            raise
        reason = str(error)
    found = _cut(adapted, traced, optimizer, options, trained, scanned, num_parts)
    warning = f"layers in one array were left together: {reason}"
    return dataclasses.replace(found, program=found.program.warning(warning))


def _cut(
    adapted: AdaptedModel,
    traced: TracedLoss,
    optimizer: optax.GradientTransformation,
    options: Options,
    trained: Sequence[bool],
    stacks: Sequence[Stack],
    num_parts: int,
    num_groups: int = 1,
) -> Cut:
    """Cuts with one leaf per layer of the given stacks."""

    def opened_for(leaves: Sequence[Leaf]) -> Program:
        return remembered(
            "opened program",
            lambda: (IdentityKey(traced), leaves),
            lambda: cut_loss(traced, leaves, opened=True),
        )

    leaves = leaves_of(traced, adapted.paths, adapted.shapes, trained, stacks)
    has_smaller_parts = True
    if num_groups > 1:
        leaves = block_parts.in_groups(leaves, num_groups, opened_for)
        leaves = block_parts.in_parts(leaves, opened_for(leaves), num_parts, _WEIGHT_OF_EXPERTS)
        has_smaller_parts = block_parts.are_divisible(leaves, num_groups)
    elif num_parts > 1:
        opened = opened_for(leaves)
        finest = block_parts.in_parts(leaves, opened, block_parts.NUMBERS_OF_PARTS[-1])
        leaves = block_parts.in_parts(leaves, opened, num_parts)
        has_smaller_parts = block_parts.largest_block(finest) < block_parts.largest_block(leaves)
    program, leaves = remembered(
        "program",
        lambda: (IdentityKey(traced), leaves, str(options.dtypes.products)),
        lambda: _cut_checked(traced, leaves, options.dtypes),
    )
    if options.microbatches != 1 or options.state_per_process:
        if reason := reason_against_microbatches(adapted, program):
            given, other = "microbatches > 1", "microbatches=1"
            if options.state_per_process:
                given, other = "state_per_process=True", "state_per_process=False"
            raise ValueError(f"{given} can't train this model: {reason}, or use {other}.")
    # Groups depend on the stages that read each leaf, so they come after the loss. The optimizer is
    # cut by groups, so it comes last.
    grouping = group_leaves(leaves, [stage.leaves for stage in program.stages])
    update = _cut_optimizer(optimizer, adapted, leaves, grouping, trained, options)
    # A step is skipped as a whole, so all gradients must be known before any group is updated.
    if options.on_nonfinite == "skip" or options.dtypes.scales_loss:
        update = dataclasses.replace(update, deferred=True, guarded=True, skips=True)
    return Cut(
        leaves=leaves,
        program=program,
        grouping=grouping,
        optimizer=update,
        has_smaller_parts=has_smaller_parts,
    )


def _cut_checked(
    traced: TracedLoss, leaves: tuple[Leaf, ...], precision: Precision
) -> tuple[Program, tuple[Leaf, ...]]:
    """The loss in stages, and its leaves; parameters without gradients are warned of."""
    program = cut_program(traced, leaves, precision)
    leaves = tuple(
        without_block(leaf) if i in program.shared else leaf for i, leaf in enumerate(leaves)
    )
    warning = refuse_no_gradient(program, leaves)
    return (program.warning(warning) if warning else program), leaves


def cut_program(traced: TracedLoss, leaves: Sequence[Leaf], precision: Precision) -> Program:
    """Cuts a traced loss into stages, with products in float8 where `precision` says so.

    Args:
        traced: The loss.
        leaves: Leaves of the model.
        precision: Precision of the run.

    Raises:
        ValueError: The loss can't be differentiated stage by stage; see `cut_loss`.
    """
    program = cut_loss(traced, leaves)
    if precision.products is None:
        return program
    choice = ProductChoice(
        itemsize=jnp.dtype(precision.compute).itemsize,
        named=precision.is_float8 if isinstance(precision.products, tuple) else None,
    )
    return with_float8_products(program, leaves, choice)


def _cut_optimizer(
    optimizer: optax.GradientTransformation,
    adapted: AdaptedModel,
    leaves: Sequence[Leaf],
    grouping: Grouping,
    trained: Sequence[bool],
    options: Options,
) -> OptimizerCut:
    """Cuts the update of trained parameters; Optax sees the rest masked, as with `optax.masked`."""
    precision, decay = options.dtypes, options.ema_decay
    parameters = [p for p, trains in enumerate(trained) if trains]
    number = {p: n for n, p in enumerate(parameters)}

    # Optax skips masked nodes, so frozen parameters get no state and don't count in norms.
    def params_tree(arrays: Sequence[Any]) -> Any:
        return adapted.params_tree(jx.merge(trained, arrays, [optax.MaskedNode()] * len(trained)))

    rows = [
        (leaf, g) for leaf, g in zip(leaves, grouping.group_of, strict=True) if leaf.is_trainable
    ]
    shapes = [jax.ShapeDtypeStruct(adapted.shapes[p].shape, precision.update) for p in parameters]
    # Renumbered without frozen parameters, which the optimizer never sees.
    of_optax = [dataclasses.replace(leaf, parameter=number[leaf.parameter]) for leaf, _ in rows]
    group_of, num_groups = [g for _, g in rows], len(grouping.names)
    is_scaled = precision.scales_loss

    def key() -> Hashable:
        tree = jax.tree.structure(params_tree(list(range(len(shapes)))))
        sizes = tuple((x.shape, x.dtype) for x in shapes)
        groups = tuple(group_of), num_groups
        what = IdentityKey(optimizer), decay
        return *what, tree, sizes, tuple(of_optax), *groups, is_scaled

    def cut() -> OptimizerCut:
        given = optimizer, params_tree, shapes, of_optax, group_of, num_groups
        made = cut_optimizer(*given, is_scaled=is_scaled, ema_decay=decay)
        numbers = [*named_numbers(optimizer.update), *named_numbers({"ema_decay": decay})]
        return dataclasses.replace(made, numbers=tuple(numbers))

    # It doesn't depend on the batch, so plans for many batches share it.
    return remembered("cut optimizer", key, cut)


def reason_against_microbatches(adapted: AdaptedModel, program: Program) -> str | None:
    """The reason why a batch can't be divided into microbatches; None if it can."""
    names = [path_name(path) for path in adapted.variable_paths]
    # If the prologue computes the new value of random state, `begin` passes it from microbatch to
    # microbatch. A value from a stage comes too late for the next microbatch.
    new = program.new_variables
    of_batch, _ = jx.split(program.state.of_batch, names)
    if of_batch:
        return (
            f"its state {', '.join(of_batch[:6])} depends on the batch (such as the statistics of "
            "a batch norm), and statistics of a part of a batch differ from those of the whole. "
            "Use a normalisation without batch statistics"
        )
    pairs, early = zip(program.state.drawn, new, strict=True), set(program.prologue_values)
    drawn, _ = jx.split([d and i not in early for d, i in pairs], names)
    if drawn:
        return (
            "random numbers are drawn from its state "
            f"{', '.join(drawn[:6])}, which depends on parameters, so that the parts of a batch "
            "would all draw the same. Draw from the `rng` of the loss"
        )
    return None
