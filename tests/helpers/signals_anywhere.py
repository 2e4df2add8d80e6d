"""A program that sends signals before any line of a run, often two: no moment is unlucky.

Of the code that holds signals back and puts handlers back, signals come before each bytecode.

It is a program because an exception that a trace function raises may stay the one that Python
handles, in the frames that it went through.
"""

import dis
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count, product
from types import FrameType, SimpleNamespace
from typing import Any

import megatrain_jax as mt
import small
from log_trainer import LogTrainer, batch_of
from megatrain_jax import FitResult
from megatrain_jax._src.engine import run_state
from megatrain_jax._src.engine import trainer as trainers
from megatrain_jax._src.engine.checkpoint import save
from megatrain_jax._src.engine.options.options import LoopOptions
from megatrain_jax._src.engine.runtime import evaluation, interrupt, training
from megatrain_jax._src.engine.train import loop, run, series, source
from runs import check_same_bits

RUNS, REAL_RUNS = 80, 25
LOOP: set[str | None] = {module.__file__ for module in (interrupt, loop, run, source)}
REAL = LOOP | {m.__file__ for m in (trainers, run_state, training, evaluation, save, series)}
# Handlers themselves; and what comes when a run's own handlers are taken away.
NOT_WATCHED = ("_receive", "_remember", "_is_within", "_waits", "Signals.__exit__")
OPTIONS = LoopOptions(steps=7, eval_data=[0], eval_every=2, progress=False)
NUMBERS = (signal.SIGINT, signal.SIGTERM)

terminated: list[int] = []
interrupted: list[int] = []


def on_sigterm(number: int, frame: FrameType | None) -> None:
    terminated.append(number)


def exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    terminated.append(number)
    raise SystemExit(number)


def raise_on_sigint(number: int, frame: FrameType | None) -> None:
    interrupted.append(number)
    raise KeyboardInterrupt


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


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

    def finish(self) -> None:
        pass


class Watching:
    """Goes on watching lines after an exception has ended that."""

    _watch: Any = None

    def flush(self) -> None:
        super().flush()  # type: ignore[misc]
        if self._watch is not None:
            sys.settrace(self._watch)
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                frame.f_trace = self._watch(frame, "call", None)
                frame = frame.f_back


class WatchedLog(Watching, LogTrainer):
    """A trainer that trains nothing."""


class WatchedTrainer(Watching, mt.Trainer):
    """A trainer that trains."""


def watched(
    trainer: Any, files: set[str | None], lines: dict[int, int], call: Callable[[], FitResult]
) -> tuple[FitResult, int, int]:
    """Runs with signals, by number, before some lines; returns the numbers of lines and signals."""
    number, sent, before = count(), count(), handlers()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        # Not before the run's own handlers are there, nor after.
        armed = not any(now is own for now, own in zip(handlers(), before, strict=True))
        if event == "line" and armed and (line := next(number)) in lines:
            next(sent)
            signal.raise_signal(lines[line])
        return local

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        in_file = code.co_filename in files
        is_watched = in_file and not code.co_qualname.endswith(NOT_WATCHED)
        return local if is_watched else None

    trainer._watch = watch
    sys.settrace(watch)
    try:
        result = call()
    finally:
        sys.settrace(None)
        trainer._watch = None
    assert handlers() == before, (lines, handlers())
    return result, next(number), next(sent)


def train(lines: dict[int, int]) -> tuple[FitResult, int, int]:
    """Trains nothing, with signals before some lines."""
    trainer: Any = WatchedLog()
    source: Any = SimpleNamespace(position=lambda batches: {}, length=None, end_tokens=())
    slots: Any = Slots()
    driver = run.Run(trainer=trainer, source=source, first=0, counted_from=0)
    data = (batch_of(i) for i in range(1, 8))
    found = watched(trainer, LOOP, lines, lambda: driver.train(data, OPTIONS, slots))
    assert slots.saved == trainer.num_steps
    return found


def some_lines(rng: random.Random, num_lines: int) -> dict[int, int]:
    """One or two lines, and the signal before each."""
    first = rng.randrange(num_lines)
    second = first + rng.choice([1, 2, 5, 20, 10**9])
    return {line: rng.choice(NUMBERS) for line in (first, second)}


def check_loop() -> None:
    """Checks that records, steps and what is saved agree, whatever line is interrupted."""
    undisturbed, num_lines, _ = train({})
    assert not undisturbed.interrupted
    rng, ends, twice = random.Random(0), set(), 0
    for _ in range(RUNS):
        terminated.clear()
        lines = some_lines(rng, num_lines)
        result, _, sent = train(lines)
        assert result.interrupted
        if sent == 2:
            assert bool(terminated) == (signal.SIGTERM in lines.values())
        done = result.trainer.num_steps
        assert [record["step"] for record in result.history] == list(range(1, done + 1))
        ends.add(done)
        twice += sent == 2
    assert len(ends) > 3 and twice > RUNS / 3, (ends, twice)


