"""The partition of a traced loss: each block's span, the borders, the stage of each equation.

A stage needs a contiguous span of equations around one block's parameters. To find such spans, each
equation is classified by its dependencies: parameters, data (batch, state, randomness), both, or
neither.

- Both (`MAIN`): the chain of activations. It is walked in order; each read of a block's parameters
  extends or starts a `Stretch`, the core of one stage.
- Only parameters, or neither (`PARAM`, `CONST`): casts, transposes and the like. They are repeated
  in every stage that needs them, so no block has to stay on the device for another.
- Only data (`DATA`): masks, positions. They run once in the prologue, except that a large result
  needed by one stage only is computed there.
- Prints and callbacks (`EFFECT`): they fire once, in the stage that computes their last operand.

Example: `x @ e`, two blocks `x + tanh(x @ w) * sqrt(sum(data))`, `x @ h`, plus `sum(w0**2)`:

    main       0: dot e | 1: dot w0, 2: tanh, 3: mul, 4: add | 5: dot w1, 6: tanh, 7: mul, 8: add
               9: dot h, ... | 13: reduce_sum of w0**2, 14: add
    data       reduce_sum, sqrt: prologue;      parameters only: w0**2: repeated where it is needed
    stretches  embedding 0-0, layers.0 1-1, layers.1 5-5, head 9-9: from first to last read

Equation 13 depends only on parameters, but is a scalar of one block: it counts as main and
*floating*, a value of layers.0's stage. `assign` then gives a stage to each equation between two
stretches.

Small parameters of a block that further blocks read too belong to no block.

T5 keeps its table of position biases in the first layer, and every layer adds its biases. As part
of the first layer, the table would cut each later layer in three: before the table is read, the
table, and after it. It is small, so it travels in a group of its own, or stays on the device.

Example: three blocks `tanh(x @ up + table) @ down`, with a table in the first. The reads are

    position  0     1        2       3     4        5       6     7        8
    leaf      up 0  table 0  down 0  up 1  table 0  down 1  up 2  table 0  down 2

Block 0 is visited at 0-2, 4 and 7. The last two visits read only `table`, a small part of it that
is read in several visits: it is shared. If a block is applied several times, all visits read most
of it, so nothing in it is shared.

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

import dataclasses
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from megatrain_jax._src.common.trees import ModelPath
from megatrain_jax._src.engine.program import effects
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf, power

# Elements: data-only values up to this size are computed once, before the stages. A larger value,
# such as a mask, is computed in its stage if only that one needs it, so it need not be kept until
# then.
SMALL = 1024
CONST, PARAM, DATA, MAIN, EFFECT = range(5)  # EFFECT: no equation reads its results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of main equations, from the first to the last read of one block: a stage's core.

    Attributes:
        name: The stage's name: a block's path, "embedding", "head", "between k" or "model".
        keys: Paths of the blocks it reads; empty for a stage of parameters outside blocks.
        first: Position of its first read among the main equations.
        last: Position of its last read.
    """

    name: str
    keys: frozenset[ModelPath]
    first: int
    last: int


