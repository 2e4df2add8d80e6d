"""The experiment on plans of others' models: its models train, and it records their times."""

import json

import planned_times
import pytest


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["t5", pytest.param("unet", marks=pytest.mark.long)])
def test_models_of_others_are_planned_trained_and_recorded(model, tmp_path):
    out = tmp_path / "times.json"
    found = planned_times.main([model, "--tiny", "--unclean", "yes", "--out", str(out)])
    assert json.loads(out.read_text()) == found
    assert found["planned_without_timing"] > 0 and found["num_measured_steps"] == 8
    assert found["num_stages"] > 4
