"""Threads that find the pages of memory that a driver maps and pins."""

import mmap
import threading
from pathlib import Path

import pytest

from megatrain_jax._src.engine.state.pool import MappingLister, parts_of, prefaulting

MIB = 2**20


def found_bytes(mapping):
    """The bytes of a mapping for which the kernel has found pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    own = next(line for line in lines if line.startswith(f"{mapping[0]:x}-{mapping[1]:x} "))
    assert "/dev/zero" in own
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def test_threads_find_the_pages_of_large_new_mappings():
    lister = MappingLister()
    unrelated = set(lister.shared())
    old = mmap.mmap(-1, 12 * MIB)  # memory that the process shares, as the driver maps it
    before = set(lister.shared())
    with prefaulting(2, least_bytes=12 * MIB):
        small = mmap.mmap(-1, 8 * MIB)
        large = mmap.mmap(-1, 12 * MIB)
        (first,) = (m for m in set(lister.shared()) - before if m[1] - m[0] == 12 * MIB)
        while found_bytes(first) < 12 * MIB:
            assert threading.active_count() > 3, "the threads have ended"
    assert large[:] == bytes(12 * MIB)
    rest = set(lister.shared()) - unrelated - {first}
    assert len(rest) == 2
    assert not sum(map(found_bytes, rest)), "neither small nor old mappings"
    for mapping in (old, small, large):
        mapping.close()


@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt])
def test_threads_end_with_their_context(raised):
    before = set(threading.enumerate())  # threads of earlier tests may end meanwhile
    with pytest.raises(raised), prefaulting(3):
        own = set(threading.enumerate()) - before
        assert len(own) == 4
        raise raised
    assert own.isdisjoint(threading.enumerate())


def test_a_long_list_of_mappings_is_read_whole_and_a_missing_one_is_empty(tmp_path):
    line = "7f{0:05x}00000-7f{1:05x}00000 rw-s 00000000 00:01 42      {2}\n"
    maps = tmp_path / "maps"
    maps.write_text(
        "".join(line.format(i, i + 1, "/lib/libc.so.6") for i in range(20_000))
        + line.format(20_000, 20_512, "/dev/zero (deleted)")
        + line.format(20_512, 20_513, "/dev/nvidiactl")
    )
    lister = MappingLister(maps)
    first = 0x7F00_0000_0000 + 20_000 * MIB
    assert lister.shared() == lister.shared() == [(first, first + 512 * MIB)]
    maps.write_text(line.format(1, 2, "/dev/zero (deleted)"))
    assert lister.shared() == [(0x7F00_0010_0000, 0x7F00_0020_0000)], "nothing of the longer list"
    maps.unlink()
    assert lister.shared() == []


@pytest.mark.parametrize("number", [1, 2, 3, 15, 16])
@pytest.mark.parametrize("mib", [1, 2, 30, 256, 257])
def test_parts_are_whole_huge_pages_that_add_up(number, mib):
    first = 5 * MIB
    parts = parts_of((first, first + mib * MIB), number)
    assert len(parts) <= number
    assert parts[0][0] == first and parts[-1][1] == first + mib * MIB
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    assert all((end - at) % (2 * MIB) == 0 for at, end in parts[:-1])
