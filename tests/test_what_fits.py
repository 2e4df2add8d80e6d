"""The page of what fits where: its tables have a row of each model, as plans make it now."""

import random

import pytest
from what_fits import GPUS, MODELS, PAGE, row, tables_in

ROWS = [(gpu, model) for gpu in GPUS for model in MODELS]
# Of the two smallest models, which are planned soonest.
SAMPLE = random.Random(0).sample([(gpu, model) for gpu, model in ROWS if model in MODELS[:2]], 2)


def published(gpu: str) -> dict[str, str]:
    """The rows of a GPU's table, by model."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = tables_in(text)[gpu]
    return {line.split("|")[1].strip(): line for line in text[begin:end].splitlines()[2:]}


@pytest.mark.parametrize("gpu", GPUS)
def test_every_model_has_its_row(gpu: str):
    assert tuple(published(gpu)) == MODELS


@pytest.mark.parametrize(
    ("gpu", "model"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.long) for each in ROWS],
)
def test_a_row_is_what_plans_say(gpu: str, model: str):
    assert published(gpu)[model] == row(gpu, model)
