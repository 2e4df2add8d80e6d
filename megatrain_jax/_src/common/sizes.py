"""Numbers: of bytes, as text, written and read; counts; divisors."""

import math
import re

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_WRITTEN = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
# The data rate of a network is given in bits (Gb/s), or in bytes (GB/s); "8x" counts its cards.
_RATE = re.compile(r"(?:([0-9]+) *[x×] *)?([0-9]+(?:\.[0-9]+)?) *([kMGT]?)(bit|b|B)(?:ps|/s)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)")
# A number of bytes without a unit is at least this; less was meant in another unit.
_LEAST_PLAIN = 2**20


def sized(num_bytes: int, largest: int = 0) -> str:
    """Formats a number of bytes: `1023 B`, `1.50 KiB`, `5.00 MiB`.

    Args:
        num_bytes: The number.
        largest: The largest number of the same table. This number uses its unit too if two decimals
            can show it: 512 MiB beside 3 GiB are `0.50 GiB`.
    """
    common = next((scale for _, scale in _UNITS if largest >= scale), None)
    for unit, scale in _UNITS:
        if num_bytes >= (scale / 100 if scale == common else scale):
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 example`, `2,000 examples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_of(name: str, given: str) -> int:
    """Reads a number of bytes.

    Args:
        name: Name of the argument, for the error.
        given: A number with a unit, of which GiB and G are 2^30 bytes and GB 10^9; or one of bytes
            without a unit, from 2^20 on.

    Raises:
        ValueError: If it is not a number of bytes, below 1, or a small number without a unit.

    Examples:
        >>> bytes_of("host", "1.5GiB"), bytes_of("host", "2 GB")
        (1610612736, 2000000000)
    """
    found = _SIZE.fullmatch(given.strip().lower())
    if found is None or found[2] not in _WRITTEN:
        raise ValueError(f"`{name}` must be bytes such as 512GiB, 24G or 80GB, but is {given!r}")
    number = float(found[1]) * _WRITTEN[found[2]]
    if not 1 <= number < math.inf:
        raise ValueError(f"`{name}`={given!r} is not a number of bytes from 1 on")
    size = int(number)
    if not found[2] and size < _LEAST_PLAIN:
        raise ValueError(f'`{name}`={given!r} would be {size} bytes: add a unit, "{found[1]} GiB"')
    return size


def rate_of(name: str, given: str) -> float:
    """Reads a rate in bytes per second.

    Args:
        name: Name of the argument, for the error.
        given: A number with a unit: of bits such as 400Gb/s or 400Gbps, or of bytes such as 50GB/s;
            several equal cards as in 8x400Gb/s.

    Raises:
        ValueError: If it is not such a rate, or 0.

    Examples:
        >>> rate_of("network", "8x400Gb/s"), rate_of("network", "12.5 GB/s")
        (400000000000.0, 12500000000.0)
    """
    found = _RATE.fullmatch(given.strip())
    rate = 0.0
    if found is not None:
        count, number, prefix, unit = found.groups()
        scale = 1000 ** (" kMGT".index(prefix) if prefix else 0)
        rate = int(count or 1) * float(number) * scale / (1 if unit == "B" else 8)
    if not rate:
        raise ValueError(
            f"`{name}` must be a rate such as 400Gb/s (bits), 50GB/s (bytes) or 8x400Gb/s, but is "
            f"{given!r}"
        )
    return rate


def read_and_write_rates(name: str, given: str) -> tuple[float, float]:
    """Reads two rates in bytes per second, of reading and of writing.

    Args:
        name: Name of the argument, for the error.
        given: One rate for both, or "7GB/s read, 2GB/s write".

    Raises:
        ValueError: If they are not such rates.

    Examples:
        >>> read_and_write_rates("disk", "7GB/s read, 2GB/s write")
        (7000000000.0, 2000000000.0)
    """
    parts = [part.split() for part in given.split(",")]
    words = {part[-1]: " ".join(part[:-1]) for part in parts if len(part) > 1}
    if {*words} == {"read", "write"} and len(parts) == 2:
        return rate_of(name, words["read"]), rate_of(name, words["write"])
    if len(parts) > 1 or {*words} & {"read", "write"}:
        raise ValueError(f'`{name}` must be as in "7GB/s read, 2GB/s write", but is {given!r}')
    return rate_of(name, given), rate_of(name, given)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending: 1, 2, 3, 4, 6 and 12 for 12."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
