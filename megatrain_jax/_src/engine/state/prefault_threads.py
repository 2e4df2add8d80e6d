"""Threads that prefault the pages of host memory while the GPU's driver pins it.

The driver maps a piece of memory and pins its pages in one thread, which waits while the kernel
finds (allocates) and clears each page. Further threads can ask for the same pages in parallel. The
kernel's `MADV_POPULATE_WRITE` (Linux 5.14) finds pages without changing their contents. It refuses
addresses that are not mapped, so it is safe even if the driver frees the memory in the meantime.

Example: the driver pins 64 GiB on a machine with 17 cores::

    driver        maps bytes 0 to 64 GiB, and pins page 0, 1, 2, ...
    one thread    sees the mapping in /proc/self/maps
    thread 0      finds the pages of bytes 0 to 4 GiB
    thread 1      finds the pages of bytes 4 to 8 GiB
    ...

While the driver pins, the kernel keeps the process's list of mappings locked against changes. A
thread that needs more memory then has to wait, and so does every later call that uses the list. So
all threads are started before the driver begins, and each prefaults its part in one call.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

# The kernel's number; Python's `mmap` has no name for it.
_MADV_POPULATE_WRITE = 23
# The kernel's name of shared memory without a file, as the driver maps it.
_SHARED = b"/dev/zero"
_SECONDS_AT_A_TIME = 0.01
# Pages of smaller mappings are found quickly.
_LEAST_BYTES = 2**28
# The largest huge page: no two threads ask for the same one.
_PAGE_BYTES = 2**21
_MOST_THREADS = 16

Mapping = tuple[int, int]
"""The first address of a mapping, and the address after its last."""


def num_threads() -> int:
    """Returns the number of threads that prefault pages; one core is left for the driver."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


@contextmanager
def prefaulting(
    threads: int, num_mappings: int = 1, least_bytes: int = _LEAST_BYTES
) -> Iterator[None]:
    """A context in which threads prefault the pages of new mappings of shared memory.

    Its end waits for the threads, which is short if the memory is pinned by then.

    Args:
        threads: Number of threads.
        num_mappings: Number of mappings that are pinned at a time.
        least_bytes: Minimum size of a mapping to prefault.
    """
    parts: SimpleQueue[Mapping | None] = SimpleQueue()
    lister, ended = MappingLister(), threading.Event()
    known = set(lister.shared())

    def watch() -> None:
        while not ended.wait(_SECONDS_AT_A_TIME):
            for mapping in set(lister.shared()) - known:
                known.add(mapping)
                if mapping[1] - mapping[0] >= least_bytes:
                    for part in parts_of(mapping, max(1, threads // num_mappings)):
                        parts.put(part)

    # Daemons, so that a process can exit without waiting for them.
    targets = [watch, *[lambda: _prefault(parts)] * threads]
    started = [threading.Thread(target=run, name="pages found", daemon=True) for run in targets]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for _ in range(threads):
            parts.put(None)
        for thread in started:
            thread.join()


class MappingLister:
    """Lists this process's mappings; only the first listing may ask the kernel for memory."""

    def __init__(self, maps: Path = Path("/proc/self/maps")):
        """Remembers the kernel's file of mappings."""
        self._maps, self._text = maps, bytearray(2**20)

    def shared(self) -> list[Mapping]:
        """Returns the mappings of shared memory; none if the kernel doesn't list them."""
        end = self._read()
        found, at = [], self._text.find(_SHARED, 0, end)
        while at >= 0:
            line = self._text.rfind(b"\n", 0, at) + 1
            # "7f0000000000-7f1000000000 rw-s 00000000 00:01 42   /dev/zero (deleted)"
            first, last = self._text[line:at].split(maxsplit=1)[0].split(b"-")
            found.append((int(first, 16), int(last, 16)))
            at = self._text.find(_SHARED, at + 1, end)
        return found

    def _read(self) -> int:
        """Reads the file; returns its length."""
        end = 0
        try:
            with self._maps.open("rb", buffering=0) as file:
                while count := file.readinto(memoryview(self._text)[end:]):
                    end += count
                    if end == len(self._text):
                        self._text += bytes(end)
        except OSError:
            return 0
        return end


def parts_of(mapping: Mapping, number: int) -> list[Mapping]:
    """Divides a mapping into at most `number` parts that begin a whole number of pages apart."""
    first, end = mapping
    size = -(-(end - first) // number // _PAGE_BYTES) * _PAGE_BYTES
    return [(at, min(at + size, end)) for at in range(first, end, size)]


def _prefault(parts: "SimpleQueue[Mapping | None]") -> None:
    """Prefaults the pages of parts of mappings until the queue gives None."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while part := parts.get():
        first, end = part
        # Errors don't matter: the driver waits for the pages that are left.
        advise(first, end - first, _MADV_POPULATE_WRITE)
