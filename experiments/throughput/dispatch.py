"""The seconds that Python takes in a training step."""

import time
from typing import Any

from decoder import Batch

import megatrain_jax as mt
from megatrain_jax._src.engine.schedule.instructions import WAITS, Instruction


def dispatch_seconds(trainer: mt.Trainer, batches: list[Batch]) -> float:
    """Returns Python's seconds for dispatching the last of some steps, without its waits.

    XLA's GPU client has 32 computations in flight at most, and has a call wait until there are
    fewer again. So what was dispatched is over before each instruction here.
    """
    engine = trainer.run_state.engine
    obey, waited = engine.obey, 0.0

    def timed(instruction: Instruction, live: Any) -> None:
        nonlocal waited
        start, waits = time.perf_counter(), instruction.op in WAITS
        engine._dispatched.wait_for_all()
        if waits:
            obey(instruction, live)
        waited += time.perf_counter() - start
        if not waits:
            obey(instruction, live)

    engine.obey, seconds = timed, 0.0
    for batch in batches:
        waited, start = 0.0, time.perf_counter()
        metrics = trainer.step(batch)
        seconds = time.perf_counter() - start - waited
        trainer.read(metrics)
    engine.obey = obey
    return seconds
