"""The loop around the step: the order of its work, and what survives when a run ends early.

Order and errors are read from a trainer that only writes down its calls; that a run trains right
is compared with plain JAX and Optax, through the public `fit`.
"""

import functools
import os
import signal
from itertools import cycle, islice, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import small
from megatrain_jax._src.fit import fit, train
from megatrain_jax._src.history import History
from megatrain_jax._src.options.batch_checks import check_batch, check_like
from megatrain_jax._src.options.precision import Precision
from megatrain_jax._src.planning import plan
from megatrain_jax._src.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.state.processes import Processes
from megatrain_jax._src.train.result import DataRanOutError, FitResult
from megatrain_jax._src.trainer import Trainer


class LogTrainer:
    """Keeps Trainer's interface and trains nothing; `log` says what was called, in order."""

    def __init__(self, log: list[tuple[str, int]] | None = None):
        self.log = [] if log is None else log
        self.history = History()
        self.num_steps = self.num_skipped = 0
        self.devices, self.processes = (None,), Processes()
        self.on_step: dict[int, Any] = {}
        self.on_read: dict[int, Any] = {}
        self.first: Any = None

    def dispatch(self, batch: Any) -> dict[str, Any]:
        with deferred_interrupt():
            action = self.on_step.get(self.num_steps + 1)
            if action is not None:
                action()
            self.num_steps += 1
            self.log.append(("step", self.num_steps))
        return {"step_read": self.num_steps, "first": batch["x"][0, 0]}

    def read(self, metrics: dict[str, Any]) -> dict[str, float]:
        step = metrics["step_read"]
        self.log.append(("read", step))
        action = self.on_read.pop(step, None)
        if action is not None:
            action()
        return {"loss": 1.0 / step, "first": float(jax.device_get(metrics["first"]))}

    def evaluate(self, batches: Any) -> dict[str, float]:
        self.log.append(("evaluate", self.num_steps))
        return {"loss": float(len(list(batches)))}

    def check_batch(self, batch: Any) -> None:
        check_batch(batch)
        self.first = self.first or batch
        check_like(batch, self.first)

    def flush(self) -> None:
        self.log.append(("flush", self.num_steps))


def log_trainer(log: list[tuple[str, int]] | None = None) -> Any:
    return LogTrainer(log)


def batch_of(value: float, examples: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.full((examples, 3), value, np.float32)}


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


# The loop's order


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

    monkeypatch.setattr("megatrain_jax._src.train.loop.time.perf_counter", lambda: now)
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


# Runs that end early


def test_data_that_runs_out_keeps_the_steps_done():
    trainer = log_trainer()
    with pytest.raises(DataRanOutError, match=r"after 2 of `steps`=5 batches") as caught:
        train(trainer, numbered(2), steps=5, progress=False)
    assert isinstance(caught.value, ValueError)
    assert caught.value.result.trainer is trainer
    assert steps_of(caught.value.result) == [1, 2]
    assert trainer.log[-1] == ("flush", 2)


def test_empty_data_is_named():
    with pytest.raises(ValueError, match="`data` gave no batch"):
        train(log_trainer(), [], progress=False)
    with pytest.raises(ValueError, match="`data` gave no batch"):
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
    with pytest.raises(ValueError, match=r"missing: batch\['x'\]") as caught:
        train(trainer, [batch_of(1), {"y": np.zeros((4, 3))}], progress=False)
    assert "batch 2 of `data`" in caught.value.__notes__[0]
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
    said = (
        "This came with the batch of training step 3: "
        "batch['x'] has shape (4, 32), and (4, 64) in the first batch."
    )
    assert said in raised.value.__notes__
    trainer = raised.value.result.trainer
    with pytest.raises(TypeError, match="dot_general") as raised:
        trainer.evaluate(data[2:])
    assert said.replace("training step 3", "an evaluation") in raised.value.__notes__


def test_a_first_batch_that_the_loss_refuses_is_named():
    x, labels = np.ones((4, 7), "float32"), np.zeros(4, "int32")
    batch, params = {"x": x, "labels": labels}, {"w": np.ones((8, 8), "float32")}

    def loss_fn(params, batch):
        return (batch["x"] @ params["w"]).mean()

    said = (
        "the first batch (`sample_batch`, or the first of `data`): batch['labels'] has shape (4,) "
        "and dtype int32; batch['x'] has shape (4, 7) and dtype float32."
    )
    made: Any = (params, loss_fn, optax.sgd(0.1), batch)
    calls: list[Any] = [
        functools.partial(fit, params, loss_fn, [batch], optax.sgd(0.1), progress=False),
        functools.partial(Trainer, *made, progress=False),
        functools.partial(plan, *made),
    ]
    for call, number in product(calls, (1, 2)):
        with pytest.raises(TypeError, match="dot_general") as raised:
            call(microbatches=number)
        part = "" if number == 1 else "one of 2 microbatches of "
        assert f"This came with {part}{said}" in raised.value.__notes__


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
    assert "Interrupted by SIGINT after step 1." in "".join(capfd.readouterr())
    result = train(trainer, batches, progress=False)
    # Batch 2 had been drawn when the interrupt took effect.
    assert [record["first"] for record in result.history] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, "`steps` must be at least 1"),
        ({"eval_every": 2}, ValueError, "`eval_every`=2 needs `eval_data`"),
        ({"eval_every": -1, "eval_data": [0]}, ValueError, "`eval_every` must be at least 1"),
        ({"eval_data": iter([0])}, TypeError, "`eval_data` is an iterator"),
        ({"eval_data": batch_of(1)}, TypeError, "`eval_data` must be an iterable of batches"),
        ({"eval_data": 3}, TypeError, "`eval_data` must be an iterable of batches"),
        ({"data": batch_of(1)}, TypeError, "`data` must be an iterable of batches"),
        ({"data": 3}, TypeError, "`data` must be an iterable of batches"),
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
    assert (
        repr(result).split()
        == (
            "FitResult steps 2 done: to the end of `data` loss 0.5 1 at step 1, least 0.5 at step 2"
        ).split()
    )


