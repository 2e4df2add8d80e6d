"""A program that sends SIGINT, often twice, before any line of the loop: no moment is unlucky.

It is a program because an exception that a trace function raises may stay the one that Python
handles, in the frames that it went through.
"""

import random
import signal
import sys
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

from megatrain_jax import FitResult
from megatrain_jax._src.build.options import LoopOptions
from megatrain_jax._src.runtime import interrupt
from megatrain_jax._src.train import loop, run, source
from test_fit import LogTrainer, batch_of

RUNS = 80
WATCHED = {module.__file__ for module in (interrupt, loop, run, source)}
HANDLERS = ("_receive", "remember", "__exit__")
OPTIONS = LoopOptions(steps=7, eval_data=[0], eval_every=2, progress=False)


class Slots:
    """The checkpoints of a run without a folder: only the number of the last one is kept."""

    folder = "memory"

    def __init__(self):
        self.saved: int | None = None

    def check_writable(self) -> None:
        pass

    def is_due(self, step: int) -> bool:
        return step % 3 == 0

    def save(self, trainer: Any, position: Any) -> None:
        self.saved = trainer.num_steps

    def finish(self, trainer: Any) -> None:
        pass


class Watched(LogTrainer):
    """A trainer that goes on watching lines after an exception has ended that."""

    def __init__(self, watch: Any):
        super().__init__()
        self.watch = watch

    def flush(self) -> None:
        super().flush()
        sys.settrace(self.watch)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = self.watch(frame, "call", None)
            frame = frame.f_back


def train(lines: set[int]) -> tuple[FitResult, int, int]:
    """Trains with signals before some lines; returns how many lines and signals there were."""
    number, sent = count(), count()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        # Not before the run's own handler is there, nor after.
        armed = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if event == "line" and armed and next(number) in lines:
            next(sent)
            signal.raise_signal(signal.SIGINT)
        return local

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        return local if code.co_filename in WATCHED and code.co_name not in HANDLERS else None

    trainer: Any = Watched(watch)
    source: Any = SimpleNamespace(position=lambda batches: {})
    slots: Any = Slots()
    driver = run.Run(trainer=trainer, source=source, first=0, counted_from=0)
    data = (batch_of(i) for i in range(1, 8))
    sys.settrace(watch)
    try:
        result = driver.train(data, OPTIONS, slots)
    finally:
        sys.settrace(None)
    assert slots.saved == trainer.num_steps
    return result, next(number), next(sent)


def main() -> None:
    undisturbed, num_lines, _ = train(set())
    assert not undisturbed.interrupted
    rng, ends, twice = random.Random(0), set(), 0
    for _ in range(RUNS):
        first = rng.randrange(num_lines)
        result, _, sent = train({first, first + rng.choice([1, 2, 5, 20, 10**9])})
        assert result.interrupted
        done = result.trainer.num_steps
        assert [record["step"] for record in result.history] == list(range(1, done + 1))
        ends.add(done)
        twice += sent == 2
    assert len(ends) > 3 and twice > RUNS / 3, (ends, twice)


if __name__ == "__main__":
    main()
