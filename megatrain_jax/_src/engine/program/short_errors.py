"""Short errors while tracing: JAX would spend long on messages that nobody reads."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax import core


class _ShortErrors:
    """The switch that makes JAX's tracers refuse `.sharding` briefly, in threads that trace here.

    JAX has no option for it, so `Tracer.sharding` is replaced while any such thread traces; all
    remaining threads still call JAX's own.
    """

    def __init__(self) -> None:
        """Makes the switch; it is off."""
        self._lock = threading.Lock()
        # How often each thread has entered: tracing may trace again inside, as a kernel that fires
        # its effects once does.
        self._entered: Counter[int] = Counter()
        self._own: Any = None

    def enter(self) -> None:
        """Switches it on in this thread."""
        with self._lock:
            if not self._entered:
                self._own = core.Tracer.sharding
                setattr(core.Tracer, "sharding", property(self._refuse))  # noqa: B010
            self._entered[threading.get_ident()] += 1

    def leave(self) -> None:
        """Switches it off in this thread, after as many calls as `enter` had."""
        with self._lock:
            self._entered[threading.get_ident()] -= 1
            self._entered = +self._entered  # without threads that have left
            if not self._entered:
                setattr(core.Tracer, "sharding", self._own)  # noqa: B010

    def _refuse(self, tracer: core.Tracer) -> Any:
        if threading.get_ident() in self._entered:
            raise AttributeError("a tracer has no sharding")
        return self._own.fget(tracer)


_SHORT_ERRORS = _ShortErrors()


@contextmanager
def short_errors() -> Iterator[None]:
    """Makes tracing skip JAX's costly search for the origin of an error that nobody sees.

    NNX asks each new variable value for its sharding, which a tracer does not have. Before 0.12,
    JAX then walks all equations so far to word an `AttributeError`, and its own `__getattr__`
    replaces that error at once: tracing time would be quadratic in the model's depth. Only the
    calling thread is affected.
    """
    _SHORT_ERRORS.enter()
    try:
        yield
    finally:
        _SHORT_ERRORS.leave()
