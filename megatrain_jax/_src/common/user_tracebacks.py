"""Tracebacks of errors in the user's own code, without the frames that led there."""

import os
import sys
from types import TracebackType

# Their code calls the user's; what the user's code calls in them is shown.
_LIBRARIES = frozenset(
    (__name__.partition(".")[0], "jax", "jaxlib", "flax", *sys.stdlib_module_names)
)


def to_users_code(traceback: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames of this library, JAX and Flax before a frame of the user's code.

    As JAX's own frames, they are shown with JAX_TRACEBACK_FILTERING=off.

    Args:
        traceback: The traceback of an error, from a frame of this library on.

    Returns:
        The frames from the first one outside of these libraries on; all, if there is none.
    """
    if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
        return traceback
    found = traceback
    while found is not None and _is_library(found):
        found = found.tb_next
    return found or traceback


def _is_library(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return name != "__main__" and name.partition(".")[0] in _LIBRARIES
