"""Keys of functions in equations' parameters, equal if the functions do the same.

A model may make a function for each layer: a `remat` policy, or a callback's function. All have the
same code. They do the same if the values they close over are equal and stay so.

Example: `make` is called for every layer, with equal names and a new list::

    def make(name, rows):
        return lambda x: print(name, x), lambda x: rows.append(x)

The first functions have equal keys, because text never changes. The second functions have different
keys, because each layer has its own list. Functions with a variable that is assigned later have
different keys too.
"""

import dis
import functools
import sys
import types
from collections.abc import Hashable
from typing import Any

from jax.tree_util import PyTreeDef

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
    return (
        "function",
        id(function.__code__),
        id(function.__globals__),
        _value_key(defaults, depth + 1),
        tuple(_variable_key(function, i, depth + 1) for i in range(_num_variables(function))),
    )


def _num_variables(function: types.FunctionType) -> int:
    return len(function.__closure__ or ())


def _variable_key(function: types.FunctionType, i: int, depth: int) -> Hashable:
    """The key of a variable that a function closes over.

    Variables are compared by value if nothing can assign them: neither the function itself, nor
    another function or a running call that shares the variable.
    """
    cells = function.__closure__ or ()
    if _references(function, i) > _ALONE or _assigns(function.__code__):
        return ("variable", id(cells[i]))
    try:
        value = cells[i].cell_contents
    except ValueError:  # not assigned yet
        return ("variable", id(cells[i]))
    # JAX's own functions never change the variables they close over.
    return _value_key(value, depth, (function.__module__ or "").startswith("jax."))


def _references(function: types.FunctionType, i: int) -> int:
    """The number of references to a variable that a function closes over."""
    assert function.__closure__ is not None
    return sys.getrefcount(function.__closure__[i])


def _probe() -> types.FunctionType:
    variable = object()

    def function() -> object:
        return variable

    return function


# The reference count of an unshared variable; it depends on the interpreter.
_ALONE = _references(_probe(), 0)


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
