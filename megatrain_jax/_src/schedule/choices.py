"""The choices of a schedule search: stages that save residuals, and parts that stay on the device.

A `Choice` fixes the stages that save residuals from forward to backward, and the number of these
stages that may move their residuals to the host in between. The remaining residuals have to stay on
the device. It also ranks further parts that may stay there: masters, gradients, optimizer state,
activations, residuals. The search then tries several numbers of them.

Example: 6 stages have equal residuals. The device has memory for 2 of them beside the tasks' needs,
and the host for 3. Stages 1 to 5 save residuals, because late stages need theirs for a shorter
time::

    stages    residuals
    4, 5      stay on the device
    1 to 3    wait in the host, or stay if the search finds more memory
    0         computes its results again
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.common.remembering import Same, remembered
from megatrain_jax._src.schedule import room
from megatrain_jax._src.schedule.order import gradient_tasks
from megatrain_jax._src.schedule.tasks import TaskLists, build_task_lists
from megatrain_jax._src.schedule.workload import Workload

# The number of counts of stages with residuals to try, of all that fit.
_NUM_KEPT_CANDIDATES = 6
# The number of task lists that a search may need again; each takes some MiB.
_MOST_LISTS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of stages that save residuals, and the parts that may stay on the device.

    Attributes:
        lists: The tasks.
        num_travelling: Number of stages with residuals that may wait in the host, like activations.
        spares_host: Whether activations stay on the device in preference to masters and optimizer
            state. This saves host memory, because state has its memory there anyway.
    """

    lists: TaskLists
    num_travelling: int = 0
    spares_host: bool = False

    @property
    def num_kept(self) -> int:
        """Number of stages that save residuals."""
        return len(self.lists.workload.kept)

    @functools.cached_property
    def ranked(self) -> list[Key]:
        """Parts that may stay, best first."""
        parts = [*_ranked_parts(self.lists), *self._residuals[self._num_staying :]]
        # State has its host memory anyway; any other part that moves takes additional memory.
        return sorted(parts, key=lambda key: key.kind in LASTING) if self.spares_host else parts

    def residents(self, count: int) -> frozenset[Key]:
        """The resident parts if the first `count` ranked parts stay."""
        return frozenset((*self._residuals[: self._num_staying], *self.ranked[:count]))

    def least_bytes(self, count: int) -> int:
        """The minimum device memory in bytes if the first `count` ranked parts stay."""
        return room.least_bytes(self.lists, self.residents(count))

    @functools.cached_property
    def _residuals(self) -> list[Key]:
        # Late stages come first, because they need their residuals for the shortest time.
        stages = sorted(self.lists.workload.kept, reverse=True)
        return [Key(Kind.RESIDUALS, stage) for stage in stages]

    @property
    def _num_staying(self) -> int:
        return len(self._residuals) - self.num_travelling


def find_choices(
    workload: Workload, lean: Workload | None, budget: int, fits_host: Callable[[Choice], bool]
) -> list[Choice]:
    """The choices with saved residuals that fit on the device.

    Args:
        workload: See `find_schedule`.
        lean: See `find_schedule`.
        budget: Maximum bytes on the device.
        fits_host: Returns whether the host has memory for a choice's waiting residuals.
    """
    able, found = len(_ranked(workload)), []
    for kinds in (workload, lean):
        # If not all residuals of all stages fit, the costliest results of each are tried as well.
        if kinds is not None and not any(choice.num_kept == able for choice in found):
            found += _staying(kinds, budget)
    # Moving all residuals would fill the host, while each byte of them saves little time.
    if workload.may_travel and lean is not None and all(c.num_kept < able for c in found):
        found += _travelling(lean, budget, fits_host)
    return found


