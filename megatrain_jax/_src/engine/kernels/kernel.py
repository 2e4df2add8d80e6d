"""The calling convention of compiled functions, both for calls and for compiling ahead of time."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A function to be compiled: its Python function, its calling convention and its identity.

    Each kernel is made by one function, such as `stage_kernels.forward` or `updates.update`, and
    only that function defines the calling convention. Callers pass the arguments in its docstring,
    in order; ahead-of-time compilation reads `takes`. Example: a kernel of a group's update::

        kernel = updates.update(cut, layout, group, "bfloat16", placement)
        kernel.takes    # ((fp32[n],), (fp32[n], fp32[n]), bf16[n], [fp32[]], bool[])
        kernel.donated  # (0, 1): it writes masters and state where they were
        cache.get(kernel)(masters, state, gradient, messages, ok, draw)

    Attributes:
        name: A short name of the operation.
        key: Key of the computation; kernels with equal names and keys share one function.
        whole: Key of the undivided kernel, if this one is in tiles; else None.
        build: Makes the Python function to compile; called once per key.
        build_for_triton: Makes a faster function for GPUs with Triton, with equal results but for
            rounding; None if there is none.
        takes: Shapes, dtypes and shardings of the arguments; None for small functions, which are
            compiled at their first call.
        donated: Positions of the arguments with memory that results may reuse.
        beside_bytes: Bytes on the device that live while the kernel runs, but are neither its own
            temporaries nor counted by the schedule.
        out_shardings: Shardings of the results, as for `jax.jit`; None if they follow from the
            arguments.
    """

    # Shapes and the Python function follow from the key, and functions never compare equal. So
    # kernels compare by name, key and memory handling.
    name: str
    key: Hashable = ()
    whole: Hashable = dataclasses.field(default=None, compare=False)
    build: Callable[[], Callable] = dataclasses.field(compare=False)
    build_for_triton: Callable[[], Callable] | None = dataclasses.field(default=None, compare=False)
    takes: tuple[Any, ...] | None = dataclasses.field(default=None, compare=False)
    donated: tuple[int, ...] = ()
    beside_bytes: int = 0
    out_shardings: Any = dataclasses.field(default=None, compare=False)


def placed(avals: Any, sharding: Sharding) -> Any:
    """A tree of shapes and dtypes with a sharding, for a kernel's `takes`."""

    def shape(aval: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(aval, "weak_type", False)  # without it, a call would compile again
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, avals)
