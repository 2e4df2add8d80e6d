"""Checks of arguments that are trees of arrays."""

from typing import Any

import jax


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
