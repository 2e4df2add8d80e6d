"""Scratch space on drives: byte ranges that threads write and read past the system's cache.

Each folder has one file without a name, so that nothing is left when the process ends, however it
ends. Ranges are divided into pieces, which go to the emptiest file: several drives work at once.
The checksum of every piece is in memory, so that damaged data is noticed.

Example: 20 MiB on two drives, in pieces of 8 MiB::

    piece          0          1          2
    of the range   0 –  8     8 – 16     16 – 20
    in file        first      second     first, after the piece before

`OrdinaryMemory` keeps ranges in memory that isn't pinned, without checksums.
"""

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from megatrain_jax._src.common.host_memory import read_text
from megatrain_jax._src.common.sizes import sized

_PIECE_BYTES = 2**23
# Direct transfers have to begin and end at multiples of this, on the drive and in memory.
_ALIGNMENT = 4096
# A drive needs several requests at once to be fast.
_THREADS = 4
# Threads that copy memory each way, at most: one core doesn't keep up with a GPU's link.
_COPYING_THREADS = 8
# Bytes copied at a time to measure a drive, and for how many seconds this is repeated.
_MEASURED_BYTES, _MEASURED_SECONDS = 2**29, 1.0
_MOUNTS = Path("/proc/self/mountinfo")
# In place of a folder: state rests in memory that isn't pinned. No folder can have this path.
ORDINARY_MEMORY = Path("/dev/null/ordinary memory")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a range: its first byte there, its length, and where it lies."""

    start: int
    num_bytes: int
    file: int
    offset: int


class Range:
    """A range of bytes on the drives, with the checksums of its pieces as last written."""

    def __init__(self, num_bytes: int, pieces: Sequence[_Piece]):
        """Has no contents yet."""
        self.num_bytes, self.pieces = num_bytes, pieces
        self.sums: list[int | None] = [None] * len(pieces)


class Storage:
    """Ranges of bytes that threads write and read; they are placed before `reserve`.

    Attributes:
        num_bytes: Bytes of all ranges, with their padding.
    """

    def __init__(self, num_files: int, num_threads: int):
        """Starts without ranges; `num_threads` threads write, and as many read."""
        self._lengths, self._num_threads = [0] * num_files, num_threads
        self._readers, self._writers = (
            ThreadPoolExecutor(num_threads, thread_name_prefix=f"disk {name}")
            for name in ("reads", "writes")
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranges, with their padding."""
        return sum(self._lengths)

    def place(self, num_bytes: int) -> Range:
        """A new range."""
        pieces, most = [], self._piece_bytes(num_bytes)
        for start in range(0, num_bytes, most):
            size = min(most, num_bytes - start)
            file = self._lengths.index(min(self._lengths))
            pieces.append(_Piece(start, size, file, self._lengths[file]))
            self._lengths[file] += _padded(size)
        return Range(num_bytes, pieces)

    def reserve(self) -> None:
        """Takes the space of all ranges, so that no write fails for want of space.

        Raises:
            OSError: If there is too little space.
        """
        raise NotImplementedError

    def write(self, rows: Iterable[tuple[Range, Callable[[], np.ndarray]]]) -> list[Future]:
        """Starts to write ranges.

        Args:
            rows: The ranges, each with a function that returns its bytes, which must not change
                until all is written; threads call it.
        """
        return self._started(self._writers, self._write, rows)

    def read(self, rows: Iterable[tuple[Range, np.ndarray]]) -> list[Future]:
        """Starts to read completely written ranges, each into an array of its bytes."""
        return self._started(self._readers, self._read, rows)

    def _started(
        self,
        threads: ThreadPoolExecutor,
        move: Callable[[Range, int, Any], None],
        rows: Iterable[tuple[Range, Any]],
    ) -> list[Future]:
        pieces = [(where, n, data) for where, data in rows for n in range(len(where.pieces))]

        def run(share: Sequence[tuple[Range, int, Any]]) -> None:
            for piece in share:
                move(*piece)

        return [threads.submit(run, share) for share in self._shares(pieces)]

    def _shares(self, pieces: Sequence[_T]) -> Iterable[Sequence[_T]]:
        """Pieces in the order in which threads take them, as each of them takes some."""
        return ([piece] for piece in pieces)

    def read_part(self, where: Range, start: int, stop: int) -> np.ndarray:
        """Reads some bytes of a range now, by whole pieces, because of their checksums."""
        found = np.empty(stop - start, np.uint8)
        jobs = [
            self._readers.submit(self._read, where, number, found, start)
            for number, piece in enumerate(where.pieces)
            if piece.start < stop and start < piece.start + piece.num_bytes
        ]
        for job in jobs:
            job.result()
        return found

    def close(self) -> None:
        """Ends the threads, and gives the space back."""
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)
        self._free()

    def _piece_bytes(self, num_bytes: int) -> int:
        """Bytes of each piece but the last of a range of so many."""
        return _PIECE_BYTES

    def _free(self) -> None:
        raise NotImplementedError

    def _write(self, where: Range, number: int, data: Callable[[], np.ndarray]) -> None:
        """Writes a piece of a range."""
        raise NotImplementedError

    def _read(self, where: Range, number: int, out: np.ndarray, begin: int = 0) -> None:
        """Reads a piece of a range into an array of the range's bytes from `begin` on."""
        raise NotImplementedError


