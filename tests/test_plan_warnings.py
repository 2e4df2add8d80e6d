"""What a plan warns of is said by every run, once, at the line of the user that started it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
import small

FP32 = mt.Precision(compute=jnp.float32)


def wide(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"].astype(jnp.float32))
    return jnp.mean(x**2)


# Nothing of this model is frozen.
NF4 = mt.Precision(frozen="nf4")


def fit(**options):
    given = small.params(), small.loss_fn, [small.batch(0)], optax.sgd(0.1)
    return mt.fit(*given, precision=NF4, **options)


def make(**options):
    given = small.params(), small.loss_fn, optax.sgd(0.1), small.batch(0)
    return mt.Trainer(*given, **{"precision": NF4, **options})


@pytest.mark.parametrize("run", [fit, make])
def test_a_run_warns_once_at_its_users_line(run):
    with pytest.warns(mt.PlanWarning, match="this run has none") as caught:
        run(progress=False)
    (warning,) = caught
    assert warning.filename == __file__


def test_going_on_with_a_trainer_does_not_say_it_again():
    with pytest.warns(mt.PlanWarning):
        trainer = make(progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.train(trainer, [small.batch(1)], progress=False)


def test_nothing_is_said_of_what_was_asked_for():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(progress=False, precision=FP32)
    assert not caught


@pytest.mark.parametrize("microbatches", [1, 2])
def test_wide_products_are_warned_of_where_they_cost_time(microbatches):
    """The threshold is 1e12 operations; each layer of this model takes 4 · 2 · 2¹⁸ per row."""

    def planned(rows, **options):
        params = [{"w": np.ones((512, 512), np.float32)} for _ in range(2)]
        batch = {"x": jax.ShapeDtypeStruct((rows, 512), jnp.float32)}
        return mt.plan(params, wide, optax.sgd(0.1), batch, **options).warnings

    (said,) = planned(2**18, microbatches=microbatches)
    assert "wider than bfloat16" in said and 'precision="float32"' in said
    assert not planned(2**17) and not planned(2**18, precision="float32")


SCRIPT = """
import optax, small, test_plan_warnings
import megatrain_jax as mt
given = small.params(), small.loss_fn, [small.batch(0)], optax.sgd(0.1)
mt.fit(*given, precision=test_plan_warnings.NF4)
"""


def test_a_terminal_shows_it_on_lines_of_its_own_beside_the_progress_bar(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=environment
    )
    lines = done.stderr.replace("\r", "\n").splitlines()
    (shown,) = (line for line in lines if "PlanWarning" in line)
    assert shown.startswith(f"{script}:5: PlanWarning: Precision(frozen=")
    assert any("step/s" in line for line in lines), "a progress bar"
