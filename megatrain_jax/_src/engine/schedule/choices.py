"""The choices of a schedule search: stages that save residuals, and parts that stay on the device.

A `Choice` fixes the stages that save residuals from forward to backward, and how many of them may
offload these residuals to the host in between. The remaining residuals stay on the device. It also
ranks further *units* that may stay there: masters with optimizer state, gradients, activations,
residuals. The search then tries several numbers of units.

Choices that differ in the number of stages alone form a *family*. Its largest number is known from
the bytes of a step without residuals, before any step is written.

Example: 6 stages have equal residuals. The device has memory for 2 of them beside the tasks' needs,
and the host for 3. Stages 1 to 5 save residuals, because late stages need theirs for a shorter
time::

    stages    residuals
    4, 5      stay on the device
    1 to 3    wait in the host, or stay if the search finds more memory
    0         computes its results again
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.schedule import memory_demand
from megatrain_jax._src.engine.schedule.least_time import computing_seconds
from megatrain_jax._src.engine.schedule.order import gradient_tasks
from megatrain_jax._src.engine.schedule.tasks import TaskLists, build_task_lists
from megatrain_jax._src.engine.schedule.workload import Workload

# Number of candidates for the count of stages that save residuals.
_NUM_CANDIDATES = 6
# Up to this fraction, the stages that save residuals are few.
_FEW = 1 / 8
# Number of task lists that a search keeps for reuse; each takes some MiB.
_MOST_LISTS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of stages that save residuals, and the parts that may stay on the device.

    Attributes:
        step: The step without saved residuals.
        kept: The stages that save residuals.
        num_offloadable: Number of stages that may offload their residuals, as activations are.
        spares_host: Whether activations stay on the device in preference to masters and optimizer
            state. This saves host memory, because state has its memory there anyway.
        masters_first: Whether masters stay in preference to gradients and optimizer state. This
            saves time where a step waits for the link, because a step fetches masters twice. The
            groups that stay are spread over the stages then, instead of the first ones.
    """

    step: Workload
    kept: frozenset[int] = frozenset()
    num_offloadable: int = 0
    spares_host: bool = False
    masters_first: bool = False

    @functools.cached_property
    def lists(self) -> TaskLists:
        """The tasks, in three waves at most."""

        def lists() -> TaskLists:
            bare = Choice(step=self.step).lists if self.kept else None
            step = replace(self.step, kept=self.kept)
            return build_task_lists(step, few_waves=True, bare=bare)

        # A search within the host's memory follows one on the same workload without that limit.
        key = IdentityKey(self.step), self.kept
        return remembered("task lists", lambda: key, lists, _MOST_LISTS)

    @functools.cached_property
    def computing(self) -> float:
        """Seconds of computation in a steady step, a lower bound of its time."""
        return computing_seconds(self.step, self.kept)

    @functools.cached_property
    def units(self) -> list[tuple[Key, ...]]:
        """Units that may stay, best first; the parts of a unit stay together or not at all."""
        offloadable = [(key,) for key in self._residuals[self._num_staying :]]
        units = [*_units(self.lists, self.masters_first), *offloadable]
        return sorted(units, key=_rests_in_host) if self.spares_host else units

    def residents(self, count: int) -> frozenset[Key]:
        """The resident parts if the first `count` units stay."""
        return frozenset(self._residuals[: self._num_staying]).union(*self.units[:count])

    def least_bytes(self, count: int) -> int:
        """The minimum device memory in bytes if the first `count` units stay."""
        return memory_demand.least_bytes(self.lists, self.residents(count))

    @functools.cached_property
    def _residuals(self) -> list[Key]:
        # Late stages come first, because they need their residuals for the shortest time.
        return [Key(Kind.RESIDUALS, stage) for stage in sorted(self.kept, reverse=True)]

    @property
    def _num_staying(self) -> int:
        return len(self.kept) - self.num_offloadable


@dataclass(frozen=True, kw_only=True)
class Family:
    """Choices that differ in the number of stages that save residuals.

    Attributes:
        of: Returns the choice for a number of stages.
        counts: Numbers of stages to try, in this order.
    """

    of: Callable[[int], Choice]
    counts: Sequence[int]


