"""The loop around steps: the order of its calls, and the results of runs that end early."""

import functools
import os
import signal
from itertools import cycle, product
from typing import Any

import numpy as np
import optax
import pytest

import small
from log_trainer import LogTrainer, batch_of
from megatrain_jax._src.engine.fit import fit, train
from megatrain_jax._src.engine.history import History
from megatrain_jax._src.engine.options.options import LoopOptions
from megatrain_jax._src.engine.planning import plan
from megatrain_jax._src.engine.train.loop import is_unevaluated
from megatrain_jax._src.engine.train.result import DataRanOutError, FitResult, StopTraining
from megatrain_jax._src.engine.trainer import Trainer
from messages import refuses, tells


def log_trainer(log: list[tuple[str, int]] | None = None) -> Any:
    return LogTrainer(log)


def numbered(count: int, log: list[tuple[str, int]] | None = None):
    for index in range(1, count + 1):
        if log is not None:
            log.append(("fetch", index))
        yield batch_of(index)


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


def steps_of(result: FitResult) -> list[int]:
    return [record["step"] for record in result.history]


def test_two_steps_overlap_and_batches_are_drawn_under_a_step():
    log: list[tuple[str, int]] = []
    train(log_trainer(log), numbered(3, log), progress=False)
    assert log == [
        ("fetch", 1),
        ("step", 1),
        ("fetch", 2),
        ("step", 2),
        ("fetch", 3),
        ("read", 1),
        ("step", 3),
        ("read", 2),
        ("read", 3),
        ("flush", 3),
    ]


def test_evaluates_before_the_next_step_and_at_the_end():
    trainer = log_trainer()
    result = train(trainer, numbered(5), eval_data=[0, 0], eval_every=2, progress=False)
    assert [entry for entry in trainer.log if entry[0] == "evaluate"] == [
        ("evaluate", 2),
        ("evaluate", 4),
        ("evaluate", 5),
    ]
    assert trainer.log.index(("evaluate", 2)) < trainer.log.index(("step", 3))
    assert trainer.log.index(("read", 2)) < trainer.log.index(("evaluate", 2))
    evaluated = [record["step"] for record in result.history if "eval_loss" in record]
    assert evaluated == [2, 4, 5]
    assert result.history[1]["eval_loss"] == 2.0


def test_a_last_step_that_was_due_is_evaluated_once():
    trainer = log_trainer()
    train(trainer, numbered(4), eval_data=lambda: iter([0]), eval_every=2, progress=False)
    assert [entry[1] for entry in trainer.log if entry[0] == "evaluate"] == [2, 4]


def test_the_last_record_alone_tells_whether_a_run_was_evaluated_at_its_end():
    before, last = {"step": 1, "loss": 2.0, "eval_loss": 2.0}, {"step": 2, "loss": 1.0}
    options = LoopOptions(eval_data=[last])
    for records, expected in (([], False), ([before], False), ([before, last], True)):
        assert is_unevaluated(History(records), options) is expected


def test_draws_exactly_as_many_batches_as_steps():
    trainer, data = log_trainer(), numbered(7)
    first = train(trainer, data, steps=3, progress=False)
    assert steps_of(first) == [1, 2, 3]
    second = train(trainer, data, steps=3, progress=False)
    assert steps_of(second) == [1, 2, 3, 4, 5, 6]
    assert [record["first"] for record in second.history] == [1, 2, 3, 4, 5, 6]
    assert next(data)["x"][0, 0] == 7


def test_callbacks_get_complete_records_in_order():
    seen: list[tuple[str, int, bool]] = []
    train(
        log_trainer(),
        numbered(3),
        eval_data=[0],
        eval_every=3,
        callbacks=[
            lambda trainer, record: seen.append(("a", record["step"], "eval_loss" in record)),
            lambda trainer, record: seen.append(("b", record["step"], record["seconds"] > 0)),
        ],
        progress=False,
    )
    assert seen == [
        ("a", 1, False),
        ("b", 1, True),
        ("a", 2, False),
        ("b", 2, True),
        ("a", 3, True),
        ("b", 3, True),
    ]


