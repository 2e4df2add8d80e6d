"""The spelling of numbers of bytes, in tables and messages alike."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def sized(num_bytes: int, largest: int = 0) -> str:
    """A number of bytes as users read it: `1023 B`, `1.50 KiB`, `5.00 MiB`.

    Args:
        num_bytes: The number.
        largest: The largest number of the same table, whose unit this one has, too, where two
            decimals still show a hundredth: 512 MiB beside 3 GiB are `0.50 GiB`.
    """
    common = next((scale for _, scale in _UNITS if largest >= scale), None)
    for unit, scale in _UNITS:
        if num_bytes >= (scale / 100 if scale == common else scale):
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
