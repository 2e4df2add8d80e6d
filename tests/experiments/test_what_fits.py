"""The tables of what fits where have a row of each model, as plans make it now."""

import pytest
from what_fits import GPUS, MODELS, MODELS_OF, place_of, row

from quantities import quantities

ROWS = [(name, model) for name in MODELS_OF for model in MODELS_OF[name]]
# The smallest models are planned soonest: one for each GPU.
SAMPLE = [*zip(GPUS, MODELS, strict=False)]


def published(name: str) -> dict[str, str]:
    """The rows of a table, by model."""
    text, begin, end = place_of(name)
    return {line.split("|")[1].strip(): line for line in text[begin:end].splitlines()[2:]}


@pytest.mark.parametrize("name", MODELS_OF)
def test_every_model_has_its_row(name: str):
    assert tuple(published(name)) == MODELS_OF[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "model"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.long) for each in ROWS],
)
def test_a_row_is_what_plans_say(name: str, model: str):
    shown, planned = (cells(line) for line in (published(name)[model], row(name, model)))
    figures = range(1, len(shown))
    if name in GPUS:
        assert shown[2:-1] == planned[2:-1], "which forms fit which hosts"
        figures = 1, -1
    for number in figures:  # to the digits that are shown
        assert quantities(shown[number]) == pytest.approx(quantities(planned[number]), rel=0.02)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
