"""Finds a run's device budget; an automatic budget is the memory that compiled functions leave.

Functions depend on the schedule, and the schedule depends on the budget, so they are found in
turns: functions for the minimum budget, then the budget that these leave, then the functions that
the new schedule needs. A function that doesn't fit is tiled. Functions are also tiled if that makes
room for residuals that save more time. If a block still doesn't fit, all blocks are cut into parts,
as few as possible; if no number of parts fits, into the parts that need the fewest bytes. Whole
blocks that take the memory in reserve are also cut, if their parts save residuals in the same
memory.

All of this is done by estimates of the functions' memory. On a GPU, the chosen functions are then
compiled. If the compiler's figures differ so much from the estimates that the choice would, they
replace the estimates, and the same search runs again.

Example: a device has 100 GiB free, and 5% stay in reserve:

    1. for the minimum budget, functions need 6 GiB, values that the schedule doesn't count 1, the
       largest slab 2
    2. budget = 95 - 2 - 1 - 6 = 86 GiB; with it, stages save residuals by new functions
    3. these need 8 GiB, more than 6: the budget is 84 GiB

With a batch 20 times as long, functions need 120 GiB, uncounted values 20, the minimum budget 10:

    4. functions may take 100 - 20 - 10 = 70 GiB; the estimate is 62 GiB in 2 tiles, 32 GiB in 4,
       and 17 GiB in 8
    5. budgets of 11, 41 and 56 GiB would give steps of 9.0, 8.2 and 8.1 s: 4 tiles are chosen,
       because 8 are faster only within the estimates' uncertainty
    6. the compiled functions need 30 GiB; if they needed 45, 45 / 32 of the estimate would be
       expected of any tiles, and the search would go on
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.least_time import least_seconds
from megatrain_jax._src.engine.schedule.schedule import BudgetError, Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.spec.block_splits import BlockSplit
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.host import peak_bytes
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.step_kernels import numbered_kernels, step_kernels
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state.placement import Placement

RESERVED = 0.05
"""Fraction of device memory that an automatic budget reserves for the allocator's gaps, in addition
to one more of the largest arrays."""
LARGE = 0.2
"""If functions need more than this fraction of device memory, smaller tiles are tried."""
# Fractions of the functions' memory to try instead, if it exceeds `LARGE` of the device.
_SHARES = (0.5, 0.25)
WORTH = 0.05
"""Fraction of a step's estimated time that smaller tiles, parts of blocks or waves must save."""
LESS_HOST = 0.2
"""Fraction of host memory that they must save if not time."""
# A function with a shorter estimate, in seconds, compiles quickly.
_QUICK = 0.5
# All parts of blocks together save at most this multiple of what two parts save.
_MOST_SAVED = 4
# Maximum number of times that functions are compiled.
_MAX_TURNS = 3


def fitted_and_compiled(
    spec: RunSpec,
    tiles: TileFinder,
    device_bytes: int | None,
    to_host: Callable[[RunSpec], RunSpec],
) -> RunSpec:
    """Fits a run to its machine, and compiles the functions of its step, and few others.

    Args:
        spec: The run before the memory of its functions is known.
        tiles: Finds tiles; its cache receives the functions.
        device_bytes: See `fit_to_machine`.
        to_host: See `fit_to_machine`.
    """
    kernels, best = tiles.cache, None
    for _ in range(_MAX_TURNS):
        found = fit_to_machine(spec, tiles, device_bytes, to_host)
        chosen = list(step_kernels(found.first, found.layouts, found.optimizer, tiles.placement))
        if best is not None and not kernels.has_compiled(chosen) and not _pays(found, best):
            return best
        needed, estimated = kernels.compile(chosen), _needed(found)
        found = dataclasses.replace(found, temporary_bytes=needed, temporary_estimated=False)
        if device_bytes is None:
            return found
        if needed <= _room(found, device_bytes):
            best = found
            # Memory that would change little is not worth another search. Fewer tiles would need
            # memory that an automatic budget has given to state.
            is_automatic = spec.options.device_budget is None
            spare = estimated - needed if is_automatic else 0
            room = estimated if is_automatic else found.room_bytes or 0
            fewer = _num_tiles(tiles.within(found.first, room)) < _num_tiles(found.first)
            if spare <= RESERVED * device_bytes and not fewer:
                return best
    return best or found


