"""Parts that several plans have in common, made once: each plan asks for them again."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Made = TypeVar("_Made")
_memory: ContextVar[dict[Hashable, object] | None] = ContextVar("memory", default=None)


def remembered(key: Callable[[], Hashable], make: Callable[[], _Made]) -> _Made:
    """Something that was made for an equal key within the same `remembering`, or is made now.

    Args:
        key: Function that names all that it depends on; asked for where anything is remembered.
        make: Function that makes it.
    """
    if (memory := _memory.get()) is None:
        return make()
    name = key()
    try:
        hash(name)
    except TypeError:  # of a part that the user's own code made
        return make()
    if name not in memory:
        memory[name] = make()
    return memory[name]  # type: ignore[return-value]  # a key names what it was made for


@contextmanager
def remembering() -> Iterator[None]:
    """Has the body remember what is made within it."""
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)
