"""The hyperparameters in an optimizer's state, such as the learning rate of a schedule."""

from collections import Counter

import jax.numpy as jnp

from megatrain_jax._src.program.optimizer.cut import OptimizerCut

# The field of the state that `optax.inject_hyperparams` keeps their values in.
_FIELD = "hyperparams"


def find_hyperparameters(cut: OptimizerCut) -> dict[str, int]:
    """Finds the hyperparameters that `optax.inject_hyperparams` keeps among the global state.

    The state of `chain(clip(1.0), inject_hyperparams(adam)(schedule))` has the leaf
    `1.hyperparams.learning_rate`, which is found as "learning_rate". If a second transformation had
    one of that name, they would be "1.learning_rate" and "2.learning_rate".

    Args:
        cut: The optimizer.

    Returns:
        For each name, the position of its value in `cut.globals`.
    """
    found: list[tuple[str, tuple[str, ...], int]] = []
    for position, leaf in enumerate(cut.globals):
        shape, path = cut.state_shapes[leaf.leaf], cut.state_paths[leaf.leaf]
        is_number = shape.shape == () and jnp.issubdtype(shape.dtype, jnp.number)
        if is_number and len(path) > 1 and path[-2] == _FIELD:
            found.append((path[-1], path[:-2], position))
    number_of = Counter(name for name, *_ in found)
    return {
        name if number_of[name] == 1 else ".".join([*before, name]): position
        for name, before, position in found
    }