class Dataflow:
    """The dataflow of a flat jaxpr: the dependencies of each variable and equation.

    An equation's number is its index in the jaxpr, a leaf's its index in `leaves`.

    Attributes:
        consts: Value of each constant variable.
        parameters: Variables of the leaves, in order.
        data: Variables of the remaining inputs: state, batch, key.
        kind: CONST, PARAM, DATA, MAIN or EFFECT for each variable.
        eqn_kind: The same for each equation.
        main: Numbers of the main equations, ascending.
        reads: Leaves that a PARAM variable is made from.
        producer: Equation that computes each variable.
        floating: Main equations of parameters alone, which any stage could compute, with the leaves
            they read: scalars of one block, sums of these with a scalar leaf, and effects with
            results that are read.
        read: Variables that some equation or the caller reads.
        ordered: Equations of stages with ordered effects, ascending.
        trainable: Variables that depend on a trainable leaf.
        name: The user's argument that the function was given as, for errors.
    """

    def __init__(self, traced: jx.Traced, leaves: Sequence[Leaf], name: str):
        """Classifies a function's equations; its inputs are the constants, `leaves`, then data."""
        self.name = name
        self.jaxpr = jaxpr = traced.jaxpr
        self.leaves = leaves
        num_consts = len(traced.consts)
        self.consts = dict(zip(jaxpr.invars[:num_consts], traced.consts, strict=True))
        self.parameters = jaxpr.invars[num_consts : num_consts + len(leaves)]
        self.data = jaxpr.invars[num_consts + len(leaves) :]
        self._of_data = jx.dependent(jaxpr, self.data)
        self.reads: dict[Any, frozenset[int]] = {}
        self.kind: dict[Any, int] = {v: CONST for v in self.consts}
        self.producer: dict[Any, int] = {}
        self.eqn_kind: list[int] = []
        self.floating: dict[int, frozenset[int]] = {}
        self.read = jx.num_readers(jaxpr).keys()
        self.ordered: list[int] = []
        pairs = zip(self.parameters, leaves, strict=True)
        self.trainable = {v for v, leaf in pairs if leaf.is_trainable}
        self.kind |= {v: PARAM for v in self.parameters} | {v: DATA for v in self.data}
        self.reads |= {v: frozenset((i,)) for i, v in enumerate(self.parameters)}
        for i, eqn in enumerate(jaxpr.eqns):
            self._classify(i, eqn)
        self.main = [i for i, kind in enumerate(self.eqn_kind) if kind == MAIN]

    def _classify(self, i, eqn):
        ins = jx.variables(eqn.invars)
        kinds = {self.kind[v] for v in ins}
        # If parameters and data have not met, the largest kind is the right one.
        kind = MAIN if MAIN in kinds or {PARAM, DATA} <= kinds else max(kinds, default=CONST)
        reads = jx.union(self.reads, ins)
        owners = {self.leaves[i].block or i for i in reads}
        makes_numbers = all(jx.num_elements(v.aval) == 1 for v in eqn.outvars)
        if effects.has_side_effects(eqn):
            kind = self._kind_of_effect(i, eqn, kind, reads)
        elif makes_numbers and kind == PARAM and len(owners) == 1:
            # A scalar made from arrays of one block, or of one leaf outside (an L2 term), is a
            # value of that block's stage.
            if any(jx.num_elements(v.aval) > 1 for v in ins):
                kind, self.floating[i] = MAIN, reads
        elif makes_numbers and kind == MAIN and reads and self._of_data.isdisjoint(eqn.outvars):
            self.floating[i] = reads  # made from parameters alone: a sum of regularisers
        self.eqn_kind.append(kind)
        if not self.trainable.isdisjoint(ins):
            self.trainable.update(eqn.outvars)
        for v in eqn.outvars:
            self.kind[v], self.producer[v] = kind, i
            # A main value carries no reads: its reader takes the activation, not the weights.
            if kind == PARAM:
                self.reads[v] = reads

    def _kind_of_effect(self, i, eqn, kind, reads):
        """The kind of an equation with an effect: one that is never repeated.

        An ordered effect of data alone runs in the prologue, unless an ordered effect in a stage
        precedes it, which it must not overtake.
        """
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

    def read_by(self, i: int) -> frozenset[int]:
        """Leaves that main equation `i` reads, directly or through casts and transposes."""
        return jx.union(self.reads, self.jaxpr.eqns[i].invars)

    def events(self) -> list[tuple[int, frozenset[int]]]:
        """The reads in order: position among the main equations, and the leaves that are read."""
        # A floating equation is computed with its block, so its traced place says nothing about
        # order.
        found = [(p, self.read_by(i)) for p, i in enumerate(self.main) if i not in self.floating]
        return [(p, reads) for p, reads in found if reads]


