"""The division of a batch into microbatches and waves, given by the user or chosen by the plan.

The plan chooses as few microbatches as possible, because kernels on larger ones run closer to the
device's rate. But a kernel's temporaries grow with its rows, and take memory from weights, sums and
residuals. Example: 512 rows of 1,024 tokens on an H100 with 68 GiB::

    microbatches    rows    a kernel needs    the limit is 68 / 8 = 8.5 GiB
    1               512     330 GiB           try about 330 / 8.5 = 39, or the next divisor
    64              8       5.2 GiB           chosen

Then it chooses the number of waves; see `wave_search.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence

from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.options.options import Options
from megatrain_jax._src.schedule.search import BudgetError
from megatrain_jax._src.spec.cut_run import undivided_since
from megatrain_jax._src.spec.run_spec import RunSpec
from megatrain_jax._src.spec.tile_search import TileFinder
from megatrain_jax._src.spec.wave_search import fit_in_waves
from megatrain_jax._src.state.placement import Placement

# Fraction of device memory that the temporaries of a microbatch's kernel may take.
_SHARE = 1 / 8
# Fraction of a need that must be proportional to rows, for smaller microbatches to be worth it.
_LEAST_LESS = 1 / 2
# Fraction of a step's estimated time that smaller microbatches must save.
_WORTH = 0.02


def leaves_parts_open(run: Options) -> bool:
    """Whether a run's options let the plan choose microbatches or waves."""
    return run.microbatches == "auto" or (run.waves is None and run.microbatches > 1)


def fit_with_parts(
    run: Options,
    make: Callable[[Options], RunSpec],
    fit: Callable[[RunSpec], RunSpec],
    num_rows: int,
    device_bytes: int | None,
    placement: Placement,
) -> RunSpec:
    """The run fitted to its machine, with the given or the best microbatches and waves.

    Args:
        run: The options.
        make: Makes a run's spec for options with a number of microbatches.
        fit: Fits a run to its machine.
        num_rows: Examples of a batch.
        device_bytes: Free device memory; if None, batches are not divided further than given.
        placement: Placement of the run without devices, so that kernels' memory is estimated.
    """
    if run.microbatches == "auto":
        spec = _fitted_in_any(run, make, fit, num_rows, device_bytes, placement)
    elif device_bytes is None or not leaves_parts_open(run):
        spec = fit(make(run))
    else:
        spec = _made(run, make, is_free=False)
        # The plan changes results only with microbatches="auto".
        is_fixed = _changes_results(spec)
        spec = fit(spec) if is_fixed else fit_in_waves(spec, fit, device_bytes)
    options = dataclasses.replace(
        spec.options, microbatches=spec.first.microbatches, waves=spec.first.waves
    )
    return dataclasses.replace(spec, options=options)


def _fitted_in_any(
    run: Options,
    make: Callable[[Options], RunSpec],
    fit: Callable[[RunSpec], RunSpec],
    num_rows: int,
    device_bytes: int | None,
    placement: Placement,
) -> RunSpec:
    """The fitted run, with microbatches and waves chosen by the plan."""
    numbers = [n for n in range(1, num_rows + 1) if num_rows % (n * run.num_devices) == 0]

    def made(number: int) -> RunSpec:
        return _made(dataclasses.replace(run, microbatches=number), make, is_free=True)

    def sized(number: int) -> RunSpec:
        # What kernels need is asked for before anything is scheduled within a budget.
        return make(dataclasses.replace(run, microbatches=number, device_budget="least"))

    spec = _in_few_microbatches(sized, numbers, device_bytes, placement)
    if run.device_budget != "least":
        spec = made(spec.first.microbatches)
    if device_bytes is None or run.waves is not None or spec.first.microbatches == 1:
        return fit(spec)
    fitted = fit_in_waves(spec, fit, device_bytes)
    # If waves have one microbatch each, smaller microbatches may be faster still.
    while (number := fitted.first.waves) == fitted.first.microbatches:
        finer = next((n for n in numbers if n >= 2 * number), None)
        if finer is None:
            break
        trial = fit_in_waves(made(finer), fit, device_bytes)
        if trial.first.schedule.seconds > (1 - _WORTH) * fitted.first.schedule.seconds:
            break
        fitted = trial
    return fitted


def _made(run: Options, make: Callable[[Options], RunSpec], *, is_free: bool) -> RunSpec:
    """A run's spec, in one wave if the device has room for that and the number is left open.

    Args:
        run: The options, with a number of microbatches.
        make: See `fit_with_parts`.
        is_free: Whether more waves may change the results.
    """
    try:
        return make(run)
    except BudgetError:
        if not leaves_parts_open(run):
            raise
        spec = make(dataclasses.replace(run, waves=run.microbatches))
        if not is_free and _changes_results(spec):
            raise
        return spec


def _changes_results(spec: RunSpec) -> bool:
    """Whether the number of waves changes how gradients are added up, or how often rounded."""
    return spec.first.workload.has_shared_sums or spec.first.narrow_sums is not None


def _in_few_microbatches(
    made: Callable[[int], RunSpec],
    numbers: Sequence[int],
    device_bytes: int | None,
    placement: Placement,
) -> RunSpec:
    """The run in the fewest microbatches with kernels that leave most of the device's memory free.

    Args:
        made: Makes the run in a number of microbatches.
        numbers: The numbers that divide the batch, ascending.
        device_bytes: See `fit_with_parts`.
        placement: See `fit_with_parts`.
    """
    spec = made(1)
    if device_bytes is None or undivided_since(spec.adapted, spec.first.program):
        return spec
    tiles = TileFinder(KernelCache(platform="gpu"), placement)
    # A kernel's need is almost proportional to its rows; fewer rows need more bytes per row.
    needed = _needed_by_one(spec, tiles)
    while numbers[-1] > (number := spec.first.microbatches):
        excess = needed / (_SHARE * device_bytes)
        if excess <= 1:
            break
        more = [n for n in numbers if n > number]
        finer = made(next((n for n in more if n >= excess * number), more[-1]))
        before, needed = needed, _needed_by_one(finer, tiles)
        # The rest of the need does not depend on rows, such as the gradient of a head.
        if before - needed < _LEAST_LESS * before * (1 - number / finer.first.microbatches):
            break
        spec = finer
    return spec


def _needed_by_one(spec: RunSpec, tiles: TileFinder) -> int:
    """Bytes that a kernel needs with the cotangents of only its own microbatch."""
    first = spec.first
    workload = first.workload.in_waves(first.microbatches)
    return tiles.most(dataclasses.replace(first, workload=workload))
