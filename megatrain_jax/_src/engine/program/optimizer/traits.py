"""Traits of optimizer state, derived from the equations that update it.

The best low-bit code depends on the state. State that is never negative needs no sign. If a product
mixes a matrix's elements, each counts by its absolute size. A copy of parameters needs their
precision. The optimizer's equations reveal these traits, so no one has to declare them.

Example: Adam and Muon on one matrix each::

    mu = b1 * mu + (1 - b1) * g         may be negative, because g may be
    nu = b2 * nu + (1 - b2) * g ** 2    never negative if nu wasn't: a square isn't
    p  = p - lr * mu / sqrt(nu)         elements are independent
    p  = p - lr * orthogonal(mu)        products of mu with itself: its elements are mixed

Centred RMSProp divides by the root of nu - mu ** 2. Rounding mu and nu separately may make that
negative: they are *paired*.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.common.remembering import remembered
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import is_product
from megatrain_jax._src.engine.program.optimizer.cut import Fragment
from megatrain_jax._src.engine.program.primitives import LAYOUT

# Never negative for any operands.
_ALWAYS = frozenset("abs exp exp2 is_finite logistic rsqrt sqrt square".split())
# Never negative if no operand is.
_IF_ALL = LAYOUT | frozenset(
    """
    add add_any mul div min pow cbrt log1p expm1 tanh sign concatenate convert_element_type
    copy reduce_precision reduce_sum reduce_max reduce_min reduce_prod dot_general stop_gradient
    cumsum cummax cummin cumprod
    """.split()
)


# Number of results to keep for reuse: a model's groups have few different updates.
_MOST_TRAITS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of one array of optimizer state, as the equations show them.

    Attributes:
        never_negative: Whether no element is ever negative.
        is_mixed: Whether a parameter's update uses its elements through a matrix product.
        like_parameters: Whether it is initialised from parameters, like averages of them.
        is_paired: Whether a root is taken of its difference to further state.
    """

    never_negative: bool
    is_mixed: bool
    like_parameters: bool
    is_paired: bool


def state_traits(initial: Fragment, apply: Fragment, num_leaves: int) -> tuple[Traits, ...]:
    """The traits of a group's state.

    Args:
        initial: The group's initial state, `(*params) -> state`.
        apply: The group's update, `(*grads, *params, *state, *messages) -> (*params, *state)`.
        num_leaves: Number of the group's parameters.
    """
    # Equal blocks have equal keys.
    key = initial.key, apply.key, num_leaves
    return remembered(
        "traits", lambda: key, lambda: _traits(initial, apply, num_leaves), _MOST_TRAITS
    )


def _traits(initial: Fragment, apply: Fragment, num_leaves: int) -> tuple[Traits, ...]:
    num_tokens = len(apply.jaxpr.outvars) - num_leaves
    before = len(apply.consts) + 2 * num_leaves
    after = len(apply.jaxpr.invars) - before - num_tokens
    signs = _signs(initial.consts) + [False] * num_leaves
    positive = _never_negative(initial.jaxpr, signs)
    # Induction over steps: state assumed never negative must stay so after an update under this
    # assumption. Each pass only removes assumptions, so this ends.
    known: list[bool] = []
    while known != positive:
        known = positive
        signs = _signs(apply.consts) + [False] * 2 * num_leaves + known + [False] * after
        still = _never_negative(apply.jaxpr, signs)[num_leaves:]
        positive = [a and b for a, b in zip(known, still, strict=True)]
    tokens = apply.jaxpr.invars[before : before + num_tokens]
    mixed = _mixed(apply.jaxpr, tokens, apply.jaxpr.outvars[:num_leaves])
    paired = _paired(apply.jaxpr, tokens)
    of_parameters = jx.dependent(initial.jaxpr, initial.jaxpr.invars[len(initial.consts) :])
    copies = [not jx.is_literal(v) and v in of_parameters for v in initial.jaxpr.outvars]
    return tuple(
        Traits(never_negative=p, is_mixed=m, like_parameters=c, is_paired=d)
        for p, m, c, d in zip(positive, mixed, copies, paired, strict=True)
    )


