"""The number of devices that share a loss, for this library's own functions inside it.

XLA by itself divides the examples of a loss over the devices. It must not divide a loop over chunks
of tokens, though: the loop's steps run one after another, each on all devices, so the devices would
have to exchange their data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A context variable, because each thread may trace its own run.
_num_devices: ContextVar[int] = ContextVar("num_devices", default=1)


def num_loss_devices() -> int:
    """The number of devices that will share the function being traced."""
    return _num_devices.get()


@contextmanager
def traced_for_devices(num_devices: int) -> Iterator[None]:
    """Traces the body for this many devices."""
    token = _num_devices.set(num_devices)
    try:
        yield
    finally:
        _num_devices.reset(token)
