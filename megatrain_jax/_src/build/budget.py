"""A run's device budget; an automatic one is the memory that its compiled functions leave free.

Functions are compiled for a schedule, and a schedule is found for a budget, so both are found in
turns: the functions for the least budget, the budget that these leave, the functions it adds.
A function that needs more than there is goes through its rows in tiles, and so does one whose
tiles make room for residuals that save more time. Where a block is too much nevertheless, all
blocks are cut into parts, the fewest with which the run fits.

A worked example, on a device with 100 GiB free, of which 5% stay free:

    1. for the least budget, functions need 6 GiB; other values 1 GiB, the largest slab 2 GiB
    2. budget = 95 - 2 - 1 - 6 = 86 GiB; with it, stages keep residuals: other functions
    3. these need 8 GiB, more than 6: the budget is 84 GiB

With a batch 20 times as long, functions would need 120 GiB, other values 20, the least budget 10:

    4. functions may take 100 - 20 - 10 = 70 GiB; in 2 tiles the estimate is 62 GiB, in 4 32 GiB,
       in 8 17 GiB
    5. budgets of 11, 41 and 56 GiB would give steps of 9.0, 8.2 and 8.1 s: 4 tiles are taken, as
       8 are faster by no more than the estimates' uncertainty
    6. compiled, the functions need 30 GiB: the budget is 43 GiB
"""

import dataclasses
import math
from collections.abc import Callable

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.build.step_kernels import compile_ahead, estimate_ahead
from megatrain_jax._src.build.tiles import TileFinder
from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.schedule.search import BudgetError, Schedule, find_schedule
from megatrain_jax._src.state.placement import Placement

# Share of the device's memory that an automatic budget leaves to the allocator's gaps, beside room
# for one more of the largest arrays.
_RESERVED = 0.05
# Shares of what functions need that are tried instead, if it is more than this share of the device.
_SHARES = (0.5, 0.25)
_LARGE = 0.2
# Part of a step's estimated seconds that smaller tiles have to save.
_WORTH = 0.05
# Times that tiles are made smaller because compiled functions need more than was estimated.
_MAX_TURNS = 3


def fit_to_machine(
    spec: RunSpec,
    kernels: KernelCache,
    device_bytes: int | None,
    placement: Placement,
    to_host: Callable[[RunSpec], RunSpec | None],
) -> RunSpec:
    """Finds what a step's functions need and, if the budget is automatic, gives it what they leave.

    Args:
        spec: The run, whose functions' memory is not known yet.
        kernels: Cache that gets the functions.
        device_bytes: Device memory that is free; None if unknown, and no function is in tiles then.
        placement: Placement of the run, to compile for; where it has no devices, what functions
            need is estimated.
        to_host: Fits a run, once it is fitted to its device, to its host, or gives None; see
            `fit_to_host`. What the device holds need not wait in the host, so that tiles are judged
            by what follows.
    """
    fitted = _fitted(spec, kernels, device_bytes, placement, to_host)
    while device_bytes is not None and _least_in_all(fitted) > device_bytes:
        if spec.finer is None:
            break
        try:
            spec = spec.finer()
        except BudgetError:  # more is handed on between more parts
            break
        if _room(spec, device_bytes) > 0:  # else its functions are compiled for nothing
            finer = _fitted(spec, kernels, device_bytes, placement, to_host)
            fitted = min(fitted, finer, key=_least_in_all)
    return fitted


def _least_in_all(spec: RunSpec) -> int:
    """The fewest device bytes for a fitted run's state, values and functions."""
    return spec.first.schedule.smallest_bytes + other_bytes(spec.first) + _needed(spec)


def _fitted(
    spec: RunSpec,
    kernels: KernelCache,
    device_bytes: int | None,
    placement: Placement,
    to_host: Callable[[RunSpec], RunSpec | None],
) -> RunSpec:
    """The run with its blocks as they are cut; see `fit_to_machine`."""
    fitting = _Fitting(spec, kernels, device_bytes, placement, to_host)
    fitted = fitting.whole() if device_bytes is None else _to_device(spec, fitting, device_bytes)
    # What the host never holds stays as it is, to be refused.
    found = fitting.on_host(fitted) or dataclasses.replace(fitted, fits_host=False)
    if not _has_functions_of(fitted.first.schedule, found.first.schedule):
        found = fitting.with_its_functions(found)
    if device_bytes is None:
        return found
    left = _room(fitted, device_bytes)
    return dataclasses.replace(found, room_bytes=max(left, _needed(fitted)))


