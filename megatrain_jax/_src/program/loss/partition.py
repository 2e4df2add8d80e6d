"""Finds what each equation of a traced loss depends on, and the stretches that read one block.

An equation depends on parameters, on data (batch, state, randomness), on both, or on neither.
Those that depend on both are walked in order and cut between runs of reads of one block; those
that depend on parameters only, or on nothing, are repeated in every stage that needs them; those
that depend on data only run once, in the prologue, unless a single stage uses a large result.
What something outside sees, a print or a callback, happens once: where its last operand is made.
"""

import dataclasses
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatrain_jax._src.program import effects
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.blocks import Leaf, Path, power

SMALL = 1024  # elements: data-only values up to this size are computed once, before the stages
CONST, PARAM, DATA, MAIN, EFFECT = range(5)  # the last: for the sake of its effect alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A stretch of equations that become one stage.

    Attributes:
        name: What the stage is called.
        keys: Blocks it reads; empty for a stage of parameters outside blocks.
        first: Position of its first read among the main equations.
        last: Position of its last read.
    """

    name: str
    keys: frozenset[Path]
    first: int
    last: int


class Dataflow:
    """What each variable of a flat jaxpr depends on."""

    def __init__(self, traced: jx.Traced, leaves: Sequence[Leaf]):
        """Classifies the equations of a function whose inputs are `leaves`, then data."""
        self.jaxpr = jaxpr = traced.jaxpr
        self.leaves = leaves
        num_consts = len(traced.consts)
        self.consts = dict(zip(jaxpr.invars[:num_consts], traced.consts, strict=True))
        self.parameters = jaxpr.invars[num_consts : num_consts + len(leaves)]
        self.data = jaxpr.invars[num_consts + len(leaves) :]
        self.reads: dict[Any, frozenset[int]] = {}
        self.kind: dict[Any, int] = {v: CONST for v in self.consts}
        self.producer: dict[Any, int] = {}
        self.eqn_kind: list[int] = []
        self.floating: dict[int, frozenset[int]] = {}
        self.read = effects.read_in(jaxpr)
        self.ordered: list[int] = []  # equations of stages whose effects are ordered
        pairs = zip(self.parameters, leaves, strict=True)
        self.trainable = {v for v, leaf in pairs if leaf.is_trainable}  # and what depends on these
        self.kind |= {v: PARAM for v in self.parameters} | {v: DATA for v in self.data}
        self.reads |= {v: frozenset((i,)) for i, v in enumerate(self.parameters)}
        for i, eqn in enumerate(jaxpr.eqns):
            self._classify(i, eqn)

    def _classify(self, i, eqn):
        ins = jx.variables(eqn.invars)
        kinds = {self.kind[v] for v in ins}
        kind = MAIN if MAIN in kinds or {PARAM, DATA} <= kinds else max(kinds, default=CONST)
        reads = frozenset().union(*(self.reads.get(v, ()) for v in ins))
        if effects.fires(eqn):
            kind = self._kind_of_effect(i, eqn, kind, reads)
        elif kind == PARAM and self._is_regulariser(eqn, ins, reads):
            # A scalar made of one block's parameters (an L2 term) is a value of that block's stage.
            kind, self.floating[i] = MAIN, reads
        self.eqn_kind.append(kind)
        if not self.trainable.isdisjoint(ins):
            self.trainable.update(eqn.outvars)
        for v in eqn.outvars:
            self.kind[v], self.producer[v] = kind, i
            if kind == PARAM:
                self.reads[v] = reads

    def _kind_of_effect(self, i, eqn, kind, reads):
        """Nothing that fires is repeated; an ordered effect does not overtake one of a stage."""
        ordered = effects.is_ordered(eqn)
        if kind in (CONST, DATA) and not (ordered and self.ordered):
            return DATA
        if ordered:
            self.ordered.append(i)
        if self.read.isdisjoint(eqn.outvars):
            return EFFECT
        if kind == PARAM:
            self.floating[i] = reads
        return MAIN

    def _is_regulariser(self, eqn, ins, reads):
        owners = {self.leaves[i].block or i for i in reads}
        return (
            len(owners) == 1
            and all(jx.num_elements(v.aval) == 1 for v in eqn.outvars)
            and any(jx.num_elements(v.aval) > 1 for v in ins)
        )

    def read_by(self, i: int) -> frozenset[int]:
        """The leaves that main equation `i` reads."""
        ins = jx.variables(self.jaxpr.eqns[i].invars)
        return frozenset().union(*(self.reads.get(v, ()) for v in ins))


def find_runs(flow: Dataflow) -> list[Run]:
    """Lists the stages as stretches of reads, in forward order."""
    main = [i for i, kind in enumerate(flow.eqn_kind) if kind == MAIN]
    events = [(p, flow.read_by(i)) for p, i in enumerate(main) if i not in flow.floating]
    events = [(p, reads) for p, reads in events if reads]
    loops = _loops(flow.leaves, events)
    runs: list[Run] = []
    history: list[list[tuple[int, int]]] = []
    for p, reads in events:
        keys = frozenset(k for i in reads if (k := loops.get(i, flow.leaves[i].block)) is not None)
        own = sorted(i for i in reads if i in loops or flow.leaves[i].block is not None)
        if not keys:
            continue
        if runs and runs[-1].keys == keys:
            runs[-1] = dataclasses.replace(runs[-1], last=p)
            history[-1] += [(p, i) for i in own]
        else:
            runs.append(Run(name="", keys=keys, first=p, last=p))
            history.append([(p, i) for i in own])
    runs = [r for run, reads in zip(runs, history, strict=True) for r in _passes(run, reads)]
    return _named(_with_rest(flow, events, runs, loops), flow.leaves)


def _loops(leaves: Sequence[Leaf], events) -> dict[int, Path]:
    """Leaves outside blocks whose module is applied several times in a row, with that module."""
    order = [(p, i) for p, reads in events for i in sorted(reads)]
    rest = {i for _, i in order if leaves[i].block is None}
    found: dict[int, Path] = {}
    prefixes = {leaves[i].path[:d] for i in rest for d in range(1, len(leaves[i].path))}
    under: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    in_blocks = [p for p, i in order if leaves[i].block is not None]
    for p, i in order:
        for d in range(1, len(leaves[i].path) + 1):
            if (prefix := leaves[i].path[:d]) in prefixes:
                under[prefix].append((p, i))
    for prefix in sorted(prefixes, key=lambda p: (len(p), tuple(map(str, p)))):
        own = under[prefix]
        ids = {i for _, i in own}
        if len(ids) < 2 or ids & found.keys() or any(leaves[i].block is not None for i in ids):
            continue
        alone = bisect_left(in_blocks, own[0][0]) == bisect_right(in_blocks, own[-1][0])
        if alone and power([i for _, i in own]) > 1:
            found.update((i, prefix) for i in ids)
    return found


def _passes(run: Run, reads: list[tuple[int, int]]) -> list[Run]:
    """Splits a run in which the same reads repeat: one block's weights applied several times."""
    times = power([i for _, i in reads]) if len({i for _, i in reads}) > 1 else 1
    size = len(reads) // times
    if len(run.keys) > 1 or times == 1:
        return [run]
    chunks = [reads[k * size : (k + 1) * size] for k in range(times)]
    if any(a[-1][0] >= b[0][0] for a, b in zip(chunks, chunks[1:], strict=False)):
        return [run]
    return [dataclasses.replace(run, first=c[0][0], last=c[-1][0]) for c in chunks]


