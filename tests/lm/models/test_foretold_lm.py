"""The forms in which texts are written, with their bytes and rates, against a table."""

import pytest

import foretold_lm
from foretold import differing, read


@pytest.mark.parametrize("name", foretold_lm.ROWS)
def test_texts_are_written_in_the_known_forms(name: str):
    assert differing(foretold_lm.ROWS[name](), read(foretold_lm.TABLE)[name]) == []
