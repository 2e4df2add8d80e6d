"""Cyclic garbage that is left lying while objects are made by the hundred thousand.

Python looks for it whenever enough objects were made. A trace makes that many all the time and
leaves next to none: looking took a fifth to a third of a plan's time, and found a few MiB.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_garbage() -> Iterator[None]:
    """Has Python not look for cyclic garbage within the body, which takes seconds at most.

    Bodies may lie in one another, and in several threads: the one that found the search switched on
    switches it on again, which another may still be glad of, but nothing relies on.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
