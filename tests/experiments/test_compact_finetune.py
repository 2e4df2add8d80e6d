"""The experiment on fine-tuning with compact state: what is run, and how curves are compared."""

import argparse
import json
from pathlib import Path

import compact_finetune
import numpy as np
import pytest


def curves(shift, seeds=3, steps=200):
    """Losses that fall, with noise that is each seed's own; `shift` raises them."""
    noise = [np.random.default_rng(seed).normal(size=steps) for seed in range(seeds)]
    trend = 2 + 2 / np.sqrt(np.arange(1, steps + 1))
    return {s: ((1 + shift) * (trend + 0.05 * noise[s])).tolist() for s in range(seeds)}


def plain_means(curve):
    return [np.mean(curve[i : i + 20]) for i in range(len(curve) - 19)]


def test_curves_are_compared_with_the_fp32_seeds():
    made = {"fp32": curves(0), "compact": curves(1e-4), "bf16": curves(0.1)}
    found = compact_finetune.compared(made)
    smooth = {n: np.array([plain_means(c) for c in s.values()]) for n, s in made.items()}
    for name, losses in smooth.items():
        np.testing.assert_allclose(found["smoothed_losses"][name], losses, atol=1e-5)
    width = (smooth["fp32"].max(0) - smooth["fp32"].min(0)) / smooth["fp32"].mean(0)
    assert found["compared"]["fp32"]["mean_width_percent"] == pytest.approx(100 * width.mean())
    close, far = found["compared"]["compact"], found["compared"]["bf16"]
    assert close["largest_percent_from_mean"] == pytest.approx(0.01)
    assert close["largest_percent_from_same_seed"] == pytest.approx(0.01)
    assert close["share_of_steps_inside"] == 1.0
    assert far["largest_percent_from_mean"] == pytest.approx(10)
    assert far["share_of_steps_inside"] == 0.0


def test_all_ways_tune_the_same_export_in_the_same_order(tmp_path, monkeypatch):
    calls = []

    def run_commands(commands, workers):
        for _, script, *words in commands:
            call(Path(script).stem, dict(zip(words[::2], words[1::2], strict=True)))

    def call(script, options):
        calls.append((script, options))
        if script == "disk_to_disk":
            lines = [json.dumps({"messages": [number]}) + "\n" for number in range(10)]
            (tmp_path / "chats.jsonl").write_text("".join(lines))
            return
        out = tmp_path / options["--out"]
        out.mkdir()
        loss = 2.0 + ("--state" in options)
        (out / "report.json").write_text(json.dumps({"history": [{"loss": loss}] * 30}))

    monkeypatch.setattr(compact_finetune, "run_commands", run_commands)
    sizes = {"shape": "tiny", "conversations": 10, "length": 8, "batch": 2, "seeds": 2, "steps": 30}
    sizes["workers"] = 1
    rates = {"learning_rate": 1e-4, "base_steps": 5, "base_learning_rate": 1e-3}
    args = argparse.Namespace(held=["fp32", "compact"], **sizes, **rates)
    found = compact_finetune.run(args, tmp_path)
    assert [script for script, _ in calls] == ["disk_to_disk", *["finetune"] * 5]
    base, *tuned = [options for _, options in calls[1:]]
    parts = [(tmp_path / f"{name}.jsonl").read_text() for name in ("first", "second")]
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    assert sorted("".join(parts).splitlines()) == sorted(lines)
    assert base["--data"] != tuned[0]["--data"] and base["--out"] + "/model" == tuned[0]["--model"]
    own = {"--out", "--seed", "--master", "--state"}
    common = [{k: v for k, v in options.items() if k not in own} for options in tuned]
    assert all(options == common[0] for options in common)
    ways = [(o["--seed"], o.get("--master"), o.get("--state")) for o in tuned]
    held = [(None, None), ("bfloat16", "int8")]
    assert ways == [(seed, *way) for seed in "01" for way in held]
    assert found["compared"]["compact"]["largest_percent_from_mean"] == pytest.approx(50)