def find_stretches(flow: Dataflow) -> list[Stretch]:
    """Lists the stretches of reads, one for each stage, in forward order.

    A module outside blocks that is applied several times in a row counts as a block. A block with
    repeated reads gives a stretch for each pass.
    """
    events = flow.events()
    loops = _loops(flow.leaves, events)
    runs: list[tuple[frozenset[ModelPath], list[tuple[int, int]]]] = []
    for p, reads in events:
        key_of = {i: loops.get(i, flow.leaves[i].block) for i in sorted(reads)}
        own = [(p, i) for i, key in key_of.items() if key is not None]
        keys = frozenset(key for key in key_of.values() if key is not None)
        # Without keys, it is the embedding or the head: added around the blocks later.
        if runs and runs[-1][0] == keys:
            runs[-1][1].extend(own)
        elif keys:
            runs.append((keys, own))
    if not runs:
        last = events[-1][0] if events else 0
        return [Stretch(name="model", keys=frozenset(), first=0, last=last)]
    stretches = [stretch for keys, reads in runs for stretch in _passes(keys, reads)]
    return _named(_with_rest(flow, events, stretches, loops))


def _loops(leaves: Sequence[Leaf], events) -> dict[int, ModelPath]:
    """Modules outside blocks that are applied several times in a row, by their leaves.

    Example: a shared `cell` with leaves 1 and 2, read as 1 2 1 2 without a block's read in between.
    """
    order = [(p, i) for p, reads in events for i in sorted(reads)]
    rest = {i for _, i in order if leaves[i].block is None}
    found: dict[int, ModelPath] = {}
    paths = [leaf.modules for leaf in leaves]
    prefixes = {paths[i][:d] for i in rest for d in range(1, len(paths[i]))}
    under: dict[ModelPath, list[tuple[int, int]]] = defaultdict(list)
    in_blocks = [p for p, i in order if leaves[i].block is not None]
    for p, i in order:
        for d in range(1, len(paths[i]) + 1):
            if (prefix := paths[i][:d]) in prefixes:
                under[prefix].append((p, i))
    # The outermost module that qualifies is taken whole: its leaves are not considered again.
    for prefix in sorted(prefixes, key=lambda p: (len(p), tuple(map(str, p)))):
        own = under[prefix]
        ids = {i for _, i in own}
        # Repeated reads of a single leaf are no module applied in a row: a tied embedding or `x @ w
        # + w` is read that way too.
        if len(ids) < 2 or ids & found.keys() or any(leaves[i].block is not None for i in ids):
            continue
        alone = bisect_left(in_blocks, own[0][0]) == bisect_right(in_blocks, own[-1][0])
        if alone and power([i for _, i in own]) > 1:
            found.update((i, prefix) for i in ids)
    return found


def _passes(keys: frozenset[ModelPath], reads: list[tuple[int, int]]) -> list[Stretch]:
    """The stretches of reads of the same blocks: one, or one for each time that they are applied.

    The reads (position, leaf) (3, 0) (4, 1) (7, 0) (8, 1) are two passes, 3-4 and 7-8.
    """
    # Two reads of a single leaf may both belong to one pass.
    times = power([i for _, i in reads]) if len({i for _, i in reads}) > 1 else 1
    size = len(reads) // times
    chunks = [reads[k * size : (k + 1) * size] for k in range(times)]
    # One equation that reads for two passes can't be in two stages.
    if len(keys) > 1 or any(a[-1][0] >= b[0][0] for a, b in itertools.pairwise(chunks)):
        chunks = [reads]
    return [Stretch(name="", keys=keys, first=c[0][0], last=c[-1][0]) for c in chunks]


