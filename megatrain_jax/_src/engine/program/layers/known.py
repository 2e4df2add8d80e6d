"""Integers known at trace time, such as the number of a loop's iteration.

`w[i]` in an unrolled loop reads layer `i`. This shows only when the arithmetic that jnp adds around
an index (negative ones count from the end) is evaluated. Example, `w[1]` for a `w` with three
layers::

    a = lt 1 0                 # False
    b = add 1 3                # 4
    c = select_n a 1 b         # 1: all operands are known, so `results` knows the result
    s = dynamic_slice w c 0    # reads layer 1

Values are computed only on request: most integers in a model never become an index.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx

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
    return (
        isinstance(dtype, np.dtype)
        and np.issubdtype(dtype, np.integer) | (dtype == np.bool_)
        and jx.num_elements(aval) <= _LARGEST
    )


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
