"""What a model's state (its variables that are not trained) depends on, and what it is for.

With several microbatches a step is still one call as far as state goes: a moving average or a power
iteration advances once. Only what random numbers are drawn from goes on from part to part.
"""

import dataclasses
from typing import Any

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.primitives import draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateUse:
    """For each variable, in order, two facts about it.

    Attributes:
        of_batch: Whether its new value depends on the batch.
        drawn: Whether random numbers are drawn from it: it is a key, or a count of keys.
    """

    of_batch: tuple[bool, ...]
    drawn: tuple[bool, ...]


def find_state_use(jaxpr: Any, data: list[Any], num_variables: int) -> StateUse:
    """Looks at a flat traced loss.

    Args:
        jaxpr: Its equations; its last outputs are the new variables.
        data: Those of its inputs that are no parameters: variables, then the batch, then a key.
        num_variables: How many variables there are.
    """
    of_batch = jx.dependent(jaxpr, data[num_variables:-1])
    sources: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if _draws(eqn) or not sources.isdisjoint(eqn.outvars):
            # Keys are made of integers; a floating operand here is a probability or an activation.
            sources.update(v for v in jx.variables(eqn.invars) if not jx.is_float(v.aval))
    new = jaxpr.outvars[len(jaxpr.outvars) - num_variables :]
    return StateUse(
        of_batch=tuple(not jx.is_literal(a) and a in of_batch for a in new),
        drawn=tuple(v in sources for v in data[:num_variables]),
    )


def _draws(eqn: Any) -> bool:
    if draws(eqn.primitive.name):
        return True
    return any(_draws(inner) for jaxpr in jx.inner_jaxprs(eqn) for inner in jaxpr.eqns)
