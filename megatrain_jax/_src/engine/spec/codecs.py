"""Chooses the codec of each master and each state array from a run's precision."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.options.precision_values import NF4
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import StateLeaf
from megatrain_jax._src.engine.program.optimizer.traits import Traits, state_traits
from megatrain_jax._src.engine.state.codec import Blockwise, Nf4, Plain, Rounded

_CODES = (jnp.dtype("int8"), jnp.dtype("int4"))


def stored_dtype(precision: Precision, leaf: Leaf) -> Any:
    """The dtype in which the host stores a parameter; int8 and "nf4" stand for codes."""
    if not leaf.is_trainable and precision.frozen is not None:
        # QLoRA's rule: matrices of products, but no embedding and no head.
        is_coded = precision.frozen != NF4 or (leaf.block is not None and len(leaf.shape) > 1)
        return precision.frozen if is_coded else jnp.dtype("bfloat16")
    held = precision.master_of(path_name(leaf.path))
    # Norms and biases are a ten-thousandth of a model, so only a mapping codes them.
    if held in _CODES and len(leaf.shape) < 2 and not isinstance(precision.master, tuple):
        return precision.update
    return held


def check_paths(precision: Precision, leaves: Sequence[Leaf], optimizer: OptimizerCut) -> None:
    """Refuses patterns that match no path, such as misspelled ones.

    Raises:
        ValueError: A pattern matches no path; lists the first known paths.
    """
    # Only state with a parameter's shape is ever coded, so patterns can match only such state.
    state = (leaf for row in optimizer.state for leaf in row if leaf.mirrors is not None)
    there = {
        "master": dict.fromkeys(path_name(leaf.path) for leaf in leaves),
        "state": dict.fromkeys(path_name(optimizer.state_paths[leaf.leaf]) for leaf in state),
        "products": dict.fromkeys(path_name(leaf.path) for leaf in leaves),
    }
    for name, known in there.items():
        given = getattr(precision, name)
        for pattern, _ in given if isinstance(given, tuple) else ():
            if not any(fnmatchcase(path, pattern) for path in known):
                shown = ", ".join(list(known)[:6]) + (", ..." if len(known) > 6 else "")
                raise ValueError(
                    f"`precision`: Precision({name}=...) has {pattern!r}, which fits none of the "
                    f"paths {shown or 'of state that mirrors parameters, as there is none'}"
                )


def master_codecs(precision: Precision, leaves: Sequence[Leaf]) -> tuple[Any, list[Plain]]:
    """The compute dtype of a group's parameters, and the codec of each.

    Args:
        precision: Precision of the run.
        leaves: The group's parameters; all are trained, or all are frozen.
    """
    held = [stored_dtype(precision, leaf) for leaf in leaves]
    # Frozen parameters are used in their stored dtype; codes are decoded first.
    frozen = not leaves[0].is_trainable and precision.frozen is not None
    coded = any(form in _CODES or form == NF4 for form in held)
    dtype = precision.update if coded or not frozen else held[0]
    # Stochastic rounding preserves small updates; without updates it would only add noise.
    stochastic = leaves[0].is_trainable and precision.rounding == "stochastic"

    def codec(form: Any) -> Plain:
        if form == dtype:
            return Plain()
        if form == NF4:
            return Nf4()
        if form in _CODES:
            # Weights are summed up in products, so all need the same absolute precision.
            return Blockwise(code="linear", stochastic=stochastic)
        return Rounded(dtype=jnp.dtype(form).name, stochastic=stochastic)

    return dtype, [codec(form) for form in held]


def state_codecs(
    precision: Precision, optimizer: OptimizerCut, group: int, num_leaves: int
) -> list[Plain]:
    """The codecs of a group's optimizer state; only state with a parameter's shape is coded.

    Args:
        precision: Precision of the run.
        optimizer: The optimizer.
        group: Number of the group.
        num_leaves: Number of the group's parameters.
    """
    state = optimizer.state[group]
    if precision.state is None or not state:
        return [Plain()] * len(state)
    traits = state_traits(optimizer.initial_state[group], optimizer.apply[group], num_leaves)
    return [
        _state_codec(
            # Rounded to nearest, an average would never move: its changes are small.
            replace(precision, rounding="stochastic")
            if leaf.leaf < optimizer.num_averages
            else precision,
            leaf,
            path_name(optimizer.state_paths[leaf.leaf]),
            row,
        )
        for leaf, row in zip(state, traits, strict=True)
    ]


def coded_differences(
    precision: Precision, optimizer: OptimizerCut, num_leaves: Sequence[int]
) -> list[str]:
    """Paths of narrow state if the optimizer takes the root of a difference of it.

    Rounding may make such a difference negative, and its root NaN.

    Args:
        precision: Precision of the run.
        optimizer: The optimizer.
        num_leaves: For each group the number of its parameters.
    """
    # A single code for all state never codes such state.
    if precision.state is None or precision.state in _CODES:
        return []
    found = []
    for group, (state, count) in enumerate(zip(optimizer.state, num_leaves, strict=True)):
        if not state:
            continue
        traits = state_traits(optimizer.initial_state[group], optimizer.apply[group], count)
        for leaf, own in zip(state, traits, strict=True):
            path = path_name(optimizer.state_paths[leaf.leaf])
            if own.is_paired and _state_codec(precision, leaf, path, own) != Plain():
                found.append(path)
    return list(dict.fromkeys(found))


def _state_codec(precision: Precision, leaf: StateLeaf, path: str, traits: Traits) -> Plain:
    stochastic = precision.rounding == "stochastic"
    form = precision.state_of(path)
    # Counts, keys and factored statistics are small. Integers and narrow floats were chosen by the
    # optimizer.
    if form is None or leaf.mirrors is None or leaf.dtype != jnp.float32:
        return Plain()
    # A mapping is followed literally; a single form for all state has exceptions.
    if form in _CODES and not isinstance(precision.state, tuple):
        # The state of norms and biases is tiny.
        if len(leaf.shape) < 2 or traits.is_paired:
            return Plain()
        # Such state is a copy of parameters, and codes would lose most of their digits.
        if traits.like_parameters:
            form = jnp.dtype("bfloat16")
    if form not in _CODES:
        return Rounded(dtype="bfloat16", stochastic=stochastic)
    return Blockwise(
        code="linear" if traits.is_mixed else "dynamic",
        bits=4 if form == jnp.dtype("int4") else 8,
        signed=not traits.never_negative,
        stochastic=stochastic,
    )
