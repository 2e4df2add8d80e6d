"""The division of a batch into microbatches and waves, given by the user or chosen by the plan.

The plan chooses as few microbatches as possible, because kernels on larger ones run closer to the
device's rate. But a kernel's temporaries grow with its rows, and take memory from weights, sums and
residuals. Example: 512 rows of 1,024 tokens on an H100 with 68 GiB::

    microbatches    rows    a kernel needs    the limit is 68 / 8 = 8.5 GiB
    1               512     330 GiB           try about 330 / 8.5 = 39, or the next divisor
    64              8       5.2 GiB           chosen

Then it chooses the number of waves; see `wave_search.py`. Larger or smaller microbatches may still
be faster, so the search goes on in both directions. Example: 8.2B parameters on an RTX 4090 with
64 GiB of host, 128 rows, sums in bfloat16::

    microbatches    waves    a step
    64              32       66.0 s    the first choice, by memory
    32              32       61.9 s    chosen; kernels on larger ones would need too much memory

Numbers of microbatches are compared as if copies took longer than estimated. With 7.6B parameters
and 128 rows on an H100, 8 waves would take 10.34 s and copy 430 GiB; 16 waves, which take 10.35 s
and copy 220 GiB, are chosen.
"""

import dataclasses
from collections.abc import Callable

from megatrain_jax._src.common.sizes import divisors
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.schedule.least_time import least_seconds
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.budget import LARGE, RESERVED, fit_to_machine
from megatrain_jax._src.engine.spec.cut_run import reason_against_microbatches
from megatrain_jax._src.engine.spec.host import fit_to_host
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.spec.wave_search import fit_in_waves, least_in_waves

# Fraction of device memory that the temporaries of a microbatch's kernel may take.
_SHARE = 1 / 8
# Microbatches become smaller only while this fraction of a kernel's bytes is proportional to rows.
_LEAST_LESS = 1 / 2
# Fraction of a step's estimated time that smaller microbatches must save.
_WORTH = 0.02


def chooses_microbatches_or_waves(run: Options) -> bool:
    """Whether a run's options let the plan choose microbatches or waves."""
    return run.microbatches == "auto" or (run.waves is None and run.microbatches > 1)


def fit_with_microbatches(
    run: Options,
    make: Callable[[Options], RunSpec],
    num_rows: int,
    tiles: TileFinder,
    process_counts: tuple[int, int],
) -> RunSpec:
    """The run fitted to its machine, with the given or the best microbatches and waves.

    Args:
        run: The options.
        make: Makes a run's spec for options with a number of microbatches.
        num_rows: Examples of a batch.
        tiles: Estimates kernels' memory, for a placement without devices.
        process_counts: See `Placement`.
    """
    # If None, batches are not divided further than given.
    device_bytes = run.machine and run.machine.usable_bytes

    def fit(spec: RunSpec) -> RunSpec:
        return fit_to_machine(
            spec, tiles, device_bytes, lambda fitted: fit_to_host(fitted, *process_counts)
        )

    spec = _Dividing(run, make, fit, num_rows, device_bytes, tiles).to_machine()
    options = dataclasses.replace(
        spec.options, microbatches=spec.first.microbatches, waves=spec.first.waves
    )
    return dataclasses.replace(spec, options=options)