def _staying(workload: Workload, budget: int) -> Iterator[Choice]:
    """Choices from few stages with residuals to the most that fit.

    They include the most stages that fit while all ranked parts stay.
    """

    @functools.cache
    def keeping(count: int) -> Choice:
        return keeping_residuals(workload, count)

    def fits(count: int, *, with_all: bool) -> bool:
        choice = keeping(count)
        return choice.least_bytes(len(choice.ranked) if with_all else 0) <= budget

    # More residuals leave memory for fewer residents; the clock decides between them.
    most = room.most_that_fit(len(_ranked(workload)), lambda count: fits(count, with_all=False))
    shares = range(1, _NUM_KEPT_CANDIDATES + 1)
    counts = {round(most * share / _NUM_KEPT_CANDIDATES) for share in shares}
    counts.add(room.most_that_fit(most, lambda count: fits(count, with_all=True)))
    for count in sorted(counts - {0}):
        yield keeping(count)


def _travelling(
    workload: Workload, budget: int, fits_host: Callable[[Choice], bool]
) -> Iterator[Choice]:
    """The choice with the most stages that save residuals, if some may wait in the host."""
    able = len(_ranked(workload))
    every = keeping_residuals(workload, able, able)
    if not able or every.least_bytes(0) > budget:
        return
    if fits_host(every):
        yield every
        return

    @functools.cache
    def keeping(count: int) -> Choice:
        """Residuals of `count` stages; as many stay on the device as fit."""

        def beside(num_staying: int) -> Choice:
            return keeping_residuals(workload, count, count - num_staying)

        return beside(room.most_that_fit(count, lambda n: beside(n).least_bytes(0) <= budget))

    if count := room.most_that_fit(able, lambda count: fits_host(keeping(count))):
        yield keeping(count)


def keeping_residuals(workload: Workload, count: int, num_travelling: int = 0) -> Choice:
    """The choice in which the best `count` stages save residuals.

    Args:
        workload: The step.
        count: Number of stages that save residuals.
        num_travelling: See `Choice`.
    """
    kept = frozenset(_ranked(workload)[:count] if count else ())

    def lists() -> TaskLists:
        return build_task_lists(replace(workload, kept=kept), few_waves=True)

    # A search within the host's memory follows one on the same workload without that limit.
    found = remembered("task lists", lambda: (Same(workload), kept), lists, _MOST_LISTS)
    return Choice(lists=found, num_travelling=num_travelling)


def _ranked(workload: Workload) -> list[int]:
    """The stages that can save residuals, best first.

    Stages that save the most time per byte come first. Among equal stages, later ones come first,
    because they need their residuals for the shortest time.
    """
    seconds, sizes = workload.costs.recompute, workload.residuals
    able = (stage for stage, size in enumerate(sizes) if size and stage not in workload.again)
    return sorted(able, key=lambda stage: (-seconds[stage] / sizes[stage], -stage))


def _ranked_parts(lists: TaskLists) -> list[Key]:
    """The parts without residuals that may stay on the device, best first."""
    workload = lists.workload
    # A gradient that is made and consumed within one task never has to stay.
    lasting = {use.key for task in lists.steady for use in task.uses if not use.creates}
    # The ends of a model come first: an embedding and a head are often larger than blocks, so that
    # computation hides less of their transfer. Groups that no stage reads come last.
    stages = (workload.stages[0], workload.stages[-1], *workload.stages, range(len(workload.sizes)))
    groups = dict.fromkeys(group for stage in stages for group in stage)
    # Gradients that are made last are used first.
    last = workload.waves - 1
    produced = [group for _, complete in gradient_tasks(workload, last) for group in complete]
    gradients = [Key(Kind.GRADIENT, group) for group in reversed(produced)]
    activations = [Key(Kind.ACTIVATION, i) for i in workload.activations]
    masters = [Key(Kind.MASTERS, group) for group in groups]
    state = [Key(Kind.OPTIMIZER_STATE, group) for group in groups]
    # Masters come first, because each byte of them is fetched twice: for the forward and for the
    # backward. All other parts move in and out once.
    if workload.waves > 1:
        # In each wave, but optimizer state once per step. Activations need their memory only for a
        # part of the time. Sums of late stages come first: the first wave updates these last, when
        # the device waits for the link, while sums of early stages arrive before it begins.
        parts = [*masters, *activations, *reversed(gradients), *state]
    else:
        parts = [*masters, *gradients, *state, *activations]
    return [key for key in parts if key in lasting]
