"""The hyperparameters in an optimizer's state, such as the learning rate of a schedule."""

from collections import Counter

import jax
import jax.numpy as jnp

from megatrain_jax._src.program import jaxpr as jx
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


def kept_hyperparameters(cut: OptimizerCut) -> dict[str, float]:
    """The hyperparameters that no schedule sets, with the values that the optimizer was made with.

    An update passes such a value on from the state before, so that a state which is restored
    decides on it.

    Args:
        cut: The optimizer.
    """
    positions = find_hyperparameters(cut)
    combine, initial = cut.combine, cut.initial_globals
    states = combine.jaxpr.invars[len(combine.consts) + 1 :]  # after the loss
    updated = combine.jaxpr.outvars[cut.num_messages :]
    kept = {
        name: position
        for name, position in positions.items()
        if updated[position] in jx.dependent(combine.jaxpr, [states[position]])
    }
    if not kept:
        return {}
    # The numbers are constants of the optimizer's own, which a guard of the user's does not mean.
    with jax.transfer_guard("allow"):
        first = jax.device_get(jx.evaluate(initial.jaxpr, initial.consts))
    # As the user wrote them: 0.001 is 0.0010000000474974513 in fp32.
    return {name: float(f"{float(first[position]):.7g}") for name, position in kept.items()}
