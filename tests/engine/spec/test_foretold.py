"""What small runs choose, and their seconds and bytes, against a table."""

import pytest

import foretold

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.mark.parametrize("name", foretold.ROWS)
def test_choices_and_estimates_are_the_known_ones(name: str):
    assert foretold.differing(foretold.ROWS[name](), foretold.read()[name]) == []
