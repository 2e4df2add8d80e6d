"""Runs that end before their time: what they save, hand over, and what goes on from it."""

import csv
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import callbacks
from megatrain_jax._src.checkpoint import folder, manifest
from megatrain_jax._src.checkpoint.save import Saving
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.interrupt import Signals
from poison import WIDTH, batch, loss_fn, poisoned
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")
STEPS = 8


class Net(nnx.Module):
    """Blocks with statistics, of which a NaN must not get hold."""

    def __init__(self, rngs):
        self.blocks = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, poison):
        x = x + nnx.relu(self.blocks[0](x))
        return self.blocks[1](poisoned(self.drop(self.norm(x)), poison))


BATCHES = [batch(seed) for seed in range(STEPS)]
OPTIMIZERS = {
    "immediate": optax.adamw(1e-2),
    "deferred": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
}


def run(optimizer: Any, data: Any = BATCHES, **options: Any) -> mt.FitResult:
    options = {"precision": mt.Precision(compute=jnp.float32), "progress": False, **options}
    return mt.fit(lambda: Net(nnx.Rngs(0)), loss_fn, data, optimizer, **options)


def everything(trainer: mt.Trainer) -> list[Any]:
    """Copies of all state, which keep no host memory of the trainer's."""

    def copied(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(copied, [trainer.params, trainer.opt_state, trainer.variables])


def losses(result: mt.FitResult) -> list[float]:
    return [record["loss"] for record in result.history]


@functools.cache
def whole(mode: str) -> SimpleNamespace:
    """The losses, the last state and the schedule of an undisturbed run."""
    result = run(OPTIMIZERS[mode])
    return SimpleNamespace(
        losses=losses(result),
        state=everything(result.trainer),
        schedule=result.trainer.schedule,
    )


def altered(step: int, value: Any) -> list[Any]:
    return [*BATCHES[: step - 1], value, *BATCHES[step:]]


def broken_data(step: int, options: dict[str, Any]) -> None:
    def data():
        yield from BATCHES[:step]
        raise OSError("disk gone")

    options["data"] = data()


def broken_callback(step: int, options: dict[str, Any]) -> None:
    def callback(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise ZeroDivisionError("in a callback")

    options["callbacks"] = [callback]


def exit_in_callback(step: int, options: dict[str, Any]) -> None:
    options["callbacks"] = [lambda trainer, record: record["step"] == step and sys.exit(7)]


def broken_evaluation(step: int, options: dict[str, Any]) -> None:
    options["eval_data"] = lambda: [{"x": np.zeros(3)}]


def nan_loss(step: int, options: dict[str, Any]) -> None:
    options["data"] = altered(step + 1, batch(99, y=np.nan))


def other_structure(step: int, options: dict[str, Any]) -> None:
    options["data"] = altered(step + 1, {"x": BATCHES[0]["x"]})


CAUSES: dict[str, tuple[str, Callable[[int, dict[str, Any]], None], type[BaseException]]] = {
    "data": ("immediate", broken_data, OSError),
    "callback": ("deferred", broken_callback, ZeroDivisionError),
    "exit": ("immediate", exit_in_callback, SystemExit),
    "evaluation": ("deferred", broken_evaluation, Exception),
    "structure": ("deferred", other_structure, ValueError),
    "nan": ("immediate", nan_loss, FloatingPointError),
    "nan with clipping": ("deferred", nan_loss, FloatingPointError),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_whatever_ends_a_run_the_last_whole_step_is_saved_and_goes_on(cause, tmp_path):
    mode, disturb, kind = CAUSES[cause]
    optimizer, expected = OPTIMIZERS[mode], whole(mode)
    step = random.Random(cause).randint(2, STEPS - 2)
    options: dict[str, Any] = {}
    disturb(step, options)
    with pytest.raises(kind) as caught:
        run(optimizer, checkpoint_dir=tmp_path, **options)
    result: Any = getattr(caught.value, "result", None)
    done = result.trainer.num_steps
    # A callback and an evaluation come when the next step has been dispatched already.
    assert done in {
        "evaluation": [STEPS],
        "callback": [step, step + 1],
        "exit": [step, step + 1],
    }.get(cause, [step])
    assert losses(result) == expected.losses[:done]
    assert folder.steps(tmp_path) == [done]
    if kind is not SystemExit:
        notes = "".join(caught.value.__notes__)
        assert str(tmp_path) in notes and "`.result`" in notes
    # What is handed over goes on, and so does what was saved: as if nothing had happened.
    resumed = run(optimizer, checkpoint_dir=tmp_path)
    check_same_bits(everything(resumed.trainer), expected.state)
    assert losses(resumed) == expected.losses
    if done < STEPS:
        mt.train(result.trainer, BATCHES[done:], progress=False)
    check_same_bits(everything(result.trainer), expected.state)


def test_a_gradient_that_stopped_an_immediate_update_half_way_is_saved_as_it_is(tmp_path):
    data = altered(4, batch(99, poison=np.inf))
    with pytest.raises(FloatingPointError, match="not finite in step 4. Updated before") as caught:
        run(OPTIMIZERS["immediate"], data, checkpoint_dir=tmp_path)
    result = caught.value.result  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == [4] and result.trainer.num_steps == 4
    with pytest.warns(UserWarning, match="step 4 was done in part"):
        resumed = run(OPTIMIZERS["immediate"], data, steps=4, checkpoint_dir=tmp_path)
    check_same_bits(everything(resumed.trainer), everything(result.trainer))


def test_a_state_that_is_not_finite_is_handed_over_and_not_saved(tmp_path):
    optimizer = optax.sgd(lambda count: jnp.where(count == 3, jnp.inf, 1e-2))
    with pytest.raises(FloatingPointError, match="loss of step 5") as caught:
        run(optimizer, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert folder.steps(tmp_path) == [3]
    assert "is not finite, so training could not go on" in "".join(caught.value.__notes__)
    assert caught.value.result.trainer.num_steps == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(("steps", "every"), [(8, None), (8, 2), (5, 1)])
def test_a_state_that_is_not_finite_takes_no_good_one_s_place(steps, every, tmp_path):
    bad = 5  # the first step whose update spoils the parameters, which its loss doesn't show
    optimizer = optax.sgd(lambda count: jnp.where(count == bad - 1, jnp.nan, 1e-2))
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": every, "keep": 1}
    with pytest.raises((mt.CheckpointError, FloatingPointError)) as caught:
        run(optimizer, steps=steps, **options)
    assert caught.value.result is not None  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == ([] if every is None else [4])
    with pytest.raises(mt.CheckpointError, match="params/.* is not finite"):
        run(optimizer, steps=bad, checkpoint_dir=tmp_path)


def test_nothing_is_saved_of_a_run_without_a_step(tmp_path):
    with pytest.raises(FloatingPointError, match="loss of step 1"):
        run(OPTIMIZERS["deferred"], altered(1, batch(99, y=np.nan)), checkpoint_dir=tmp_path)
    assert folder.steps(tmp_path) == []


def failing(monkeypatch: pytest.MonkeyPatch, record: int) -> None:
    """Has the engine fail at one of the records to come."""
    obey, left = Engine.obey, iter(range(record))

    def fails(self: Engine, *args: Any) -> None:
        if next(left, None) is None:
            monkeypatch.setattr(Engine, "obey", obey)
            raise RuntimeError("no memory")
        obey(self, *args)

    monkeypatch.setattr(Engine, "obey", fails)


@pytest.mark.parametrize("mode", OPTIMIZERS)
def test_a_step_that_was_cut_off_is_not_taken_for_whole(mode, tmp_path, monkeypatch):
    optimizer, expected = OPTIMIZERS[mode], whole(mode)
    schedule = expected.schedule
    two_steps = len(schedule.cold) + len(schedule.steady)
    saved = two_steps + len(schedule.flush)
    for record in random.Random(mode).sample(range(saved, saved + two_steps), 2):
        path = tmp_path / str(record)
        failing(monkeypatch, record)
        with pytest.raises(RuntimeError, match="no memory") as caught:
            run(optimizer, checkpoint_dir=path, checkpoint_every=2)
        trainer = caught.value.result.trainer  # type: ignore[attr-defined]
        assert folder.steps(path) == [2]
        for attempt in (
            lambda t=trainer: t.params,
            lambda t=trainer: t.step(BATCHES[0]),
            lambda t=trainer: t.save(tmp_path / "never"),
        ):
            with pytest.raises(RuntimeError, match="state is lost.*Restore"):
                attempt()
        trainer.restore(path / "2")
        mt.train(trainer, BATCHES[2:], progress=False)
        check_same_bits(everything(trainer), expected.state)


@pytest.mark.parametrize("mode", OPTIMIZERS)
def test_an_evaluation_that_was_cut_off_loses_nothing(mode, monkeypatch):
    optimizer, expected = OPTIMIZERS[mode], whole(mode)
    trainer = run(optimizer, BATCHES[:3]).trainer
    for record in range(0, len(trainer.schedule.evaluation), 4):
        failing(monkeypatch, record)
        with pytest.raises(RuntimeError, match="no memory"):
            trainer.evaluate(BATCHES[:1])
        monkeypatch.undo()
    mt.train(trainer, BATCHES[3:], progress=False)
    check_same_bits(everything(trainer), expected.state)


# Signals


def during_the_save(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Sends signals, each once the one before was received, when only the name is missing."""
    publish, receive, received = Saving._publish, Signals._receive, threading.Semaphore(0)

    def counted(*args: Any) -> None:
        received.release()
        receive(*args)

    def interrupted(*args: Any) -> None:
        while received.acquire(blocking=False):
            pass
        for number in numbers:
            # To this thread: the main one has to notice it without being woken.
            signal.pthread_kill(threading.get_ident(), number)
            assert received.acquire(timeout=60)
        publish(*args)

    monkeypatch.setattr(Signals, "_receive", counted)
    monkeypatch.setattr(Saving, "_publish", interrupted)


@pytest.mark.parametrize("first", [None, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_disturb_the_final_save(
    first, second, tmp_path, monkeypatch, capfd
):
    during_the_save(monkeypatch, second)

    def at_three(trainer: Any, record: dict[str, Any]) -> None:
        if first is not None and record["step"] == 3:
            os.kill(os.getpid(), first)

    try:
        result: Any = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=[at_three])
        status = 0
    except SystemExit as error:
        result, status = error.result, error.code  # type: ignore[attr-defined]
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("the signal has cut the save off")
    assert status == (143 if signal.SIGTERM in (first, second) else 0)
    assert result.interrupted
    done = result.trainer.num_steps
    assert done == (STEPS if first is None else 4)
    assert folder.steps(tmp_path) == [done]
    assert f"after step {done}, saved in {tmp_path}" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGTERM])
def test_a_third_signal_cuts_the_final_save_off(last, tmp_path, monkeypatch, capfd):
    during_the_save(monkeypatch, signal.SIGINT, signal.SIGINT, last)
    with pytest.raises(SystemExit if last == signal.SIGTERM else KeyboardInterrupt) as caught:
        run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path)
    assert caught.value.result.trainer.num_steps == STEPS  # type: ignore[attr-defined]
    shown = capfd.readouterr().err
    assert f"after step {STEPS}." in shown and "saved" not in shown


def test_sigterm_is_handed_on_to_a_handler_of_the_caller(tmp_path):
    seen = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: seen.append(folder.steps(tmp_path))
    )
    try:
        callbacks = [lambda trainer, record: os.kill(os.getpid(), signal.SIGTERM)]
        result = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=callbacks)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.interrupted
    assert seen == [[result.trainer.num_steps]]


def test_signals_at_any_line_lose_nothing():
    program = Path(__file__).with_name("signals_anywhere.py")
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", "."), str(program.parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run([sys.executable, program], env=environment, timeout=200)
    assert ended.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_callback_can_not_keep_a_signal_to_itself(number):
    def careless(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                pass

    try:
        result: Any = run(OPTIMIZERS["deferred"], callbacks=[careless])
        assert number == signal.SIGINT
    except SystemExit as error:
        result = error.result  # type: ignore[attr-defined]
    assert result.trainer.num_steps == 4


def test_a_callback_may_put_anything_into_a_record(tmp_path):
    def notes(trainer: Any, record: dict[str, Any]) -> None:
        record |= {"rate": np.float32(0.5), "jax": jnp.arange(2), "what": {1}, "none": None}

    result = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=[notes])
    result.history.save(tmp_path / "history.json")
    last = manifest.facts_of(tmp_path / str(STEPS))["history"][-1]
    assert [last[k] for k in ("rate", "jax", "what", "none")] == [0.5, [0, 1], "{1}", None]


def test_a_callback_that_moves_the_trainer_is_named():
    callbacks = [lambda trainer, record: trainer.step(BATCHES[0])]
    with pytest.raises(RuntimeError, match="a callback has moved the trainer from step 2 to 3"):
        run(OPTIMIZERS["deferred"], callbacks=callbacks)


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_process_that_a_callback_forks_can_end_by_itself(tmp_path):
    parent, ended = os.getpid(), []

    def forks(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(30)  # ends it where it hangs
                sys.exit(7)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    try:
        optimizer, options = OPTIMIZERS["immediate"], {"checkpoint_every": 1, "keep": 9}
        result = run(optimizer, checkpoint_dir=tmp_path, callbacks=[forks], **options)
    except SystemExit as error:
        if os.getpid() == parent:
            raise
        os._exit(error.code)  # type: ignore[arg-type]
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert ended == [7]
    assert losses(result) == whole("immediate").losses
    assert folder.steps(tmp_path) == list(range(1, STEPS + 1))


def test_a_run_of_several_calls_resumes_with_the_batches_to_come(tmp_path):
    data, optimizer = iter(BATCHES), OPTIMIZERS["deferred"]
    result = run(optimizer, data, steps=3, checkpoint_dir=tmp_path)
    mt.train(result.trainer, data, steps=2, checkpoint_dir=tmp_path, progress=False)
    with pytest.warns(UserWarning, match="as many batches as it has steps are skipped"):
        resumed = run(optimizer, checkpoint_dir=tmp_path)
    assert losses(resumed) == whole("deferred").losses
    check_same_bits(everything(resumed.trainer), whole("deferred").state)


# Evaluations, finished runs, names


def test_an_evaluation_that_stalls_gives_way_to_the_second_signal(tmp_path):
    def stalled():
        yield BATCHES[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    result = run(OPTIMIZERS["deferred"], eval_data=stalled, eval_every=3, checkpoint_dir=tmp_path)
    assert result.interrupted
    assert folder.steps(tmp_path) == [3]
    assert len(result.history) == 3 and "eval_loss" not in result.history[-1]


def test_an_evaluation_that_was_cut_off_is_made_when_the_run_goes_on(tmp_path):
    def go(folder, cut_off):
        def evaluated():
            yield BATCHES[0]
            if cut_off:
                signal.raise_signal(signal.SIGINT)
            yield BATCHES[1]

        seen = []
        logs = [callbacks.CSVLog(folder / "log.csv"), callbacks.JSONLog(folder / "log.jsonl")]
        records = [*logs, lambda trainer, record: seen.append((record["step"], *record))]
        options = {"eval_data": evaluated, "eval_every": 2, "checkpoint_dir": folder}
        return run(OPTIMIZERS["deferred"], callbacks=records, **options), seen

    whole, _ = go(tmp_path / "whole", False)
    cut, _ = go(tmp_path / "cut", True)
    assert cut.interrupted and cut.trainer.num_steps == 2 and "eval_loss" not in cut.history[-1]
    resumed, seen = go(tmp_path / "cut", False)
    values = [[r.get("eval_loss") for r in result.history] for result in (whole, resumed)]
    assert values[0] == values[1] and values[0][1] is not None
    # `train` makes it, too.
    options = {"eval_data": BATCHES[:2], "eval_every": 2, "progress": False}
    mt.train(cut.trainer, BATCHES[2:], **options)
    assert [r.get("eval_loss") for r in cut.history] == values[0]
    # But none that was never begun.
    by_hand = run(OPTIMIZERS["deferred"], BATCHES[:2]).trainer
    mt.train(by_hand, BATCHES[2:], **options)
    assert [r.get("eval_loss") for r in by_hand.history] == [None, None, *values[0][2:]]
    assert seen[0][0] == 2 and "eval_loss" in seen[0] and seen[1][0] == 3
    table, lines = (
        (tmp_path / "cut" / name).read_text(encoding="utf-8").splitlines()
        for name in ("log.csv", "log.jsonl")
    )
    logged = [list(csv.DictReader(table)), [json.loads(line) for line in lines]]
    for found in logged:
        assert [int(row["step"]) for row in found] == list(range(1, STEPS + 1))
        assert float(found[1]["eval_loss"]) == pytest.approx(values[0][1])


def test_an_evaluation_is_cut_short_by_one_signal():
    drawn = []

    def long():
        for i in count():
            drawn.append(i)
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield BATCHES[0]

    trainer = run(OPTIMIZERS["deferred"], BATCHES[:2]).trainer
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(long())
    assert drawn == [0, 1, 2]
    trainer.read(trainer.step(BATCHES[2]))


@pytest.mark.parametrize(("steps", "checkpoint_every"), [(6, 2), (6, 4), (5, 5), (None, 4)])
def test_the_last_step_is_evaluated_and_saved_with_that(steps, checkpoint_every, tmp_path):
    result = run(
        OPTIMIZERS["immediate"],
        steps=steps,
        checkpoint_every=checkpoint_every,
        checkpoint_dir=tmp_path,
        eval_data=BATCHES[:1],
    )
    evaluated = ["eval_loss" in record for record in result.history]
    assert evaluated == [*[False] * ((steps or STEPS) - 1), True]
    saved = manifest.facts_of(tmp_path / str(steps or STEPS))["history"]
    assert saved == list(result.history)


def test_a_finished_run_is_handed_back(tmp_path):
    first = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path)
    for data in (BATCHES, iter(BATCHES)):
        again = run(OPTIMIZERS["deferred"], data, checkpoint_dir=tmp_path)
        assert losses(again) == losses(first) and not again.interrupted
        check_same_bits(everything(again.trainer), everything(first.trainer))
    with pytest.raises(mt.DataRanOutError, match=f"after {STEPS} of `steps`=20") as caught:
        run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, steps=20)
    assert losses(caught.value.result) == losses(first)


@pytest.mark.parametrize("steps", [STEPS, None])
def test_a_finished_run_is_evaluated_on_data_that_it_did_not_have(steps, tmp_path):
    options = {"steps": steps, "checkpoint_dir": tmp_path}
    first, seen = run(OPTIMIZERS["deferred"], **options), []
    options |= {"eval_data": BATCHES[:2], "callbacks": [lambda *_: seen.append(1)]}
    again = run(OPTIMIZERS["deferred"], **options)
    means = again.trainer.evaluate(BATCHES[:2])
    assert again.history[-1] == first.history[-1] | {"eval_loss": means["loss"]}
    assert list(again.history[:-1]) == list(first.history[:-1]) and not seen
    check_same_bits(everything(again.trainer), everything(first.trainer))
    with pytest.raises(ValueError, match="no batch to evaluate") as caught:
        run(OPTIMIZERS["deferred"], **(options | {"eval_data": lambda: []}))
    assert losses(caught.value.result) == losses(first)  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == [STEPS]


@pytest.mark.parametrize("steps", [2, 4, 5])
def test_a_resumed_run_goes_on_counting_what_it_skips_in_a_row(steps, tmp_path):
    bad = batch(99, y=np.nan)
    data = [BATCHES[0], *repeat(bad, 2), BATCHES[1], *repeat(bad, 9)]
    options = {"on_nonfinite": "skip", "max_skipped": 4, "checkpoint_dir": tmp_path}
    run(OPTIMIZERS["immediate"], data, steps=steps, **options)
    with pytest.raises(FloatingPointError, match="from 5 to 8 .* `max_skipped`=4"):
        run(OPTIMIZERS["immediate"], data, **options)
    # After that error it counts anew, step 9 having been in flight, as in the process that met it.
    with pytest.raises(FloatingPointError, match="from 9 to 12 ") as caught:
        run(OPTIMIZERS["immediate"], data, **options)
    result = caught.value.result  # type: ignore[attr-defined]
    assert [r["step"] for r in result.history] == [*range(1, 14)]


@pytest.mark.parametrize("name", ["step", "seconds", "skipped", "loss", "grad_norm", "eval_loss"])
def test_a_metric_may_not_take_a_record_s_own_names(name):
    def with_metric(model, batch):
        return loss_fn(model, batch), {name: 0.0}

    with pytest.raises(ValueError, match=f"may not name a metric '{name}'"):
        mt.fit(lambda: Net(nnx.Rngs(0)), with_metric, BATCHES, optax.adam(1e-2))


def test_a_run_that_only_skips_ends(tmp_path):
    bad = batch(99, y=np.nan)
    data = [BATCHES[0], bad, bad, BATCHES[1], BATCHES[2], *repeat(bad, 9)]
    with pytest.raises(FloatingPointError, match="from 6 to 8 .* `max_skipped`=3") as caught:
        run(
            OPTIMIZERS["immediate"],
            data,
            on_nonfinite="skip",
            max_skipped=3,
            checkpoint_dir=tmp_path,
        )
    result = caught.value.result  # type: ignore[attr-defined]
    (newest,) = folder.steps(tmp_path)
    assert result.trainer.num_steps == newest == 9
    # The step that was one too many has a record, and so has the one in flight.
    assert [r["step"] for r in result.history] == [*range(1, 10)]
    assert [r["skipped"] for r in result.history] == [0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert result.trainer.num_skipped == 6
    good = run(OPTIMIZERS["immediate"], BATCHES[:3], on_nonfinite="skip")
    check_same_bits(result.params, good.params)