def _num_tiles(step: BoundStep) -> int:
    return sum(tiling.num_tiles for bound in step.stages for tiling in bound.tiles.values())


def _pays(found: RunSpec, best: RunSpec) -> bool:
    """Whether a run is worth compiling further functions, beside a compiled one.

    Each tile reads and writes the sums of gradients, so unneeded tiles may take 5% of a step. But
    XLA takes minutes to compile a huge function, because it times all algorithms for products that
    take a second each.
    """
    costs, seconds = best.first.workload.costs, best.first.schedule.seconds
    if found.first.schedule.seconds < (1 - WORTH) * seconds:
        return True
    is_quick = max(costs.backward) / best.first.wave_microbatches <= _QUICK
    has_fewer = _num_tiles(found.first) < _num_tiles(best.first)
    return has_fewer and is_quick and found.first.schedule.seconds <= seconds


def fit_to_machine(
    spec: RunSpec,
    tiles: TileFinder,
    device_bytes: int | None,
    to_host: Callable[[RunSpec], RunSpec],
) -> RunSpec:
    """Finds the memory of a step's functions, and an automatic budget from the rest.

    Args:
        spec: The run before the memory of its functions is known.
        tiles: Finds tiles; its cache knows, or estimates, the functions' memory.
        device_bytes: Free device memory; None if unknown, and then no function is tiled.
        to_host: Fits a run that is fitted to its device to its host; see `fit_to_host`. Tiles are
            compared by the result, because parts that stay on the device need no host memory.
    """

    def fitting(spec: RunSpec, reserved: int | None = None) -> _Fitting:
        return _Fitting(spec, tiles, device_bytes, to_host, reserved)

    whole = smallest = finer = fitting(spec).to_machine()
    if device_bytes is None:
        return whole
    if (left := device_bytes - least_device_bytes(whole)) >= 0:
        return _faster_in_parts(whole, lambda spec: fitting(spec, left), device_bytes)
    ways = whole.finer_ways
    while (finer := _cut_in(before := finer, ways)) is not None:
        if _room(finer, device_bytes) > 0:  # otherwise compiling its functions is useless
            finer = fitting(finer).to_machine()
            if least_device_bytes(finer) <= device_bytes:
                return finer
        smallest, ways = min(smallest, finer, key=least_device_bytes), finer.finer_ways
        # Parts divide what they save; the first two halve it.
        saved = least_device_bytes(whole) - least_device_bytes(smallest)
        if smallest.num_parts == 2 and left + _MOST_SAVED * saved < 0:
            break
        if _has_enough_groups(before, finer):
            break
        # The most parts tell whether any number of parts may fit.
        parts = [way for way in ways if way.num_groups == 1]
        if before is whole and (most := _cut_in(finer, parts[-1:])) is not None:
            smallest = min(smallest, most := fitting(most).to_machine(), key=least_device_bytes)
            if _least_of_largest(most, tiles) > device_bytes:
                ways = [way for way in ways if way.num_groups > 1]
    if smallest.temporary_bytes is None:
        smallest = min(whole, fitting(smallest).to_machine(), key=least_device_bytes)
    return to_host(smallest)


def _has_enough_groups(before: RunSpec, finer: RunSpec) -> bool:
    """Whether more groups of experts than those of `before` only take more memory.

    Twice as many groups save half of what groups saved before, and pass on twice as many values.
    """
    are_fitted = before.temporary_bytes is not None and finer.temporary_bytes is not None
    needs_less = least_device_bytes(finer) < least_device_bytes(before)
    return before.num_groups > 1 and are_fitted and not needs_less