def test_seconds_are_those_of_the_steps_alone(monkeypatch: pytest.MonkeyPatch):
    trainer, now = log_trainer(), 0.0

    def takes(seconds: float):
        nonlocal now
        now += seconds

    monkeypatch.setattr("megatrain_jax._src.engine.train.loop.time.perf_counter", lambda: now)
    for step in range(1, 7):
        trainer.on_step[step] = functools.partial(takes, step)
        trainer.on_read[step] = functools.partial(takes, 0.125)
    result = train(
        trainer,
        numbered(6),
        eval_data=lambda: takes(1000) or [0],
        eval_every=3,
        progress=False,
    )
    seconds = [record["seconds"] for record in result.history]
    # What is read one step late counts for the step that went on meanwhile.
    assert seconds == [1, 2.125, 3.25, 4, 5.125, 6.25]


def test_a_callback_can_stop_the_run():
    def stop_at_two(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] >= 2:
            raise KeyboardInterrupt

    result = train(log_trainer(), cycle([batch_of(1)]), callbacks=[stop_at_two], progress=False)
    assert result.interrupted
    assert steps_of(result) == [1, 2, 3]


def test_progress_shows_loss_and_rate_or_nothing(capfd: pytest.CaptureFixture[str]):
    train(log_trainer(), numbered(2), progress=False)
    assert capfd.readouterr() == ("", "")
    train(log_trainer(), numbered(2), steps=2, progress=True)
    shown = capfd.readouterr().err
    assert "loss 0.5" in shown and "examples/s" in shown and "2/2" in shown


def test_data_that_runs_out_keeps_the_steps_done():
    trainer = log_trainer()
    with refuses(DataRanOutError, 2, "`steps`=5") as caught:
        train(trainer, numbered(2), steps=5, progress=False)
    assert isinstance(caught.value, ValueError)
    assert caught.value.result.trainer is trainer  # type: ignore
    assert steps_of(caught.value.result) == [1, 2]  # type: ignore
    assert trainer.log[-1] == ("flush", 2)


def test_empty_data_is_named():
    with refuses(ValueError, "`data`", "batch"):
        train(log_trainer(), [], progress=False)
    with refuses(ValueError, "`data`", "batch"):
        fit({"w": np.ones(3)}, lambda model, batch: 0.0, iter([]), optax.sgd(0.1))


def test_an_error_in_the_data_keeps_the_steps_done():
    def broken():
        yield batch_of(1)
        yield batch_of(2)
        raise OSError("disk gone")

    trainer = log_trainer()
    with pytest.raises(OSError, match="disk gone"):
        train(trainer, broken(), progress=False)
    assert [record["step"] for record in trainer.history] == [1, 2]
    assert trainer.log[-1] == ("flush", 2)


def test_a_batch_unlike_the_first_is_numbered_and_keeps_the_steps_done():
    trainer = log_trainer()
    with refuses(ValueError, "batch['x']", "batch['y']") as caught:
        train(trainer, [batch_of(1), {"y": np.zeros((4, 3))}], progress=False)
    assert tells(caught.value.__notes__[0], "`data`", 2)
    assert [record["step"] for record in trainer.history] == [1]
    assert trainer.log[-1] == ("flush", 1)


def test_a_batch_the_trainer_refuses_keeps_the_steps_done():
    trainer = log_trainer()
    trainer.on_step[3] = raising(ValueError("not divisible"))
    with pytest.raises(ValueError, match="not divisible"):
        train(trainer, numbered(5), progress=False)
    assert [record["step"] for record in trainer.history] == [1, 2]
    assert trainer.log[-1] == ("flush", 2)


