"""Integers known at trace time, such as the number of a loop's iteration.

`w[i]` in an unrolled loop reads layer `i`. This shows only when the arithmetic that jnp adds around
an index (negative ones count from the end) is evaluated. Example, `w[1]` for a `w` with three
layers::

    a = lt 1 0                 # False
    b = add 1 3                # 4
    c = select_n a 1 b         # 1: all operands are known, so `results` knows the result
    s = dynamic_slice w c 0    # reads layer 1

Values are computed only on request: most integers in a model never become an index.

`reads_by_counter` finds loops that slice a stacked array by their iteration number.

`for i in range(n): x = layer(x, w[i])` in a `scan` or a `fori_loop` passes all of `w` to the body
as a constant, and the body slices it by a counter.

Example: the body of that loop with `w` of shape (3, 4, 4), and `i` and `x` carried::

    j = add i 1                          # i starts at a constant and depends on itself: a counter
    h = select_n (i < 0) i (i + 3)       # made from a counter and constants: a counter
    s = dynamic_slice[sizes=(1, 4, 4)] w h 0 0    # one position of axis 0, by a counter: found
    y = tanh (dot x s)                   # a float: unknown

If `i` depended on `x`, the first walk would show that, and the second walk would treat `h` as
unknown.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import LAYOUT, is_elementwise

_LARGEST = 4096  # elements: larger integer arrays are not indices of layers

# The operations that jnp adds around an index, in NumPy, because a device call takes milliseconds.
_QUICK: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "convert_element_type": np.asarray,
    "lt": np.less,
    "select_n": lambda which, *cases: np.choose(which, cases),
    "sub": np.subtract,
}


class Known:
    """An integer array that depends on no input; computed once, on first use."""

    def __init__(self, compute: Callable[[], np.ndarray]):
        """Makes an array that is not computed yet."""
        self._compute = compute

    @functools.cached_property
    def value(self) -> np.ndarray:
        """The integers."""
        return self._compute()

    def row(self, i: int) -> "Known":
        """Slice `i` along axis 0."""
        return Known(lambda: self.value[i])


def is_index(aval: Any) -> bool:
    """Whether a value with this type can be an index or an array of indices."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub":
        return False
    return jx.num_elements(aval) <= _LARGEST


def constant(value: Any) -> Known | None:
    """A literal or a constant, if it can be an index; else None."""
    if isinstance(value, (bool, int, np.generic, np.ndarray)):
        array = np.asarray(value)
        if is_index(array):
            return Known(lambda: array)
    return None


def results(eqn: Any, ins: Sequence[Known | None]) -> list[Known | None]:
    """The results of an equation with known operands; None for each if any operand is unknown.

    Args:
        eqn: The equation.
        ins: The integers of its operands, None for unknown ones.
    """
    fits = not eqn.effects and all(is_index(v.aval) for v in eqn.outvars)
    if not fits or any(v is None for v in ins):
        return [None] * len(eqn.outvars)
    operands = [(v, a.aval.dtype) for v, a in zip(ins, eqn.invars, strict=True) if v is not None]

    # One evaluation serves all results of the equation.
    @functools.cache
    def computed() -> list[np.ndarray]:
        quick = _QUICK.get(eqn.primitive.name)
        if quick is not None:
            (dtype,) = (v.aval.dtype for v in eqn.outvars)
            with np.errstate(over="ignore"):  # integers wrap around
                return [np.asarray(quick(*(v.value for v, _ in operands)), dtype)]
        with jax.ensure_compile_time_eval():
            arrays = jx.bind(eqn, [np.asarray(v.value, dtype) for v, dtype in operands])
            return [np.asarray(jax.device_get(a)) for a in arrays]

    return [Known(lambda k=k: computed()[k]) for k in range(len(eqn.outvars))]


# Levels of knowledge of a value: unknown, constant, or computed from a counter.
_UNKNOWN, _CONSTANT, _COUNTER = range(3)


def reads_by_counter(eqn: Any, stacked: Sequence[bool], integers: Sequence[bool]) -> bool:
    """Whether a loop slices one of the marked operands by a counter.

    Args:
        eqn: A `scan` or `while` equation.
        stacked: Mask of the operands to look for.
        integers: Whether each of its operands is a known integer.
    """
    if not any(stacked):
        return False
    levels = [_CONSTANT if k else _UNKNOWN for k in integers]
    return _Search().loop(eqn, list(stacked), levels)


class _Search:
    """Searches a loop's body, following stacked values and counters through its equations."""

    def __init__(self):
        self.found = False

    def loop(self, eqn, stacked, levels) -> bool:
        """Whether a loop slices a stacked operand by a counter; see `reads_by_counter`."""
        if eqn.primitive.name == "while":
            # Operands of a `while`: constants of its condition, constants of its body, then the
            # carry.
            skipped, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            stacked, levels = stacked[skipped:], levels[skipped:]
            carry = len(stacked) - count
        else:
            count, carry = jx.scan_parts(eqn)
        counters = [_COUNTER if level and k >= count else level for k, level in enumerate(levels)]
        # A carried number is a counter if it depends only on itself and constants. At first, each
        # carried number with a known start is assumed to be a counter; each walk removes the wrong
        # ones, so this ends.
        while True:
            given = self._follow(jx.loop_body(eqn).jaxpr, stacked, counters)
            lost = [k for k, level in enumerate(given[:carry], count) if counters[k] and not level]
            if not lost:
                return self.found
            # The finding may have relied on numbers that turned out not to be counters.
            self.found = False
            for k in lost:
                counters[k] = _UNKNOWN

    def _follow(self, jaxpr, stacked, levels) -> list[int]:
        """Walks a body and notes slices by a counter; returns the level of each result."""
        whole = {v for v, s in zip(jaxpr.invars, stacked, strict=True) if s}

        def results_of(eqn: Any, ins: list[int]) -> list[int]:
            name, found = eqn.primitive.name, [_UNKNOWN] * len(eqn.outvars)
            flags = [not jx.is_literal(a) and a in whole for a in eqn.invars]
            if inner := jx.called(eqn):
                found = self._follow(inner.jaxpr, flags, ins)
            elif name in ("scan", "while") and any(flags):
                self.found |= _Search().loop(eqn, flags, ins)
            elif all(ins) and all(is_index(v.aval) for v in eqn.outvars):
                found = [max(ins, default=_CONSTANT)] * len(eqn.outvars)
            if name in ("dynamic_slice", "gather") and flags[0]:
                sizes = zip(eqn.params["slice_sizes"], eqn.invars[0].aval.shape, strict=True)
                takes_one = any(size == 1 < n for size, n in sizes)
                self.found |= all(ins[1:]) and _COUNTER in ins[1:] and takes_one
            elif any(flags) and (name in LAYOUT or is_elementwise(eqn)):
                whole.update(eqn.outvars)
            return found

        values = [*[_UNKNOWN] * len(jaxpr.constvars), *levels]
        return jx.interpret(jaxpr, values, results_of, lambda atom: _CONSTANT)