def _faster_in_parts(
    whole: RunSpec, fitting: "Callable[[RunSpec], _Fitting]", device_bytes: int
) -> RunSpec:
    """The run with blocks cut into parts if they are faster in the same memory, or whole.

    Parts may save residuals where whole blocks can't.

    Args:
        whole: The fitted run with whole blocks.
        fitting: Fits a run to the memory that `whole` takes.
        device_bytes: Free device memory.
    """
    schedule, able = whole.first.schedule, any(whole.first.workload.residuals)
    has_more = _left(whole, device_bytes, None) >= schedule.smallest_bytes
    # With more than the minimum, whole blocks may use the rest.
    if whole.options.device_budget is not None or schedule.kept or has_more or not able:
        return whole
    finer = _cut_in(whole, whole.finer_ways)
    # Experts are divided only if they don't fit: each group passes on the rows of all tokens.
    if finer is None or finer.num_groups > whole.num_groups:
        return whole
    # Smaller tiles take long to try; they are only if parts are faster without.
    trial = (found := fitting(finer)).to_machine(smaller_tiles=False)
    return found.to_machine() if is_better(trial, whole) else whole


def _cut_in(spec: RunSpec, ways: Sequence[BlockSplit]) -> RunSpec | None:
    """The run with blocks cut in the first possible way; None if there is none."""
    try:
        return spec.finer(ways) if ways else None
    except BudgetError:  # more parts pass more activations to each other
        return None


def _least_of_largest(spec: RunSpec, tiles: TileFinder) -> int:
    """Device bytes of the largest function, and of all that its task uses."""
    first = spec.first
    needed, number = tiles.largest(first)
    beside = (
        sum(first.workload.size(use.key) for use in task.uses)
        for task in build_task_lists(first.workload, few_waves=True).steady
        if any(c.instruction.stage == number for c in task.computations)
    )
    return needed + uncounted_activation_bytes(first) + max(beside)


def least_device_bytes(spec: RunSpec) -> int:
    """The fewest device bytes for a run's state, values and, if it is fitted, functions."""
    known = spec.temporary_bytes or 0
    return spec.first.schedule.smallest_bytes + uncounted_activation_bytes(spec.first) + known


def fit_new_shape_to_device(
    step: BoundStep, spec: RunSpec, kernels: KernelCache, placement: Placement, *, training: bool
) -> BoundStep:
    """A step of a new batch shape, tiled so that its functions fit.

    If the device's memory is known, as on a GPU, its functions are compiled as well, because
    dispatching a stage depends on its function's memory.

    Args:
        step: The step.
        spec: The run, fitted to its device.
        kernels: The run's functions.
        placement: Placement of the run.
        training: Whether it is a training step, not an evaluation.
    """
    if spec.room_bytes is None:
        return step
    tiles = TileFinder(kernels, placement)
    # If the estimate for the first shape is too large, estimates for later shapes are as well.
    room = max(spec.room_bytes, tiles.most(spec.first))
    divided = tiles.within(step, room, training=training)
    what = divided, spec.layouts, spec.optimizer, placement
    kernels.compile(step_kernels(*what, training=training))
    return divided


