"""Assigns each equation of a cut loss to a stage: between two borders, or where its sources are."""

from typing import Any

import numpy as np

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.loss.borders import find_borders
from megatrain_jax._src.program.loss.partition import EFFECT, MAIN, Dataflow, Stretch


def assign(flow: Dataflow, stretches: list[Stretch]) -> dict[int, int]:
    """The stage of each main equation, and of each that is there for its effect."""
    jaxpr = flow.jaxpr
    main = [i for i, kind in enumerate(flow.eqn_kind) if kind == MAIN]
    position = {i: p for p, i in enumerate(main)}
    starts = find_borders(flow, stretches, main, position)
    stage_of: dict[int, int] = {}
    first_use: dict[int, int] = {}
    for p, i in enumerate(main):
        if i not in flow.floating:
            s = int(np.searchsorted(starts, p, side="right")) - 1
            for leaf in flow.read_by(i):
                first_use.setdefault(leaf, s)
    for p, i in enumerate(main):
        if i in flow.floating:
            uses = [first_use[leaf] for leaf in flow.floating[i] if leaf in first_use]
            home = min(uses) if uses else int(np.searchsorted(starts, p, side="right")) - 1
        else:
            home = int(np.searchsorted(starts, p, side="right")) - 1
        sources = [
            stage_of[flow.producer[v]] for v in jx.variables(jaxpr.eqns[i].invars)
            if flow.kind[v] == MAIN
        ]  # fmt: skip
        stage_of[i] = max([home, *sources])
    stage_of = _postponed(flow, main, stage_of, len(stretches) - 1)
    return _with_effects(flow, stage_of, first_use, len(stretches) - 1)


def _with_effects(
    flow, stage_of: dict[int, int], first_use: dict[int, int], last: int
) -> dict[int, int]:
    """Adds the equations that are there for their effects: where their last operand is made."""
    earliest = 0
    for i, kind in enumerate(flow.eqn_kind):
        if kind == EFFECT:
            operands = jx.variables(flow.jaxpr.eqns[i].invars)
            made = [stage_of[flow.producer[v]] for v in operands if flow.kind[v] == MAIN]
            read = [first_use.get(leaf, last) for leaf in flow.read_by(i)]
            stage_of[i] = max([0, *made, *read, *([earliest] if i in flow.ordered else [])])
        if i in flow.ordered:
            if stage_of[i] < earliest:
                raise ValueError(
                    "loss_fn has ordered effects that can't be kept in order: what "
                    f"{flow.jaxpr.eqns[i].primitive.name} shows is computed in a stage before "
                    "that of an earlier effect. Leave out `ordered=True`"
                )
            earliest = stage_of[i]
    return stage_of


def _postponed(flow, main, stage_of: dict[int, int], last: int) -> dict[int, int]:
    """Moves what depends on no data (sums of regularisers) to where it is first used."""
    data = jx.dependent(flow.jaxpr, flow.data)
    uses: dict[Any, int] = {}
    moved = dict(stage_of)
    for i in reversed(main):
        eqn = flow.jaxpr.eqns[i]
        if i not in flow.floating and not any(v in data for v in eqn.outvars):
            moved[i] = min(uses.get(v, last) for v in eqn.outvars)
        for v in jx.variables(eqn.invars):
            uses[v] = min(uses.get(v, last), moved[i])
    return moved
