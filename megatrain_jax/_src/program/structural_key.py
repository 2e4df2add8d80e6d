"""Keys of jaxprs: equal for those that compute the same, so that they share one compiled function.

Two blocks of a model are traced to equations on different variables. Their keys are equal, since
variables are numbered in the order in which they appear:

    a:f32[8] = dot x w1; b:f32[8] = tanh a     dot 0 1 -> 2; tanh 2 -> 3
    c:f32[8] = dot b w2; d:f32[8] = tanh c     dot 0 1 -> 2; tanh 2 -> 3

Literals and constants count by their bytes, parameters of equations recursively, functions among
them by their code and what they close over, names of nested jits not at all, and a custom
derivative rule by what its VJP computes. A rule that is told which operands are perturbed, or
refuses some, is compared within the VJP of the whole jaxpr, where it sees what it will see in
training.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.function_key import function_key, is_function
from megatrain_jax._src.program.primitives import CUSTOM_RULES


class StructuralKey:
    """A stand-in for a computation: jaxprs that compute the same have one and the same object.

    A step looks a function up for every call, and what stands behind a key takes longer to hash
    than the call.
    """

    __slots__ = ("__weakref__",)


# Weak, so that a key goes with the last stage or fragment that has it.
_keys: WeakValueDictionary[Hashable, StructuralKey] = WeakValueDictionary()
# The keys of jaxprs within equations, by the level of comparison.
_inner_keys: WeakKeyDictionary[Any, dict[int, StructuralKey]] = WeakKeyDictionary()


def structural_key(
    jaxpr: Any, consts: Sequence[Any] = (), perturbed: Sequence[bool] | None = None
) -> StructuralKey:
    """A key that is equal for two jaxprs exactly if they compute the same with the same derivative.

    Variables are numbered, literals and constants compared by their bytes, parameters recursively,
    names of nested jits dropped, custom derivative rules compared by the jaxpr of their VJP.
    The context that an equation was traced in, such as a mesh, counts, too.

    Args:
        jaxpr: Open jaxpr.
        consts: Values of its first inputs, if these are fixed.
        perturbed: Whether the loss is differentiated by each of its other inputs; None for all that
            are floating-point numbers.
    """
    try:
        return _standing_for(_jaxpr_key(jaxpr, consts, _RULES))
    except _AsksForPerturbedError:
        pass
    inputs = jaxpr.invars[len(consts) :]
    perturbed = [jx.is_float(v.aval) for v in inputs] if perturbed is None else perturbed
    try:
        pullback = _pullback_key(jaxpr, [*[False] * len(consts), *perturbed])
    except Exception:
        # Nothing tells such a derivative from another one, so that the key is equal to itself
        # alone. Where the loss is differentiated, the error comes again, to the user.
        return StructuralKey()
    return _standing_for((_jaxpr_key(jaxpr, consts, _VALUES), pullback))


class _AsksForPerturbedError(Exception):
    """A derivative rule depends on which operands are perturbed, or allows only some to be."""


def _standing_for(key: Hashable) -> StructuralKey:
    return _keys.setdefault(key, StructuralKey())


def form(eqn: Any) -> Hashable:
    """The form of an equation: its primitive and parameters, but for the values of literals."""
    return eqn.primitive.name, _params_key(eqn, _FORM)


# Levels of comparison of equations: by primitives and parameters; by literals within their jaxprs,
# too; and by their derivative rules as well.
_FORM, _VALUES, _RULES = range(3)


def _jaxpr_key(jaxpr, consts, level):
    """The hashable form of a jaxpr: inputs, equations and results, on numbered variables."""
    numbers: dict[Any, int] = {}

    def define(v):
        numbers[v] = len(numbers)
        return _aval_key(v.aval)

    def read(a):
        if not jx.is_literal(a):
            return numbers[a]
        return (*(value_key(a.val) if level > _FORM else ()), str(a.aval))

    invars = (*jaxpr.constvars, *jaxpr.invars)
    head = tuple((define(v), value_key(c)) for v, c in zip(invars, consts, strict=False))
    head += tuple(define(v) for v in invars[len(consts) :])
    body = []
    for eqn in jaxpr.eqns:
        ins = tuple(read(a) for a in eqn.invars)
        outs = tuple(define(v) for v in eqn.outvars)
        body.append((eqn.primitive.name, ins, _params_key(eqn, level), outs, eqn.ctx))
    tail = tuple(read(a) for a in jaxpr.outvars)
    return (head, tuple(body), tail)


def _inner_key(jaxpr, level):
    """The key of a jaxpr within an equation; JAX gives all layers that call a function the same."""
    known = _inner_keys.setdefault(jaxpr, {})
    if level not in known:
        key = _jaxpr_key(jx.opened(jaxpr), jx.constants(jaxpr), level)
        known[level] = _standing_for(key)
    return known[level]


def variable_numbers(jaxpr: Any) -> dict[Any, int]:
    """The number `structural_key` gives to each variable."""
    numbers: dict[Any, int] = {}
    for v in (*jaxpr.constvars, *jaxpr.invars, *(o for e in jaxpr.eqns for o in e.outvars)):
        numbers[v] = len(numbers)
    return numbers


def _aval_key(aval):
    return (
        getattr(aval, "shape", None),
        _dtype_name(getattr(aval, "dtype", aval)),
        getattr(aval, "weak_type", False),
        getattr(aval, "memory_space", None),  # of the references in a kernel of Pallas
    )


# NumPy composes a name anew each time it is asked, and every variable's is.
_dtype_name = functools.lru_cache(maxsize=256)(str)


def value_key(value: Any) -> tuple[Any, ...]:
    """Shape, dtype and bytes of a fixed array; a hash of the bytes if they are many."""
    if isinstance(value, Tracer):
        # Kernels of Pallas close over references, which have no values: each is equal to itself.
        return ("tracer", id(value))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), np.asarray(jax.random.key_data(value)).tobytes())
    array = np.asarray(value)
    raw = array.tobytes()
    return (array.shape, str(array.dtype), raw if len(raw) <= 64 else hashlib.sha256(raw).digest())


def _params_key(eqn, level):
    params = eqn.params
    if eqn.primitive.name in CUSTOM_RULES:
        key = _inner_key(params["call_jaxpr"], level)
        # A rule may call its own function, so only the first derivative is compared.
        return (key, _vjp_key(eqn)) if level == _RULES else key
    skipped = ("name",) if "jaxpr" in params else ()
    if eqn.primitive.name != "sharding_constraint":
        params = {k: None if jx.is_automatic(v) else v for k, v in params.items()}
    return tuple((k, _param_key(v, level)) for k, v in sorted(params.items()) if k not in skipped)


# Types of most parameters, and of the numbers in their tuples.
_PLAIN = frozenset((int, bool, float, str, type(None)))


def _param_key(value, level):
    if type(value) in _PLAIN:
        return (type(value).__name__, value)
    if hasattr(value, "eqns"):
        return _inner_key(value, level)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_param_key(v, level) for v in value))
    if isinstance(value, dict):
        return tuple((k, _param_key(v, level)) for k, v in sorted(value.items(), key=str))
    if isinstance(value, (np.ndarray, jax.Array)):
        return value_key(value)
    if _is_frozen_dataclass(value):
        # A grid of Pallas, whose jaxprs each trace makes anew, or a function with its arguments.
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return (type(value), *(_param_key(v, level) for v in fields))
    # A stage with the key has its jaxpr, too, which holds the function: none that is made meanwhile
    # gets its id, or that of what it closes over.
    if is_function(value):
        return function_key(value)
    if callable(value) and not isinstance(value, type):
        return ("callable", id(value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value).__name__, value)


def _is_frozen_dataclass(value):
    """Whether a value is what its fields are, and stays so."""
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _vjp_key(eqn):
    """The key of the VJP of one equation: what tells two custom derivative rules apart.

    Raises:
        _AsksForPerturbedError: The rule can't be compared with all its operands perturbed.
    """
    if eqn.params.get("symbolic_zeros"):
        raise _AsksForPerturbedError
    try:
        return _key_of_pullback(
            lambda *args: jx.bind(eqn, args), eqn.invars, eqn.outvars, [True] * len(eqn.invars)
        )
    except Exception as error:
        # The user's own rule may raise anything.
        raise _AsksForPerturbedError from error


def _pullback_key(jaxpr, perturbed):
    """The key of the VJP of a jaxpr with some inputs perturbed; of its rules it has the results."""
    if not jaxpr.outvars or not any(perturbed):
        return ()
    return _key_of_pullback(
        lambda *args: jx.evaluate(jaxpr, args), jaxpr.invars, jaxpr.outvars, perturbed
    )


def _key_of_pullback(function, invars, outvars, perturbed):
    """The key of a function's values and cotangents, as a jaxpr of operands and cotangents."""
    is_diff = [p and jx.is_float(v.aval) for p, v in zip(perturbed, invars, strict=True)]
    keep = [jx.is_float(v.aval) for v in outvars]

    def vjp(diff, others, cotangents):
        diff_out, pull = jax.vjp(
            lambda *d: _floats(function(*jx.merge(is_diff, d, others)), keep), *diff
        )
        return diff_out, pull(cotangents)

    diff, others = jx.split(is_diff, [jx.shape_of(v.aval) for v in invars])
    cotangents = [jx.shape_of(v.aval) for v, k in zip(outvars, keep, strict=True) if k]
    traced = jx.trace(vjp, diff, others, cotangents)
    return _jaxpr_key(traced.jaxpr, traced.consts, _VALUES)


def _floats(values, keep):
    return [v for v, k in zip(values, keep, strict=True) if k]
