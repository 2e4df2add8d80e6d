"""Traits of the values in a stage: made of parameters alone, or of the batch.

Example: a stage reads the leaf `w`, and x from the stage before::

    a = transpose w     laid out from w
    b = rsqrt(sum a)    computed from parameters, not laid out
    q = dot x a         of the batch
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import (
    BARRIER,
    CUSTOM_RULES,
    ELEMENTWISE,
    JOINING,
    LAYOUT,
)

_LAID_OUT = ELEMENTWISE | JOINING | LAYOUT | {"expand_dims", BARRIER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandTraits:
    """The traits of a value in a stage.

    Attributes:
        rearranged_from: The leaves that it is a rearrangement of, none for a constant; None for a
            value that is computed in any other way.
        of_batch: Whether it depends on the batch.
        varies: Whether it depends on a parameter.
        is_perturbed: Whether it depends on a trained parameter.
    """

    rearranged_from: frozenset[int] | None
    of_batch: bool
    varies: bool
    is_perturbed: bool

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters alone."""
        return self.varies and not self.of_batch


CONSTANT = OperandTraits(
    rearranged_from=frozenset(), of_batch=False, varies=False, is_perturbed=False
)


def leaf_traits(leaf: int, is_trainable: bool) -> OperandTraits:
    """The traits of a parameter.

    Args:
        leaf: Its number.
        is_trainable: Whether it gets a gradient.
    """
    return OperandTraits(
        rearranged_from=frozenset((leaf,)), of_batch=False, varies=True, is_perturbed=is_trainable
    )


def input_traits(varies: bool, is_perturbed: bool) -> OperandTraits:
    """The traits of a value that arrives at a stage; see `OperandTraits`."""
    return OperandTraits(
        rearranged_from=None, of_batch=True, varies=varies, is_perturbed=is_perturbed
    )


def traits_of(env: Mapping[Any, OperandTraits], atoms: Sequence[Any]) -> list[OperandTraits]:
    """The traits of operands."""
    return [CONSTANT if jx.is_literal(a) else env[a] for a in atoms]


def weight_sizes(eqn: Any, side: int) -> tuple[int, int]:
    """The two sides of a weight as a matrix: its contracted sizes, and its free ones."""
    contracted, batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[side].aval.shape
    inner = math.prod(shape[axis] for axis in contracted[side])
    free = (n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batch[side]))
    return inner, math.prod(free)


def traits_in(jaxpr: Any, inputs: Sequence[OperandTraits]) -> dict[Any, OperandTraits]:
    """The traits of all variables of an open jaxpr.

    Args:
        jaxpr: The jaxpr.
        inputs: Traits of its constants and inputs.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    for eqn in jaxpr.eqns:
        ins = traits_of(env, eqn.invars)
        outs = [_of_result(eqn, ins)] * len(eqn.outvars)
        if jx.called(eqn) is not None:
            ((body, own),) = searched_bodies(eqn, ins)
            outs = traits_of(traits_in(body, own), body.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return env


def _joined(ins: Sequence[OperandTraits], rearranged_from: frozenset[int] | None) -> OperandTraits:
    """The traits of a value computed from values with these traits."""
    return OperandTraits(
        rearranged_from=rearranged_from,
        of_batch=any(t.of_batch for t in ins),
        varies=any(t.varies for t in ins),
        is_perturbed=any(t.is_perturbed for t in ins),
    )


def _of_result(eqn: Any, ins: Sequence[OperandTraits]) -> OperandTraits:
    """The traits of an equation's results."""
    origins = [t.rearranged_from for t in ins]
    rearranged_from = None
    if not ins:
        rearranged_from = frozenset()  # a counter
    elif eqn.primitive.name in _LAID_OUT and None not in origins:
        rearranged_from = frozenset().union(*(o for o in origins if o is not None))
    return _joined(ins, rearranged_from)


Searched = tuple[Any, list[OperandTraits]]
"""An inner jaxpr, and the traits of its constants and inputs."""


def searched_bodies(eqn: Any, ins: Sequence[OperandTraits]) -> list[Searched]:
    """The inner jaxprs of an equation in which products may be replaced.

    Args:
        eqn: The equation.
        ins: Traits of its operands.
    """
    if (body := jx.called(eqn)) is not None:
        return [_with_consts(body, ins)]
    if eqn.primitive.name == "cond":
        return [_with_consts(body, ins[1:]) for body in jx.branches(eqn)]
    if eqn.primitive.name == "scan":
        consts, carry = jx.scan_parts(eqn)
        # Carried values may depend on all of the loop's inputs.
        carried = [_joined(ins, None)] * carry
        return [_with_consts(jx.loop_body(eqn), [*ins[:consts], *carried, *ins[consts + carry :]])]
    return []


def ruled_bodies(eqn: Any, ins: Sequence[OperandTraits]) -> list[Searched]:
    """The inner jaxpr of a function with a derivative rule of its own; see `searched_bodies`."""
    body = jx.called(eqn, CUSTOM_RULES)
    return [] if body is None else [_with_consts(body, ins)]


def _with_consts(body: jx.Body, ins: Sequence[OperandTraits]) -> Searched:
    return body.jaxpr, [*[CONSTANT] * len(body.consts), *ins]