def _with_rest(flow, events, runs: list[Run], loops) -> list[Run]:
    """Adds the stages of parameters outside blocks: before, after, and alone between blocks."""
    rest = [
        (p, i) for p, reads in events for i in sorted(reads)
        if flow.leaves[i].block is None and i not in loops
    ]  # fmt: skip
    if not runs:
        return [Run(name="model", keys=frozenset(), first=0, last=rest[-1][0] if rest else 0)]
    ends = (0, len(runs))
    gaps: dict[int, set[int]] = defaultdict(set)  # leaf → gaps (before run k) or -1 inside a run
    outside: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lasts = [run.last for run in runs]
    for p, i in rest:
        k = bisect_left(lasts, p)
        inside = k < len(runs) and p >= runs[k].first
        gaps[i].add(-1 if inside else k)
        if not inside:
            outside[k].append((p, i))
    positions: dict[int, list[int]] = {}
    for k, reads in outside.items():
        # What is also read between blocks may belong to the first block, or to the last one.
        own = [p for p, i in reads if gaps[i] <= ({k} | set(ends) if k in ends else {k})]
        if not own and k in ends:
            own = [reads[0 if k == 0 else -1][0]]
        positions[k] = own
    out = []
    for k in range(len(runs) + 1):
        if positions.get(k):
            out.append(
                Run(name="", keys=frozenset(), first=min(positions[k]), last=max(positions[k]))
            )
        out += runs[k : k + 1]
    return out


def _named(runs: list[Run], leaves) -> list[Run]:
    seen: dict[frozenset, int] = defaultdict(int)
    named = []
    blocks = [k for k, run in enumerate(runs) if run.keys]
    for k, run in enumerate(runs):
        if run.name:
            named.append(run)
            continue
        if not run.keys:
            name = "embedding" if k < blocks[0] else "head" if k > blocks[-1] else f"between {k}"
        else:
            name = " + ".join(".".join(map(str, key)) for key in sorted(run.keys, key=str))
            seen[run.keys] += 1
            if seen[run.keys] > 1:
                name += f" (pass {seen[run.keys]})"
        named.append(dataclasses.replace(run, name=name))
    return named
