"""Lists of wrong arrays, for error messages."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

_MOST_SHOWN = 10


def listed(lines: Sequence[str]) -> str:
    """Joins lines below each other; of more than 10 lines, it shows the first ones and a count."""
    more = len(lines) - _MOST_SHOWN
    shown = [*lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  " + "\n  ".join(shown)


def described(shape: Sequence[int], dtype: DTypeLike) -> str:
    """An array's type, such as `float32[16,8]`."""
    return f"{jnp.dtype(dtype).name}[{','.join(map(str, shape))}]"
