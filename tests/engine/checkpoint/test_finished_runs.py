"""Calls of `fit` for a run that has ended: the same result, and a continuation."""

from itertools import repeat

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import megatrain_jax as mt
from ending_runs import BATCHES, OPTIMIZERS, STEPS, Net, everything, losses, run, whole
from megatrain_jax import callbacks
from megatrain_jax._src.engine.checkpoint import folder, manifest
from messages import refuses, warns
from poison import batch, loss_fn
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


def test_a_run_of_several_calls_resumes_with_the_batches_to_come(tmp_path):
    data, optimizer = iter(BATCHES), OPTIMIZERS["deferred"]
    result = run(optimizer, data, steps=3, checkpoint_dir=tmp_path)
    mt.train(result.trainer, data, steps=2, checkpoint_dir=tmp_path, progress=False)
    with warns(UserWarning, "batches", "skipped"):
        resumed = run(optimizer, checkpoint_dir=tmp_path)
    assert losses(resumed) == whole("deferred").losses
    check_same_bits(everything(resumed.trainer), whole("deferred").state)


@pytest.mark.by_default("6-4", "5-5", "None-4")
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


class Stateful:
    """An iterator of batches whose position can be saved."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(BATCHES):
            raise StopIteration
        self.place += 1
        return BATCHES[self.place - 1]

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place


@pytest.mark.parametrize("data", [lambda: BATCHES, Stateful], ids=["counted", "state"])
def test_a_run_that_ended_before_its_first_step_begins_with_the_first_batch(data, tmp_path):
    class Stop(callbacks.Callback):
        def begin(self, trainer):
            raise KeyboardInterrupt

        def __call__(self, trainer, record):
            pass

    optimizer = OPTIMIZERS["deferred"]
    ended = run(optimizer, data(), checkpoint_dir=tmp_path, callbacks=[Stop()])
    assert ended.interrupted and (tmp_path / "0").is_dir()
    resumed = run(optimizer, data(), checkpoint_dir=tmp_path)
    assert losses(resumed) == whole("deferred").losses
    check_same_bits(everything(resumed.trainer), whole("deferred").state)


def test_a_finished_run_is_handed_back(tmp_path):
    first = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path)
    for data in (BATCHES, iter(BATCHES)):
        again = run(OPTIMIZERS["deferred"], data, checkpoint_dir=tmp_path)
        assert losses(again) == losses(first) and not again.interrupted
        check_same_bits(everything(again.trainer), everything(first.trainer))
    with refuses(mt.DataRanOutError, STEPS, "`steps`=20") as caught:
        run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, steps=20)
    assert losses(caught.value.result) == losses(first)


def test_a_run_of_several_epochs_is_not_called_shorter_data_alone(tmp_path):
    run(OPTIMIZERS["deferred"], BATCHES[:2], epochs=2, checkpoint_dir=tmp_path)
    with refuses(ValueError, "2", "4", "`data`", "`epochs`", "`steps`"):
        run(OPTIMIZERS["deferred"], BATCHES[:2], checkpoint_dir=tmp_path)
    with refuses(ValueError, "2", "4", "`data`") as caught:
        run(OPTIMIZERS["deferred"], BATCHES[:2], steps=5, checkpoint_dir=tmp_path)
    assert "`epochs`" not in str(caught.value)


@pytest.mark.by_default("8")
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
    fp32 = mt.Precision(compute=jnp.float32)
    made = lambda: Net(nnx.Rngs(0))  # noqa: E731
    trainer = mt.Trainer(
        made, loss_fn, OPTIMIZERS["deferred"], BATCHES[0], precision=fp32, progress=False
    )
    by_train = mt.train(trainer, BATCHES, resume=True, progress=False, **options)
    assert list(by_train.history) == list(again.history) and not seen
    with refuses(ValueError, "batch", "evaluate") as caught:
        run(OPTIMIZERS["deferred"], **(options | {"eval_data": lambda: []}))
    assert losses(caught.value.result) == losses(first)  # type: ignore[attr-defined]
    assert folder.steps(tmp_path) == [STEPS]


@pytest.mark.by_default("4")
@pytest.mark.parametrize("steps", [2, 4, 5])
def test_a_resumed_run_goes_on_counting_what_it_skips_in_a_row(steps, tmp_path):
    bad = batch(99, y=np.nan)
    data = [BATCHES[0], *repeat(bad, 2), BATCHES[1], *repeat(bad, 9)]
    options = {"on_nonfinite": "skip", "max_skipped": 4, "checkpoint_dir": tmp_path}
    run(OPTIMIZERS["immediate"], data, steps=steps, **options)
    with refuses(FloatingPointError, 5, 8, "`max_skipped`=4"):
        run(OPTIMIZERS["immediate"], data, **options)
    # After that error it counts anew, step 9 having been in flight, as in the process that met it.
    with refuses(FloatingPointError, 9, 12) as caught:
        run(OPTIMIZERS["immediate"], data, **options)
    result = caught.value.result  # type: ignore[attr-defined]
    assert [r["step"] for r in result.history] == [*range(1, 14)]
