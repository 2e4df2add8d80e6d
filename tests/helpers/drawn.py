"""The tests that a seed draws."""

from collections.abc import Iterable
from hashlib import sha256


def digest(seed: str, text: str) -> bytes:
    """Bytes to sort by: an order that another seed makes another one."""
    return sha256(f"{seed} {text}".encode()).digest()


def drawn(seed: str, ids: Iterable[str], number: int) -> set[str]:
    """Chooses `number` of the ids by a seed; over many seeds, all of them are chosen."""
    return set(sorted(ids, key=lambda i: digest(seed, i))[:number])
