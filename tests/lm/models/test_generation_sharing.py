"""Texts that several processes write: shares, passes, and all texts in each of them."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatrain_jax._src.lm.models.generation import sharing
from megatrain_jax._src.lm.models.generation.generate import OpenText, _join
from megatrain_jax._src.lm.models.generation.sharing import Sharing
from messages import refuses


def together(count: int, run: Callable[[Sharing], Any]) -> list[Any]:
    """The results of a function in each of some processes, which are threads here."""
    meet = threading.Barrier(count, timeout=5)
    values: list[Any] = [None] * count
    found: list[Any] = [None] * count

    def take_part(index: int) -> None:
        def gather(where: str, value: Any) -> list[Any]:
            values[index] = (where, value)
            meet.wait()
            there = list(values)
            meet.wait()
            assert len({place for place, _ in there}) == 1
            return [each for _, each in there]

        try:
            found[index] = run(Sharing(SimpleNamespace(count=count, index=index, gather=gather)))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=take_part, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("number", [0, 1, 5, 6])
def test_shares_are_all_texts_in_order(number: int):
    texts = list(range(number))
    shares = together(3, lambda some: some.own(texts))
    assert sum(shares, []) == texts
    assert max(map(len, shares)) <= -(-number // 3)
    assert Sharing().own(texts) == texts


def test_processes_pass_over_the_layers_equally_often():
    def passes(some: Sharing) -> tuple[int, int]:
        """A process with as many passes of its own as its number, and those for others."""
        own = some._processes.index
        for _ in range(own):
            assert some.goes_on(True)
        others = 0
        while some.goes_on(False):
            others += 1
        return own, others

    assert together(4, passes) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert Sharing().goes_on(True) and not Sharing().goes_on(False)


def test_arrays_of_different_lengths_are_joined_in_order_in_long_messages(monkeypatch):
    monkeypatch.setattr(sharing, "_MESSAGE", 5)

    def joined(some: Sharing) -> list[np.ndarray]:
        index = some._processes.index
        rows = np.arange(6 * index, dtype=np.float32).reshape(-1, 3) / 7
        return some.joined([rows, np.full(2 - index, index, np.int32)])

    for rows, numbers in together(3, joined):
        whole = [np.arange(6 * i, dtype=np.float32).reshape(-1, 3) / 7 for i in range(3)]
        np.testing.assert_array_equal(rows, np.concatenate(whole))
        assert rows.dtype == np.float32 and numbers.tolist() == [0, 0, 1]


def test_the_least_memory_decides_and_different_arguments_are_refused():
    assert together(2, lambda some: some.least(some._processes.index + 3.0)) == [3.0, 3.0]
    found = together(2, lambda some: some.check_equal(([some._processes.index], 5)))
    for error in found:
        with refuses(ValueError, "prompts"):
            raise error
    assert together(2, lambda some: some.check_equal(([1], 5))) == [None, None]


def test_scores_are_known_in_all_processes():
    def joined(some: Any) -> list[Any]:
        texts = [OpenText(prompt=i, sample=0, ids=[1], start=1) for i in range(3)]
        own = some.own(texts)
        for text in own:
            text.ids.append(7 + text.prompt)
            text.log_probs, text.finish = [(-1.0, -1.0, -1.0)], "stop"
            text.score = -float(text.prompt) if text.prompt else None
        _join(some, texts, own)
        return [(text.ids, text.score) for text in texts]

    for texts in together(2, joined):
        assert texts == [([1, 7], None), ([1, 8], -1.0), ([1, 9], -2.0)]
