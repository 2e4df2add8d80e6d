"""Progress bars, and lines of a start's phases where a file or a pipe receives the output.

The bars are tqdm's, without its warning about notebooks that have no widgets.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from tqdm import TqdmWarning

# In a notebook without ipywidgets, bars are text, which needs no advice.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["phase_lines", "tell_phase", "tqdm"]

_ALWAYS: ContextVar[bool] = ContextVar("phase_lines", default=False)


@contextlib.contextmanager
def phase_lines() -> Iterator[None]:
    """Has phases told on the standard output, though there are no progress bars.

    The command has lines of its own in place of bars where it is not at a terminal.
    """
    before = _ALWAYS.set(not sys.stderr.isatty())
    try:
        yield
    finally:
        _ALWAYS.reset(before)


def tell_phase(text: str, progress: bool) -> None:
    """Prints a line at the beginning of a phase that may take minutes, unless a bar shows it.

    Args:
        text: The phase.
        progress: Whether the user wants to see the progress of this call.
    """
    if _ALWAYS.get():
        print(text, flush=True)
    elif progress and not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        tqdm.write(text, file=sys.stderr)
