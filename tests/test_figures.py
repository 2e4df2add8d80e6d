"""Figures on pages: each one equals its result file, to the last digit printed.

`tests/experiments/test_check_figures.py` tests the check itself.
"""

from check_figures import pages, problems
from file_list import check_list


def test_every_figure_is_its_files():
    found = [problem for page in pages() for problem in problems(page)]
    found += check_list()
    assert not found, "\n".join(found)