def find_families(workload: Workload, selective: Workload | None, budget: int) -> Iterator[Family]:
    """The families of choices with saved residuals that fit on the device.

    Args:
        workload: See `find_schedule`.
        selective: See `find_schedule`.
        budget: Maximum bytes on the device.
    """
    able, most = len(_ranked(workload)), 0
    for kinds in (workload, selective):
        # If not all residuals of all stages fit, the costliest results of each are tried as well.
        if kinds is not None and most < able:
            yield (family := _staying(kinds, budget))
            most = max(most, *family.counts, 0)
    if not workload.may_offload_residuals or most == able:
        return
    # Moving all residuals would fill the host, while each byte of them saves little time.
    if selective is not None:
        for family in _with_offload(selective, budget):
            yield family
            most = max(most, *family.counts)
    # If the device can hold the residuals of few stages only, further residuals may be offloaded.
    if most <= _FEW * able:
        yield _spread_out(workload, budget)


class _Fits:
    """Tells which residuals fit on the device, from the bytes of a step without them."""

    def __init__(self, workload: Workload, budget: int):
        self._sizes, self._budget = workload.residuals, budget
        self._bare = Choice(step=workload)

    def __call__(
        self, staying: Sequence[int], moving: Sequence[int] = (), *, with_all: bool = False
    ) -> bool:
        resident = self._bare.residents(len(self._bare.units) if with_all else 0)
        both = ({stage: self._sizes[stage] for stage in those} for those in (staying, moving))
        lists = self._bare.lists
        needed = memory_demand.least_bytes_with_residuals(lists, resident, *both)
        return needed <= self._budget


def _shares(most: int) -> set[int]:
    shares = range(1, _NUM_CANDIDATES + 1)
    return {round(most * share / _NUM_CANDIDATES) for share in shares} - {0}


def _staying(workload: Workload, budget: int) -> Family:
    """Choices from the most stages with residuals that fit to few.

    They include the most stages that fit while all units stay.
    """
    ranked, fits = _ranked(workload), _Fits(workload, budget)

    def of(count: int) -> Choice:
        return Choice(step=workload, kept=frozenset(ranked[:count]))

    # More residuals leave memory for fewer residents; the clock decides between them.
    most = memory_demand.most_that_fit(len(ranked), lambda count: fits(ranked[:count]))
    while most and of(most).least_bytes(0) > budget:
        most -= 1
    every = memory_demand.most_that_fit(most, lambda count: fits(ranked[:count], with_all=True))
    return Family(of=of, counts=sorted(_shares(most) | {every} - {0}, reverse=True))


def _with_offload(workload: Workload, budget: int) -> Iterator[Family]:
    """All stages save residuals, or the most of which enough stay on the device for the host."""
    ranked, fits = _ranked(workload), _Fits(workload, budget)

    @functools.cache
    def of(count: int) -> Choice:
        """Residuals of `count` stages; as many stay on the device as fit."""
        those = sorted(ranked[:count], reverse=True)
        staying = memory_demand.most_that_fit(count, lambda n: fits(those[:n], those[n:]))
        return Choice(step=workload, kept=frozenset(those), num_offloadable=count - staying)

    able = len(ranked)
    every = Choice(step=workload, kept=frozenset(ranked), num_offloadable=able)
    if able and every.least_bytes(0) <= budget:
        yield Family(of=lambda _: every, counts=[able])
        yield Family(of=of, counts=sorted(_shares(able), reverse=True))


def _spread_out(workload: Workload, budget: int) -> Family:
    """Choices that offload the residuals of stages far from each other, from few stages on.

    The residuals of neighbours would be on the device, and on the link, at the same time. With
    stages between them, the residuals of one stage move while these stages compute.
    """
    fits = _Fits(workload, budget)
    # Around the ends of a model, larger groups may leave no memory for residuals.
    able = [stage for stage in _ranked(workload) if fits((), (stage,))]
    of_a_kind = groupby(able, lambda s: (workload.costs.recompute[s], workload.residuals[s]))
    stages = tuple(stage for _, those in of_a_kind for stage in spread_out(list(those)))

    @functools.cache
    def of(count: int) -> Choice:
        return Choice(step=workload, kept=frozenset(stages[:count]), num_offloadable=count)

    most = memory_demand.most_that_fit(len(stages), lambda count: fits((), stages[:count]))
    while most and of(most).least_bytes(0) > budget:
        most -= 1
    return Family(of=of, counts=sorted(_shares(most)))


