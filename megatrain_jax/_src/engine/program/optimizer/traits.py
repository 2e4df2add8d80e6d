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

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.slicing import Fragment
from megatrain_jax._src.engine.program.primitives import LAYOUT, PRODUCTS

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
    return [_is_number(x) and bool((np.asarray(x) >= 0).all()) for x in constants]


def _is_number(x: Any) -> bool:
    return np.issubdtype(getattr(x, "dtype", np.asarray(x).dtype), np.number)


def _never_negative(jaxpr: Any, known: Sequence[bool]) -> list[bool]:
    """Whether each output is never negative, given which inputs aren't."""
    found = dict(zip(jaxpr.invars, known, strict=True))
    found.update(zip(jaxpr.constvars, [False] * len(jaxpr.constvars), strict=True))

    def holds(atom: Any) -> bool:
        return _signs([atom.val])[0] if jx.is_literal(atom) else found[atom]

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [holds(a) for a in eqn.invars]
        if inner := jx.called(eqn):
            results = _never_negative(inner.jaxpr, operands)
        elif name == "integer_pow":
            results = [operands[0] or eqn.params["y"] % 2 == 0]
        # A square, however it is written.
        elif name == "mul" and eqn.invars[0] is eqn.invars[1]:
            results = [True]
        elif name == "max":
            results = [any(operands)]  # one lower bound is enough
        elif name == "select_n":
            # The first operand selects among the remaining ones.
            results = [all(operands[1:])]
        elif name == "clamp":
            results = [operands[0] or all(operands[1:])]
        elif name in _ALWAYS:
            results = [True] * len(eqn.outvars)
        elif name in _IF_ALL:
            results = [all(operands)] * len(eqn.outvars)
        else:
            results = None
        found.update(zip(eqn.outvars, results or [False] * len(eqn.outvars), strict=True))
    return [holds(a) for a in jaxpr.outvars]


def _mixed(jaxpr: Any, tokens: Sequence[Any], parameters: Sequence[Any]) -> list[bool]:
    """Whether each token passes a matrix product on its way to a parameter.

    Sets of inputs are bit masks, so one walk serves all of them.
    """
    reaches = {v: 1 << i for i, v in enumerate(tokens)}
    # By variable, the tokens that have passed a product on their way to it.
    mixes: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        operands = jx.variables(eqn.invars)
        own, through = _union(reaches, operands), _union(mixes, operands)
        if jx.contains(eqn, _is_product):
            through |= own
        reaches.update(dict.fromkeys(eqn.outvars, own))
        mixes.update(dict.fromkeys(eqn.outvars, through))
    found = _union(mixes, jx.variables(parameters))
    return [bool(found >> i & 1) for i in range(len(tokens))]


def _paired(jaxpr: Any, tokens: Sequence[Any]) -> list[bool]:
    """Whether each token is in a difference with another one, of which a root is taken."""
    found = _roots(jaxpr, {v: 1 << i for i, v in enumerate(tokens)}, {})
    return [bool(found >> i & 1) for i in range(len(tokens))]


def _roots(jaxpr: Any, reaches: dict[Any, int], apart: dict[Any, int]) -> int:
    """The inputs in differences under roots; `apart` maps variables to inputs in differences.

    Both are continued to the jaxpr's outputs, including calls.
    """
    found = 0
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, jx.variables(eqn.invars)
        own, differences = _union(reaches, operands), _union(apart, operands)
        if name == "sub" and len(operands) == 2:
            left, right = (reaches.get(v, 0) for v in operands)
            # If both sides contain the same state, rounding is the same.
            differences |= left | right if left and right and left != right else 0
        elif name in ("sqrt", "rsqrt"):
            found |= differences
        elif name in ("square", "abs") or (name == "integer_pow" and eqn.params["y"] % 2 == 0):
            differences = 0  # never negative again
        inner = jx.called(eqn)
        if inner is None:
            reaches.update(dict.fromkeys(eqn.outvars, own))
            apart.update(dict.fromkeys(eqn.outvars, differences))
            continue
        outside = zip(inner.jaxpr.invars, eqn.invars, strict=True)
        known = [(v, a) for v, a in outside if not jx.is_literal(a)]
        inside = {v: reaches.get(a, 0) for v, a in known}
        inside_apart = {v: apart.get(a, 0) for v, a in known}
        found |= _roots(inner.jaxpr, inside, inside_apart)
        for out, v in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
            literal = jx.is_literal(v)
            reaches[out] = 0 if literal else inside.get(v, 0)
            apart[out] = 0 if literal else inside_apart.get(v, 0)
    return found


def _union(sets: dict[Any, int], variables: Sequence[Any]) -> int:
    whole = 0
    for v in variables:
        whole |= sets.get(v, 0)
    return whole


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS
