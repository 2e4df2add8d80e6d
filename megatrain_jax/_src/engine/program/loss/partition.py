"""Classifies the equations of a traced loss by their dependencies, and finds each block's span.

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
*floating*, a value of layers.0's stage. `borders.py` then assigns the equations between two
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
"""

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
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
        reads: Leaves that a PARAM variable is made from.
        producer: Equation that computes each variable.
        floating: Main equations of parameters alone, which any stage could compute, with the leaves
            they read: scalars of one block, sums of these with a scalar leaf, and effects with
            results that are read.
        read: Variables that some equation or the caller reads.
        ordered: Equations of stages with ordered effects, ascending.
        trainable: Variables that depend on a trainable leaf.
    """

    def __init__(self, traced: jx.Traced, leaves: Sequence[Leaf]):
        """Classifies a function's equations; its inputs are the constants, `leaves`, then data."""
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

    def _classify(self, i, eqn):
        ins = jx.variables(eqn.invars)
        kinds = {self.kind[v] for v in ins}
        # If parameters and data have not met, the largest kind is the right one.
        kind = MAIN if MAIN in kinds or {PARAM, DATA} <= kinds else max(kinds, default=CONST)
        reads = jx.union(self.reads, ins)
        if effects.has_side_effects(eqn):
            kind = self._kind_of_effect(i, eqn, kind, reads)
        elif kind == PARAM and self._is_regulariser(eqn, ins, reads):
            # A scalar made from one block's parameters (an L2 term) is a value of that block's
            # stage.
            kind, self.floating[i] = MAIN, reads
        elif kind == MAIN and reads and self._is_number_without_data(eqn):
            self.floating[i] = reads
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

    def _is_regulariser(self, eqn, ins, reads):
        """Whether an equation reduces arrays of one block, or of one leaf outside, to scalars."""
        owners = {self.leaves[i].block or i for i in reads}
        return (
            len(owners) == 1
            and all(jx.num_elements(v.aval) == 1 for v in eqn.outvars)
            and any(jx.num_elements(v.aval) > 1 for v in ins)
        )

    def _is_number_without_data(self, eqn):
        """Whether an equation computes scalars from parameters alone (sums of regularisers)."""
        outs = eqn.outvars
        return self._of_data.isdisjoint(outs) and all(jx.num_elements(v.aval) == 1 for v in outs)

    def read_by(self, i: int) -> frozenset[int]:
        """Leaves that main equation `i` reads, directly or through casts and transposes."""
        return jx.union(self.reads, self.jaxpr.eqns[i].invars)

    def events(self) -> list[tuple[int, frozenset[int]]]:
        """The reads in order: position among the main equations, and the leaves that are read."""
        main = [i for i, kind in enumerate(self.eqn_kind) if kind == MAIN]
        # A floating equation is computed with its block, so its traced place says nothing about
        # order.
        found = [(p, self.read_by(i)) for p, i in enumerate(main) if i not in self.floating]
        return [(p, reads) for p, reads in found if reads]


def find_stretches(flow: Dataflow) -> list[Stretch]:
    """Lists the stretches of reads, one for each stage, in forward order.

    A module outside blocks that is applied several times in a row counts as a block. A block with
    repeated reads gives a stretch for each pass.
    """
    events = flow.events()
    loops = _loops(flow.leaves, events)
    stretches: list[Stretch] = []
    history: list[list[tuple[int, int]]] = []
    for p, reads in events:
        keys = frozenset(k for i in reads if (k := loops.get(i, flow.leaves[i].block)) is not None)
        own = sorted(i for i in reads if i in loops or flow.leaves[i].block is not None)
        if not keys:
            continue  # the embedding or the head: added around the blocks later
        if stretches and stretches[-1].keys == keys:
            stretches[-1] = dataclasses.replace(stretches[-1], last=p)
            history[-1] += [(p, i) for i in own]
        else:
            stretches.append(Stretch(name="", keys=keys, first=p, last=p))
            history.append([(p, i) for i in own])
    stretches = [
        r
        for stretch, reads in zip(stretches, history, strict=True)
        for r in _passes(stretch, reads)
    ]
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


def _passes(stretch: Stretch, reads: list[tuple[int, int]]) -> list[Stretch]:
    """Splits a stretch with repeated reads: one block's weights, applied several times.

    The reads (position, leaf) (3, 0) (4, 1) (7, 0) (8, 1) are two passes, 3-4 and 7-8.
    """
    # Two reads of a single leaf may both belong to one pass.
    times = power([i for _, i in reads]) if len({i for _, i in reads}) > 1 else 1
    size = len(reads) // times
    if len(stretch.keys) > 1 or times == 1:
        return [stretch]
    chunks = [reads[k * size : (k + 1) * size] for k in range(times)]
    # One equation that reads for two passes can't be in two stages.
    if any(a[-1][0] >= b[0][0] for a, b in zip(chunks, chunks[1:], strict=False)):
        return [stretch]
    return [dataclasses.replace(stretch, first=c[0][0], last=c[-1][0]) for c in chunks]


def _with_rest(flow, events, stretches: list[Stretch], loops) -> list[Stretch]:
    """Adds stretches for parameters outside blocks: before, after, and alone between blocks."""
    rest = [
        (p, i) for p, reads in events for i in sorted(reads)
        if flow.leaves[i].block is None and i not in loops
    ]  # fmt: skip
    if not stretches:
        return [Stretch(name="model", keys=frozenset(), first=0, last=rest[-1][0] if rest else 0)]
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
    positions: dict[int, list[int]] = {}
    for k, reads in outside.items():
        # A leaf that is read only in this gap, or only at both ends like a tied embedding, makes a
        # stretch. A leaf read elsewhere too doesn't: a neighbouring block may take that read.
        own = [p for p, i in reads if gaps[i] <= ({k} | set(ends) if k in ends else {k})]
        # Reads before the first block or after the last one always get their own stage; inside the
        # block's stage, they would make it differ from its like blocks.
        if not own and k in ends:
            own = [reads[0 if k == 0 else -1][0]]
        positions[k] = own
    out = []
    for k in range(len(stretches) + 1):
        if positions.get(k):
            out.append(
                Stretch(name="", keys=frozenset(), first=min(positions[k]), last=max(positions[k]))
            )
        out += stretches[k : k + 1]
    return out


def _named(stretches: list[Stretch]) -> list[Stretch]:
    """Names stretches by their blocks, or by their place between them."""
    seen: dict[frozenset, int] = defaultdict(int)
    named = []
    blocks = [k for k, stretch in enumerate(stretches) if stretch.keys]
    for k, stretch in enumerate(stretches):
        if stretch.name:
            named.append(stretch)
            continue
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
        times = Counter(i for visit in visits for i in visit)
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
        by_block: dict[ModelPath, set[int]] = defaultdict(set)
        for i in reads:
            if (block := flow.leaves[i].block) is not None:
                by_block[block].add(i)
        if not by_block:
            continue
        for block, own in by_block.items():
            if block in before:
                visits[block][-1] |= own
            else:
                visits[block].append(frozenset(own))
        before = frozenset(by_block)
    return visits
