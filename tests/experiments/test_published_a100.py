"""The A100's rates, beside training speeds that others published."""

import pytest
from published_a100 import ROWS, planned_tokens_per_second


@pytest.mark.parametrize("row", [row for row in ROWS if row.length == 1024], ids=lambda r: r.name)
def test_an_a100_computes_as_fast_as_published(row):
    seconds = row.tokens_per_second / planned_tokens_per_second(row)
    assert seconds == pytest.approx(1.0, abs=0.08)
