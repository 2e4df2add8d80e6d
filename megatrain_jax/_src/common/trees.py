"""Trees of arrays that users pass: their leaves, and lists of wrong arrays in error messages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_MOST_SHOWN = 10


def leaves(name: str, tree: Any) -> list[tuple[Any, Any]]:
    """Returns the leaves of a pytree with their paths, as JAX does.

    Raises:
        TypeError: If JAX can't flatten it: a dict's keys can't be sorted, or a list contains
            itself.
    """
    try:
        return jax.tree_util.tree_leaves_with_path(tree)
    except Exception as error:  # a SystemError if it is too deep
        raise TypeError(f"`{name}` is no pytree that JAX can take apart: {error}") from error


def listed(lines: Sequence[str]) -> str:
    """Joins lines below each other; of more than 10 lines, it shows the first ones and a count."""
    more = len(lines) - _MOST_SHOWN
    shown = [*lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  " + "\n  ".join(shown)


def described(shape: Sequence[int], dtype: DTypeLike) -> str:
    """An array's type, such as `float32[16,8]`."""
    return f"{jnp.dtype(dtype).name}[{','.join(map(str, shape))}]"
