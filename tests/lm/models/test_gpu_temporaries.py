"""Estimates of decoders' memory on a GPU, against the figures of XLA's compiler for it."""

import json

import pytest
from temporaries import CASES, MIB, estimated, kernels

from places import HELPERS

MEASURED = json.loads((HELPERS / "gpu_temporaries.json").read_text())["cases"]
# The estimate counts results beside temporaries, and the compiler may put temporaries where a
# result comes later; with a softcap of the logits, also one more array of logits.
FAR = {
    "Llama 1 x 1024": 1.5,
    "Llama 1 x 8192": 1.35,
    "Qwen 1 x 1024, int8": 1.5,
    "Gemma 2 x 2048": 1.4,
}
# Pieces of updates, and functions that write only results, need next to nothing.
SMALL = 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("Llama 1 x 2048, summed", "SmallArrays Qwen 8 x 2048", "Qwen muon")
        else pytest.param(name, marks=pytest.mark.long)
        for name in CASES
    ],
)
def test_an_estimate_is_never_below_the_compiler_s_figure_and_near_it(name):
    # Of a run, only the largest function counts.
    slack = max(32, max(row["mib"] for row in MEASURED[name]) / 100)
    for kernel, row in zip(kernels(CASES[name]), MEASURED[name], strict=True):
        assert kernel.name == row["function"]
        found = estimated(kernel) / MIB
        assert row["mib"] - slack <= found, row
        assert found <= max(FAR.get(name, 1.33) * row["mib"], row["mib"] + SMALL), row
