"""Runs that end by an error: the saved step, the returned state, and the continued run."""

import os
import random
import signal
import sys
from collections.abc import Callable
from itertools import repeat
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
import small
from ending_runs import BATCHES, OPTIMIZERS, STEPS, Net, everything, losses, run, whole
from megatrain_jax._src.engine.checkpoint import folder, manifest
from megatrain_jax._src.engine.runtime.engine import Engine
from messages import refuses, tells, warns
from poison import batch, loss_fn
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


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
    options["eval_data"] = lambda: [BATCHES[0], {"x": np.zeros(3)}]


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


@pytest.mark.by_default("structure")
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
    with refuses(FloatingPointError, "finite", "step 4", "Updated") as caught:
        run(OPTIMIZERS["immediate"], data, checkpoint_dir=tmp_path)
    result = caught.value.result  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == [4] and result.trainer.num_steps == 4
    with warns(UserWarning, "step 4", "part"):
        resumed = run(OPTIMIZERS["immediate"], data, steps=4, checkpoint_dir=tmp_path)
    check_same_bits(everything(resumed.trainer), everything(result.trainer))


def test_a_state_that_is_not_finite_is_handed_over_and_not_saved(tmp_path):
    optimizer = optax.sgd(lambda count: jnp.where(count == 3, jnp.inf, 1e-2))
    with refuses(FloatingPointError, "loss", "step 5") as caught:
        run(optimizer, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert folder.steps(tmp_path) == [3]
    assert tells("".join(caught.value.__notes__), "finite")
    assert caught.value.result.trainer.num_steps == 4  # type: ignore[attr-defined]


@pytest.mark.by_default("8-None")
@pytest.mark.parametrize(("steps", "every"), [(8, None), (8, 2), (5, 1)])
def test_a_state_that_is_not_finite_takes_no_good_one_s_place(steps, every, tmp_path):
    bad = 5  # the first step whose update spoils the parameters, which its loss doesn't show
    optimizer = optax.sgd(lambda count: jnp.where(count == bad - 1, jnp.nan, 1e-2))
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": every, "keep": 1}
    with pytest.raises((mt.CheckpointError, FloatingPointError)) as caught:
        run(optimizer, steps=steps, **options)
    assert caught.value.result is not None  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == ([] if every is None else [4])
    with pytest.raises(mt.CheckpointError, match="params/.*finite"):
        run(optimizer, steps=bad, checkpoint_dir=tmp_path)


def test_nothing_is_saved_of_a_run_without_a_step(tmp_path):
    with refuses(FloatingPointError, "loss", "step 1"):
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


@pytest.mark.by_default("immediate")
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
            with refuses(RuntimeError, "lost", "Restore"):
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


def test_a_callback_may_put_anything_into_a_record(tmp_path):
    def notes(trainer: Any, record: dict[str, Any]) -> None:
        record |= {"rate": np.float32(0.5), "jax": jnp.arange(2), "what": {1}, "none": None}

    result = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=[notes])
    result.history.save(tmp_path / "history.json")
    last = manifest.facts_of(tmp_path / str(STEPS))["history"][-1]
    assert [last[k] for k in ("rate", "jax", "what", "none")] == [0.5, [0, 1], "{1}", None]


def test_a_callback_that_moves_the_trainer_is_named():
    callbacks = [lambda trainer, record: trainer.step(BATCHES[0])]
    with refuses(RuntimeError, "callback", "step 2", 3):
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


@pytest.mark.parametrize("name", ["step", "seconds", "skipped", "loss", "grad_norm", "eval_loss"])
def test_a_metric_may_not_take_a_record_s_own_names(name):
    def with_metric(model, batch):
        return loss_fn(model, batch), {name: 0.0}

    with refuses(ValueError, "metric", f"'{name}'"):
        mt.fit(lambda: Net(nnx.Rngs(0)), with_metric, BATCHES, optax.adam(1e-2))


def test_a_run_that_only_skips_ends(tmp_path):
    good = [small.batch(seed) for seed in range(3)]
    bad = {"x": np.full_like(good[0]["x"], np.nan)}
    data = [good[0], bad, bad, good[1], good[2], *repeat(bad, 9)]
    with refuses(FloatingPointError, 6, 8, "`max_skipped`=3") as caught:
        small.fit(tmp_path, None, data=data, on_nonfinite="skip", max_skipped=3)
    result = caught.value.result  # type: ignore[attr-defined]
    (newest,) = folder.steps(tmp_path)
    assert result.trainer.num_steps == newest == 9
    # The step that was one too many has a record, and so has the one in flight.
    assert [r["step"] for r in result.history] == [*range(1, 10)]
    assert [r["skipped"] for r in result.history] == [0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert result.trainer.num_skipped == 6
    expected = small.fit(None, None, data=good, on_nonfinite="skip")
    check_same_bits(result.params, expected.params)