def _signs(constants: Sequence[Any]) -> list[bool]:
    """Whether no element is negative, for each constant."""
    dtypes = [getattr(x, "dtype", np.asarray(x).dtype) for x in constants]
    rows = zip(constants, dtypes, strict=True)
    return [np.issubdtype(t, np.number) and bool((np.asarray(x) >= 0).all()) for x, t in rows]


def _never_negative(jaxpr: Any, known: Sequence[bool]) -> list[bool]:
    """Whether each output is never negative, given which inputs aren't."""

    def results_of(eqn: Any, operands: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if inner := jx.called(eqn):
            return _never_negative(inner.jaxpr, operands)
        if name == "integer_pow":
            is_positive = operands[0] or eqn.params["y"] % 2 == 0
        # A square, however it is written.
        elif name == "mul" and eqn.invars[0] is eqn.invars[1]:
            is_positive = True
        elif name == "max":
            is_positive = any(operands)  # one lower bound is enough
        elif name == "select_n":
            # The first operand selects among the remaining ones.
            is_positive = all(operands[1:])
        elif name == "clamp":
            is_positive = operands[0] or all(operands[1:])
        else:
            is_positive = name in _ALWAYS or name in _IF_ALL and all(operands)
        return [is_positive] * len(eqn.outvars)

    values = [*[False] * len(jaxpr.constvars), *known]
    return jx.interpret(jaxpr, values, results_of, lambda atom: _signs([atom.val])[0])


def _mixed(jaxpr: Any, tokens: Sequence[Any], parameters: Sequence[Any]) -> list[bool]:
    """Whether each token passes a matrix product on its way to a parameter."""
    reaches = {v: frozenset((v,)) for v in tokens}
    # By variable, the tokens that have passed a product on their way to it.
    mixes: dict[Any, frozenset[Any]] = {}
    for eqn in jaxpr.eqns:
        own, through = jx.union(reaches, eqn.invars), jx.union(mixes, eqn.invars)
        if jx.contains(eqn, is_product):
            through |= own
        reaches.update(dict.fromkeys(eqn.outvars, own))
        mixes.update(dict.fromkeys(eqn.outvars, through))
    found = jx.union(mixes, parameters)
    return [v in found for v in tokens]


# Of a value, the tokens that it depends on, and the ones in differences that it depends on.
_Sources = tuple[frozenset[Any], frozenset[Any]]


def _paired(jaxpr: Any, tokens: Sequence[Any]) -> list[bool]:
    """Whether each token is in a difference with another one, of which a root is taken."""
    nothing: frozenset[Any] = frozenset()
    found: set[Any] = set()

    def results_of(eqn: Any, ins: list[_Sources]) -> list[_Sources]:
        name = eqn.primitive.name
        if inner := jx.called(eqn):
            return walk(inner.jaxpr, ins)
        own, apart = (nothing.union(*sets) for sets in zip(*ins, strict=True)) if ins else none
        if name == "sub" and not any(map(jx.is_literal, eqn.invars)):
            left, right = (reached for reached, _ in ins)
            # If both sides contain the same state, rounding is the same.
            apart |= left | right if left and right and left != right else nothing
        elif name in ("sqrt", "rsqrt"):
            found.update(apart)
        elif name in ("square", "abs") or (name == "integer_pow" and eqn.params["y"] % 2 == 0):
            apart = nothing  # never negative again
        return [(own, apart)] * len(eqn.outvars)

    def walk(jaxpr: Any, ins: Sequence[_Sources]) -> list[_Sources]:
        values = [*[none] * len(jaxpr.constvars), *ins]
        return jx.interpret(jaxpr, values, results_of, lambda atom: none)

    none = nothing, nothing
    known = dict.fromkeys(jaxpr.invars, none) | {v: (frozenset((v,)), nothing) for v in tokens}
    walk(jaxpr, [known[v] for v in jaxpr.invars])
    return [v in found for v in tokens]
