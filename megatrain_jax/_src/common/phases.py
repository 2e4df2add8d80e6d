"""The phases of a run's start, with their seconds."""

import contextlib
import time
from collections.abc import Collection, Iterator

from megatrain_jax._src.common.progress import tell_phase
from megatrain_jax._src.common.sizes import sized

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