class Drives(Storage):
    """Ranges in a file of each folder; their space is free when nobody has this object."""

    def __init__(self, folders: Sequence[Path]):
        """Makes the folders and the files.

        Raises:
            OSError: If a folder can't be written.
        """
        super().__init__(len(folders), _THREADS * len(folders))
        self._folders = list(folders)
        self._files: list[int] = []
        # A read or write under way has this object, too. When the process ends, files close anyway.
        self._closing = weakref.finalize(self, _close_files, self._files)
        self._closing.atexit = False
        self._buffers = threading.local()
        for folder in self._folders:
            with _told(folder, "can't be used"):
                if os.path.lexists(folder):
                    os.stat(f"{folder}/.")  # or `mkdir` says of a file that it exists
                folder.mkdir(parents=True, exist_ok=True)
                self._files.append(_unnamed_file(folder))

    def reserve(self) -> None:
        """See `Storage`; writes the files if need be."""
        for folder, file, length in zip(self._folders, self._files, self._lengths, strict=True):
            if not length:
                continue
            _check_free(folder, length)
            with _told(folder, f"can't hold {sized(length)}"):
                _allocate(file, length)

    def _free(self) -> None:
        self._closing()

    def _buffer(self) -> memoryview:
        """This thread's memory for direct transfers."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        return self._buffers.memory

    def _write(self, where: Range, number: int, data: Callable[[], np.ndarray]) -> None:
        piece, buffer = where.pieces[number], self._buffer()
        own = data()[piece.start : piece.start + piece.num_bytes]
        np.frombuffer(buffer, np.uint8)[: piece.num_bytes] = own
        where.sums[number] = xxhash.xxh3_64_intdigest(buffer[: piece.num_bytes])
        left = buffer[: _padded(piece.num_bytes)]
        offset = piece.offset
        with _told(self._folders[piece.file], "can't be written"):
            while left:
                done = os.pwrite(self._files[piece.file], left, offset)
                left, offset = left[done:], offset + done

    def _read(self, where: Range, number: int, out: np.ndarray, begin: int = 0) -> None:
        piece, buffer = where.pieces[number], self._buffer()
        left, offset = buffer[: _padded(piece.num_bytes)], piece.offset
        folder = self._folders[piece.file]
        with _told(folder, "can't be read"):
            while left:
                done = os.preadv(self._files[piece.file], [left], offset)
                if not done:
                    raise OSError(errno.EIO, "the file has become shorter")
                left, offset = left[done:], offset + done
        found = buffer[: piece.num_bytes]
        if xxhash.xxh3_64_intdigest(found) != where.sums[number]:
            raise OSError(
                errno.EIO,
                f"`disk_dir`={str(folder)!r}: the drive has returned other bytes than were written "
                "there. Continue from the last checkpoint, and check the drive",
            )
        _copy_part(np.frombuffer(found, np.uint8), piece.start, out, begin)


class OrdinaryMemory(Storage):
    """Ranges in memory that isn't pinned."""

    def __init__(self) -> None:
        """Has no ranges yet."""
        super().__init__(1, min(_COPYING_THREADS, len(os.sched_getaffinity(0))))

    def reserve(self) -> None:
        """See `Storage`; the system gives pages when they are written."""
        memory = mmap.mmap(-1, max(1, self.num_bytes))
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(memory, np.uint8)

    def _free(self) -> None:
        self._memory = np.empty(0, np.uint8)

    # What all threads do in Python, one does at a time, and the driver waits: so they do little.

    def _piece_bytes(self, num_bytes: int) -> int:
        return max(_PIECE_BYTES, _padded(-(-num_bytes // self._num_threads)))

    def _shares(self, pieces: Sequence[_T]) -> Iterable[Sequence[_T]]:
        shares = (pieces[number :: self._num_threads] for number in range(self._num_threads))
        return filter(len, shares)

    def _of(self, piece: _Piece) -> np.ndarray:
        return self._memory[piece.offset : piece.offset + piece.num_bytes]

    def _write(self, where: Range, number: int, data: Callable[[], np.ndarray]) -> None:
        piece = where.pieces[number]
        self._of(piece)[:] = data()[piece.start : piece.start + piece.num_bytes]

    def _read(self, where: Range, number: int, out: np.ndarray, begin: int = 0) -> None:
        piece = where.pieces[number]
        _copy_part(self._of(piece), piece.start, out, begin)


def drives_of(folders: Sequence[Path]) -> Storage:
    """Storage in these folders, or in memory if `ORDINARY_MEMORY` is the only one."""
    return OrdinaryMemory() if list(folders) == [ORDINARY_MEMORY] else Drives(folders)


def _copy_part(found: np.ndarray, start: int, out: np.ndarray, begin: int) -> None:
    """Copies the bytes that `found`, from `start` on, and `out`, from `begin` on, share."""
    first, last = max(begin, start), min(begin + out.size, start + found.size)
    out[first - begin : last - begin] = found[first - start : last - start]


@contextmanager
def _told(folder: Path, what: str) -> Iterator[None]:
    """A context whose system errors name the folder and the option it comes from."""
    try:
        yield
    except OSError as error:
        text = f"`disk_dir`={str(folder)!r} {what}: {error.strerror or error}"
        raise OSError(error.errno, text) from error


def _allocate(file: int, length: int) -> None:
    """Reserves the space of a new file, by writing zeros if the file system can't reserve it."""
    try:
        os.posix_fallocate(file, 0, length)
    except OSError as error:
        # The C library then writes single bytes, and direct transfers refuse these.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        zeros = mmap.mmap(-1, _PIECE_BYTES)
        offset = 0
        while offset < length:
            offset += os.pwrite(file, memoryview(zeros)[: length - offset], offset)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _close_files(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def check_space(folders: Sequence[Path], num_bytes: int) -> None:
    """Refuses folders with too little space for so many bytes in all; they need not exist.

    Raises:
        OSError: If a drive has too little space.
    """
    for folder in folders:
        if folder != ORDINARY_MEMORY:  # limited by `within_pinned`
            _check_free(folder, num_bytes // len(folders))


def _check_free(folder: Path, num_bytes: int) -> None:
    if (free := _free_bytes(_existing(folder))) < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"`disk_dir`={str(folder)!r} has {sized(free)} free, and {sized(num_bytes)} of the "
            "state would rest there. Free some space, or add another folder",
        )


def _existing(folder: Path) -> Path:
    """A folder, or if it does not exist yet, the one that it will be made in."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _unnamed_file(folder: Path) -> int:
    """Opens a new file without a name; its space is free again when the process ends."""
    path = folder / f".megatrain-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Not every file system can bypass the cache; some have made the file already.
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
    path.unlink()
    return file


def in_memory(folder: Path) -> bool:
    """Whether a folder lies in the host's memory itself; it need not exist."""
    device = _existing(folder).stat().st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    rows = (row.partition(" - ") for row in (read_text(_MOUNTS) or "").splitlines())
    kinds = [kind.split()[0] for mount, _, kind in rows if mount.split()[2] == own]
    return any(kind in ("ramfs", "tmpfs") for kind in kinds)


def measured_rates(folders: Sequence[Path]) -> tuple[float, float, float]:
    """Bytes per second that are read from the drives, written to them, and moved both ways at once.

    Both ways together count the bytes of both. A drive that writes into a fast cache first is
    slower once that is full.

    Raises:
        OSError: If a folder can't be written.
    """
    drives = drives_of(folders)
    try:
        # A little of what is free, because nothing may come to rest there.
        free = [_free_bytes(x) for x in folders if x != ORDINARY_MEMORY]
        size = max(_PIECE_BYTES, min([_MEASURED_BYTES, *(x // 8 for x in free)]))
        first, second = (drives.place(size) for _ in range(2))
        drives.reserve()
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        into = data.copy()  # its pages exist before it is timed

        def write(where: Range) -> Sequence[Future]:
            return drives.write([(where, lambda: data)])

        def rate(*transfers: Callable[[], Sequence[Future]]) -> float:
            start, moved, seconds = time.perf_counter(), 0, 0.0
            while seconds < _MEASURED_SECONDS:
                for future in [future for transfer in transfers for future in transfer()]:
                    future.result()
                moved += size * len(transfers)
                seconds = time.perf_counter() - start
            return moved / seconds

        for where in first, second:  # the first write of new space may be slower than later ones
            for future in write(where):
                future.result()
        ways = partial(drives.read, [(first, into)]), partial(write, second)
        return rate(ways[0]), rate(ways[1]), rate(*ways)
    finally:
        drives.close()
