"""The experiments on generation and GRPO: their figures, and the files that pages link to."""

import json

import figures
import generation_speed
import grpo_speed
import jax
import numpy as np
import pytest


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "form", [["--layers", "2"], ["--layers", "6", "--device-budget", "320KiB"]]
)
def test_generation_is_measured_and_recorded(form, tmp_path, monkeypatch):
    calls = []
    timed = generation_speed.timed_call
    kept = lambda *args: calls.append(timed(*args)) or calls[-1]  # noqa: E731
    monkeypatch.setattr(generation_speed, "timed_call", kept)
    out = tmp_path / "generation.json"
    found = generation_speed.main(["--tiny", *form, "--unclean", "yes", "--out", str(out)])
    assert json.loads(out.read_text()) == found
    assert found["versions"]["jax"] == jax.__version__
    measured = calls[1:]  # the first one compiles
    seconds = np.mean([call["seconds"] for call in measured])
    assert found["generation"]["tokens_per_second"] == pytest.approx(4 * 32 / seconds)
    config = generation_speed.sizes("Qwen3-8B", tiny=True, layers=int(form[1]))
    _, params = generation_speed.random_model(config)
    weights = {name: sum(x.nbytes for x in jax.tree.leaves(part)) for name, part in params.items()}
    if len(form) > 2:
        moved = weights["layers"]
    else:
        # Keys and values of 2 heads of 8 numbers, 2 bytes each, for 24 of 40 tokens on average.
        caches = 4 * 24 * config.num_layers * 2 * 2 * 8 * 2
        moved = sum(weights.values()) - weights["embed_tokens"] + caches
    assert found["resident"] == (len(form) == 2)
    per_token = np.mean([call["seconds_per_token"] for call in measured])
    assert figures.figure(out, "decode.gib_per_s") == pytest.approx(moved / 2**30 / per_token)


def test_figures_of_grpo_are_of_the_steps_after_the_first():
    steps = [(90, 80, 9), (2, 3, 0.1), (4, 5, 0.3)]
    history = [
        {
            "generation/seconds": generation,
            "training/seconds": training,
            "sampling/sampling_logp_difference/mean": difference,
        }
        for generation, training, difference in steps
    ]
    found = grpo_speed.figures_of(history, 700)
    assert found["generation"]["tokens_per_second"] == 700 / 3
    assert found["training"]["tokens_per_second"] == 700 / 4
    assert found["mean_logp_difference"] == pytest.approx(0.2)
    assert figures.tokens_per_second(found) == 700 / 7
    assert figures.num_measured_steps(found | {"record": {}}) == 2
