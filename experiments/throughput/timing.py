"""Times training steps as a training loop runs them, and what Python costs in one."""

import time
from collections.abc import Mapping
from typing import Any

import jax
from decoder import Batch

import megatrain_jax as mt
from megatrain_jax.stream.laps import WAITS, Record


def time_steps(trainer: mt.Trainer, batches: list[Batch]) -> tuple[list[float], list[float]]:
    """Runs steps of which the next is always dispatched before one is waited for.

    Returns:
        Each step's loss, and the seconds between the moments at which a step was seen to be over
        and the next one was dispatched. As dispatching a streamed step itself takes most of a
        step, the first of these intervals holds nearly two steps, and the last one nearly none.
    """
    losses, ends = [], [time.perf_counter()]

    def finish(metrics: Mapping[str, jax.Array]) -> None:
        jax.block_until_ready(dict(metrics))
        ends.append(time.perf_counter())
        losses.append(trainer.read(metrics)["loss"])

    before = trainer.step(batches[0])
    for batch in batches[1:]:
        dispatched = trainer.step(batch)
        finish(before)
        before = dispatched
    finish(before)
    return losses, [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]


def dispatch_seconds(trainer: mt.Trainer, batches: list[Batch]) -> float:
    """Returns what Python needs to dispatch the last of some steps, without what it waits.

    XLA's GPU client has 32 computations in flight at most, and has a call wait until there are
    fewer again. So what was dispatched is over before each record here.
    """
    engine = trainer._engine
    obey, waited = engine.obey, 0.0

    def timed(record: Record, step: Any) -> None:
        nonlocal waited
        start, waits = time.perf_counter(), record.op in WAITS
        jax.block_until_ready([x for x in engine._tokens.values() if not x.is_deleted()])
        if waits:
            obey(record, step)
        waited += time.perf_counter() - start
        if not waits:
            obey(record, step)

    engine.obey, seconds = timed, 0.0
    for batch in batches:
        waited, start = 0.0, time.perf_counter()
        metrics = trainer.step(batch)
        seconds = time.perf_counter() - start - waited
        trainer.read(metrics)
    engine.obey = obey
    return seconds
