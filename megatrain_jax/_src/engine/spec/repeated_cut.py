"""The cut of a deep model, from the cut of the same model with fewer of its blocks.

Example: four layers, of which the second one is repeated twice, so that there are six. The stages
before it and after it stay, and the values between them get new numbers::

    few      embedding  layers.0  layers.1                      layers.2  layers.3  head
    inputs   ()         (1,)      (2,)                          (3,)      (4,)      (5,)
    whole    embedding  layers.0  layers.1  layers.2  layers.3  layers.4  layers.5  head
    inputs   ()         (1,)      (2,)      (3,)      (4,)      (5,)      (6,)      (7,)

The layer after a repeated one tells which of its inputs move on from layer to layer, which are the
same for all, such as rotary tables, and which are made from data for each layer anew. The prologue
makes the latter only once here, for all copies of a layer, as no plan depends on what it computes.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from megatrain_jax._src.common.repeated_model import RepeatedModel
from megatrain_jax._src.common.trees import ModelPath
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.spec.cut_run import Cut
from megatrain_jax._src.engine.state.layout import Grouping, group_leaves

Copied = tuple[int, int]
"""The number of a leaf or stage of the small model, and of its copy; 0 for the first one."""


class NotAlikeError(Exception):
    """Raised if blocks that are to be repeated differ from those after them."""


def repeated_cut(cut: Cut, model: RepeatedModel) -> Cut:
    """The cut of a whole model, for plans of it.

    Its optimizer has no update of the whole tree and no scalars over all groups.

    Args:
        cut: The cut of the smaller model.
        model: The model.

    Raises:
        NotAlikeError: If the blocks differ.
    """
    return _Repeating(cut, model).cut()


class _Repeating:
    """Repeats the stages and groups of some blocks."""

    def __init__(self, cut: Cut, model: RepeatedModel):
        self._cut, self._model, self._stages = cut, model, cut.program.stages
        self._numbers = [self._number(leaf.block) for leaf in cut.leaves]
        self._leaves = self._copied(self._numbers)
        of_stages = [{self._numbers[i] for i in s.leaves} - {None} for s in self._stages]
        _check(all(len(numbers) <= 1 for numbers in of_stages))
        self._order = self._copied([next(iter(numbers), None) for numbers in of_stages])
        copied = [s for s, copy in self._order if copy == 1]
        self._start, self._stop = copied[0], copied[-1] + 1
        self._makers = {
            value: (s, at)
            for s, stage in enumerate(self._stages)
            for at, value in enumerate(stage.outputs)
        }
        self._own: dict[int, int] = {}  # data of a repeated block alone, and of the next block
        self._check_alike()

    def _number(self, path: ModelPath | None) -> int | None:
        """The number of the block that a path is in; None outside of the blocks."""
        depth = len(self._model.container)
        if path is None or path[:depth] != self._model.container:
            return None
        return int(path[depth])

    def _copied(self, numbers: Sequence[int | None]) -> list[Copied]:
        """Leaves or stages in their order with copies, from the number of each one's block."""
        first, stop = self._model.first, self._model.first + self._model.period
        those = [i for i, n in enumerate(numbers) if n is not None and first <= n < stop]
        _check(those == list(range(those[0], those[-1] + 1)))
        copies = range(1, self._model.times + 1)
        return [
            *((i, 0) for i in range(those[-1] + 1)),
            *((i, copy) for copy in copies for i in those),
            *((i, 0) for i in range(those[-1] + 1, len(numbers))),
        ]

    def _check_alike(self) -> None:
        """Checks that the blocks after the repeated ones, or those before them, are like these."""
        cut, stages, start, stop = self._cut, self._stages, self._start, self._stop
        _check(not cut.program.warnings and start >= stop - start)
        later = {*range(stop, len(stages))}
        for s, by in self._distances.items():
            _check(0 <= s + by < len(stages))
            self._check_stages(s, by)
            later.discard(s + by)
        made = {value for s in range(start, stop) for value in stages[s].outputs}
        read = [value for s in later for value in stages[s].inputs]
        _check(made.isdisjoint([*cut.program.outputs, *read]))

    @functools.cached_property
    def _distances(self) -> dict[int, int]:
        """How many stages after each repeated one the stage is that it is compared with.

        The last block may differ. So a block with no like one between it and the last is compared
        with the one before it.
        """
        last = max(number for number in self._numbers if number is not None)
        found = {}
        for s in range(self._start, self._stop):
            own = [self._numbers[i] for i in self._stages[s].leaves]
            ends = any(n is not None and n + self._model.period >= last for n in own)
            found[s] = (self._start - self._stop) if ends else (self._stop - self._start)
        return found

    def _check_stages(self, s: int, by: int) -> None:
        """Checks that a stage of a repeated block is like the one so many stages after it."""
        cut, one, other = self._cut, self._stages[s], self._stages[s + by]
        places = {(x.path, x.index): i for i, x in enumerate(cut.leaves)}
        groups, period = cut.grouping.group_of, self._model.period * (1 if by > 0 else -1)
        moved = [self._moved(cut.leaves[i], period) for i in one.leaves]
        _check(tuple(places.get((x.path, x.index)) for x in moved) == other.leaves)
        _check(_form(one) == _form(other))
        names = {".".join(map(str, leaf.block)) for leaf in moved if leaf.block}
        _check(not names or names == {other.name})
        for a, b in zip(one.leaves, other.leaves, strict=True):
            _check(_update(cut.optimizer, groups[a]) == _update(cut.optimizer, groups[b]))
        for a, b in zip(one.inputs, other.inputs, strict=True):
            maker, at = self._makers.get(a, (-1, 0))
            if a == b:
                _check(maker < self._start)
            elif a in self._makers:
                _check(maker >= (self._start - by if by > 0 else self._start))
                _check(self._makers.get(b) == (maker + by, at))
            else:
                _check(self._own.setdefault(a, b) == b and self._are_own(a, b, by))

    def _are_own(self, value: int, other: int, by: int) -> bool:
        """Whether two values are alike, and each is read by its own block only."""
        values, along = self._cut.program.values, self._cut.program.examples.values
        forms = {(values[i].shape, values[i].dtype, i in along) for i in (value, other)}
        own = range(self._start, self._stop)
        readers = {
            i: [s for s, x in enumerate(self._stages) if i in x.inputs] for i in (value, other)
        }
        return (
            len(forms) == 1
            and all(s in own for s in readers[value])
            and all(s - by in own for s in readers[other])
            and {value, other}.isdisjoint([*self._makers, *self._cut.program.outputs])
        )

    def _moved(self, leaf: Leaf, by: int) -> Leaf:
        """A leaf as that of a later block."""
        if self._number(leaf.block) is None:
            return leaf
        depth = len(self._model.container)

        def moved(path: ModelPath) -> ModelPath:
            key: Any = path[depth]
            return *path[:depth], type(key)(int(key) + by), *path[depth + 1 :]

        assert leaf.block is not None
        return dataclasses.replace(leaf, path=moved(leaf.path), block=moved(leaf.block))

    def cut(self) -> Cut:
        """See `repeated_cut`."""
        cut, model = self._cut, self._model
        whole, stop = [], model.first + model.period
        for i, copy in self._leaves:
            number = self._numbers[i]
            after = number is not None and number >= stop
            times = model.times if after else copy
            whole.append(self._moved(cut.leaves[i], times * model.period))
        program = self._program(whole)
        grouping = group_leaves(whole, [stage.leaves for stage in program.stages])
        return dataclasses.replace(
            cut,
            leaves=tuple(whole),
            program=program,
            grouping=grouping,
            optimizer=self._optimizer(grouping),
        )

    def _program(self, leaves: Sequence[Leaf]) -> Any:
        """The loss, with stages repeated."""
        program, start, stop = self._cut.program, self._start, self._stop
        place = {copied: i for i, copied in enumerate(self._leaves)}
        times = self._model.times
        # Values by number or, if a stage makes them, by stage and place; and by copy.
        ids: dict[Hashable, int] = {}
        source: list[int] = []

        def number(value: int, copy: int = 0) -> int:
            maker = self._makers.get(value)
            own = copy if maker or value in self._own else 0
            name = maker or value, own
            if name not in ids:
                source.append(value)
            return ids.setdefault(name, len(ids))

        def taken(s: int, copy: int, at: int) -> int:
            """The number of an input of a stage."""
            value = self._stages[s].inputs[at]
            maker = self._makers.get(value, (-1, 0))[0]
            if s >= stop:
                return number(value, times if start <= maker < stop else 0)
            if s < start or maker >= start or value in self._own:
                return number(value, copy)
            moved = self._stages[s + self._distances[s]].inputs[at]
            # Of the blocks before: for a copy, these are copies, too.
            return number(value) if moved == value or not copy else number(moved, copy - 1)

        outputs = tuple(map(number, program.outputs))
        stages = []
        for s, copy in self._order:
            stage = self._stages[s]
            inputs = tuple(taken(s, copy, at) for at in range(len(stage.inputs)))
            made = tuple(number(value, copy) for value in stage.outputs)
            own = tuple(place[i, copy if (i, copy) in place else 0] for i in stage.leaves)
            blocks = [block for i in own if (block := leaves[i].block)]
            name = ".".join(map(str, blocks[0])) if blocks else stage.name
            stages.append(
                dataclasses.replace(stage, name=name, leaves=own, inputs=inputs, outputs=made)
            )
        for value in program.prologue_values:
            number(value)
        results = dict(zip(program.prologue_values, program.prologue.outvars, strict=True))
        early = [i for i, value in enumerate(source) if value in results]
        prologue = program.prologue
        outvars = [results[source[i]] for i in early]
        along = program.examples.values
        examples = frozenset(i for i, value in enumerate(source) if value in along)
        return dataclasses.replace(
            program,
            stages=tuple(stages),
            prologue=jx.sub_jaxpr(prologue, prologue.eqns, prologue.invars, outvars),
            prologue_values=tuple(early),
            values=tuple(program.values[value] for value in source),
            outputs=outputs,
            examples=dataclasses.replace(program.examples, values=examples),
            shared=self._with_copies(program.shared),
            in_float8=self._with_copies(program.in_float8),
        )

    def _with_copies(self, leaves: frozenset[int]) -> frozenset[int]:
        return frozenset(at for at, (i, _) in enumerate(self._leaves) if i in leaves)

    def _optimizer(self, grouping: Grouping) -> OptimizerCut:
        """The optimizer, with groups repeated."""
        group_of, optimizer = self._cut.grouping.group_of, self._cut.optimizer
        groups = [group_of[self._leaves[rows[0]][0]] for rows in grouping.leaves]

        def each(rows: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(rows[g] for g in groups)

        names = "state reduce apply messages initial_state initial_scalars".split()
        changes: dict[str, Any] = {name: each(getattr(optimizer, name)) for name in names}
        return dataclasses.replace(optimizer, **changes)


def _check(is_alike: bool) -> None:
    if not is_alike:
        raise NotAlikeError


def _form(stage: Stage) -> Hashable:
    """What equal blocks have in common."""
    flags = stage.is_trainable, stage.active, stage.has_cotangent
    return stage.key, *flags, len(stage.inputs), len(stage.outputs)


def _update(optimizer: OptimizerCut, group: int) -> Hashable:
    """What the updates of equal blocks have in common."""
    fragments = optimizer.reduce, optimizer.apply, optimizer.initial_state
    keys = [rows[group].key for rows in fragments]
    state = [(leaf.shape, leaf.dtype) for leaf in optimizer.state[group]]
    return *keys, tuple(state), optimizer.messages[group]
