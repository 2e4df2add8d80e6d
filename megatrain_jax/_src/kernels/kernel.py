"""The calling convention of compiled functions, both for calls and for compiling ahead of time."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled function before it is compiled: how it is built, called, and told from others.

    A function that makes one (`stages.forward`, `updates.update`) is the only place that knows how
    the function is called: those who call it pass what its docstring says, in that order, and
    those who compile it ahead read `takes`. A kernel of a group's update, for example::

        kernel = updates.update(cut, layout, group, "bfloat16")
        kernel.takes    # ((fp32[n],), (fp32[n], fp32[n]), bf16[n], [fp32[]], bool[])
        kernel.donated  # (0, 1): it writes masters and state where they were
        cache.get(kernel)(masters, state, gradient, messages, ok)

    Attributes:
        name: Name of what the function does, in a word.
        key: Key, equal for kernels of one name that compute the same: these share one function.
        build: Makes the Python function that is compiled; called once for all of one key.
        takes: Shapes, dtypes and shardings of its arguments; None for small functions, which their
            first call compiles.
        donated: Positions of the arguments whose memory its results may take.
        beside_bytes: Bytes on the device, other than state and the values that a schedule counts,
            that live while it runs and that it does not allocate for itself alone.
        gives: Shardings of the results, one for each subtree of them as `jax.jit` has it; None
            where they follow from the arguments'.
    """

    # Shapes and the Python function follow from the key, and functions are never equal: what tells
    # kernels apart is the name, the key and how memory and results are handed over.
    name: str
    key: Hashable = ()
    build: Callable[[], Callable] = dataclasses.field(compare=False)
    takes: tuple[Any, ...] | None = dataclasses.field(default=None, compare=False)
    donated: tuple[int, ...] = ()
    beside_bytes: int = 0
    gives: Any = dataclasses.field(default=None, compare=False)


def placed(avals: Any, sharding: Sharding) -> Any:
    """Arguments of a kernel, a tree of shapes and dtypes, as shapes that have a sharding."""

    def shape(aval: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(aval, "weak_type", False)  # without it, a call would compile again
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, avals)
