"""Fingerprints of traced functions and hashes of Python functions, equal in every process.

Traced functions have equal fingerprints if they compute the same.

A structural key compares functions within one process. A fingerprint is saved in a checkpoint and
compared by a later process, so it hashes a canonical text with numbered variables. The text has no
memory addresses, no names of nested jits, no source lines, and no equations without an effect on
the outputs, such as prints.

Example, `lambda w: w - 0.1 * w`:

    form     hash of "in f32[3]; mul 0 # f32[] -> f32[3]; sub 0 1 -> f32[3]; out 2"
    numbers  {"0.1": 1}
    values   hash of the bytes of 0.1

If two runs have equal forms, they differ only in numbers, and a message can name these.

Python functions have equal hashes if the code is the same.

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
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.jaxpr import Traced

# Libraries with functions that appear in the trace of a loss or an optimizer.
LIBRARIES = ("jax", "flax", "equinox", "optax", "megatrain_jax")
_ADDRESS = re.compile("0x[0-9a-f]+")
# With more numbers, a text would not tell a reader the number that matters.
_MOST_NUMBERS = 200
# Types with short text that contains no address.
_PLAIN = frozenset((int, bool, float, str, type(None)))


def fingerprint(traced: Traced) -> dict[str, Any]:
    """The fingerprint of a traced function, in a form that JSON can hold.

    Returns:
        `form`, a hash of the equations without their numbers; `values`, a hash of the bytes of all
        literals and constants; and `numbers`, the count of each scalar among them, by its text
        without sign.
    """
    found = _Writer({}).write(traced.jaxpr, traced.consts)
    numbers = dict(found.numbers) if len(found.numbers) <= _MOST_NUMBERS else {}
    return {"form": found.form, "values": found.values, "numbers": numbers}


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A jaxpr written as text; see `fingerprint`.

    It holds the jaxpr, so that no new jaxpr gets the same id.
    """

    jaxpr: Any
    form: str
    values: str
    numbers: Counter[str]


class _Writer:
    """Writes one jaxpr as canonical text, and collects its literals and constants separately."""

    def __init__(self, known: dict[int, _Written]):
        """Starts with the inner jaxprs that are already written, by id.

        Layers that call one function share its jaxpr, so it is written once.
        """
        self._known = known
        self._numbers: Counter[str] = Counter()
        self._values = xxhash.xxh3_128()

    def write(self, jaxpr: Any, consts: Sequence[Any]) -> _Written:
        """Writes a jaxpr; `consts` are the values of its first inputs."""
        numbers: dict[Any, int] = {}

        def define(variable: Any) -> str:
            numbers[variable] = len(numbers)
            return _type_text(variable.aval)

        def read(atom: Any) -> str:
            if not jx.is_literal(atom):
                return str(numbers[atom])
            self._note(atom.val)
            return f"# {_type_text(atom.aval)}"

        opened = jx.opened(jaxpr)
        for const in consts:
            self._note(const)
        lines = ["in " + " ".join(map(define, (*opened.constvars, *opened.invars)))]
        for eqn in jx.live_equations(opened):
            ins, params = " ".join(map(read, eqn.invars)), self._params(eqn)
            outs = " ".join(map(define, eqn.outvars))
            lines.append(f"{eqn.primitive.name} {ins} {params} -> {outs}")
        lines.append("out " + " ".join(map(read, opened.outvars)))
        form = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
        values = self._values.hexdigest()
        return _Written(jaxpr=jaxpr, form=form, values=values, numbers=self._numbers)

    def _inner(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self._known:
            written = _Writer(self._known).write(jaxpr, jx.constants(jaxpr))
            self._known[id(jaxpr)] = written
        found = self._known[id(jaxpr)]
        # Repeated for every call, because sharing of a jaxpr depends on the process's caches.
        self._values.update(found.values.encode())
        self._numbers.update(found.numbers)
        return found.form

    def _note(self, value: Any) -> None:
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = jax.random.key_data(value)
            value = jax.device_get(value)
        array = np.asarray(value)
        self._values.update(f"{array.dtype}{array.shape}".encode())
        self._values.update(array.tobytes())
        if array.size == 1 and array.dtype != np.bool_:
            # An update multiplies by the negative learning rate; messages show numbers as the user
            # wrote them.
            self._numbers[f"{abs(float(array.reshape(())[()])):.6g}"] += 1

    def _params(self, eqn: Any) -> str:
        # Names of nested jits are names of Python functions; users may rename these.
        skipped = ("name",) if "jaxpr" in eqn.params else ()
        rows = sorted((k, v) for k, v in eqn.params.items() if k not in skipped)
        return " ".join(f"{name}={self._param(value)}" for name, value in rows)

    def _param(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        if jx.is_jaxpr(value):
            return self._inner(value)
        if isinstance(value, tuple | list):
            return f"({' '.join(map(self._param, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{' '.join(sorted(map(self._param, value)))}}}"
        if isinstance(value, Mapping):
            rows = sorted(value.items(), key=str)
            return f"{{{' '.join(f'{k}:{self._param(v)}' for k, v in rows)}}}"
        if isinstance(value, np.ndarray | jax.Array):
            self._note(value)
            return f"# {value.dtype}{value.shape}"
        # A function's equations are not known here. If it has a jaxpr, that is a separate
        # parameter.
        if callable(value):
            return getattr(value, "__qualname__", type(value).__qualname__)
        return _ADDRESS.sub("", str(value))


def _type_text(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', ())}"


_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)
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
        if isinstance(value, _PLAIN_VALUES):
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
            function = self.read(value.__func__, depth + 1)
            return f"{function} of {self._object(value.__self__, depth)}"
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
        plain = {k: v for k, v in rows.items() if isinstance(v, _PLAIN_VALUES)}
        return f"{type(value).__qualname__} {self._named(plain, depth)}"

    def _function(self, function: types.FunctionType, depth: int) -> str:
        if id(function) in self._seen:
            return "seen"
        self._seen.add(id(function))
        code = self._code(function.__code__, depth, function.__doc__)
        defaults = self.read(function.__defaults__ or (), depth + 1)
        named = function.__kwdefaults__ or {}, dict(closed_over(function)), _globals(function)
        return " ".join([code, defaults, *(self._named(rows, depth) for rows in named)])

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


def closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names and values of the variables that a function closes over."""
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
        if is_own or isinstance(value, _PLAIN_VALUES) and name in function.__globals__:
            found[name] = value
    return found


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _global_names(code: types.CodeType) -> set[str]:
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    steps = dis.get_instructions(code)
    return {s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(*inner)