def _with_rest(flow, events, stretches: list[Stretch], loops) -> list[Stretch]:
    """Adds stretches for parameters outside blocks: before, after, and alone between blocks."""
    rest = [
        (p, i) for p, reads in events for i in sorted(reads)
        if flow.leaves[i].block is None and i not in loops
    ]  # fmt: skip
    ends = (0, len(stretches))
    gaps: dict[int, set[int]] = defaultdict(set)  # leaf → gaps (before stretch k), or -1 inside one
    outside: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lasts = [stretch.last for stretch in stretches]
    for p, i in rest:
        k = bisect_left(lasts, p)
        inside = k < len(stretches) and p >= stretches[k].first
        gaps[i].add(-1 if inside else k)
        if not inside:
            outside[k].append((p, i))
    found = []
    for k in range(len(stretches) + 1):
        reads = outside[k]
        # A leaf that is read only in this gap, or only at both ends like a tied embedding, makes a
        # stretch. A leaf read elsewhere too doesn't: a neighbouring block may take that read.
        own = [p for p, i in reads if gaps[i] <= ({k} | set(ends) if k in ends else {k})]
        # Reads before the first block or after the last one always get their own stage; inside the
        # block's stage, they would make it differ from its like blocks.
        if reads and not own and k in ends:
            own = [reads[0 if k == 0 else -1][0]]
        if own:
            found.append(Stretch(name="", keys=frozenset(), first=min(own), last=max(own)))
        found += stretches[k : k + 1]
    return found


def _named(stretches: list[Stretch]) -> list[Stretch]:
    """Names stretches by their blocks, or by their place between them."""
    seen: dict[frozenset, int] = defaultdict(int)
    named = []
    blocks = [k for k, stretch in enumerate(stretches) if stretch.keys]
    for k, stretch in enumerate(stretches):
        if not stretch.keys:
            name = "embedding" if k < blocks[0] else "head" if k > blocks[-1] else f"between {k}"
        else:
            name = " + ".join(".".join(map(str, key)) for key in sorted(stretch.keys, key=str))
            seen[stretch.keys] += 1
            if seen[stretch.keys] > 1:
                name += f" (pass {seen[stretch.keys]})"
        named.append(dataclasses.replace(stretch, name=name))
    return named


_SMALL = 1 / 8  # share of a block


def find_shared(flow: Dataflow) -> frozenset[int]:
    """The numbers of the leaves that belong to no block, though their path is in one."""
    sizes: Counter[ModelPath | None] = Counter()
    for leaf in flow.leaves:
        sizes[leaf.block] += math.prod(leaf.shape)

    def is_small(block: ModelPath, visit: frozenset[int]) -> bool:
        return sum(math.prod(flow.leaves[i].shape) for i in visit) <= _SMALL * sizes[block]

    shared: set[int] = set()
    for block, visits in _visits(flow).items():
        times = Counter(itertools.chain(*visits))
        small = [visit for visit in visits if is_small(block, visit)]
        if len(small) < len(visits):  # without a visit of its own there is no block left
            shared.update(i for visit in small for i in visit if times[i] > 1)
    return frozenset(shared)


def without_block(leaf: Leaf) -> Leaf:
    """The same leaf, without a block."""
    return dataclasses.replace(leaf, block=None)


def _visits(flow: Dataflow) -> dict[ModelPath, list[frozenset[int]]]:
    """The leaves read in each visit of a block; a read of only another block ends a visit."""
    visits: dict[ModelPath, list[frozenset[int]]] = defaultdict(list)
    before: frozenset[ModelPath] = frozenset()
    for _, reads in flow.events():
        blocks = frozenset(b for i in reads if (b := flow.leaves[i].block) is not None)
        for block in blocks:
            own = frozenset(i for i in reads if flow.leaves[i].block == block)
            if block in before:
                visits[block][-1] |= own
            else:
                visits[block].append(own)
        before = blocks or before
    return visits


