"""Reads files into the system's cache while a run waits for compilation and pinning.

When the store is filled, initial values in files are read one by one; they then come from the cache
instead of the disk. Compiling and pinning use neither the disk nor Python's lock much.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Bytes per read. Python's lock is free during a read, and the thread can end only between reads.
_CHUNK_BYTES = 2**23


class ReadAhead:
    """A context with a thread that reads files, as far as free memory allows.

    Only the system's cache keeps the data, and gives it up if memory is short.
    """

    def __init__(self, paths: Iterable[Path], limit_bytes: int):
        """Makes the thread.

        Args:
            paths: The files, in the order of their later use.
            limit_bytes: Maximum bytes to read.
        """
        self.read_bytes, self._left, self._ended = 0, limit_bytes, threading.Event()
        # A daemon, so that a process can exit without waiting for a disk.
        run = threading.Thread(target=self._read, args=[list(paths)], daemon=True)
        run.name = "files read ahead"
        self._thread = run

    def __enter__(self) -> "ReadAhead":
        """Starts to read."""
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the thread after its current read."""
        self._ended.set()

    def wait(self) -> None:
        """Waits until everything is read."""
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
                return  # the later reader of the file reports its error