def _to_device(spec: RunSpec, fitting: "_Fitting", device_bytes: int) -> RunSpec:
    """The run fitted to its device; see `fit_to_machine`."""
    room = _room(spec, device_bytes)
    if room <= 0:  # refused in any case
        return fitting.whole()
    share = 1.0
    # An estimate may be twice the compiler's figure (tests/test_liveness.py holds that). Tiles that
    # were not needed cost little; a function that only may fit takes XLA minutes to compile whole,
    # as it tries all ways to compute products of a second each.
    fitted = fitting.whole() if fitting.tiles.most(spec.first) <= room else None
    for _ in range(_MAX_TURNS):
        if fitted is not None and _needed(fitted) <= room:
            break
        fitted = fitting.within(share * room)
        share /= 2
    assert fitted is not None
    if spec.options.device_budget is None and _needed(fitted) > _LARGE * device_bytes:
        fitted = fitting.faster(fitted)
    return fitted


def in_room(
    step: BoundStep, spec: RunSpec, kernels: KernelCache, placement: Placement, *, training: bool
) -> BoundStep:
    """A step of another batch shape, in tiles where its functions would need more than there is.

    Where that is known, on a GPU, its functions are compiled, too: a stage is dispatched by what
    its function needs.

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
    # If the estimate for the first shape is too large, those for others are, too.
    room = max(spec.room_bytes, tiles.most(spec.first))
    divided = tiles.within(step, room, training=training)
    compile_ahead(kernels, divided, spec.layouts, spec.optimizer, placement, training=training)
    return divided


class _Fitting:
    """A run fitted to its device in different ways."""

    def __init__(
        self,
        spec: RunSpec,
        kernels: KernelCache,
        device_bytes: int | None,
        placement: Placement,
        to_host: Callable[[RunSpec], RunSpec | None],
    ):
        """See `fit_to_machine`."""
        self._spec, self._kernels = spec, kernels
        self._device_bytes, self._placement = device_bytes, placement
        self._to_host = to_host
        self.tiles = TileFinder(kernels, placement)
        self._budgets: dict[int, tuple[int | None, Schedule]] = {}
        self._on_host: dict[int, RunSpec | None] = {}

    def whole(self) -> RunSpec:
        """The run with no function in tiles."""
        return self._fitted(None, estimated=not self._placement.devices)

    def within(self, room: float) -> RunSpec:
        """The run with functions in the fewest tiles that need so many bytes by estimate."""
        return self._fitted(room, estimated=not self._placement.devices)

    def faster(self, fitted: RunSpec) -> RunSpec:
        """The run with its functions in smaller tiles, if what fits beside them saves time."""
        trials = [
            (self._fitted(room, estimated=True), room)
            for room in (share * _needed(fitted) for share in _SHARES)
        ]
        best = self._seconds(fitted)
        # The larger tiles of two that are as fast.
        for trial, room in trials:
            if self._seconds(trial) < (1 - _WORTH) * best:
                fitted = trial if not self._placement.devices else self.within(room)
                best = self._seconds(fitted)
        return fitted

    def on_host(self, fitted: RunSpec) -> RunSpec | None:
        """The run fitted to its host; None if that never holds it."""
        # As for budgets: runs with the same need have the same schedule, whatever their tiles, and
        # what waits in the host follows from it.
        needed = _needed(fitted)
        if needed not in self._on_host:
            self._on_host[needed] = self._to_host(fitted)
        found = self._on_host[needed]
        return found and dataclasses.replace(
            found,
            temporary_estimated=fitted.temporary_estimated,
            first=dataclasses.replace(found.first, stages=fitted.first.stages),
        )

    def with_its_functions(self, spec: RunSpec) -> RunSpec:
        """The run with functions that it was not fitted with, in tiles that need no more."""
        first = self.tiles.within(spec.first, _needed(spec))
        needed = self._needs(first, not self._placement.devices)
        return dataclasses.replace(spec, first=first, temporary_bytes=max(needed, _needed(spec)))

    def _seconds(self, fitted: RunSpec) -> float:
        """Seconds that a step takes once the run is fitted to its host; infinite if it never is."""
        found = self.on_host(fitted)
        return math.inf if found is None else found.first.schedule.seconds

    def _fitted(self, room: float | None, *, estimated: bool) -> RunSpec:
        """The run whose functions need so many bytes by estimate, with the budget they leave."""

        def divided(spec: RunSpec) -> RunSpec:
            if room is None:
                return spec
            return dataclasses.replace(spec, first=self.tiles.within(spec.first, room))

        def with_budget(spec: RunSpec, needed: int) -> RunSpec:
            return self._with_budget(spec, needed, estimated=estimated)

        fitted = divided(self._spec)
        needed, known = self._needs(fitted.first, estimated), [fitted.first.schedule]
        fitted = with_budget(fitted, needed)
        # Keeping residuals takes other functions. A smaller budget keeps fewer, by functions that
        # are known then, or leaner ones.
        while not any(_has_functions_of(schedule, fitted.first.schedule) for schedule in known):
            known.append(fitted.first.schedule)
            fitted = divided(fitted)
            more = self._needs(fitted.first, estimated)
            if more <= needed:
                break
            needed = more
            fitted = with_budget(fitted, needed)
        return divided(fitted)

    def _with_budget(self, spec: RunSpec, needed: int, *, estimated: bool) -> RunSpec:
        """The run, whose functions need so many bytes, with the budget that these leave."""
        # Tiles change no workload: the same need leaves the same budget and takes the same
        # schedule, which is what takes long to find.
        if needed not in self._budgets:
            found = with_temporaries(spec, needed, self._device_bytes, estimated=estimated)
            self._budgets[needed] = found.budget_bytes, found.first.schedule
        budget, schedule = self._budgets[needed]
        return dataclasses.replace(
            spec,
            budget_bytes=budget,
            temporary_bytes=needed,
            temporary_estimated=estimated,
            first=dataclasses.replace(spec.first, schedule=schedule),
        )

    def _needs(self, step: BoundStep, estimated: bool) -> int:
        ahead = estimate_ahead if estimated else compile_ahead
        what = self._spec.layouts, self._spec.optimizer, self._placement
        needed = ahead(self._kernels, step, *what)
        # Each process compiles by itself, and all have to obey one schedule.
        return max(self._placement.processes.gather("compiling", needed))


def _needed(spec: RunSpec) -> int:
    assert spec.temporary_bytes is not None
    return spec.temporary_bytes


def _room(spec: RunSpec, device_bytes: int) -> int:
    """The most bytes that functions may take beside the state and values that a schedule counts."""
    return device_bytes - other_bytes(spec.first) - spec.first.schedule.peak_bytes


def _has_functions_of(schedule: Schedule, other: Schedule) -> bool:
    """Whether what runs one schedule runs another one of the same step, too."""
    return not other.kept or (schedule.lean == other.lean and other.kept <= schedule.kept)


def with_temporaries(
    spec: RunSpec, temporary_bytes: int, device_bytes: int | None, *, estimated: bool
) -> RunSpec:
    """The same run with its functions' memory known; an automatic budget is what they leave.

    Args:
        spec: The run.
        temporary_bytes: Device bytes that compiled functions need for themselves.
        device_bytes: Device memory that is free; None if unknown.
        estimated: Whether the functions' memory is an estimate.
    """
    known = dataclasses.replace(
        spec, temporary_bytes=temporary_bytes, temporary_estimated=estimated
    )
    if spec.options.device_budget is not None or device_bytes is None:
        return known
    taken = other_bytes(spec.first) + temporary_bytes
    left = int(device_bytes * (1 - _RESERVED)) - spec.largest_slab_bytes - taken
    # The least even where less is left: a plan says then by how much, and training is refused.
    budget = max(left, spec.first.schedule.smallest_bytes)
    schedule = find_schedule(spec.first.workload, budget, spec.first.lean)
    first = dataclasses.replace(spec.first, schedule=schedule)
    return dataclasses.replace(known, budget_bytes=budget, first=first)


def other_bytes(step: BoundStep) -> int:
    """Bytes of the activations that live between stages and that the schedule doesn't count."""
    others = step.kept - step.workload.activations.keys()
    # The step's end reads its outputs, and the values before all stages are made at its begin; the
    # others exist for one wave.
    whole = {*step.program.outputs, *step.program.prologue_values}
    times = {i: step.microbatches if i in whole else step.wave_microbatches for i in others}
    times |= dict.fromkeys(others & step.kept_once, 1)
    return sum(n * step.program.num_bytes(i, step.num_devices) for i, n in times.items())
