"""The tests that a seed draws, and the combinations that it draws from."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import pytest


def digest(seed: str, text: str) -> bytes:
    """Bytes to sort by: an order that another seed makes another one."""
    return sha256(f"{seed} {text}".encode()).digest()


def drawn(seed: str, ids: Iterable[str], number: int) -> set[str]:
    """Chooses `number` of the ids by a seed; over many seeds, all of them are chosen."""
    return set(sorted(ids, key=lambda i: digest(seed, i))[:number])


def in_turn(names: Iterable[str], ways: Mapping[str, Any], *kept: str) -> list[Any]:
    """Cases of a name and a way, of which each name has one, the ways in turn; others are long.

    Args:
        names: First values.
        ways: Second values by their names.
        kept: Ids, a name and a way's name with a dash between, of further cases that aren't long.
    """
    cases = []
    for number, name in enumerate(names):
        for place, (way, value) in enumerate(ways.items()):
            usual = number % len(ways) == place or f"{name}-{way}" in kept
            marks = () if usual else pytest.mark.long
            cases.append(pytest.param(name, value, id=f"{name}-{way}", marks=marks))
    return cases
