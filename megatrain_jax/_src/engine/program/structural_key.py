"""Keys of jaxprs, equal if they compute the same, so that they share one compiled function.

Two blocks of a model are traced to equations on different variables. Their keys are equal, because
variables are numbered in order of appearance:

    a:f32[8] = dot x w1; b:f32[8] = tanh a     dot 0 1 -> 2; tanh 2 -> 3
    c:f32[8] = dot b w2; d:f32[8] = tanh c     dot 0 1 -> 2; tanh 2 -> 3

Literals and constants are compared by their bytes, parameters of equations recursively, functions
among them by their code and closure, and a custom derivative rule by its VJP's jaxpr. Names of
nested jits don't count. A rule that asks which operands are perturbed, or rejects some, is compared
within the VJP of the whole jaxpr, under the same conditions as in training.

Functions in equations' parameters have equal keys if they do the same.

A model may make a function for each layer: a `remat` policy, or a callback's function. All have the
same code. They do the same if the values they close over are equal and stay so.

Example: `make` is called for every layer, with equal names and a new list::

    def make(name, rows):
        return lambda x: print(name, x), lambda x: rows.append(x)

The first functions have equal keys, because text never changes. The second functions have different
keys, because each layer has its own list. Functions with a variable that is assigned later have
different keys too.
"""

import contextlib
import dataclasses
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import PyTreeDef

from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import CUSTOM_RULES

# Objects of these types never change, so they are compared by value.
_FIXED = (bool, int, str, bytes, type(None), PyTreeDef)
_NUMBERS = (float, complex)  # -0.0 equals 0.0, but prints differently
_COLLECTIONS = (list, dict, set)
# Nested functions are compared to this depth: a function that closes over itself never ends.
_DEPTH = 8


def is_function(value: Any) -> bool:
    """Whether a value is a function with known code, or such a function with fixed arguments."""
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def function_key(function: Any, depth: int = 0) -> Hashable:
    """A key that is equal for two functions only if they do the same.

    The key contains ids of objects, so the caller must keep the function alive as long as the key.

    Args:
        function: The function; any object that is not a function equals only itself.
        depth: Number of functions that enclose it.
    """
    # A function's code may read attributes that have been set on it.
    written = not isinstance(function, types.MethodType) and getattr(function, "__dict__", None)
    if depth > _DEPTH or not is_function(function) or written:
        return ("object", id(function))
    if isinstance(function, types.MethodType):
        return ("method", function_key(function.__func__, depth + 1), id(function.__self__))
    if isinstance(function, functools.partial):
        parts = function.func, function.args, tuple(sorted(function.keywords.items()))
        return ("partial", _value_key(parts, depth + 1))
    defaults = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    num_variables = len(function.__closure__ or ())
    return (
        "function",
        id(function.__code__),
        id(function.__globals__),
        _value_key(defaults, depth + 1),
        tuple(_variable_key(function, i, depth + 1) for i in range(num_variables)),
    )


def _variable_key(function: types.FunctionType, i: int, depth: int) -> Hashable:
    """The key of a variable that a function closes over.

    Variables are compared by value if nothing can assign them: neither the function itself, nor
    another function or a running call that shares the variable.
    """
    cells = function.__closure__ or ()
    if _references(function, i) <= _ALONE and not _assigns(function.__code__):
        with contextlib.suppress(ValueError):  # not assigned yet
            # JAX's own functions never change the variables they close over.
            of_jax = (function.__module__ or "").startswith("jax.")
            return _value_key(cells[i].cell_contents, depth, of_jax)
    return ("variable", id(cells[i]))


def _references(function: types.FunctionType, i: int) -> int:
    """The number of references to a variable that a function closes over."""
    assert function.__closure__ is not None
    return sys.getrefcount(function.__closure__[i])


# The reference count of an unshared variable; it depends on the interpreter.
_ALONE = _references((lambda variable: lambda: variable)(object()), 0)


def _value_key(value: Any, depth: int, with_collections: bool = False) -> Hashable:
    """The key of a value that a function closes over: by value if it cannot change, else by id."""
    kind = type(value)
    if kind in (tuple, frozenset) or with_collections and kind in _COLLECTIONS:
        items = value.items() if kind is dict else value
        keys = (_value_key(item, depth, with_collections) for item in items)
        return (kind.__name__, frozenset(keys) if kind in (frozenset, set) else tuple(keys))
    if kind in _FIXED:
        return (kind.__name__, value)
    return (kind.__name__, repr(value)) if kind in _NUMBERS else function_key(value, depth)


@functools.lru_cache(maxsize=256)
def _assigns(code: types.CodeType) -> bool:
    """Whether a function, or one nested in it, assigns a variable that it closes over."""
    return any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    ) or any(_assigns(c) for c in code.co_consts if isinstance(c, types.CodeType))


# Equations with a custom derivative rule for which a plan remembers the key of the VJP.
_MOST_VJPS = 1024


class StructuralKey:
    """A stand-in for a computation: equal jaxprs have the same key object.

    A step looks up a function for every call, and hashing the full description would take longer
    than the call.
    """

    __slots__ = ("__weakref__",)


# Weak, so a key is freed with the last stage or fragment that holds it.
_keys: WeakValueDictionary[Hashable, StructuralKey] = WeakValueDictionary()
# The keys of jaxprs inside equations, by the level of comparison.
_inner_keys: WeakKeyDictionary[Any, dict[int, StructuralKey]] = WeakKeyDictionary()


