"""The table of planned large steps: it has all rows, as plans make them now."""

import pytest
from large_steps import PAGE, STEPS, LargeStep, row, table_in


def published() -> list[str]:
    """The rows of the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = table_in(text)
    return text[begin:end].splitlines()[2:]


def test_the_page_has_a_row_of_each_step():
    starts = [f"| {step.name} | {step.tokens:,} |" for step in STEPS]
    assert all(line.startswith(start) for line, start in zip(published(), starts, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("number", "step"), list(enumerate(STEPS)))
def test_a_row_is_what_the_plan_says(number: int, step: LargeStep):
    assert published()[number] == row(step)
