"""The spelling of numbers of bytes, in tables and messages alike."""


def sized(num_bytes: int) -> str:
    """A number of bytes as users read it: `1023 B`, `1.50 KiB`, `5.00 MiB`, `0.50 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # Two decimals still show a hundredth, and a large model's table stays in one unit.
        if num_bytes >= (scale / 100 if unit == "GiB" else scale):
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
