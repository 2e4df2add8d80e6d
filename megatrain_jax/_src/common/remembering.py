"""A cache of results that several plans share, and a pause of the garbage collector.

The collector runs after every so many new objects. Tracing makes hundreds of thousands and leaves
almost no garbage: collecting took a fifth to a third of a plan's time and freed a few MiB.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_memory: ContextVar[dict[str, dict[Hashable, Any]] | None] = ContextVar("memory", default=None)

# Traces of large models take tens of MiB, so only the last few results of each kind are kept.
_MOST = 8


class IdentityKey:
    """A key that compares by the object's identity; it holds the object, so the id stays unique."""

    def __init__(self, of: object):
        """Makes the key of an object, which need not be hashable."""
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)


def remembered(
    kind: str, key: Callable[[], Hashable], make: Callable[[], _Made], most: int = _MOST
) -> _Made:
    """Returns the result made for an equal key in this `remembering` block, or makes it now.

    Args:
        kind: Name of the kind of result.
        key: Function that returns everything the result depends on; called only within
            `remembering`.
        make: Function that makes the result.
        most: Number of results of this kind that are kept.
    """
    if (memory := _memory.get()) is None:
        return make()
    known, name = memory.setdefault(kind, {}), key()
    try:
        hash(name)
    except TypeError:  # the key contains a user's unhashable object
        return make()
    # Reinserting a key moves it to the dict's end, so the first key is the least recently used.
    known[name] = known.pop(name) if name in known else make()
    if len(known) > most:
        del known[next(iter(known))]
    return known[name]


@contextmanager
def remembering() -> Iterator[None]:
    """Makes `remembered` cache its results within the body; nested bodies share their results.

    The body must not outlast the call that received the user's objects: functions may read changed
    globals later.
    """
    outer = _memory.get()
    token = _memory.set({} if outer is None else outer)
    try:
        yield
    finally:
        _memory.reset(token)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses cyclic garbage collection within the body, for a few seconds at most.

    Bodies may be nested or run in several threads. The body that found the collector enabled
    enables it again, maybe while another body still runs; that body is then slower, not wrong.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
