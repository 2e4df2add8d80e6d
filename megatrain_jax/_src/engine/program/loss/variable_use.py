"""The use of a model's untrained variables, such as batch statistics or random keys.

For state, a step with several microbatches is still one call: a moving average or a power iteration
advances once. Only keys and counters for random numbers advance with each microbatch.
"""

import dataclasses
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateUse:
    """The use of a model's variables, with a flag for each variable, in order.

    A batch norm's running mean is only `of_batch`, a dropout's key counter only `drawn`.

    Attributes:
        of_batch: Whether the variable's new value depends on the batch.
        drawn: Whether random numbers are drawn from the variable: a key, or a counter of keys.
    """

    of_batch: tuple[bool, ...]
    drawn: tuple[bool, ...]


def find_state_use(jaxpr: Any, data: list[Any], num_variables: int) -> StateUse:
    """Finds out how a flat traced loss uses the model's variables.

    Args:
        jaxpr: The loss; its last outputs are the new variables.
        data: Inputs of the loss other than parameters: variables, then the batch, then a key.
        num_variables: Number of variables.
    """
    of_batch = jx.dependent(jaxpr, data[num_variables:-1])
    # Backwards from draws to their sources; forwards, a key's use would not be known yet.
    sources: set[Any] = set()  # integers and keys behind random numbers
    for eqn in reversed(jaxpr.eqns):
        if jx.contains(eqn, _draws) or not sources.isdisjoint(eqn.outvars):
            # Keys are made from integers; a floating operand here is a probability or an
            # activation.
            sources.update(v for v in jx.variables(eqn.invars) if not jx.is_float(v.aval))
    new = jaxpr.outvars[len(jaxpr.outvars) - num_variables :]
    return StateUse(
        of_batch=tuple(not jx.is_literal(a) and a in of_batch for a in new),
        drawn=tuple(v in sources for v in data[:num_variables]),
    )


def _draws(eqn: Any) -> bool:
    """Whether an equation draws random numbers by itself."""
    return draws(eqn.primitive.name)
