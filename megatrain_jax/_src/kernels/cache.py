"""Compiled functions by what they compute, and the memory they need.

Stages and groups that are alike share one function, so a model of any depth compiles a handful.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.kernels.liveness import temporary_bytes
from megatrain_jax._src.program import jaxpr as jx

# With memory pending, CUDA's pool was seen to refuse a kernel's 5.8 GiB while 53 GiB of the GPU
# were free, and 7 GiB while 33 of 67 were in use. So kernels with as much are dispatched one by
# one: each then reaches the device some milliseconds late.
_LARGE_TEMPORARIES = 4 * 2**30


class KernelCache:
    """Jitted functions by their kernels' names and keys; each is traced and compiled once."""

    def __init__(self, compiler_options: Mapping[str, str] | None = None):
        """Makes an empty cache.

        Args:
            compiler_options: Options of XLA's that all kernels are compiled with.
        """
        self._options = dict(compiler_options or {})
        self._functions: dict[tuple[str, Hashable], Callable] = {}
        self._estimates: dict[tuple[str, Hashable], int] = {}
        self._temporaries: dict[tuple[str, Hashable], int] = {}

    def get(self, kernel: Kernel) -> Any:
        """The jitted function of a kernel, built if it is new."""
        key = kernel.name, kernel.key
        if key not in self._functions:
            self._functions[key] = self._built(kernel)
        return self._functions[key]

    def _built(self, kernel: Kernel) -> Any:
        # Said where callers count on shardings that XLA need not choose by itself.
        placed = {} if kernel.gives is None else {"out_shardings": kernel.gives}
        return jax.jit(
            kernel.build(),
            donate_argnums=kernel.donated,
            compiler_options=self._options or None,
            **placed,
        )

    def __len__(self) -> int:
        """The number of different functions."""
        return len(self._functions)

    def compile(self, kernels: Iterable[Kernel]) -> int:
        """Compiles kernels for what they take; their later calls find them compiled.

        Returns:
            Bytes that they need on each device besides arguments and results. The device runs one
            function after another, so the largest counts.
        """
        different = _different(kernels)
        # Tracing needs Python's lock, and comes first for all, so that threads only compile.
        lowered = [self.get(k).lower(*k.takes or ()) for k in different]
        with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
            stats = pool.map(lambda row: row.compile().memory_analysis(), lowered)
            found = {k: s.temp_size_in_bytes for s, k in zip(stats, different, strict=True)}
        self._temporaries |= {(k.name, k.key): temporaries for k, temporaries in found.items()}
        return max(temporaries + k.beside_bytes for k, temporaries in found.items())

    def has_large_temporaries(self, kernel: Kernel) -> bool:
        """Whether a kernel is only dispatched once the device is through with large ones before it.

        Until then, the memory that they give back is pending.
        """
        return self._temporaries.get((kernel.name, kernel.key), 0) >= _LARGE_TEMPORARIES

    def estimate(self, kernels: Iterable[Kernel]) -> int:
        """Estimates what `compile` would return, on shapes alone: for a device not here."""
        return max(self._estimate(k, self.get) for k in _different(kernels))

    def estimate_trial(self, kernel: Kernel) -> int:
        """Estimates what one kernel would need that is only tried: its function isn't kept."""
        return self._estimate(kernel, self._built)

    def _estimate(self, kernel: Kernel, function: Callable[[Kernel], Any]) -> int:
        key = kernel.name, kernel.key
        if key not in self._estimates:
            self._estimates[key] = _estimated_bytes(function(kernel), kernel)
        return self._estimates[key]


def _estimated_bytes(function: Any, kernel: Kernel) -> int:
    """Estimates the bytes that a kernel needs on each device besides arguments and results."""
    takes = kernel.takes or ()
    jaxpr = jx.opened(function.trace(*takes).jaxpr)
    shardings = [x.sharding for x in jax.tree.leaves(takes)]
    rows = zip(jaxpr.invars, shardings, strict=True)
    # Whatever is divided at all, slabs and examples alike, is divided along its first axis.
    divided = {v: 0 for v, sharding in rows if not sharding.is_fully_replicated}
    num_devices = max((sharding.num_devices for sharding in shardings), default=1)
    return temporary_bytes(jaxpr, divided, num_devices) + kernel.beside_bytes


def _different(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each name and key."""
    return list({(kernel.name, kernel.key): kernel for kernel in kernels}.values())