def test_a_batch_of_a_shape_that_the_loss_refuses_is_told_apart_from_the_first():
    """Its structure and dtypes are right, so JAX refuses it in the middle of the model."""
    data = [small.batch(0), small.batch(1), {"x": small.batch(2)["x"][:, :32]}]
    raised: Any  # an error of `fit` has a result
    with pytest.raises(TypeError, match="dot_general") as raised:
        small.fit(None, None, data=data)
    said = ["batch['x']", (4, 32), (4, 64)]
    assert any(tells(note, "step 3", *said) for note in raised.value.__notes__)
    trainer = raised.value.result.trainer
    with pytest.raises(TypeError, match="dot_general") as raised:
        trainer.evaluate(data[2:])
    assert any(tells(note, "evaluation", *said) for note in raised.value.__notes__)


def test_a_first_batch_that_the_loss_refuses_is_named():
    x, labels = np.ones((4, 7), "float32"), np.zeros(4, "int32")
    batch, params = {"x": x, "labels": labels}, {"w": np.ones((8, 8), "float32")}

    def loss_fn(params, batch):
        return (batch["x"] @ params["w"]).mean()

    said = ["`sample_batch`", "`data`", "batch['labels']", (4,), "int32", "batch['x']", (4, 7)]
    made: Any = (params, loss_fn, optax.sgd(0.1), batch)
    calls: list[Any] = [
        functools.partial(fit, params, loss_fn, [batch], optax.sgd(0.1), progress=False),
        functools.partial(Trainer, *made, progress=False),
        functools.partial(plan, *made),
    ]
    for call, number in product(calls, (1, 2)):
        with pytest.raises(TypeError, match="dot_general") as raised:
            call(microbatches=number)
        told = [note for note in raised.value.__notes__ if tells(note, *said, "float32")]
        assert len(told) == 1 and tells(told[0], 2, "microbatches") == (number == 2)


def test_a_loss_that_is_not_finite_stops_the_run():
    trainer = log_trainer()
    trainer.on_read[2] = raising(FloatingPointError("step 2"))
    with pytest.raises(FloatingPointError, match="step 2"):
        train(trainer, numbered(9), progress=False)
    assert trainer.num_steps == 3
    assert [record["step"] for record in trainer.history] == [1]


@pytest.mark.parametrize("where", ["on_step", "on_read"])
def test_an_interrupt_returns_what_was_trained_and_training_goes_on(where: str):
    trainer = log_trainer()
    getattr(trainer, where)[3] = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = train(trainer, cycle([batch_of(1)]), progress=False)
    assert result.interrupted
    done = trainer.num_steps
    assert done == (3 if where == "on_step" else 4)
    assert steps_of(result) == list(range(1, done + 1))
    assert trainer.log[-1] == ("flush", done)
    trainer.on_step.clear()
    again = train(result.trainer, cycle([batch_of(1)]), steps=2, progress=False)
    assert not again.interrupted
    assert steps_of(again) == list(range(1, done + 3))


def test_an_interrupt_leaves_a_generator_usable(capfd: pytest.CaptureFixture[str]):
    def data():
        for index in range(1, 7):
            if index == 2:
                signal.raise_signal(signal.SIGINT)
            yield batch_of(index)

    batches, trainer = data(), log_trainer()
    assert train(trainer, batches).interrupted
    assert tells("".join(capfd.readouterr()), "SIGINT", "step 1")
    result = train(trainer, batches, progress=False)
    # Batch 2 had been drawn when the interrupt took effect.
    assert [record["first"] for record in result.history] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, "`steps`.*1.*0"),
        ({"eval_every": 2}, ValueError, "`eval_every`=2 .*`eval_data`"),
        ({"eval_every": -1, "eval_data": [0]}, ValueError, "`eval_every` .*1.*-1"),
        ({"eval_data": iter([0])}, TypeError, "`eval_data` .*iterator"),
        ({"eval_data": batch_of(1)}, TypeError, "`eval_data` .*iterable"),
        ({"eval_data": 3}, TypeError, "`eval_data` .*iterable"),
        ({"data": batch_of(1)}, TypeError, "`data` .*iterable"),
        ({"data": 3}, TypeError, "`data` .*iterable"),
    ],
)
def test_options_that_make_no_sense_are_named(
    options: dict[str, Any], error: type[Exception], message: str
):
    options = {"data": [batch_of(1)], "progress": False, **options}
    with pytest.raises(error, match=message):
        train(log_trainer(), **options)


