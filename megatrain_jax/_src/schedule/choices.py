"""The choices of a schedule search: which stages keep residuals, which parts stay on the device.

A choice says which stages keep residuals, and of how many of these the host may hold them for the
time between. Residuals of all others have to stay on the device. So may further parts, *units* one
after the other: masters with optimizer state, gradients, activations, residuals.

A worked example: 6 stages whose residuals are alike, a device with room for 2 of them beside what
tasks need, and a host that takes 3. Stages 1 to 5 keep theirs, since those of the last stages are
needed for the shortest time::

    stages    residuals
    4, 5      stay on the device
    1 to 3    wait in the host, or stay if the search finds more room
    0         computes its results again
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.schedule import room
from megatrain_jax._src.schedule.order import gradient_tasks
from megatrain_jax._src.schedule.tasks import TaskLists, build_task_lists
from megatrain_jax._src.schedule.workload import Workload

# Of all numbers of stages that keep residuals and fit, these many are tried.
_NUM_KEPT_CANDIDATES = 6


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The tasks if some stages keep residuals, and what may stay on the device.

    Attributes:
        lists: The tasks.
        num_travelling: Number of stages whose residuals may wait in the host, as activations may.
        spares_host: Whether activations stay on the device in preference to masters and optimizer
            state: an activation that stays needs no host memory, and state has its place there.
    """

    lists: TaskLists
    num_travelling: int = 0
    spares_host: bool = False

    @property
    def num_kept(self) -> int:
        """Number of the stages that keep residuals."""
        return len(self.lists.workload.kept)

    @functools.cached_property
    def computing(self) -> float:
        """Seconds that a steady step computes: whatever moves, it takes no less."""
        return sum(
            self.lists.times(number) * computation.seconds
            for number, task in enumerate(self.lists.steady)
            for computation in task.computations
        )

    @functools.cached_property
    def units(self) -> list[tuple[Key, ...]]:
        """Parts that may stay, best first; those of a unit stay together or not at all."""
        travelling = [(key,) for key in self._residuals[self._num_staying :]]
        units = [*_units(self.lists), *travelling]
        return sorted(units, key=_rests_in_host) if self.spares_host else units

    def residents(self, count: int) -> frozenset[Key]:
        """The parts that stay if the first so many units do."""
        return frozenset(self._residuals[: self._num_staying]).union(*self.units[:count])

    def least_bytes(self, count: int) -> int:
        """The least device memory with which the first so many units can stay."""
        return room.least_bytes(self.lists, self.residents(count))

    @functools.cached_property
    def _residuals(self) -> list[Key]:
        # Those of the last stages come first, as they are needed for the shortest time.
        stages = sorted(self.lists.workload.kept, reverse=True)
        return [Key(Kind.RESIDUALS, stage) for stage in stages]

    @property
    def _num_staying(self) -> int:
        return len(self._residuals) - self.num_travelling


def find_choices(
    workload: Workload, lean: Workload | None, budget: int, fits_host: Callable[[Choice], bool]
) -> list[Choice]:
    """The choices in which stages keep residuals, and which fit the device.

    Args:
        workload: See `find_schedule`.
        lean: See `find_schedule`.
        budget: Bytes that may be on the device.
        fits_host: Whether the host has room for the residuals that wait there by a choice.
    """
    able, found = len(_ranked(workload)), []
    for kinds in (workload, lean):
        # The costliest results are kept if there is no room for all of them.
        if kinds is not None and not any(choice.num_kept == able for choice in found):
            found += _staying(kinds, budget)
    # All residuals would fill the host for the little that each byte of them saves.
    if workload.may_travel and lean is not None and all(c.num_kept < able for c in found):
        found += _travelling(lean, budget, fits_host)
    return found