@dataclasses.dataclass(eq=False)
class _Fitting:
    """Fits a run to its device and its host, without cutting its blocks further.

    See `fit_to_machine`, and `with_temporaries` for the reserved bytes.
    """

    _spec: RunSpec
    _tiles: TileFinder
    _device_bytes: int | None
    _to_host: Callable[[RunSpec], RunSpec]
    _reserved: int | None = None
    _budgets: dict[int, tuple[int | None, Schedule]] = dataclasses.field(default_factory=dict)
    _on_host: dict[int, RunSpec] = dataclasses.field(default_factory=dict)
    _least: float = 0  # bytes that functions need in any tiles

    def to_machine(self, *, smaller_tiles: bool = True) -> RunSpec:
        """The run fitted to its device, then to its host if it fits the device.

        Args:
            smaller_tiles: Whether smaller tiles than needed are tried, to save time.
        """
        device_bytes = self._device_bytes
        if device_bytes is None:
            fitted = self._tiled(None)
        else:
            fitted = self._to_device(device_bytes, smaller_tiles)
        lacking = 0 if device_bytes is None else least_device_bytes(fitted) - device_bytes
        if lacking > 0:
            return dataclasses.replace(fitted, lacking_device=lacking)
        found = self._to_its_host(fitted)
        if not _has_functions_of(fitted.first.schedule, found.first.schedule):
            found = self._with_its_functions(found)
        if device_bytes is None:
            return found
        left = _room(fitted, device_bytes)
        return dataclasses.replace(
            found,
            room_bytes=max(left, _needed(fitted)),
            lacking_device=max(0, _needed(found) - _room(found, device_bytes)),
        )

    def _to_device(self, device_bytes: int, smaller_tiles: bool) -> RunSpec:
        """The run fitted to its device; see `to_machine`."""
        spec, room = self._spec, _room(self._spec, device_bytes)
        if room <= 0:  # refused in any case
            return self._tiled(None)
        # With saved residuals, functions may need more.
        if self._tiles.most(spec.first) > room or _needed(fitted := self._tiled(None)) > room:
            fitted = self._tiled(room)
        is_large = spec.options.device_budget is None and _needed(fitted) > LARGE * device_bytes
        # Needed tiles are small enough already where nothing fits.
        if smaller_tiles and is_large and least_device_bytes(fitted) <= device_bytes:
            fitted = self._faster(fitted, device_bytes)
        return fitted

    def _faster(self, fitted: RunSpec, device_bytes: int) -> RunSpec:
        """The run with smaller tiles, if the memory that they free saves time."""
        needed, first, best = _needed(fitted), fitted.first, self._to_its_host(fitted)
        for share in _SHARES:
            smaller = dataclasses.replace(fitted, temporary_bytes=round(share * needed))
            left = _left(smaller, device_bytes, self._reserved)
            bound = least_seconds(first.workload, first.selective, left, best.host_room)
            is_fast = not best.lacking_host and bound >= (1 - WORTH) * best.first.schedule.seconds
            if share * needed < self._least or is_fast:
                break
            trial = self._tiled(share * needed)
            # Of two equally fast choices, the larger tiles are taken.
            if is_better(found := self._to_its_host(trial), best):
                fitted, best = trial, found
        return fitted

    def _to_its_host(self, fitted: RunSpec) -> RunSpec:
        """The run fitted to its host."""
        # Cached like budgets: runs with equal needs have the same schedule for any tiles, and so
        # need the same host memory.
        needed = _needed(fitted)
        if needed not in self._on_host:
            self._on_host[needed] = self._to_host(fitted)
        found = self._on_host[needed]
        first = dataclasses.replace(found.first, stages=fitted.first.stages)
        return dataclasses.replace(found, first=first)

    def _with_its_functions(self, spec: RunSpec) -> RunSpec:
        """The run with the functions that its new schedule needs, tiled to need no more memory."""
        first = self._tiles.within(spec.first, _needed(spec))
        needed = self._needs(first)
        return dataclasses.replace(spec, first=first, temporary_bytes=max(needed, _needed(spec)))

    def _tiled(self, room: float | None) -> RunSpec:
        """The run with functions of at most `room` bytes, and the budget they leave.

        Args:
            room: Bytes that choose the number of tiles; None for functions without tiles.
        """

        def divided(spec: RunSpec) -> RunSpec:
            if room is None:
                return spec
            return dataclasses.replace(spec, first=self._tiles.within(spec.first, room))

        fitted = divided(self._spec)
        needed, known = self._needs(fitted.first), [fitted.first.schedule]
        fitted = self._with_budget(fitted, needed)
        # Saving residuals needs new functions. With a smaller budget, fewer stages save residuals,
        # by functions that are known already, or leaner ones.
        while not any(_has_functions_of(schedule, fitted.first.schedule) for schedule in known):
            known.append(fitted.first.schedule)
            fitted = divided(fitted)
            more = self._needs(fitted.first)
            if more <= needed:
                break
            needed = more
            fitted = self._with_budget(fitted, needed)
        fitted = divided(fitted)
        if room is not None and (most := self._tiles.most(fitted.first)) > room:
            self._least = most
        return fitted

    def _with_budget(self, spec: RunSpec, needed: int) -> RunSpec:
        """The run with the budget that functions of `needed` bytes leave."""
        # Tiles don't change the workload, so equal needs leave the same budget and schedule; cached
        # because finding the schedule is slow.
        if needed not in self._budgets:
            free, reserved = self._device_bytes, self._reserved
            found = with_temporaries(spec, needed, free, reserved)
            self._budgets[needed] = found.budget_bytes, found.first.schedule
        budget, schedule = self._budgets[needed]
        return dataclasses.replace(
            spec,
            budget_bytes=budget,
            temporary_bytes=needed,
            temporary_estimated=True,
            first=dataclasses.replace(spec.first, schedule=schedule),
        )

    def _needs(self, step: BoundStep) -> int:
        return max(self._tiles.most(step), self._of_groups)

    @functools.cached_property
    def _of_groups(self) -> int:
        """Bytes that the functions of all groups need; they depend on no schedule."""
        spec, first = self._spec, self._spec.first
        rows = numbered_kernels(first, spec.layouts, spec.optimizer, self._tiles.placement)
        of_groups = [kernel for op, _, kernel in rows if op in (Op.REDUCE, Op.UPDATE)]
        return self._tiles.cache.estimate(of_groups) if of_groups else 0