# With the real trainer


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return self.head(x)


def build() -> Mlp:
    return Mlp(nnx.Rngs(0))


def squared_error(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def regression(count: int, examples: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": (x := rng.standard_normal((examples, 6), np.float32)),
            "y": np.stack([x.sum(-1), x[:, 0] * x[:, 1]], -1),
        }
        for _ in range(count)
    ]


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-2, eps=1e-3)


FP32 = Precision(compute=jnp.float32)
OPTIONS = {"precision": FP32, "progress": False}


@functools.cache
def plain_step() -> tuple[Any, optax.GradientTransformation, Any]:
    graphdef, params = nnx.split(build())
    optimizer = adam()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return squared_error(nnx.merge(graphdef, params), batch)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    return params, optimizer, step


def plain_run(batches: list[Any]) -> tuple[list[float], list[np.ndarray]]:
    """The losses and the parameters of a plain JAX and Optax loop."""
    params, optimizer, step = plain_step()
    state = optimizer.init(params)
    losses = []
    for batch in batches:
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def assert_same_run(result: FitResult, batches: list[Any]) -> None:
    losses, params = plain_run(batches)
    got = [record["loss"] for record in result.history]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(result.params), params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fit_trains_like_plain_optax():
    batches = regression(6)
    # A last batch of another size is trained on as it is.
    batches.append({name: value[:4] for name, value in batches[0].items()})
    result = fit(build, squared_error, iter(batches), adam(), **OPTIONS)
    assert not result.interrupted
    assert steps_of(result) == [1, 2, 3, 4, 5, 6, 7]
    assert_same_run(result, batches)
    last = result.history[-1]
    assert list(last) == ["step", "loss", "grad_norm", "seconds"]
    assert all(type(value) is float for name, value in last.items() if name != "step")
    x = batches[0]["x"]
    np.testing.assert_allclose(
        result.model(x), nnx.merge(nnx.graphdef(build()), result.params)(x), rtol=1e-5
    )


def test_fit_makes_no_implicit_transfers():
    batches = regression(3)
    trainer = Trainer(build, squared_error, adam(), batches[0], precision=FP32)
    with jax.transfer_guard("disallow"):
        result = train(trainer, batches, progress=False)
    assert_same_run(result, batches)


def test_fit_goes_on_after_its_steps_and_after_an_interrupt():
    batches = regression(8)

    def interrupt_at_four(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 4:
            signal.raise_signal(signal.SIGINT)

    data = iter(batches)
    result = fit(build, squared_error, data, adam(), steps=2, **OPTIONS)
    result = train(
        result.trainer, batches[2:], callbacks=[interrupt_at_four], steps=6, progress=False
    )
    assert result.interrupted
    done = result.trainer.num_steps
    assert done == 5
    assert_same_run(result, batches[:done])
    result = train(result.trainer, islice(data, done - 2, None), progress=False)
    assert_same_run(result, batches)


def test_fit_evaluates_with_the_parameters_of_the_step():
    batches = regression(4)
    result = fit(
        build, squared_error, batches, adam(), eval_data=batches[:1], eval_every=2, **OPTIONS
    )
    evaluations = {r["step"]: r["eval_loss"] for r in result.history if "eval_loss" in r}
    assert sorted(evaluations) == [2, 4]
    for step, value in evaluations.items():
        # The loss of one more plain step on that batch is its loss under these parameters.
        expected = plain_run(batches[:step] + batches[:1])[0][-1]
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_fit_stops_at_a_loss_that_is_not_finite():
    batches = regression(4)
    batches[1]["x"][0, 0] = np.nan
    with pytest.raises(FloatingPointError, match="step"):
        fit(build, squared_error, batches, adam(), **OPTIONS)


def test_fit_names_a_batch_that_microbatches_do_not_divide():
    with pytest.raises(ValueError, match="`microbatches`=3 does not divide the 8 examples"):
        fit(build, squared_error, regression(1), adam(), microbatches=3, **OPTIONS)


def test_fit_hands_back_the_steps_done_when_data_runs_out():
    batches = regression(3)
    with pytest.raises(DataRanOutError, match="after 3 of `steps`=9 batches") as caught:
        fit(build, squared_error, batches, adam(), steps=9, **OPTIONS)
    assert_same_run(caught.value.result, batches)