def check_trainer() -> None:
    """Checks that a trainer that was interrupted again and again has trained as if it never was."""
    made = (small.params(), small.loss_fn, small.OPTIMIZER, small.batch(0))
    options: Any = {"precision": mt.Precision(compute="float32"), "progress": False}
    trainer, undisturbed = WatchedTrainer(*made, **options), mt.Trainer(*made, **options)
    os.fsync = lambda opened: None  # takes most of the time of a save
    with tempfile.TemporaryDirectory() as folder:

        def go_on() -> FitResult:
            first = trainer.num_steps
            data = (small.batch(seed) for seed in range(first, first + 9))
            return mt.train(
                trainer,
                data,
                steps=4,
                eval_data=[small.batch(0)],
                eval_every=2,
                checkpoint_dir=folder,
                checkpoint_every=3,
                keep=1,
                progress=False,
            )

        _, num_lines, _ = watched(trainer, REAL, {}, go_on)
        rng, ends = random.Random(1), set()
        for _ in range(REAL_RUNS):
            before = trainer.num_steps
            result, _, sent = watched(trainer, REAL, some_lines(rng, num_lines), go_on)
            assert result.interrupted == (sent > 0)
            assert os.listdir(folder) == [str(trainer.num_steps)] or trainer.num_steps == before
            ends.add(trainer.num_steps - before)
        assert len(ends) > 3, ends
    steps = [record["step"] for record in trainer.history]
    assert steps == list(range(1, trainer.num_steps + 1))
    for seed in range(trainer.num_steps):
        undisturbed.read(undisturbed.step(small.batch(seed)))
    check_same_bits(small.state(trainer), small.state(undisturbed))


def interrupted_at(
    make: Callable[[], AbstractContextManager[Any]], numbers: dict[int, int]
) -> tuple[bool, int]:
    """Whether a block raised, signals having come before bytecodes of it; and their number."""
    seen, raised = count(), False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        # Python looks for signals after calls and jumps, never between a value and its return.
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "opcode" and name != "RETURN_VALUE" and (at := next(seen)) in numbers:
            signal.raise_signal(numbers[at])
        return local

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename != interrupt.__file__ or code.co_name in NOT_WATCHED:
            return None
        frame.f_trace_opcodes = True
        return local

    sys.settrace(watch)
    try:
        with make() as block:
            if isinstance(block, interrupt.Signals):
                block.begin()
    except (KeyboardInterrupt, SystemExit):
        raised = True
    finally:
        sys.settrace(None)
    return raised, next(seen)


def check_bytecodes() -> None:
    """Checks that handlers are put back, and no signal is lost, at any bytecode."""
    blocks = {
        "held back": interrupt.deferred_interrupt,
        "insisting": lambda: interrupt.deferred_interrupt(second_interrupts=True),
        "a run": interrupt.Signals,
    }
    for name, make in blocks.items():
        for terminate in (on_sigterm, exit_on_sigterm):
            for number in NUMBERS:
                for at in count():
                    signal.signal(signal.SIGTERM, terminate)
                    before = handlers()
                    terminated.clear()
                    raised, num_codes = interrupted_at(make, {at: number})
                    if at >= num_codes:
                        break
                    assert handlers() == before, (name, number, at, handlers())
                    # A run looks for itself at what has come.
                    assert raised or terminated or name == "a run", (name, number, at)
                assert at > 50


def check_own_handler_of_sigint() -> None:
    """Checks that a program's own handler of SIGINT, which raises, leaves no handler replaced."""
    blocks = interrupt.deferred_interrupt, interrupt.Signals
    for make, first, second in product(blocks, NUMBERS, NUMBERS):
        for at in count():
            signal.signal(signal.SIGINT, raise_on_sigint)
            signal.signal(signal.SIGTERM, on_sigterm)
            before = handlers()
            interrupted.clear()
            _, num_codes = interrupted_at(make, {at: first, at + 3: second})
            if at >= num_codes:
                break
            assert handlers() == before, (make, first, second, at, handlers())
            assert interrupted or first != signal.SIGINT, (make, second, at)
        assert at > 50
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    check_bytecodes()
    check_own_handler_of_sigint()
    signal.signal(signal.SIGTERM, on_sigterm)
    check_loop()
    check_trainer()


if __name__ == "__main__":
    main()
