"""Reads files into the system's cache while a run has other things to wait for.

Initial values that lie in files are read one by one once the store is filled, from a cache then
instead of a disk. Until then compiling and pinning keep neither the disk nor Python's lock busy.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Read at a time: the lock is free meanwhile, and whoever ends it doesn't wait long.
_CHUNK_BYTES = 2**23


class ReadAhead:
    """A context within which a thread reads files, as far as memory can hold them beside all else.

    Nothing is kept but what the system caches, which gives it back where memory is short.
    """

    def __init__(self, paths: Iterable[Path], limit_bytes: int):
        """Makes the thread.

        Args:
            paths: The files, in the order in which they will be needed.
            limit_bytes: Bytes to read at most.
        """
        self.read_bytes, self._left, self._ended = 0, limit_bytes, threading.Event()
        # A daemon: no process has to wait for a disk at its end.
        run = threading.Thread(target=self._read, args=[list(paths)], daemon=True)
        run.name = "files read ahead"
        self._thread = run

    def __enter__(self) -> "ReadAhead":
        """Starts to read."""
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends it after what is being read."""
        self._ended.set()

    def wait(self) -> None:
        """Waits until all is read."""
        self._thread.join()

    def _read(self, paths: Iterable[Path]) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for path in paths:
            try:
                with path.open("rb", buffering=0) as file:
                    while self._left > 0 and not self._ended.is_set():
                        count = file.readinto(buffer[: self._left])
                        if not count:
                            break
                        self.read_bytes += count
                        self._left -= count
            except OSError:
                return  # whoever needs the numbers says what is wrong with the file