def structural_key(
    jaxpr: Any, consts: Sequence[Any], perturbed: Sequence[bool] | None = None
) -> StructuralKey:
    """A key that is equal for two jaxprs exactly if they and their derivatives compute the same.

    Variables are numbered. Literals and constants are compared by their bytes, parameters
    recursively, and custom derivative rules by the jaxpr of their VJP. Names of nested jits are
    ignored. The context in which an equation was traced, such as a mesh, counts too.

    Args:
        jaxpr: Open jaxpr.
        consts: Values of its first inputs, if these are fixed.
        perturbed: Whether the loss is differentiated by each of the remaining inputs; None for all
            floating-point inputs.
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
        # Nothing can tell such a derivative from another one, so the key equals only itself. When
        # the loss is differentiated, the error is raised again, for the user.
        return StructuralKey()
    return _standing_for((_jaxpr_key(jaxpr, consts, _VALUES), pullback))


class _AsksForPerturbedError(Exception):
    """A derivative rule depends on the perturbed operands, or allows only some to be perturbed."""


def _standing_for(key: Hashable) -> StructuralKey:
    return _keys.setdefault(key, StructuralKey())


def form(eqn: Any) -> Hashable:
    """The form of an equation: its primitive and parameters, without the values of literals."""
    return eqn.primitive.name, _params_key(eqn, _FORM)


# Levels of comparison of equations: by primitives and parameters; also by the literals in their
# jaxprs; also by their derivative rules.
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
    """The key of a jaxpr inside an equation; layers that call one function share its jaxpr."""
    known = _inner_keys.setdefault(jaxpr, {})
    if level not in known:
        key = _jaxpr_key(jx.opened(jaxpr), jx.constants(jaxpr), level)
        known[level] = _standing_for(key)
    return known[level]


def _aval_key(aval):
    return (
        getattr(aval, "shape", None),
        _dtype_name(getattr(aval, "dtype", aval)),
        getattr(aval, "weak_type", False),
        getattr(aval, "memory_space", None),  # of the references in a kernel of Pallas
    )


# NumPy builds a dtype's name anew on each request, and every variable asks for it.
_dtype_name = functools.lru_cache(maxsize=256)(str)


def value_key(value: Any) -> tuple[Any, ...]:
    """Shape, dtype and bytes of a fixed array; for many bytes, their hash."""
    if isinstance(value, Tracer):
        # Pallas kernels close over references without values: each equals only itself.
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
        if level != _RULES:
            return key
        # A stage's key is asked for before and after its outputs are known.
        return key, remembered("VJPs", lambda: IdentityKey(eqn), lambda: _vjp_key(eqn), _MOST_VJPS)
    skipped = ("name",) if "jaxpr" in params else ()
    if eqn.primitive.name != "sharding_constraint":
        params = {k: None if jx.is_automatic(v) else v for k, v in params.items()}
    return tuple((k, _param_key(v, level)) for k, v in sorted(params.items()) if k not in skipped)


# The types of most parameters, and of the numbers in their tuples.
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
    dataclass = getattr(type(value), "__dataclass_params__", None)
    # The fields of a frozen dataclass define it for good.
    if dataclass is not None and dataclass.frozen:
        # A Pallas grid, with jaxprs that are new in each trace, or a function with its arguments.
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return (type(value), *(_param_key(v, level) for v in fields))
    # A stage with this key also holds the jaxpr, which holds the function. So no new object gets
    # the id of the function, or of an object it closes over.
    if is_function(value):
        return function_key(value)
    if callable(value) and not isinstance(value, type):
        return ("callable", id(value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value).__name__, value)


def _vjp_key(eqn):
    """The key of one equation's VJP, which distinguishes two custom derivative rules."""
    if eqn.params.get("symbolic_zeros"):
        raise _AsksForPerturbedError
    try:
        return _key_of_pullback(lambda *args: jx.bind(eqn, args), eqn, [True] * len(eqn.invars))
    except Exception as error:
        # The user's own rule may raise anything.
        raise _AsksForPerturbedError from error


def _pullback_key(jaxpr, perturbed):
    """The key of a jaxpr's VJP with some inputs perturbed; it contains the results of its rules."""
    if not jaxpr.outvars or not any(perturbed):
        return ()
    return _key_of_pullback(lambda *args: jx.evaluate(jaxpr, args), jaxpr, perturbed)


def _key_of_pullback(function, source, perturbed):
    """The key of a function's values and cotangents, as a jaxpr of operands and cotangents.

    Its operands and results are those of `source`, an equation or a jaxpr.
    """
    is_diff = [p and jx.is_float(v.aval) for p, v in zip(perturbed, source.invars, strict=True)]
    keep = [jx.is_float(v.aval) for v in source.outvars]

    def vjp(diff, others, cotangents):
        def floats(*diff):
            return jx.split(keep, function(*jx.merge(is_diff, diff, others)))[0]

        diff_out, pull = jax.vjp(floats, *diff)
        return diff_out, pull(cotangents)

    diff, others = jx.split(is_diff, [jx.shape_of(v.aval) for v in source.invars])
    cotangents, _ = jx.split(keep, [jx.shape_of(v.aval) for v in source.outvars])
    traced = jx.trace(vjp, diff, others, cotangents)
    return _jaxpr_key(traced.jaxpr, traced.consts, _VALUES)