def is_better(other: RunSpec, simpler: RunSpec) -> bool:
    """Whether a fitted run is better than one with fewer waves, tiles or parts of blocks.

    It is if it lacks fewer bytes; of two that lack as many, if it saves more time than the clock's
    uncertainty, or much host memory in no more time.
    """
    if other.lacking != simpler.lacking:
        return other.lacking < simpler.lacking
    seconds, before = other.first.schedule.seconds, simpler.first.schedule.seconds
    saves_host = peak_bytes(other.first) <= (1 - LESS_HOST) * peak_bytes(simpler.first)
    return seconds < (1 - WORTH) * before or (seconds <= before and saves_host)


def _needed(spec: RunSpec) -> int:
    assert spec.temporary_bytes is not None
    return spec.temporary_bytes


def _room(spec: RunSpec, device_bytes: int) -> int:
    """Device bytes that functions may take beside the schedule's peak and uncounted values."""
    return device_bytes - uncounted_activation_bytes(spec.first) - spec.first.schedule.peak_bytes


def _has_functions_of(schedule: Schedule, other: Schedule) -> bool:
    """Whether the functions for `schedule` also run `other`, a schedule of the same step."""
    return not other.kept or (schedule.selective == other.selective and other.kept <= schedule.kept)


def with_temporaries(
    spec: RunSpec, temporary_bytes: int, device_bytes: int | None, reserved: int | None = None
) -> RunSpec:
    """The same run with known memory of its functions, and the automatic budget they leave.

    Args:
        spec: The run.
        temporary_bytes: Device bytes of the functions' temporaries.
        device_bytes: Free device memory; None if unknown.
        reserved: Device bytes that an automatic budget leaves free; None for the usual reserve.
    """
    known = dataclasses.replace(spec, temporary_bytes=temporary_bytes, temporary_estimated=True)
    if spec.options.device_budget is not None or device_bytes is None:
        return known
    left = _left(known, device_bytes, reserved)
    # At least the minimum, even if less is left: then a plan shows the excess, and training is
    # refused.
    budget = max(left, spec.first.schedule.smallest_bytes)
    schedule = find_schedule(spec.first.workload, budget, spec.first.selective)
    first = dataclasses.replace(spec.first, schedule=schedule)
    return dataclasses.replace(known, budget_bytes=budget, first=first)


def _left(spec: RunSpec, device_bytes: int, reserved: int | None) -> int:
    """Device bytes that functions of known memory leave for an automatic budget."""
    if reserved is None:
        free = int(device_bytes * (1 - RESERVED)) - spec.largest_slab_bytes
    else:
        free = device_bytes - reserved
    return free - uncounted_activation_bytes(spec.first) - _needed(spec)


def uncounted_activation_bytes(step: BoundStep) -> int:
    """Bytes of the activations that live between stages and that the schedule doesn't count."""
    others = step.kept - step.workload.activations.keys()
    # Outputs and the prologue's values exist for the whole step; remaining values exist for one
    # wave.
    whole = {*step.program.outputs, *step.program.prologue_values}
    times = {i: step.microbatches if i in whole else step.wave_microbatches for i in others}
    times |= dict.fromkeys(others & step.kept_once, 1)
    return sum(n * step.program.num_bytes(i, step.num_devices) for i, n in times.items())
