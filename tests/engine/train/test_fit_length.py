"""The length of a run: `epochs`, the bar's total, and batches that are tuples."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatrain_jax as mt
import small
from megatrain_jax._src.engine.state.processes import Processes
from megatrain_jax._src.engine.train.series import RunCheckpoints
from megatrain_jax._src.engine.train.source import length_of
from messages import refuses, tells
from runs import check_same_bits

BATCHES = [small.batch(seed) for seed in range(3)]
X = BATCHES[0]["x"]


class Endless:
    """Data whose length is an error, as of a data set that repeats without end."""

    def __len__(self) -> int:
        raise TypeError("the batches never end")

    def __iter__(self) -> Any:
        return itertools.cycle(BATCHES)


def totals(shown: str) -> set[str]:
    """The numbers of steps that a bar shows as done and as all."""
    return set(re.findall(r"(\d+/\d+) \[", shown))


def test_epochs_are_passes_over_the_data(tmp_path: Path):
    expected = small.fit(None, None, data=2 * BATCHES)
    found = small.fit(None, None, data=BATCHES, epochs=2)
    assert found.history["loss"] == expected.history["loss"]
    check_same_bits(found.params, expected.params)
    # A run that stopped in the second epoch goes on there, and one that is done does no more.
    small.fit(tmp_path / "run", 4, data=2 * BATCHES)
    for _ in range(2):
        found = small.fit(tmp_path / "run", None, data=BATCHES, epochs=2)
        assert found.history["loss"] == expected.history["loss"]
    # `train` counts from the run's first step if it resumes, and from its own if it doesn't.
    trainer = small.trainer()
    for steps in (2, 5, 5):
        options: Any = {"checkpoint_dir": tmp_path / "train", "resume": True, "progress": False}
        trainer = small.trainer()
        mt.train(trainer, 2 * BATCHES, steps=steps, **options)
        assert trainer.history["loss"] == expected.history["loss"][:steps]
    first = small.fit(None, None, data=BATCHES, epochs=1)
    again = mt.train(first.trainer, BATCHES, epochs=1, progress=False)
    assert again.history["loss"] == expected.history["loss"]


def test_a_length_that_is_not_known_is_no_number():
    assert length_of(BATCHES) == 3 and length_of(iter(BATCHES)) == 3
    assert length_of(Endless()) is length_of(x for x in BATCHES) is None
    trainer = small.trainer()
    for data in (Endless(), iter(BATCHES)):
        with refuses(TypeError, "`epochs`=2", "`data`", "length", "`steps`"):
            mt.train(trainer, data, epochs=2)


@pytest.mark.by_default("epochs", "steps", "generator")
@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (BATCHES, {}, "3/3"),
        (BATCHES, {"epochs": 2}, "6/6"),
        (Endless(), {"steps": 2}, "2/2"),
        ((x for x in BATCHES), {}, None),
    ],
    ids=["list", "epochs", "steps", "generator"],
)
def test_the_bar_has_a_total_where_the_length_is_known(
    data: Any, options: Any, expected: str | None, capfd: Any
):
    mt.train(small.trainer(), data, **options)
    shown = capfd.readouterr().err
    assert "step/s" in shown or "s/step" in shown
    assert expected in totals(shown) if expected else not totals(shown)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_process_says_from_where_a_run_goes_on(
    is_first: bool, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    small.fit(tmp_path, 1)
    resume = RunCheckpoints.resume

    def resumed(self: RunCheckpoints, trainer: mt.Trainer) -> Any:
        found = resume(self, trainer)  # in which the first process looks for the others
        monkeypatch.setattr(Processes, "is_first", is_first)
        return found

    monkeypatch.setattr(RunCheckpoints, "resume", resumed)
    mt.fit(
        small.params(),
        small.loss_fn,
        BATCHES,
        small.OPTIMIZER,
        steps=1,
        precision="float32",
        checkpoint_dir=tmp_path,
    )
    assert tells(capsys.readouterr().out, "Resumed", tmp_path / "1") == is_first


def test_the_bar_of_a_run_that_goes_on_counts_what_is_left(tmp_path: Path, capfd: Any):
    small.fit(tmp_path, 1, data=BATCHES)
    mt.fit(
        small.params(),
        small.loss_fn,
        BATCHES,
        small.OPTIMIZER,
        precision="float32",
        checkpoint_dir=tmp_path,
    )
    assert "2/2" in totals(capfd.readouterr().err)


def test_batches_may_be_tuples():
    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        return small.loss_fn(params, {"x": x}) + 0 * y.sum()

    def fit(loss: Any, batches: Any) -> mt.FitResult:
        return mt.fit(small.params(), loss, batches, small.OPTIMIZER, progress=False)

    pairs = [(batch["x"], batch["x"][:, 0]) for batch in BATCHES]
    found = fit(loss_fn, pairs)
    assert found.history["loss"] == fit(small.loss_fn, BATCHES).history["loss"]


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        ((X, X[:, 0]), '`x, y = batch`.* {"x": x, "y": y}'),
        ([X] * 4, "list.* `a, b, c, ... = batch`"),
        (X, "array"),
    ],
)
def test_a_loss_that_asks_for_names_learns_how_a_batch_without_any_is_read(batch, advice):
    with pytest.raises(TypeError) as raised:
        mt.plan(small.params(), small.loss_fn, small.OPTIMIZER, batch)
    assert re.search(advice, raised.value.__notes__[-1])


def test_a_loss_that_unpacks_a_dict_learns_that_it_gets_keys():
    def loss_fn(params, batch):
        x, y = batch
        return small.loss_fn(params, {"x": x}) + y.sum()

    for batch in ({"x": X, "y": X[:, 0]}, {"x": X, "y": X[:, 0], "z": X}):
        with pytest.raises((TypeError, ValueError)) as raised:
            mt.plan(small.params(), loss_fn, small.OPTIMIZER, batch)
        assert tells(raised.value.__notes__[-1], "`x, y = batch`", "keys")


@pytest.mark.exhaustive
def test_bars_of_a_notebook_without_widgets_are_text_without_advice():
    # As in a kernel, where tqdm looks for ipywidgets and advises to install them.
    code = (
        "import sys, types, warnings; warnings.simplefilter('error');"
        "sys.modules['ipywidgets'] = None;"
        "shell = types.SimpleNamespace(config={'IPKernelApp': {}});"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: shell);"
        "from megatrain_jax._src.common.progress import tqdm;"
        "print([*tqdm(range(2))], tqdm.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "[0, 1] tqdm.asyncio\n", done.stderr
    assert "2/2" in done.stderr and "Warning" not in done.stderr
