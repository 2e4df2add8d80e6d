"""Hashes of Python functions that are equal in every process if the code is the same.

The fingerprint of a traced function depends on the shapes it was traced for. A hash of the Python
code does not, so it can compare functions traced with different shapes.

Example: `lambda x: 2 * x` and `lambda y: 2 * y` have the same hash; `lambda x: 3 * x` differs.

The hash covers the bytecode, the plain values (numbers, text, tuples of them) that the function
closes over or reads as globals, and, in the same way, the functions of its own package that it
calls by name. Arrays, lists and dictionaries are left out: they may be large, or change while the
function is in use.
"""

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from megatrain_jax._src.engine.program.fingerprint import LIBRARIES

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
# A loss may scale by the number of microbatches, and that number does not change the function.
_OF_THE_RUN = "microbatches"
# Nested tuples and nested functions are read to this depth.
_DEPTH = 16


def code_hash(function: Any) -> dict[str, str]:
    """The hash of a function's code.

    Args:
        function: A function, a method, a `functools.partial`, a jitted function, or a callable
            object.

    Returns:
        The hash, under the name of the interpreter's bytecode, as in `{"cpython-311": "9f0c..."}`,
        because each Python version compiles to different bytecode.
    """
    text = _Reader().read(function, 0)
    return {str(sys.implementation.cache_tag): xxhash.xxh3_128_hexdigest(text.encode())}


class _Reader:
    """Writes functions as text, each one once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def read(self, value: Any, depth: int) -> str:
        """The text of a function or of a value that it reads."""
        if depth > _DEPTH:
            return "..."
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, tuple):
            return f"({' '.join(self.read(item, depth + 1) for item in value)})"
        if isinstance(value, frozenset):
            return f"{{{' '.join(sorted(self.read(item, depth + 1) for item in value))}}}"
        if isinstance(value, type):
            return value.__qualname__
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return (
                f"{self.read(value.__func__, depth + 1)} of {self._object(value.__self__, depth)}"
            )
        if isinstance(value, functools.partial):
            keywords = self._named(value.keywords, depth)
            return f"{self.read((value.func, value.args), depth + 1)} {keywords}"
        if callable(inner := getattr(value, "__wrapped__", None)):
            return self.read(inner, depth + 1)
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType):
            return f"{self.read(call, depth + 1)} of {self._object(value, depth)}"
        return type(value).__qualname__

    def _object(self, value: Any, depth: int) -> str:
        """The type and the plain public attributes of a method's object."""
        rows = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
        plain = {k: v for k, v in rows.items() if isinstance(v, _PLAIN)}
        return f"{type(value).__qualname__} {self._named(plain, depth)}"

    def _function(self, function: types.FunctionType, depth: int) -> str:
        if id(function) in self._seen:
            return "seen"
        self._seen.add(id(function))
        closed = dict(_closed_over(function))
        keywords = function.__kwdefaults__ or {}
        return " ".join(
            (
                self._code(function.__code__, depth, function.__doc__),
                self.read(function.__defaults__ or (), depth + 1),
                *(self._named(rows, depth) for rows in (keywords, closed, _globals(function))),
            )
        )

    def _code(self, code: types.CodeType, depth: int, doc: str | None = None) -> str:
        consts = [
            self._code(c, depth + 1) if isinstance(c, types.CodeType) else self.read(c, depth + 1)
            for c in code.co_consts
            if c is None or c is not doc
        ]
        return f"{code.co_code.hex()} {code.co_names} {consts}"

    def _named(self, rows: Mapping[str, Any], depth: int) -> str:
        kept = sorted((k, v) for k, v in rows.items() if k != _OF_THE_RUN)
        return f"{{{' '.join(f'{k}:{self.read(v, depth + 1)}' for k, v in kept)}}}"


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """Plain globals that a function reads, and the functions it reads from its own package."""
    if _package(function) in LIBRARIES:
        return {}
    found = {}
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        is_own = isinstance(value, types.FunctionType) and _package(value) == _package(function)
        if is_own or isinstance(value, _PLAIN) and name in function.__globals__:
            found[name] = value
    return found


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _global_names(code: types.CodeType) -> set[str]:
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    steps = dis.get_instructions(code)
    return {s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(*inner)
