"""Trees of arrays that users pass, paths in a user's model, and lists of wrong arrays."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

ModelPath = tuple[str | int, ...]


def path_name(path: ModelPath) -> str:
    """A path as users read it, such as `layers/3/kernel`."""
    return "/".join(map(str, path))


def finds(pattern: str, name: str) -> bool:
    """Whether a pattern finds a path.

    Args:
        pattern: Whole names of a path, such as `head` or `layers/3`, or, with any special
            character, a regular expression to search for.
        name: The path, as `path_name` has it.
    """
    if re.search(r"[\\^$.|?*+()[\]{}]", pattern):
        return re.search(pattern, name) is not None
    return f"/{pattern.strip('/')}/" in f"/{name}/"


def may_train(leaf: Any) -> bool:
    """Whether a leaf may be trained: all but those made by `nnx.Param(x, trainable=False)`."""
    found = leaf.get_metadata().get("trainable", True) if isinstance(leaf, nnx.Variable) else True
    if not isinstance(found, bool):
        raise TypeError(f"`trainable`={found!r} of a variable of the model must be True or False")
    return found


def module_path(path: ModelPath) -> ModelPath:
    """A path with one component for each module.

    A component that is itself a path, as keys of a flat dict or of a safetensors file, is split:
    both `("layers/3/kernel",)` and `("layers.3.kernel",)` become `("layers", "3", "kernel")`.
    """
    rows = (re.split(r"[/.]", part) if isinstance(part, str) else (part,) for part in path)
    return tuple(part for row in rows for part in row)


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
