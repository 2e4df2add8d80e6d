"""Assigns the main equations and effects of a loss to stages.

An equation belongs to the stage with borders around it, or to a later stage that computes one of
its operands. Example: borders 0, 1, 5, 9 and an L2 term `total + sum(w0**2)` at the end:

    equation                position  by borders  why                             stage
    dot, tanh, mul, add     1-4       1           between 1 and 5                 1
    reduce_sum of w0**2     13        3           floating: w0 is first read in   1
    add of loss and term    14        3           its operands are in 3 and 1     3

An equation that depends on no data, such as a sum of such terms, is moved from the first stage that
could compute it to the stage of its first use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.borders import find_borders
from megatrain_jax._src.engine.program.loss.partition import EFFECT, MAIN, Dataflow, Stretch


def assign(flow: Dataflow, stretches: list[Stretch]) -> dict[int, int]:
    """The stage (index in `stretches`) of each main equation and each equation with effects.

    Raises:
        ValueError: Ordered effects would change their order.
    """
    jaxpr = flow.jaxpr
    main = [i for i, kind in enumerate(flow.eqn_kind) if kind == MAIN]
    position = {i: p for p, i in enumerate(main)}
    starts = find_borders(flow, stretches, main, position)
    stage_of: dict[int, int] = {}
    first_use: dict[int, int] = {}  # leaf → the first stage that reads it
    # All first uses are collected first, because a regulariser may be traced before its block.
    for p, i in enumerate(main):
        if i not in flow.floating:
            s = int(np.searchsorted(starts, p, side="right")) - 1
            for leaf in flow.read_by(i):
                first_use.setdefault(leaf, s)
    for p, i in enumerate(main):
        if i in flow.floating:
            uses = [first_use[leaf] for leaf in flow.floating[i] if leaf in first_use]
            # Its leaves are on the device there anyway. At its traced place they would be fetched
            # once more, for a stage that reads nothing else of that block.
            home = min(uses) if uses else int(np.searchsorted(starts, p, side="right")) - 1
        else:
            home = int(np.searchsorted(starts, p, side="right")) - 1
        sources = [
            stage_of[flow.producer[v]] for v in jx.variables(jaxpr.eqns[i].invars)
            if flow.kind[v] == MAIN
        ]  # fmt: skip
        # Never before its operands, because values only pass forwards from stage to stage.
        # Equations come in order, so their operands' stages are known.
        stage_of[i] = max([home, *sources])
    # After the stages of all equations are known, because a term may be first used long after it is
    # traced; and before effects, because they may print moved values.
    stage_of = _postponed(flow, main, stage_of, len(stretches) - 1)
    return _with_effects(flow, stage_of, first_use, len(stretches) - 1)


def without_empty(
    stretches: Sequence[Stretch], stage_of: dict[int, int]
) -> tuple[list[Stretch], dict[int, int]]:
    """Drops stages that have no equations left after postponing.

    The last stage stays: it computes outputs of the loss that depend only on parameters.
    """
    left = sorted({*stage_of.values(), len(stretches) - 1})
    number = {s: k for k, s in enumerate(left)}
    return [stretches[s] for s in left], {i: number[s] for i, s in stage_of.items()}


def _with_effects(
    flow, stage_of: dict[int, int], first_use: dict[int, int], last: int
) -> dict[int, int]:
    """Adds the equations kept for their effects, in the stage that makes their last operand.

    An effect of parameters alone belongs to the stage that reads them. An ordered effect never
    moves to a stage before the previous ordered effect's.
    """
    earliest = 0  # stage of the last ordered effect so far
    for i, kind in enumerate(flow.eqn_kind):
        if kind == EFFECT:
            operands = jx.variables(flow.jaxpr.eqns[i].invars)
            made = [stage_of[flow.producer[v]] for v in operands if flow.kind[v] == MAIN]
            read = [first_use.get(leaf, last) for leaf in flow.read_by(i)]
            stage_of[i] = max([0, *made, *read, *([earliest] if i in flow.ordered else [])])
        if i in flow.ordered:
            if stage_of[i] < earliest:
                raise ValueError(
                    "loss_fn has ordered effects that can't be kept in order: the operands of "
                    f"{flow.jaxpr.eqns[i].primitive.name} are computed in an earlier stage than "
                    "those of an effect before it. Leave out `ordered=True`"
                )
            earliest = stage_of[i]
    return stage_of


def _postponed(flow, main, stage_of: dict[int, int], last: int) -> dict[int, int]:
    """Moves equations that depend on no data (sums of regularisers) to their first use.

    A running sum over all blocks' terms is then computed where the loss uses it, and its additions
    don't make the stages of equal blocks differ.
    """
    data = jx.dependent(flow.jaxpr, flow.data)
    uses: dict[Any, int] = {}
    moved = dict(stage_of)
    # Backwards, so that a chain of additions moves as a whole, each to its user's new stage.
    for i in reversed(main):
        eqn = flow.jaxpr.eqns[i]
        if i not in flow.floating and not any(v in data for v in eqn.outvars):
            moved[i] = min(uses.get(v, last) for v in eqn.outvars)
        for v in jx.variables(eqn.invars):
            uses[v] = min(uses.get(v, last), moved[i])
    return moved