def _ranked(workload: Workload) -> list[int]:
    """The stages that can save residuals, best first.

    Stages that save the most time per byte come first. Among equal stages, later ones come first,
    because they need their residuals for the shortest time.
    """
    seconds, sizes = workload.costs.recompute, workload.residuals
    able = (stage for stage, size in enumerate(sizes) if size and stage not in workload.again)
    return sorted(able, key=lambda stage: (-seconds[stage] / sizes[stage], -stage))


def _rests_in_host(unit: tuple[Key, ...]) -> bool:
    """Whether a unit always has host memory; moving any other unit takes additional memory."""
    return unit[0].kind in LASTING


_T = TypeVar("_T")


def spread_out(groups: Sequence[_T]) -> list[_T]:
    """Reorders groups so that the first few, and the rest, are spread over all of them.

    While a forward computes with groups that stay, the next group that moves arrives. Moving groups
    in a row would arrive one after another, and each forward would wait. In turn, late groups in a
    row may stay from their forward to their backward.

    Example: of groups 0 to 7, the first four in the new order are 0, 4, 2 and 6, and the rest are
    1, 5, 3 and 7.
    """
    num_bits = (len(groups) - 1).bit_length()

    def reversed_bits(at: int) -> int:
        return sum((at >> bit & 1) << (num_bits - 1 - bit) for bit in range(num_bits))

    return [groups[at] for at in sorted(range(len(groups)), key=reversed_bits)]


def _units(lists: TaskLists, masters_first: bool) -> list[tuple[Key, ...]]:
    """The units without residuals that may stay on the device, best first."""
    workload = lists.workload
    # A gradient that is made and consumed within one task never has to stay.
    lasting = {use.key for task in lists.steady for use in task.uses if not use.creates}
    # The ends of a model come first: an embedding and a head are often larger than blocks, so that
    # computation hides less of their transfer. Groups that no stage reads come last.
    ends = (*workload.stages[0], *workload.stages[-1])
    blocks = list(dict.fromkeys(group for stage in workload.stages for group in stage))
    blocks = spread_out(blocks) if masters_first else blocks
    groups = dict.fromkeys((*ends, *blocks, *range(len(workload.sizes))))
    if workload.on_disk:  # what stays on the device need not be read and written
        on_disk = {key.owner for key in workload.on_disk if key.kind is not Kind.ACTIVATION}
        groups = dict.fromkeys(sorted(groups, key=lambda group: group not in on_disk))
    # Gradients that are made last are used first.
    last = workload.waves - 1
    produced = [group for _, complete in gradient_tasks(workload, last) for group in complete]
    gradients = [(Key(Kind.GRADIENT, group),) for group in reversed(produced)]
    activations = [(Key(Kind.ACTIVATION, i),) for i in workload.activations]
    masters = [(Key(Kind.MASTERS, group),) for group in groups]
    state = [(Key(Kind.OPTIMIZER_STATE, group),) for group in groups]
    together = [(*m, *s) for m, s in zip(masters, state, strict=True)]
    if workload.waves > 1:
        # Each wave fetches masters twice, and moves gradients and activations in and out once;
        # activations need their memory only for a part of the time. Optimizer state moves once per
        # step. Sums of late stages come first: the first wave updates these last, when the device
        # waits for the link, while sums of early stages arrive before it begins.
        units = [*masters, *activations, *reversed(gradients), *state]
    elif masters_first:
        # Everything else moves in and out once.
        units = [*masters, *gradients, *state, *activations]
    elif workload.deferred:
        # A resident gradient saves a round trip for few bytes. An activation moves out and in once,
        # which is less traffic per byte than state.
        units = [*gradients, *together, *activations]
    else:
        of_group = zip(together, groups, strict=True)
        units = [(*unit, Key(Kind.GRADIENT, group)) for unit, group in of_group] + activations
    sized = (tuple(key for key in unit if key in lasting) for unit in units)
    return [unit for unit in sized if unit]
