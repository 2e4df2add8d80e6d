"""What small runs choose, and their seconds and bytes, against a table."""

import pytest

import foretold

pytestmark = pytest.mark.usefixtures("traced_once")


# Combinations of what other rows have, and further random models.
_MORE = {*(f"model {i}" for i in (0, 1, 3)), *(f"products {i}" for i in (0, 1, 5)), "tiles waves"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (x in _MORE)) for x in foretold.ROWS],
)
def test_choices_and_estimates_are_the_known_ones(name: str):
    assert foretold.differing(foretold.ROWS[name](), foretold.read()[name]) == []
