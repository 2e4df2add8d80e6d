"""The number of devices that share the work of a loss, for the library's own functions in it.

XLA divides a loss over its examples by itself. Only a loop over chunks of tokens is not to be left
to it: a loop's steps are computed one after another, each by all devices, which would have to
exchange what they have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A context variable, since each thread may trace a run of its own.
_num_devices: ContextVar[int] = ContextVar("num_devices", default=1)


def num_sharing() -> int:
    """The number of devices that are to share the function being traced."""
    return _num_devices.get()


@contextmanager
def shared_by(num_devices: int) -> Iterator[None]:
    """Traces the body for so many devices."""
    token = _num_devices.set(num_devices)
    try:
        yield
    finally:
        _num_devices.reset(token)
