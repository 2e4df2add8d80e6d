"""Times steps of any library, so that each owes nothing when the clock is read.

Needs neither JAX nor PyTorch: this library and its peers are measured by the same lines.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MIN_STEPS = 8
_SHORT_RUN = 2
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The steps that are timed, of any library.

    Attributes:
        begin: Begins the next step. It may return before the step is over.
        finish: Waits for the step of what `begin` returned, and returns its loss.
        drain: Waits for all that is in flight and does what steps still owe, as an update that
            would have come with the next step.
    """

    begin: Callable[[], Any]
    finish: Callable[[Any], float]
    drain: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Some steps from a drained state to a drained state."""

    seconds: float
    cpu_seconds: float
    ends: list[float]
    losses: list[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """The measured times of steps, in seconds.

    Attributes:
        mean: Mean of a step, with all that it owes.
        driver_cpu: Processor time of the thread that begins the steps, a step.
        intervals: Between the ends of neighbouring steps, one for each that `mean` is of. They
            tell how even steps are; their own mean leaves out what the last ones owe.
        runs: Seconds of each drained run, by its number of steps.
        losses: Losses of all steps.
    """

    mean: float
    driver_cpu: float
    intervals: list[float]
    runs: dict[int, float]
    losses: list[float]

    def figures(self) -> dict[str, Any]:
        """Returns the figures of a step's time for a result file."""
        spread = statistics.stdev(self.intervals) if len(self.intervals) > 1 else None
        return {
            "num_measured_steps": len(self.intervals),
            "mean_seconds_per_step": self.mean,
            "stdev_seconds_per_step": spread,
            "seconds_of_steps": self.intervals,
            "seconds_of_drained_runs": {str(steps): s for steps, s in self.runs.items()},
        }


def time_steps(
    work: Work,
    num_steps: int,
    *,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.thread_time,
) -> Times:
    """Times two short runs and one of `num_steps` more, and takes the difference to the faster.

    Before each begins and before it ends, nothing is in flight and nothing is owed. So the
    difference holds everything that its steps cause, their updates among it. What a run pays once
    is in all and cancels: that state has to come to the device and to leave it again, and that
    the first step has no update to hide while the last update has no step to hide behind.

    For example, with steps of 1 s whose updates take 0.1 s more, and 3 s to bring the state and
    take it away, two steps take 5.2 s and ten take 14 s: (14 - 5.2) / 8 = 1.1.

    Args:
        work: The steps to time, warmed up to the end of a `drain`.
        num_steps: Number of steps that the mean is of.
        clock: Tells seconds.
        cpu_clock: Tells seconds of the calling thread's processor time.

    Raises:
        ValueError: If there are too few steps for a mean.
    """
    if num_steps < MIN_STEPS:
        raise ValueError(f"num_steps must be at least {MIN_STEPS}, not {num_steps}")
    work.drain()
    shorts = [_drained_run(work, _SHORT_RUN, clock, cpu_clock) for _ in range(2)]
    # The faster one: what holds the other up must not be taken off the long run's time.
    short = min(shorts, key=lambda run: run.seconds)
    long = _drained_run(work, _SHORT_RUN + num_steps, clock, cpu_clock)
    # Nothing was begun while the last step was waited for, which makes its interval a short one.
    pairs = list(zip(long.ends[:-2], long.ends[1:-1], strict=True))
    return Times(
        mean=(long.seconds - short.seconds) / num_steps,
        driver_cpu=(long.cpu_seconds - short.cpu_seconds) / num_steps,
        intervals=[end - start for start, end in pairs],
        runs={len(run.ends): run.seconds for run in (short, long)},
        losses=[loss for run in (*shorts, long) for loss in run.losses],
    )


def time_long_steps(work: Work, num_steps: int, *, clock: Clock = time.perf_counter) -> Times:
    """Times steps of minutes, each from the end of one to the end of the next.

    None is begun before the one before it is over, which costs a step what little of it could have
    been overlapped. The first step begins at rest and has no update to apply; each one after it
    applies that of the step before, as in a long run, and is timed. For example, with steps of 35 s
    whose updates take 1 s more, and 3 s to bring the state, steps end after 38, 74 and 110 s: two
    intervals of 36 s. Nothing warms up: what is compiled late is in the first interval.

    Args:
        work: The steps to time; `finish` waits for all of a step.
        num_steps: Number of steps that the mean is of; one more is run.
        clock: Tells seconds.

    Raises:
        ValueError: If there is no step to time.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")
    losses, ends = [], []
    cpu_start, start = time.thread_time(), clock()
    for _ in range(num_steps + 1):
        losses.append(work.finish(work.begin()))
        ends.append(clock())
    work.drain()
    intervals = [end - before for before, end in pairwise(ends)]
    return Times(
        mean=statistics.mean(intervals),
        driver_cpu=(time.thread_time() - cpu_start) / (num_steps + 1),
        intervals=intervals,
        runs={num_steps + 1: clock() - start},
        losses=losses,
    )


def time_from_rest(work: Work, *, clock: Clock = time.perf_counter) -> Times:
    """Times one step of many minutes, from rest to rest, with all that it owes.

    It takes no less than a step among many: the way of the state to the device and back is in it,
    and what is compiled late. For example, a step of 400 s whose update takes 3 s more, and 5 s to
    bring the state and take it away: 408 s.

    Args:
        work: The step to time, with nothing in flight.
        clock: Tells seconds.
    """
    cpu_start, start = time.thread_time(), clock()
    loss = work.finish(work.begin())
    work.drain()
    seconds = clock() - start
    return Times(
        mean=seconds,
        driver_cpu=time.thread_time() - cpu_start,
        intervals=[seconds],
        runs={1: seconds},
        losses=[loss],
    )


def _drained_run(work: Work, num_steps: int, clock: Clock, cpu_clock: Clock) -> _Run:
    """Runs steps as a training loop does: the next one is begun before one is waited for."""
    ends, losses = [], []

    def finish(begun: Any) -> None:
        losses.append(work.finish(begun))
        ends.append(clock())

    cpu_start, start = cpu_clock(), clock()
    before = work.begin()
    for _ in range(num_steps - 1):
        begun = work.begin()
        finish(before)
        before = begun
    finish(before)
    work.drain()
    seconds, cpu_seconds = clock() - start, cpu_clock() - cpu_start
    return _Run(seconds=seconds, cpu_seconds=cpu_seconds, ends=ends, losses=losses)
