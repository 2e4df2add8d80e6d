"""Progress bars, and the phases of a run's start, as lines where a file receives the output.

The bars are tqdm's, without its warning about notebooks that have no widgets.
"""

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator
from contextvars import ContextVar

from tqdm import TqdmWarning

from megatrain_jax._src.common.sizes import sized

# In a notebook without ipywidgets, bars are text, which needs no advice.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["phase_lines", "tell_phase", "told_if_slow", "tqdm"]

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


def tell(text: str, progress: bool) -> None:
    """Prints a line about a run.

    Args:
        text: The line.
        progress: Whether the user wants to see the progress of this call.
    """
    if _ALWAYS.get():
        print(text, flush=True)
    elif progress:
        tqdm.write(text, file=sys.stderr)


def tell_phase(text: str, progress: bool) -> None:
    """Prints a line at the beginning of a phase that may take minutes, unless a bar shows it.

    Args:
        text: The phase.
        progress: Whether the user wants to see the progress of this call.
    """
    if _ALWAYS.get() or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        tell(text, progress)


@contextlib.contextmanager
def told_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Prints a line at a terminal if the body takes longer than some seconds.

    Args:
        text: The line.
        seconds: The seconds.
    """
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(seconds, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_GIB = 2**30


class Phases:
    """Seconds of the phases of a start, and the bytes that were pinned.

    Attributes:
        seconds: The seconds by phase: "tracing", "compiling", "timing" (of functions, on a GPU,
            unless a step is short), "pinning", "timing copies" (likewise, if a step copies state)
            and "initialising".
        pinned_bytes: Bytes that were pinned.
        pinned_in: Seconds that pinning took.
    """

    def __init__(self, began: float, told: Collection[str] = (), progress: bool = False):
        """Records the tracing phase.

        Args:
            began: The value of `time.perf_counter` when it began.
            told: Phases that may take minutes, of which a line is printed; see `tell_phase`.
            progress: See `tell_phase`.
        """
        self._told, self._progress = told, progress
        self.seconds = {"tracing": time.perf_counter() - began}
        self.pinned_bytes, self.pinned_in = 0, 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the time within the context."""
        began = time.perf_counter()
        if name in self._told:
            tell_phase(f"{name} ...", self._progress)
        yield
        self.seconds[name] = time.perf_counter() - began

    def __str__(self) -> str:
        """Returns one line with the seconds of each phase."""
        each = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        line = f"started in {sum(self.seconds.values()):.1f} s: {each}"
        if self.pinned_bytes:
            rate = self.pinned_bytes / _GIB / max(self.pinned_in, 1e-9)
            line += f"; {sized(self.pinned_bytes)} pinned in {self.pinned_in:.1f} s"
            line += f", {rate:.2f} GiB/s"
        return line
