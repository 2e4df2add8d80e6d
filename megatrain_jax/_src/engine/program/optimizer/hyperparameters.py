"""Finds the hyperparameters in an optimizer's state, such as a scheduled learning rate."""

from collections import Counter

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut

# The name that `optax.inject_hyperparams` gives to the field of its state with their values.
_FIELD = "hyperparams"


def find_hyperparameters(cut: OptimizerCut) -> dict[str, int]:
    """Finds the hyperparameters that `optax.inject_hyperparams` keeps in the global state.

    Example: the state of `chain(clip(1.0), inject_hyperparams(adam)(schedule))` has the leaf
    `1.hyperparams.learning_rate`, and its name here is "learning_rate". If two transformations have
    a hyperparameter of one name, the names are "1.learning_rate" and "2.learning_rate".

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
    """The hyperparameters without a schedule, with their initial values.

    An update copies such a value from the previous state, so a restored state determines it.

    Args:
        cut: The optimizer.
    """
    positions = find_hyperparameters(cut)
    combine, initial = cut.combine, cut.initial_globals
    first = len(combine.consts) + 1 + cut.is_scaled  # after the loss and its scale
    states = combine.jaxpr.invars[first:]
    updated = combine.jaxpr.outvars[cut.num_messages :]
    kept = {
        name: position
        for name, position in positions.items()
        if updated[position] in jx.dependent(combine.jaxpr, [states[position]])
    }
    if not kept:
        return {}
    # A user's transfer guard does not concern these constants of the optimizer.
    with jax.transfer_guard("allow"):
        first = jax.device_get(jx.evaluate(initial.jaxpr, initial.consts))
    # As the user wrote them: 0.001 is 0.0010000000474974513 in fp32.
    return {name: float(f"{float(first[position]):.7g}") for name, position in kept.items()}
