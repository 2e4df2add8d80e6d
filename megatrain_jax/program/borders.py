"""Finds the borders between stages: where a traced loss is cut between two runs of reads."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from megatrain_jax.program import jaxpr as jx
from megatrain_jax.program.partition import MAIN, Dataflow, Run


def find_borders(
    flow: Dataflow, runs: list[Run], main: list[int], position: dict[int, int]
) -> list[int]:
    """The first main equation of each stage."""
    alive = _live_bytes(flow, main, position)
    tied: list[list[int]] = []
    starts = [0]
    for before, after in zip(runs, runs[1:], strict=False):
        gap = range(before.last + 1, after.first + 1)
        fewest = min(alive[p] for p in gap)
        tied.append([p for p in gap if alive[p] == fewest])
        # Of equal cuts the one after which the next run takes the least, then the earliest.
        taken = {p: _taken_bytes(flow, main, position, p, after) for p in tied[-1]}
        starts.append(min(tied[-1], key=lambda p: (taken[p], p)))
    # Like blocks begin alike, if that costs nothing: at the most common distance to their reads.
    cores = [tuple(_row(flow, i) for i in main[run.first : run.last + 1]) for run in runs]
    ahead: dict[tuple, Counter] = defaultdict(Counter)
    for core, run, start in zip(cores, runs, starts, strict=True):
        ahead[core][run.first - start] += 1
    for k, run in enumerate(runs[1:], 1):
        wish = run.first - ahead[cores[k]].most_common(1)[0][0]
        if wish in tied[k - 1]:
            starts[k] = wish
    return starts


def _row(flow, i: int) -> tuple:
    eqn = flow.jaxpr.eqns[i]
    return eqn.primitive.name, tuple(str(v.aval) for v in eqn.outvars)


def _taken_bytes(flow, main, position, cut: int, run: Run) -> int:
    """Bytes made before `cut` that the equations from there to the run's end read."""
    values = {
        v for i in main[cut : run.last + 1] for v in jx.variables(flow.jaxpr.eqns[i].invars)
        if flow.kind[v] == MAIN and position[flow.producer[v]] < cut
    }  # fmt: skip
    return sum(jx.num_bytes(v.aval) for v in values)


def _live_bytes(flow, main, position) -> list[int]:
    """Bytes of main values alive just before each main equation."""
    last: dict[Any, int] = {}
    for p, i in enumerate(main):
        for v in jx.variables(flow.jaxpr.eqns[i].invars):
            last[v] = p
    for v in jx.variables(flow.jaxpr.outvars):
        last[v] = len(main)
    change = np.zeros(len(main) + 2, dtype=np.int64)
    for v, p in last.items():
        if flow.kind[v] == MAIN:
            born = position[flow.producer[v]] + 1
            change[born] += jx.num_bytes(v.aval)
            change[p + 1] -= jx.num_bytes(v.aval)
    return np.cumsum(change).tolist()