def _staying(workload: Workload, budget: int) -> Iterator[Choice]:
    """Few stages that keep residuals, as many as fit, and as many as all state leaves room for."""

    @functools.cache
    def keeping(count: int) -> Choice:
        return _keeping(workload, count)

    def fits(count: int, *, with_all: bool) -> bool:
        choice = keeping(count)
        return choice.least_bytes(len(choice.units) if with_all else 0) <= budget

    # More residuals leave room for fewer residents: which of the two saves more, the clock tells.
    most = room.most_that_fit(len(_ranked(workload)), lambda count: fits(count, with_all=False))
    shares = range(1, _NUM_KEPT_CANDIDATES + 1)
    counts = {round(most * share / _NUM_KEPT_CANDIDATES) for share in shares}
    counts.add(room.most_that_fit(most, lambda count: fits(count, with_all=True)))
    for count in sorted(counts - {0}):
        yield keeping(count)


def _travelling(
    workload: Workload, budget: int, fits_host: Callable[[Choice], bool]
) -> Iterator[Choice]:
    """The most stages that can keep residuals if those of some may wait in the host."""
    able = len(_ranked(workload))
    every = _keeping(workload, able, able)
    if not able or every.least_bytes(0) > budget:
        return
    if fits_host(every):
        yield every
        return

    @functools.cache
    def keeping(count: int) -> Choice:
        """Residuals of so many stages, of which as many stay as the device has room for."""

        def beside(num_staying: int) -> Choice:
            return _keeping(workload, count, count - num_staying)

        return beside(room.most_that_fit(count, lambda n: beside(n).least_bytes(0) <= budget))

    if count := room.most_that_fit(able, lambda count: fits_host(keeping(count))):
        yield keeping(count)


def _keeping(workload: Workload, count: int, num_travelling: int = 0) -> Choice:
    kept = frozenset(_ranked(workload)[:count])
    lists = build_task_lists(replace(workload, kept=kept), few_waves=True)
    return Choice(lists=lists, num_travelling=num_travelling)


def _ranked(workload: Workload) -> list[int]:
    """The stages that can keep residuals, best first.

    Those that save the most time for their bytes come first, and of equal ones the last stages,
    whose residuals are needed for the shortest time.
    """
    seconds, sizes = workload.costs.recompute, workload.residuals
    able = (stage for stage, size in enumerate(sizes) if size and stage not in workload.again)
    return sorted(able, key=lambda stage: (-seconds[stage] / sizes[stage], -stage))


def _rests_in_host(unit: tuple[Key, ...]) -> bool:
    """Whether a unit has its place in the host anyway; the others take more of it to wait there."""
    return unit[0].kind in LASTING


def _units(lists: TaskLists) -> list[tuple[Key, ...]]:
    """The parts other than residuals that may stay on the device, best first."""
    workload = lists.workload
    # A gradient that one task makes and consumes needs no lasting room.
    lasting = {use.key for task in lists.steady for use in task.uses if not use.creates}
    # The ends of a model first: mostly an embedding and a head, larger than blocks, so that what
    # is computed beside them hides less of their way. Last, the groups that no stage reads.
    stages = (workload.stages[0], workload.stages[-1], *workload.stages, range(len(workload.sizes)))
    groups = dict.fromkeys(group for stage in stages for group in stage)
    # Those made last are used first.
    last = workload.waves - 1
    produced = [group for _, complete in gradient_tasks(workload, last) for group in complete]
    gradients = [(Key(Kind.GRADIENT, group),) for group in reversed(produced)]
    activations = [(Key(Kind.ACTIVATION, i),) for i in workload.activations]
    masters = [(Key(Kind.MASTERS, group),) for group in groups]
    state = [(Key(Kind.OPTIMIZER_STATE, group),) for group in groups]
    together = [(*m, *s) for m, s in zip(masters, state, strict=True)]
    if workload.waves > 1:
        # Each wave takes masters in twice and the others in and out once, activations for a part of
        # the time; optimizer state moves once a step.
        units = [*masters, *activations, *gradients, *state]
    elif workload.deferred:
        # A waiting gradient saves a round trip for few bytes. An activation takes one trip out and
        # one in, less for its bytes than what lasts.
        units = [*gradients, *together, *activations]
    else:
        of_group = zip(together, groups, strict=True)
        units = [(*unit, Key(Kind.GRADIENT, group)) for unit, group in of_group] + activations
    sized = (tuple(key for key in unit if key in lasting) for unit in units)
    return [unit for unit in sized if unit]