def test_a_result_shows_itself_briefly():
    result = train(log_trainer(), numbered(2), progress=False)
    assert tells(repr(result), "FitResult", "steps 2", "done", result.reason, "loss 0.5")
    assert tells(repr(result), "1 at step 1", "0.5 at step 2")


class Seeing:
    """Keeps the steps of its records, and raises an error at one of them."""

    def __init__(self, at: int | None = None, error: Any = None):
        self.seen: list[int] = []
        self._at, self._error = at, error

    def __call__(self, trainer: Any, record: dict[str, Any]) -> None:
        self.seen.append(record["step"])
        if record["step"] == self._at:
            raise self._error


@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt(), StopTraining("enough")])
@pytest.mark.parametrize(("at", "also_at"), [(2, None), (4, None), (2, 2), (2, 3), (4, 4)])
def test_a_callback_that_raises_costs_the_others_no_record(error: Any, at: int, also_at: Any):
    first, last = Seeing(), Seeing()
    raises, also = Seeing(at, error), Seeing(also_at, ValueError("late"))
    trainer, given = log_trainer(), {"callbacks": [first, raises, also, last], "progress": False}
    if isinstance(error, ValueError) or also_at is not None:
        with refuses(ValueError) as caught:
            train(trainer, numbered(4), **given)
        result = caught.value.result
    else:
        result = train(trainer, numbered(4), **given)
    assert result.trainer.num_steps == min(at + 1, 4)
    assert steps_of(result) == first.seen == last.seen == [*range(1, min(at + 1, 4) + 1)]
    # One that failed is not called again; one that stopped the run is.
    assert raises.seen == (first.seen[:at] if isinstance(error, ValueError) else first.seen)
    assert also.seen == first.seen[:also_at]


def test_the_first_two_errors_of_callbacks_are_told():
    def failing(number):
        def call(trainer, record):
            raise ValueError(f"number {number}")

        return call

    with refuses(ValueError, "number 0") as caught:
        calls = [failing(number) for number in range(4)]
        train(log_trainer(), numbered(4), callbacks=calls, progress=False)
    (note,) = (note for note in caught.value.__notes__ if "number" in note)
    assert tells(note, "number 1")


def test_records_before_a_failed_step_are_seen_after_a_callback_failed():
    trainer, last = log_trainer(), Seeing()
    trainer.on_read[3] = raising(FloatingPointError("step 3"))
    given: Any = {"callbacks": [Seeing(2, ValueError("own")), last], "progress": False}
    with refuses(ValueError, "own") as caught:
        train(trainer, numbered(4), **given)
    assert tells(" ".join(caught.value.__notes__), "step 3")
    assert last.seen == [1, 2]


def test_an_evaluation_that_was_cut_off_is_seen_by_all():
    trainer, last = log_trainer(), Seeing()
    train(trainer, numbered(2), progress=False)
    trainer.history.cut_off = 2
    given: Any = {"eval_data": [0], "eval_every": 2, "progress": False}
    with refuses(ValueError, "own"):
        train(trainer, numbered(2), callbacks=[Seeing(2, ValueError("own")), last], **given)
    assert last.seen == [2]


def test_an_evaluation_that_was_cut_off_is_repeated_only_where_one_is_due():
    trainer = log_trainer()
    train(trainer, numbered(2), progress=False)
    trainer.history.cut_off = 2
    train(trainer, numbered(1), eval_data=[0], eval_every=3, progress=False)
    evaluated = [any(name.startswith("eval_") for name in row) for row in trainer.history]
    assert evaluated == [False, False, True]
