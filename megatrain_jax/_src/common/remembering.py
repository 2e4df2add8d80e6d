"""Parts that several plans have in common, made once: each plan asks for them again."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_memory: ContextVar[dict[str, dict[Hashable, Any]] | None] = ContextVar("memory", default=None)

# Traces of large models take tens of MiB: of each kind only the last few are held.
_MOST = 8


class Same:
    """A key for an object as such: equal to no other object's, and holding it, so it stays so."""

    def __init__(self, of: object):
        """Makes the key of an object, which need not be hashable."""
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)


def remembered(kind: str, key: Callable[[], Hashable], make: Callable[[], _Made]) -> _Made:
    """Something that was made for an equal key within the same `remembering`, or is made now.

    Args:
        kind: Name of what is made.
        key: Function that names all that it depends on; asked for where anything is remembered.
        make: Function that makes it.
    """
    if (memory := _memory.get()) is None:
        return make()
    known, name = memory.setdefault(kind, {}), key()
    try:
        hash(name)
    except TypeError:  # of a part that the user's own code made
        return make()
    # A dict is in the order in which its keys came, so that the first is the one used least lately.
    known[name] = known.pop(name) if name in known else make()
    if len(known) > _MOST:
        del known[next(iter(known))]
    return known[name]


@contextmanager
def remembering() -> Iterator[None]:
    """Has the body remember what is made within it.

    It must not outlive a call that was given the objects: functions may read other globals later.
    """
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)
