"""Figures on pages: each one equals its result file, to the last digit printed.

`tests/experiments/test_check_figures.py` tests the check itself.
"""

import figures
from check_figures import pages, problems
from file_list import RESULTS, check_list

from megatrain_jax._src.common.sizes import bytes_of


def test_every_figure_is_its_files():
    found = [problem for page in pages() for problem in problems(page)]
    found += check_list()
    assert not found, "\n".join(found)


def test_plans_of_the_host_hold_in_all_results_but_the_named_ones():
    """Within 2% of the peak, and never above a `host_budget`."""
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for path in sorted(RESULTS.rglob("*.json")):
        result, name = figures.read(path), path.relative_to(RESULTS).as_posix()
        if not isinstance(result, dict) or not (peak := result.get("peak_host_gib")):
            continue
        if budget := result.get("host_budget"):
            assert peak * 2**30 <= bytes_of("host_budget", budget), name
        error = figures.process_error(result)
        is_named = f"({name}#process_error)" in page
        assert is_named == (error is not None and abs(error) > 0.02), f"{name}: {error}"
