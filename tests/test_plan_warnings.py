"""What a plan warns of is said by every run, once, at the line of the user that started it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
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


def fit(**options):
    return mt.fit(small.params(), wide, [small.batch(0)], optax.sgd(0.1), **options)


def make(**options):
    return mt.Trainer(small.params(), wide, optax.sgd(0.1), small.batch(0), **options)


@pytest.mark.parametrize("run", [fit, make])
def test_a_run_warns_once_at_its_users_line(run):
    with pytest.warns(mt.PlanWarning, match="wider than bfloat16") as caught:
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


SCRIPT = """
import optax, small, test_plan_warnings
import megatrain_jax as mt
mt.fit(small.params(), test_plan_warnings.wide, [small.batch(0)], optax.sgd(0.1))
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
    assert shown.startswith(f"{script}:4: PlanWarning: 100% of the matrix products")
    assert any("step/s" in line for line in lines), "a progress bar"
