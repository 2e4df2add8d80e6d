"""Tracebacks of errors in the user's own code, without the frames that led there."""

import os
import sys
from types import TracebackType

# Their code calls the user's; what the user's code calls in them is shown.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "equinox", "numpy")
_LIBRARIES = frozenset((__name__.partition(".")[0], *_PACKAGES, *sys.stdlib_module_names))


def to_users_code(traceback: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames of libraries, such as JAX, before a frame of the user's code.

    As JAX's own frames, they are shown with JAX_TRACEBACK_FILTERING=off.

    Args:
        traceback: The traceback of an error, from a frame of this library on.

    Returns:
        The frames from the first one outside of these libraries on; all, if there is none.
    """
    if _shows_all():
        return traceback
    found = traceback
    while found is not None and _is_library(found):
        found = found.tb_next
    return found or traceback


def frames_of_user(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of the user's code alone, None if there are none; see `to_users_code`."""
    if traceback is None or _shows_all():
        return traceback
    rest = frames_of_user(traceback.tb_next)
    if _is_library(traceback):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _shows_all() -> bool:
    return os.environ.get("JAX_TRACEBACK_FILTERING") == "off"


def _is_library(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return name != "__main__" and name.partition(".")[0] in _LIBRARIES
