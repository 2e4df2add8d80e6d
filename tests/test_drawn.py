"""Combinations of tests that a seed draws: as many as asked, the same again, and all over time."""

from types import SimpleNamespace

from conftest import pytest_collection_modifyitems
from drawn import drawn

IDS = [f"test_one[{n}]" for n in range(12)]


def test_a_seed_draws_as_many_as_asked_and_seeds_together_draw_all():
    every = [drawn(str(seed), IDS, 4) for seed in range(30)]
    assert all(len(ids) == 4 and ids <= set(IDS) for ids in every)
    assert set().union(*every) == set(IDS)
    assert drawn("7", reversed(IDS), 4) == drawn("7", IDS, 4) != drawn("8", IDS, 4)
    assert drawn("7", IDS[:3], 4) == set(IDS[:3])


class Item(SimpleNamespace):
    """A test with one mark, or none."""

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self.number,)) if name == self.mark else None


def test_only_marked_tests_are_drawn_and_only_with_a_seed():
    def run(seed: str) -> tuple[set[str], set[str]]:
        of_one = [Item(nodeid=i, path="a", mark="drawn", number=4) for i in IDS]
        other = Item(nodeid="test_other[0]", path="b", mark="slow", number=0)
        items, left = [*of_one, other], []
        hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
        config = SimpleNamespace(getoption=lambda name: seed, hook=hook)
        pytest_collection_modifyitems(config, items)  # type: ignore
        assert items[0] is other, "slow files come first"
        return {x.nodeid for x in items}, {x.nodeid for x in left}

    assert run("") == ({*IDS, "test_other[0]"}, set())
    kept, left = run("7")
    assert kept == {*drawn("7", IDS, 4), "test_other[0]"} and left == set(IDS) - kept
