"""Finds the borders between stages: where a traced loss is cut between two stretches of reads.

A border lies between the last read of one stretch and the first read of the next. What is computed
there belongs to neither by itself: a dropout after a block may end it or begin the next one.
Example: `embed a [norm W1] add drop [norm W2] add drop head`, with reads in brackets and as many
bytes alive before each `drop` as after it. Cut before the drops, the blocks are `norm W1 add` and
`drop norm W2 add`, and the head begins with a drop; cut after them, both are `norm W add drop`.
So borders are chosen for all stretches that read alike at once: the equations before the first read
and those after the last one are the same in as many of them as possible.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.loss.partition import MAIN, PARAM, Dataflow, Stretch

_Stage = tuple[int, int, int]  # a stretch, its border, the next one's


def find_borders(
    flow: Dataflow, stretches: Sequence[Stretch], main: Sequence[int], position: dict[int, int]
) -> list[int]:
    """The first main equation of each stage: of the places with the fewest bytes alive one."""
    return _Borders(flow, stretches, main, position).find()


class _Borders:
    """Borders by the stretch that they precede; one more stands for the end."""

    def __init__(self, flow, stretches, main, position):
        self.flow, self.stretches, self.main, self.position = flow, stretches, main, position
        self.alive = _live_bytes(flow, main, position)
        between = [
            range(before.last + 1, after.first + 1)
            for before, after in zip(stretches, stretches[1:], strict=False)
        ]
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
        # What lies between a border and the first read, or the last read and a border, by number.
        self.before = [
            _numbers(rows, range(stretch.first, gap.start - 1, -1), -1, ids)
            for stretch, gap in zip(stretches, self.gaps, strict=False)
        ]
        self.after = [
            _numbers(rows, range(stretch.last + 1, gap.stop), 0, ids)
            for stretch, gap in zip(stretches, self.gaps[1:], strict=True)
        ]

    def find(self) -> list[int]:
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
        """Of equal cuts the one after which the next stretch takes the least, then the earliest."""
        return self.alive[p], self._taken(g, p) if self.alive[p] == self.fewest[g] else 0, p

    def _alike(self, members: Sequence[int]) -> list[_Stage]:
        """The borders that make the most of these stretches equal stages; nothing if no two are."""
        limit = self._limit(members)
        found: dict[tuple[int, int], list[_Stage]] = defaultdict(list)
        for k in members:
            for start, end in self._choices(k, members, limit):
                found[self.before[k][start], self.after[k][end]].append((k, start, end))
        best: list[_Stage] = []
        for stages in sorted(found.values(), key=len, reverse=True):
            if len(stages) < max(2, len(best)):
                break
            stages = self._affordable(self._wired_alike(stages), limit)
            if len(stages) > 1:
                best = min(best or stages, stages, key=self._preference)
        return best

    def _wired_alike(self, stages: Sequence[_Stage]) -> list[_Stage]:
        """The most stages that take the same operands from within."""
        groups: dict[tuple, list[_Stage]] = defaultdict(list)
        for k, start, end in stages:
            wiring = ((d if p - d >= start else 0 for d in self.back[p]) for p in range(start, end))
            groups[tuple(map(tuple, wiring))].append((k, start, end))
        return max(groups.values(), key=len)

    def _choices(self, k: int, members: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
        """The borders of stretch `k`; one right after it that is like it begins as it does."""
        for start in self._allowed(k, limit):
            if k + 1 in members:
                end = self.stretches[k + 1].first - (self.stretches[k].first - start)
                if end in self._allowed(k + 1, limit):
                    yield start, end
            else:
                yield from ((start, end) for end in self._allowed(k + 1, limit))

    def _limit(self, members: Sequence[int]) -> int:
        """The most bytes that a border of these stretches between blocks needs at least."""
        borders = {g for k in members for g in (k, k + 1) if 0 < g < len(self.stretches)}
        inner = [g for g in borders if self.stretches[g - 1].keys and self.stretches[g].keys]
        return max((self.fewest[g] for g in inner), default=0)

    def _allowed(self, g: int, limit: int) -> list[int]:
        if g in self.fixed:
            return [self.fixed[g]]
        most = max(limit, self.fewest[g])
        return [p for p in self.gaps[g] if self.alive[p] <= most]

    def _affordable(self, stages: list[_Stage], limit: int) -> list[_Stage]:
        """Drops stages until all borders together carry at most `limit` bytes over the fewest.

        The last block may so hand on a value that all others hand on, but it need not.
        """
        kept: list[_Stage] = []
        for stage in sorted(stages, key=lambda s: (self._excess([s]), s)):
            if self._excess([*kept, stage]) <= limit:
                kept.append(stage)
        return sorted(kept)

    def _excess(self, stages: Sequence[_Stage]) -> int:
        borders = {g: p for k, start, end in stages for g, p in ((k, start), (k + 1, end))}
        return sum(self.alive[p] - self.fewest[g] for g, p in borders.items())

    def _preference(self, stages: Sequence[_Stage]) -> tuple[int, int, int, list[_Stage]]:
        """Most stages, fewest bytes alive, fewest taken by the next stretches, earliest."""
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
    """For each cut, in the order of their distance, a number for the rows between it and a read."""
    number, numbers = -1, {}
    for cut in cuts:
        numbers[cut] = number
        if cut + shift in range(len(rows)):
            number = ids.setdefault((number, rows[cut + shift]), len(ids))
    return numbers


def _row(flow: Dataflow, i: int) -> tuple:
    """What an equation looks like; a literal looks like any other scalar but a parameter's."""
    eqn = flow.jaxpr.eqns[i]

    def operand(atom):
        read = not jx.is_literal(atom) and flow.kind[atom] == PARAM
        return read, *_aval(atom)

    return eqn.primitive.name, *map(operand, eqn.invars), *map(_aval, eqn.outvars)


def _distances(flow: Dataflow, i: int, p: int, position: dict[int, int]) -> list[int]:
    """How far before each operand's main equation lies; 0 for what no main equation makes."""
    return [
        0 if jx.is_literal(a) or flow.kind[a] != MAIN else p - position[flow.producer[a]]
        for a in flow.jaxpr.eqns[i].invars
    ]


def _aval(atom) -> tuple:
    return getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)


def _live_bytes(flow, main, position) -> list[int]:
    """Bytes of main values alive just before each main equation, and at the end."""
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
