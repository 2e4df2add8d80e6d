"""The combinations that a seed draws of tests marked `drawn`."""

from collections.abc import Iterable
from hashlib import sha256


def drawn(seed: str, ids: Iterable[str], number: int) -> set[str]:
    """Chooses `number` of a test's ids by a seed; over many seeds, all of them are chosen."""
    return set(sorted(ids, key=lambda i: sha256(f"{seed} {i}".encode()).digest())[:number])