class _Dividing:
    """Divides a run's batch into microbatches and waves."""

    def __init__(
        self,
        run: Options,
        make: Callable[[Options], RunSpec],
        fit: Callable[[RunSpec], RunSpec],
        num_rows: int,
        device_bytes: int | None,
        tiles: TileFinder,
    ):
        """Keeps what `fit_with_microbatches` has; `fit` fits a run to its machine."""
        self._run, self._make, self._fit = run, make, fit
        self._device_bytes, self._tiles = device_bytes, tiles
        self._known: dict[int, int] = {}  # see `_needed_by_one`, by number of microbatches
        of_device, rest = divmod(num_rows, run.num_devices)
        self._numbers = [] if rest else divisors(of_device)

    def to_machine(self) -> RunSpec:
        """The run fitted to its machine."""
        run = self._run
        if run.microbatches == "auto":
            return self._in_any()
        if self._device_bytes is None or not chooses_microbatches_or_waves(run):
            return self._fit(self._make(run))
        spec = self._made(run, is_free=False)
        # The plan changes results only with microbatches="auto".
        if spec.first.depends_on_waves:
            return self._fit(spec)
        return self._in_waves(spec, self._device_bytes)

    def _in_any(self) -> RunSpec:
        """The fitted run, with microbatches and waves chosen by the plan."""
        run, device_bytes = self._run, self._device_bytes
        spec = self._in_few_microbatches()
        if run.device_budget != "minimum":
            spec = self._divided(spec.first.microbatches)
        if device_bytes is None or run.waves is not None or spec.first.microbatches == 1:
            return self._fit(spec)
        first = self._in_waves(spec, device_bytes)
        fitted = self._in_larger(first, device_bytes)
        # If waves have one microbatch each, smaller microbatches may be faster still.
        while fitted is first and (number := fitted.first.waves) == fitted.first.microbatches:
            lacking, seconds = self._cautious(fitted)
            enough = lacking, (1 - _WORTH) * seconds
            finer = next((n for n in self._numbers if n >= 2 * number), None)
            # Smaller microbatches never compute faster, however much memory they leave.
            bound = least_seconds(fitted.first.workload, fitted.first.selective)
            if finer is None or (not any(lacking) and bound > enough[1]):
                break
            trial = self._in_waves(self._divided(finer), device_bytes)
            if self._cautious(trial) > enough:
                break
            first = fitted = trial
        return fitted

    def _in_larger(self, fitted: RunSpec, device_bytes: int) -> RunSpec:
        """The fitted run in larger microbatches, as long as these are as fast.

        Args:
            fitted: The run, fitted to its machine in waves.
            device_bytes: Free device memory.
        """
        if self._run.device_budget == "minimum" or any(fitted.lacking):
            return fitted
        while fewer := [n for n in self._numbers if n < fitted.first.microbatches]:
            enough = fitted.first.schedule.seconds
            # Such kernels would be computed in tiles, which are no faster than microbatches.
            if self._expected_by_one(fewer[-1]) > LARGE * device_bytes:
                break
            spec = self._divided(fewer[-1])
            if self._needed_by_one(spec) > LARGE * device_bytes:
                break
            # A schedule is slow to find, and often the bound tells that none is fast enough.
            if self._least_seconds(spec, device_bytes, fitted.host_room) > enough:
                break
            trial = self._in_waves(spec, device_bytes)
            if self._cautious(trial) > self._cautious(fitted):
                break
            fitted = trial
        return fitted

    def _cautious(self, spec: RunSpec) -> tuple[tuple[int, int], float]:
        """What a fitted run lacks, and seconds of its step if copies take longer than estimated.

        Two numbers of microbatches may take equally long while one of them copies twice as much.
        Copies to the host also delay computations, because CUDA's pool waits for them.
        """
        return spec.lacking, spec.first.schedule.cautious_seconds

    def _in_waves(self, spec: RunSpec, device_bytes: int) -> RunSpec:
        """The run fitted to its machine in the best number of waves."""
        return fit_in_waves(spec, self._fit, self._room(spec, device_bytes))

    def _room(self, spec: RunSpec, device_bytes: int) -> float:
        """The most bytes that state, activations and residuals can have beside the kernels."""
        room, needed = device_bytes * (1 - RESERVED), self._needed_by_one(spec)
        # Kernels that need more may be computed in tiles.
        return device_bytes if needed > LARGE * device_bytes else room - needed

    def _least_seconds(self, spec: RunSpec, device_bytes: int, host_room: float) -> float:
        """A lower bound of a step's time in the run's microbatches, in any number of waves."""
        first, room = spec.first, self._room(spec, device_bytes)
        return min(least_in_waves(first, n, room, host_room) for n in divisors(first.microbatches))

    def _divided(self, number: int) -> RunSpec:
        """The run in a number of microbatches."""
        return self._made(dataclasses.replace(self._run, microbatches=number), is_free=True)

    def _made(self, run: Options, *, is_free: bool) -> RunSpec:
        """A run's spec, in one wave if the device has room and the number is left open.

        Args:
            run: The options, with a number of microbatches.
            is_free: Whether more waves may change the results.
        """
        try:
            return self._make(run)
        except BudgetError:
            if not chooses_microbatches_or_waves(run):
                raise
            spec = self._make(dataclasses.replace(run, waves=run.microbatches))
            if not is_free and spec.first.depends_on_waves:
                raise
            return spec

    def _in_few_microbatches(self) -> RunSpec:
        """The run in as few microbatches as leave most of the device's memory free."""
        numbers, spec = self._numbers, self._sized(1)
        if self._device_bytes is None or reason_against_microbatches(
            spec.adapted, spec.first.program
        ):
            return spec
        # A kernel's need is almost proportional to its rows; fewer rows need more bytes per row.
        needed = self._needed_by_one(spec)
        while numbers[-1] > (number := spec.first.microbatches):
            excess = needed / (_SHARE * self._device_bytes)
            if excess <= 1:
                break
            more = [n for n in numbers if n > number]
            finer = self._sized(next((n for n in more if n >= excess * number), more[-1]))
            before, needed = needed, self._needed_by_one(finer)
            enough = _LEAST_LESS * before * (1 - number / finer.first.microbatches)
            fits = before <= (1 - RESERVED) * self._device_bytes
            # The rest of the need does not depend on rows, such as the gradient of a head.
            if before - needed < (enough if fits else 1):
                break
            spec = finer
        return spec

    def _sized(self, number: int) -> RunSpec:
        """The run in a number of microbatches, to ask for its kernels' memory."""
        # With the minimum budget, because only the memory of kernels is needed here.
        run = dataclasses.replace(self._run, microbatches=number, device_budget="minimum")
        return self._make(run)

    def _needed_by_one(self, spec: RunSpec) -> int:
        """Bytes that a kernel needs with the cotangents of only its own microbatch."""
        first = spec.first
        workload = first.workload.in_waves(first.microbatches)
        needed = self._tiles.most(dataclasses.replace(first, workload=workload))
        self._known[first.microbatches] = needed
        return needed

    def _expected_by_one(self, number: int) -> float:
        """Bytes that a kernel is expected to need, in proportion to rows; 0 if it isn't known.

        Making a run's spec takes long.
        """
        fewer = max((n for n in self._known if n <= number), default=None)
        more = min((n for n in self._known if n > number), default=None)
        if fewer is None or more is None:
            return 0.0
        share = (1 / number - 1 / more) / (1 / fewer - 1 / more)
        return self._known[more] + share * (self._known[fewer] - self._known[more])