_Stage = tuple[int, int, int]  # a stretch, its border, the next stretch's border


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

    def __init__(self, flow: Dataflow, stretches: Sequence[Stretch]):
        self.flow, self.stretches = flow, stretches
        self.main = main = flow.main
        self.position = {i: p for p, i in enumerate(main)}
        # Values of data alone don't count: the prologue, or the one stage that uses them, makes
        # them.
        eqns = [flow.jaxpr.eqns[i] for i in main]
        self.alive = jx.bytes_alive(eqns, flow.jaxpr.outvars, lambda v: flow.kind[v] == MAIN)
        pairs = itertools.pairwise(stretches)
        between = [range(before.last + 1, after.first + 1) for before, after in pairs]
        # The first stage begins with the first equation, and the last one ends with the last.
        self.gaps = [range(1), *between, range(len(main), len(main) + 1)]
        self.fewest = [min(self.alive[p] for p in gap) for gap in self.gaps]
        self.fixed: dict[int, int] = {}
        self.taken: dict[tuple[int, int], int] = {}
        ids: dict[Any, int] = {}
        rows = [ids.setdefault(_row(flow, i), len(ids)) for i in main]
        self.back = [self._distances(i) for i in main]
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

    def _distances(self, i: int) -> list[int]:
        """Distances from main equations that make the operands of one; 0 if none makes one."""
        flow = self.flow
        return [
            0 if jx.is_literal(a) or flow.kind[a] != MAIN
            else self.position[i] - self.position[flow.producer[a]]
            for a in flow.jaxpr.eqns[i].invars
        ]  # fmt: skip

    def find(self) -> list[int]:
        """The first main equation of each stage, as positions, ascending; the first is 0.

        Borders are chosen first for the largest classes of like stretches, then for single ones.
        """
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


def _aval(atom) -> tuple:
    """Shape and dtype of a variable or literal."""
    return getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)


def assign(flow: Dataflow, stretches: list[Stretch]) -> dict[int, int]:
    """The stage (index in `stretches`) of each main equation and each equation with effects.

    Raises:
        ValueError: Ordered effects would change their order.
    """
    starts = _Borders(flow, stretches).find()
    by_borders = {i: bisect_right(starts, p) - 1 for p, i in enumerate(flow.main)}
    stage_of: dict[int, int] = {}
    first_use: dict[int, int] = {}  # leaf → the first stage that reads it
    # All first uses are collected first, because a regulariser may be traced before its block.
    for i in flow.main:
        if i not in flow.floating:
            for leaf in flow.read_by(i):
                first_use.setdefault(leaf, by_borders[i])
    for i in flow.main:
        # Where leaves of a floating equation are read first, they are on the device anyway. At its
        # traced place they would be fetched once more, for a stage that reads nothing else of that
        # block.
        uses = [first_use[leaf] for leaf in flow.floating.get(i, ()) if leaf in first_use]
        home = min(uses, default=by_borders[i])
        operands = jx.variables(flow.jaxpr.eqns[i].invars)
        sources = [stage_of[flow.producer[v]] for v in operands if flow.kind[v] == MAIN]
        # Never before its operands, because values only pass forwards from stage to stage.
        # Equations come in order, so their operands' stages are known.
        stage_of[i] = max([home, *sources])
    # After the stages of all equations are known, because a term may be first used long after it is
    # traced; and before effects, because they may print moved values.
    stage_of = _postponed(flow, stage_of, len(stretches) - 1)
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
                    f"{flow.name} has ordered effects that can't be kept in order: the operands of "
                    f"{flow.jaxpr.eqns[i].primitive.name} are computed in an earlier stage than "
                    "those of an effect before it. Leave out `ordered=True`"
                )
            earliest = stage_of[i]
    return stage_of


def _postponed(flow: Dataflow, stage_of: dict[int, int], last: int) -> dict[int, int]:
    """Moves equations that depend on no data (sums of regularisers) to their first use.

    A running sum over all blocks' terms is then computed where the loss uses it, and its additions
    don't make the stages of equal blocks differ.
    """
    data = jx.dependent(flow.jaxpr, flow.data)
    uses: dict[Any, int] = {}
    moved = dict(stage_of)
    # Backwards, so that a chain of additions moves as a whole, each to its user's new stage.
    for i in reversed(flow.main):
        eqn = flow.jaxpr.eqns[i]
        if i not in flow.floating and not any(v in data for v in eqn.outvars):
            moved[i] = min(uses.get(v, last) for v in eqn.outvars)
        for v in jx.variables(eqn.invars):
            uses[v] = min(uses.get(v, last), moved[i])
    return moved
