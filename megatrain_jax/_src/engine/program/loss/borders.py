"""The borders between stages, and the stage of each equation of a traced loss.

A border is the first main equation of a stage.

A border lies between the last read of one stretch and the first read of the next. The equations in
between could belong to either: a scaling after a block may end it or begin the next one. So borders
are chosen for all similar stretches at once, to give as many of them as possible the same equations
before the first read and after the last one.

Example: two blocks `x + tanh(x @ w)`, each followed by a scaling; activations have 64 bytes.

    position  0       1       2     3    4    5       6     7    8    9       10
    equation  dot e   dot w0  tanh  add  mul  dot w1  tanh  add  mul  dot h   reduce_sum
    alive     0       64      128   128  64   64      128   128  64   64      16

The border before layers.1 lies in the gap 2-5, the head's in 6-9; positions 4 and 5, 8 and 9 carry
the fewest bytes. Chosen separately, each would be the earliest, giving the blocks `dot tanh add`
and `mul dot tanh add`. Chosen together, the blocks span 1 to 5 and 5 to 9, both `dot tanh add mul`:
the borders are 0, 1, 5, 9.

`assign` gives the main equations and effects of a loss to stages.

An equation belongs to the stage with borders around it, or to a later stage that computes one of
its operands. Example: borders 0, 1, 5, 9 and an L2 term `total + sum(w0**2)` at the end:

    equation                position  by borders  why                             stage
    dot, tanh, mul, add     1-4       1           between 1 and 5                 1
    reduce_sum of w0**2     13        3           floating: w0 is first read in   1
    add of loss and term    14        3           its operands are in 3 and 1     3

An equation that depends on no data, such as a sum of such terms, is moved from the first stage that
could compute it to the stage of its first use.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.partition import EFFECT, MAIN, PARAM, Dataflow, Stretch

_Stage = tuple[int, int, int]  # a stretch, its border, the next stretch's border


def find_borders(
    flow: Dataflow, stretches: Sequence[Stretch], main: Sequence[int], position: dict[int, int]
) -> list[int]:
    """Finds the first main equation of each stage.

    Args:
        flow: The dataflow of the equations.
        stretches: Stretches of reads in forward order.
        main: Numbers of the main equations, ascending.
        position: Position of each of these numbers in `main`.

    Returns:
        A position in `main` for each stretch, ascending; the first is 0.
    """
    return _Borders(flow, stretches, main, position).find()


class _Borders:
    """The search for borders. Border `g` precedes stretch `g`; one more stands for the end.

    Attributes:
        alive: Bytes alive before each main equation, and at the end.
        gaps: Positions that each border may have.
        fewest: The fewest bytes alive in each gap.
        fixed: Borders chosen so far.
        taken: Results of `_taken`.
        back: For each main equation, the distances to the equations that make its operands.
        like: Stretches with equal rows from first to last read.
        before: For each stretch and possible border, a number that identifies the rows up to the
            first read.
        after: The same for the rows between the last read and the next stretch's border.
    """

    def __init__(self, flow, stretches, main, position):
        self.flow, self.stretches, self.main, self.position = flow, stretches, main, position
        # Values of data alone don't count: the prologue, or the one stage that uses them, makes
        # them.
        eqns = [flow.jaxpr.eqns[i] for i in main]
        self.alive = jx.bytes_alive(eqns, flow.jaxpr.outvars, lambda v: flow.kind[v] == MAIN)
        between = [
            range(before.last + 1, after.first + 1)
            for before, after in zip(stretches, stretches[1:], strict=False)
        ]
        # The first stage begins with the first equation, and the last one ends with the last.
        self.gaps = [range(1), *between, range(len(main), len(main) + 1)]
        self.fewest = [min(self.alive[p] for p in gap) for gap in self.gaps]
        self.fixed: dict[int, int] = {}
        self.taken: dict[tuple[int, int], int] = {}
        ids: dict[Any, int] = {}
        rows = [ids.setdefault(_row(flow, i), len(ids)) for i in main]
        self.back = [_distances(flow, i, p, position) for p, i in enumerate(main)]
        self.like: dict[tuple, list[int]] = defaultdict(list)
        for k, stretch in enumerate(stretches):
            self.like[tuple(rows[stretch.first : stretch.last + 1])].append(k)
        # Equal rows have equal numbers, so two numbers suffice to compare stages.
        self.before = [
            _numbers(rows, range(stretch.first, gap.start - 1, -1), -1, ids)
            for stretch, gap in zip(stretches, self.gaps, strict=False)
        ]
        self.after = [
            _numbers(rows, range(stretch.last + 1, gap.stop), 0, ids)
            for stretch, gap in zip(stretches, self.gaps[1:], strict=True)
        ]

    def find(self) -> list[int]:
        """The borders: first for the largest classes of like stretches, then for single ones."""
        # A fixed border stays fixed for the neighbouring stretch too. So the largest class, which
        # saves the most compilations, goes first.
        for members in sorted(self.like.values(), key=len, reverse=True):
            left = members
            while len(left) > 1 and (alike := self._alike(left)):
                for k, start, end in alike:
                    self.fixed[k], self.fixed[k + 1] = start, end
                left = [k for k in left if k not in {stage[0] for stage in alike}]
        return [
            self.fixed.get(g, min(self.gaps[g], key=lambda p, g=g: self._order(g, p)))
            for g in range(len(self.stretches))
        ]

    def _order(self, g: int, p: int) -> tuple[int, int, int]:
        """Sort key of position `p` for border `g`: bytes alive, bytes the stretch takes, position.

        The bytes that the next stretch takes only decide among positions with the fewest bytes
        alive.
        """
        return self.alive[p], self._taken(g, p) if self.alive[p] == self.fewest[g] else 0, p

    def _alike(self, members: Sequence[int]) -> list[_Stage]:
        """The borders that turn the most of these stretches into equal stages; [] if no two are."""
        limit = self._limit(members)
        found: dict[tuple[int, int], list[_Stage]] = defaultdict(list)
        for k in members:
            for start, end in self._choices(k, members, limit):
                found[self.before[k][start], self.after[k][end]].append((k, start, end))
        best: list[_Stage] = []
        # Each class of equal stages is a candidate, with the borders it needs. So candidates grow
        # with the number of different stages, not with combinations of borders.
        for stages in sorted(found.values(), key=len, reverse=True):
            if len(stages) < max(2, len(best)):
                break  # sorted by size, and the filters below only shrink a class
            stages = self._affordable(self._wired_alike(stages), limit)
            if len(stages) > 1:
                best = min(best or stages, stages, key=self._preference)
        return best

    def _wired_alike(self, stages: Sequence[_Stage]) -> list[_Stage]:
        """The largest class of stages with operands taken from the same equations within.

        Rows don't distinguish operands of equal shape: `x + f(x)` and `f(x) + f(x)` differ in
        wiring.
        """
        groups: dict[tuple, list[_Stage]] = defaultdict(list)
        for k, start, end in stages:
            wiring = ((d if p - d >= start else 0 for d in self.back[p]) for p in range(start, end))
            # Only operands made within the stage count: an operand from outside is an input,
            # wherever it was made.
            groups[tuple(map(tuple, wiring))].append((k, start, end))
        return max(groups.values(), key=len)

    def _choices(self, k: int, members: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
        """Pairs of borders around stretch `k`.

        If the next stretch is like it, both borders lie equally far before their first reads.
        """
        for start in self._allowed(k, limit):
            if k + 1 in members:
                end = self.stretches[k + 1].first - (self.stretches[k].first - start)
                if end in self._allowed(k + 1, limit):
                    yield start, end
            else:
                yield from ((start, end) for end in self._allowed(k + 1, limit))

    def _limit(self, members: Sequence[int]) -> int:
        """The largest of the `fewest` bytes among these stretches' borders between two blocks.

        Their remaining borders may carry as much: if all blocks pass on a value, the last one may
        too.
        """
        borders = {g for k in members for g in (k, k + 1) if 0 < g < len(self.stretches)}
        inner = [g for g in borders if self.stretches[g - 1].keys and self.stretches[g].keys]
        return max((self.fewest[g] for g in inner), default=0)

    def _allowed(self, g: int, limit: int) -> list[int]:
        """Positions for border `g` with at most `limit` bytes alive, or with the fewest."""
        if g in self.fixed:
            return [self.fixed[g]]
        most = max(limit, self.fewest[g])
        return [p for p in self.gaps[g] if self.alive[p] <= most]

    def _affordable(self, stages: list[_Stage], limit: int) -> list[_Stage]:
        """Drops stages until all borders together carry at most `limit` bytes over the fewest.

        So the last block may pass on a value that all earlier blocks pass on, but it need not.
        """
        kept: list[_Stage] = []
        for stage in sorted(stages, key=lambda s: (self._excess([s]), s)):
            if self._excess([*kept, stage]) <= limit:
                kept.append(stage)
        return sorted(kept)

    def _excess(self, stages: Sequence[_Stage]) -> int:
        """Bytes over the fewest at the borders of these stages; a shared border counts once."""
        borders = {g: p for k, start, end in stages for g, p in ((k, start), (k + 1, end))}
        return sum(self.alive[p] - self.fewest[g] for g, p in borders.items())

    def _preference(self, stages: Sequence[_Stage]) -> tuple[int, int, int, list[_Stage]]:
        """Sort key: most stages, fewest bytes alive, fewest taken by next stretches, earliest."""
        borders = {g: p for k, start, end in stages for g, p in ((k, start), (k + 1, end))}
        taken = [self._taken(g, p) for g, p in borders.items() if g < len(self.stretches)]
        return -len(stages), self._excess(stages), sum(taken), list(stages)

    def _taken(self, g: int, cut: int) -> int:
        """Bytes made before `cut` that the equations from there to the end of stretch `g` read."""
        if (g, cut) not in self.taken:
            flow, position = self.flow, self.position
            stretch = self.main[cut : self.stretches[g].last + 1]
            values = {
                v for i in stretch for v in jx.variables(flow.jaxpr.eqns[i].invars)
                if flow.kind[v] == MAIN and position[flow.producer[v]] < cut
            }  # fmt: skip
            self.taken[g, cut] = sum(jx.num_bytes(v.aval) for v in values)
        return self.taken[g, cut]


def _numbers(rows: Sequence[int], cuts: range, shift: int, ids: dict[Any, int]) -> dict[int, int]:
    """Numbers the rows between each cut and a read: equal rows get equal numbers.

    Args:
        rows: A number for each main equation; equations that look alike have equal numbers.
        cuts: Possible borders, the nearest to the read first.
        shift: The position of the next row relative to a cut: -1 before it, 0 at it.
        ids: Numbers so far, shared by all calls; -1 stands for no rows.
    """
    number, numbers = -1, {}
    for cut in cuts:
        numbers[cut] = number
        if cut + shift in range(len(rows)):
            number = ids.setdefault((number, rows[cut + shift]), len(ids))
    return numbers


def _row(flow: Dataflow, i: int) -> tuple:
    """An equation's row: primitive, shapes, dtypes, and a mark on operands that are parameters.

    A literal looks like any scalar, because it may become an input of a shared template.
    """
    eqn = flow.jaxpr.eqns[i]

    def operand(atom):
        read = not jx.is_literal(atom) and flow.kind[atom] == PARAM
        return read, *_aval(atom)

    return eqn.primitive.name, *map(operand, eqn.invars), *map(_aval, eqn.outvars)


def _distances(flow: Dataflow, i: int, p: int, position: dict[int, int]) -> list[int]:
    """Distances from the main equations that make the operands to `p`; 0 if none makes one."""
    return [
        0 if jx.is_literal(a) or flow.kind[a] != MAIN else p - position[flow.producer[a]]
        for a in flow.jaxpr.eqns[i].invars
    ]


def _aval(atom) -> tuple:
    """Shape and dtype of a variable or literal."""
    return getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)


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
