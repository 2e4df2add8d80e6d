"""Numbers of bytes as people write them."""

import re
from typing import Any

_UNITS = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)")


def bytes_of(name: str, given: str) -> int:
    """Reads a number of bytes.

    Args:
        name: Name of the option, for the error.
        given: A number with or without a unit; GiB and G are 2^30 bytes, GB are 10^9.

    Raises:
        ValueError: If it is none, or below 1.

    Examples:
        >>> bytes_of("host", "1.5GiB"), bytes_of("host", "2 GB")
        (1610612736, 2000000000)
    """
    found = _SIZE.fullmatch(given.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        raise ValueError(f"`{name}` must be bytes such as 512GiB, 24G or 80GB, but is {given!r}")
    return size


def budget_of(given: str | None) -> Any:
    """Reads a device budget: bytes, "least", or None for what the device has left."""
    return given if given in (None, "least") else bytes_of("device_budget", given)
