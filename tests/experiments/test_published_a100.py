"""The A100's rates, beside training speeds that others published."""

import pytest
from published_a100 import ROWS, planned_tokens_per_second


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row.name} with {row.length} tokens per sequence"
)
def test_an_a100_computes_as_fast_as_published(row):
    seconds = row.tokens_per_second / planned_tokens_per_second(row)
    assert seconds == pytest.approx(1.0, abs=0.12)
