"""The paths of checkpoints: local folders of any name; what leads nowhere is refused by name."""

import os

import pytest

import small
from megatrain_jax._src.engine.checkpoint import manifest
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


@pytest.fixture(scope="module")
def trainer():
    return small.trained()


NAMES = ("run[1]", "a*", "a?", ".dot", "é: [%20#")


@pytest.mark.by_default("a*", "a?", ".dot")
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_local_folder_can_be_used(name, trainer, tmp_path):
    (tmp_path / "ab" / "2").mkdir(parents=True)  # fits the patterns, too
    for path in (tmp_path / name / "2", tmp_path / "x" / name):
        trainer.save(path)
        check_same_bits(small.plain(path)["params"]["1"], trainer.params[1])
        expected = small.state(trainer)
        trainer.step(small.batch(3))
        trainer.restore(path)
        check_same_bits(small.state(trainer), expected)


def test_a_run_in_a_folder_with_brackets_goes_on(tmp_path):
    for steps in (2, 5):
        result = small.fit(tmp_path / "lr[0.1]*", steps, checkpoint_every=1, keep=1)
    assert small.losses(result) == small.expected(5)
    assert os.listdir(tmp_path / "lr[0.1]*") == ["5"]


REFUSED = ("gs://", "s3://b/../c", "gs:/b/c", "file:///tmp/run", "x/gs:/y", "a\\b", "", "a\0b")


@pytest.mark.parametrize("path", [*REFUSED, "~nobody-of-this-name/run", 5])
def test_paths_that_lead_nowhere_are_refused_by_name(path, trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = {
        "`checkpoint_dir`": lambda: small.fit(path, 1, data=nothing()),
        "`path`": lambda: trainer.save(path),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError if path == 5 else ValueError, match=name):
            call()
    with pytest.raises(TypeError if path == 5 else ValueError, match="`path`"):
        trainer.restore(path)
    assert not os.listdir(tmp_path)


def nothing():
    raise AssertionError("a batch was drawn")
    yield


def test_the_home_folder_is_expanded(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer.save("~/2")
    trainer.restore("~/2")
    small.trainer(params="~/2")
    small.fit("~/runs", 1)
    assert sorted(os.listdir(tmp_path)) == ["2", "runs"]
    assert manifest.facts_of(tmp_path / "runs" / "1")["step"] == 1
