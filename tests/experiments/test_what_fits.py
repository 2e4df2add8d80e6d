"""The page of what fits where: its tables have a row of each model, as plans make it now."""

import pytest
from what_fits import GPUS, MODELS, PAGE, row, tables_in

from quantities import quantities

ROWS = [(gpu, model) for gpu in GPUS for model in MODELS]
# The smallest models are planned soonest: one for each GPU.
SAMPLE = [*zip(GPUS, MODELS, strict=False)]


def published(gpu: str) -> dict[str, str]:
    """The rows of a GPU's table, by model."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = tables_in(text)[gpu]
    return {line.split("|")[1].strip(): line for line in text[begin:end].splitlines()[2:]}


@pytest.mark.parametrize("gpu", GPUS)
def test_every_model_has_its_row(gpu: str):
    assert tuple(published(gpu)) == MODELS


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpu", "model"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.long) for each in ROWS],
)
def test_a_row_is_what_plans_say(gpu: str, model: str):
    shown, planned = (cells(line) for line in (published(gpu)[model], row(gpu, model)))
    assert shown[:1] + shown[2:-1] == planned[:1] + planned[2:-1], "which forms fit which hosts"
    for number in (1, -1):  # host memory and tokens per second, to the digits that are shown
        assert quantities(shown[number]) == pytest.approx(quantities(planned[number]), rel=0.02)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
