"""Which tests run by default, and which quarter of the exhaustive ones a seed draws."""

import conftest
import pytest

from drawn import drawn

pytest_plugins = ["pytester"]

IDS = [f"test_one[{n}]" for n in range(12)]

TESTS = """
    import pytest

    @pytest.mark.by_default("1", "3")
    @pytest.mark.parametrize("n", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
    def test_cases(n):
        pass

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("n", [*range(30), pytest.param(99, marks=pytest.mark.long)])
    def test_whole(n):
        pass

    def test_other():
        pass
"""

TOGETHER = """
    import pytest

    pytestmark = [pytest.mark.exhaustive, pytest.mark.together("shared")]

    @pytest.fixture
    def shared():
        pass

    @pytest.mark.parametrize("n", range(7))
    def test_alone(n):
        pass

    @pytest.mark.parametrize("n", range(9))
    def test_both(shared, n):
        pass
"""


class Plugin:
    """The part of the tests' own configuration that sorts tests into tiers."""

    pytest_addoption = staticmethod(conftest.pytest_addoption)
    pytest_pycollect_makeitem = staticmethod(conftest.pytest_pycollect_makeitem)
    pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)


@pytest.fixture
def selected(pytester):
    """Returns a function that runs a file's text with options of pytest, and names what has run."""

    def run(text: str, *options: str) -> list[str]:
        pytester.makepyfile(text)
        ran = pytester.inline_run(*options, "-p", "no:cacheprovider", plugins=[Plugin()])
        return [report.nodeid.split("::")[1] for report in ran.listoutcomes()[0]]

    return run


def test_a_seed_draws_as_many_as_asked_and_seeds_together_draw_all():
    every = [drawn(str(seed), IDS, 4) for seed in range(30)]
    assert all(len(ids) == 4 and ids <= set(IDS) for ids in every)
    assert set().union(*every) == set(IDS)
    assert drawn("7", reversed(IDS), 4) == drawn("7", IDS, 4) != drawn("8", IDS, 4)
    assert drawn("7", IDS[:3], 4) == set(IDS[:3])


def test_default_tests_are_those_that_no_mark_takes_out(selected):
    default = "not exhaustive and not long"
    assert selected(TESTS, "-m", default) == ["test_cases[1]", "test_other"]
    assert selected(TESTS, "-m", "long") == ["test_cases[3]", "test_whole[99]"]


def test_a_seed_draws_a_quarter_of_the_exhaustive_tests(selected):
    every = selected(TESTS, "-m", "exhaustive")
    assert every == [f"test_cases[{n}]" for n in (0, 2)] + [f"test_whole[{n}]" for n in range(30)]
    some = [selected(TESTS, "-m", "exhaustive", "--draw", seed) for seed in ("a", "b", "a")]
    assert all(len(names) == 8 and set(names) <= set(every) for names in some)
    assert some[0] == some[2] != some[1]


def test_tests_that_share_a_fixture_are_drawn_together_and_run_first(selected):
    found = [selected(TOGETHER, "-m", "exhaustive", "--draw", str(seed)) for seed in range(12)]
    numbers = set()
    for names in found:
        shared = [name.startswith("test_both") for name in names]
        assert shared == sorted(shared, reverse=True)
        numbers.add((sum(shared), len(names)))
    assert numbers == {(9, 10), (0, 2)}


def test_a_seed_orders_tests_and_keeps_the_cases_of_each_together(selected):
    orders = [selected(TESTS, "-m", "not long", "--draw", seed) for seed in "abcdab"]
    assert orders[:2] == orders[4:]
    functions = [list(dict.fromkeys(name.split("[")[0] for name in names)) for names in orders]
    assert len({tuple(names) for names in functions}) > 1
    for names, each in zip(orders, functions, strict=True):
        assert [name.split("[")[0] for name in names] == sorted(
            (name.split("[")[0] for name in names), key=each.index
        )
    assert "test_other" in selected(TESTS, "-m", "not long", "--draw", "0")


def test_cases_that_do_not_exist_are_refused(pytester):
    pytester.makepyfile(TESTS.replace('"1", ', '"4", '))
    result = pytester.inline_run("-p", "no:cacheprovider", plugins=[Plugin()])
    assert result.ret == pytest.ExitCode.INTERRUPTED
