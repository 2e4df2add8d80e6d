"""The comparison of ways to fine-tune SmolLM2: what is run, and how losses are compared."""

import argparse
import importlib.util
import json

import pytest

from places import ROOT

SCRIPT = ROOT / "experiments" / "smollm2" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("smollm2_compare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_losses_are_compared_with_their_own_yardstick(compare):
    losses = {
        "LoRA": {1: 1.2, 0: 1.0},
        "LoRA, NF4 base": {0: 1.1, 1: 1.4},
        "whole": {0: 2.0, 1: 2.01},
        "whole, compact": {0: 2.1, 1: 2.11},
    }
    found = compare.compared(losses)
    assert found["LoRA"]["of_seeds"] == [1.0, 1.2]
    assert "mean_difference" not in found["whole"]
    near, far = found["LoRA, NF4 base"], found["whole, compact"]
    assert near["mean_difference"] == pytest.approx(0.15)
    assert near["largest_difference_of_a_seed"] == pytest.approx(0.2)
    assert near["spread"] == pytest.approx(0.3)
    assert near["within_spread"] and not far["within_spread"]


@pytest.fixture
def calls(compare, tmp_path, monkeypatch):
    """The options of the commands that a test runs; the loss of each is its number."""
    called = []

    def run_commands(commands, workers):
        assert workers == 2
        for words in commands:
            assert words[1] == str(ROOT / "experiments" / "finetune.py")
            options = dict(zip(words[2::2], words[3::2], strict=True))
            called.append(options)
            out = tmp_path / options["--out"]
            out.mkdir()
            (out / "report.json").write_text(json.dumps({"eval_loss": float(len(called))}))

    monkeypatch.setattr(compare, "run_commands", run_commands)
    return called


def test_ways_differ_in_nothing_but_their_own_options(compare, tmp_path, calls):
    ways = ["LoRA", "LoRA, NF4 base"]
    args = argparse.Namespace(
        model="m", ways=ways, seeds=2, steps=3, batch=1, workers=2, folder=tmp_path / "runs"
    )
    found = compare.run(args)
    assert found == {"LoRA": {0: 1.0, 1: 3.0}, "LoRA, NF4 base": {0: 2.0, 1: 4.0}}
    assert [o["--seed"] for o in calls] == ["0", "0", "1", "1"]
    assert [o["--frozen"] for o in calls] == ["bfloat16", "nf4"] * 2
    own = {"--frozen", "--seed", "--out"}
    common = [{k: v for k, v in o.items() if k not in own} for o in calls]
    assert all(options == common[0] for options in common)
    parts = [
        set((args.folder / f"{n}.jsonl").read_text().splitlines()) for n in ("trained", "held_out")
    ]
    assert not parts[0] & parts[1] and len(parts[1]) == 32
    # A second call computes nothing again.
    assert compare.run(args) == found and len(calls) == 4


def test_adapters_are_also_evaluated_with_the_other_products(compare, tmp_path, calls):
    ways = ["LoRA", "LoRA, NF4 base", "LoRA, float8 products"]
    args = argparse.Namespace(
        model="m", ways=ways, seeds=1, steps=3, batch=1, workers=2, folder=tmp_path / "runs"
    )
    compare.run(args)
    assert compare.run_crossed(args) == {"LoRA": [4.0], "LoRA, float8 products": [5.0]}
    assert [o.get("--products") for o in calls] == [None, None, "float8-all", "float8-all", None]
    assert [o["--adapter"] for o in calls[3:]] == [f"{calls[i]['--out']}/adapter" for i in (0, 2)]
    compare.run_crossed(args)
    assert len(calls) == 5
