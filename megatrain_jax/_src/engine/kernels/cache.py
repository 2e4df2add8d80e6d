"""A cache of compiled functions, with the memory that they need.

Equal stages and groups share one function, so a model of any depth compiles only a few.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.engine.kernels.code_passes import with_code_passes
from megatrain_jax._src.engine.kernels.gpu_memory import gpu_temporary_bytes
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.liveness import temporary_bytes
from megatrain_jax._src.engine.kernels.rewrites import (
    NO_TRITON,
    compiles_float8_by_cublas,
    has_only_large_products,
    with_float8_by_cublas,
    with_scaled_sums,
)
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.float8 import is_float8_product
from megatrain_jax._src.engine.state.placement import LARGEST_PART, PART

# With frees pending, CUDA's pool was seen to refuse a piece of 5.8 GiB while 53 GiB of the GPU were
# free, and 7 GiB while 33 of 67 were in use. So kernels with a large piece of temporaries are
# dispatched one by one, which delays each by some milliseconds.
_LARGE_TEMPORARIES = 4 * 2**30
# Bytes for each number of slabs that are too long for an update: more than any device has, so that
# a block is cut into parts.
_PER_NUMBER = 2**20


class KernelCache:
    """Jitted functions by their kernels' names and keys; each is traced and compiled once."""

    def __init__(
        self,
        compiler_options: Mapping[str, str | bool] | None = None,
        platform: str = "cpu",
        *,
        code_passes: bool = False,
        with_triton: bool = False,
        device: Any = None,
        agree: Callable[[list[int]], list[int]] = lambda own: own,
    ):
        """Makes an empty cache.

        Args:
            compiler_options: XLA options for all kernels.
            platform: JAX's name of the platform that estimates are for. A plan's devices are GPUs.
            code_passes: Whether to compile backwards with the passes of `code_passes.py`, and with
                `with_scaled_sums`.
            with_triton: Whether the devices run kernels that Triton compiles.
            device: One of the devices, to find out what JAX compiles for it; None if there is none.
            agree: Makes the bytes of compiled temporaries those of all processes. Each compiles
                separately, but all have to choose alike.
        """
        self._agree = agree
        self._options = dict(compiler_options or {})
        self._code_passes = code_passes
        self._with_triton, self._device = with_triton, device
        self._temporary_bytes = gpu_temporary_bytes if platform == "gpu" else temporary_bytes
        self._functions: dict[tuple[str, Hashable], Callable] = {}
        self._estimates: dict[tuple[str, Hashable], int] = {}
        # The largest piece of each kernel's temporaries, if XLA divides them.
        self._pieces: dict[tuple[str, Hashable], int] = {}
        self._temporaries: dict[tuple[str, Hashable], int] = {}
        # Compiled bytes by estimated ones, of the kernels that were compiled or are like these but
        # for their tiles.
        self._shares: dict[tuple[str, Hashable], float] = {}
        self._beside: list[Kernel] = []

    def get(self, kernel: Kernel) -> Any:
        """The jitted function of a kernel, built if it is new."""
        key = kernel.name, kernel.key
        if key not in self._functions:
            self._functions[key] = self._built(kernel)
        return self._functions[key]

    def traced(self, kernel: Kernel) -> jx.Traced:
        """A kernel as it was written, traced on the shapes that it takes."""
        takes = kernel.takes or ()
        if self._code_passes or PART in self._options:  # its function differs
            return jx.trace(kernel.build(), *takes)
        return jx.trace_jitted(self.get(kernel), *takes)

    def _built(self, kernel: Kernel) -> Any:
        # Given if callers rely on shardings that XLA might not choose by itself.
        placed = {} if kernel.out_shardings is None else {"out_shardings": kernel.out_shardings}
        build = kernel.build_for_triton if self._with_triton else None
        function = (build or kernel.build)()
        in_passes = self._code_passes and kernel.name.startswith("backward")
        if in_passes:
            function = with_code_passes(function)
        options, tries_triton = self._options, False
        if PART in options and kernel.takes is not None:
            jaxpr = jx.opened(jax.jit(function, **placed).trace(*kernel.takes).jaxpr)
            options = self._in_parts(kernel, jaxpr)
            in_float8 = any(jx.contains(eqn, is_float8_product) for eqn in jaxpr.eqns)
            tries_triton = not has_only_large_products(jaxpr)
            if tries_triton and in_float8:
                tries_triton = compiles_float8_by_cublas(self._device)
                function = with_float8_by_cublas(function) if tries_triton else function
            if not tries_triton:
                options |= NO_TRITON
        if in_passes and not tries_triton:  # Triton's functions would expand the codes in fp32
            function = with_scaled_sums(function)
        return jax.jit(
            function, donate_argnums=kernel.donated, compiler_options=options or None, **placed
        )

    def _in_parts(self, kernel: Kernel, jaxpr: Any) -> dict[str, str | bool]:
        """The options with the largest part of the kernel's temporaries, or undivided."""
        largest = _largest_bytes(jaxpr)
        # Such a kernel is dispatched alone anyway, and parts with one large array each fit together
        # badly: a decoder's block with 262,144 tokens would take 72 GiB instead of 49.
        if largest >= _LARGE_TEMPORARIES:
            return {name: value for name, value in self._options.items() if name != PART}
        # XLA warns of each array that is larger than a part.
        part = min(max(int(self._options[PART]), largest), LARGEST_PART)
        self._pieces[kernel.name, kernel.key] = max(part, largest)
        return {**self._options, PART: str(part)}

    def __len__(self) -> int:
        """The number of different functions."""
        return len(self._functions)

    def queue_for_compile(self, kernels: Iterable[Kernel]) -> None:
        """Adds kernels to the next call of `compile`, which does not count their memory."""
        self._beside += _different(kernels)

    def compile(self, kernels: Iterable[Kernel]) -> int:
        """Compiles kernels ahead of time for the arguments in `takes`, unless they are compiled.

        From then on, `estimate` gives the compiler's figures for them, and corrects its estimates
        of the same kernels in other tiles.

        Returns:
            The maximum bytes per device that a kernel needs; see `estimate`.
        """
        kernels = list(kernels)
        new = [k for k in _different(kernels) if (k.name, k.key) not in self._temporaries]
        for kernel, temporaries in zip(new, self._agree(self._compiled(new)), strict=True):
            key = kernel.name, kernel.key
            if estimate := self._estimates.get(key):
                self._shares[kernel.name, kernel.whole or kernel.key] = temporaries / estimate
            self._temporaries[key] = temporaries
        return self.estimate(kernels)

    def _compiled(self, kernels: Sequence[Kernel]) -> list[int]:
        """Compiles kernels, and the queued ones, and returns the bytes of their temporaries."""
        beside, self._beside = self._beside, []
        # Tracing holds Python's lock, so it comes first for all kernels, and threads only compile.
        lowered = [self.get(k).lower(*k.takes or ()) for k in (*kernels, *beside)]
        with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
            stats = pool.map(_compiled_stats, lowered)
            return [found.temp_size_in_bytes for found in stats][: len(kernels)]

    def has_compiled(self, kernels: Iterable[Kernel]) -> bool:
        """Whether all of some kernels are compiled."""
        return all((k.name, k.key) in self._temporaries for k in kernels)

    def keep_only(self, kernels: Iterable[Kernel]) -> None:
        """Drops all other functions, with the memory of their programs."""
        self._forget(self._functions.keys() - {(kernel.name, kernel.key) for kernel in kernels})

    def drop(self, functions: Collection[int]) -> None:
        """Drops functions, given by `id`, and what is known about their kernels."""
        self._forget({key for key, f in self._functions.items() if id(f) in functions})

    def _forget(self, keys: Set[tuple[str, Hashable]]) -> None:
        for known in (self._functions, self._estimates, self._pieces, self._temporaries):
            for key in keys & known.keys():  # one that comes again is compiled again
                del known[key]

    def has_large_temporaries(self, kernel: Kernel) -> bool:
        """Whether a kernel must wait for earlier large kernels before it is dispatched.

        Until these have run, the memory that they free is pending. A kernel needs no wait if XLA
        divides its temporaries into small pieces.
        """
        key = kernel.name, kernel.key
        num_bytes = self._temporaries.get(key, 0)
        return min(num_bytes, self._pieces.get(key, num_bytes)) >= _LARGE_TEMPORARIES

    def estimate(self, kernels: Iterable[Kernel]) -> int:
        """The maximum bytes per device that a kernel needs besides arguments and results.

        Kernels run one after another. The bytes are the compiler's for compiled kernels, and else
        estimated from shapes alone.
        """
        return max(self._estimate(k, self.get) for k in _different(kernels))

    def estimate_trial(self, kernel: Kernel) -> int:
        """Estimates the bytes of one kernel without keeping its function in the cache."""
        return self._estimate(kernel, self._built)

    def _estimate(self, kernel: Kernel, function: Callable[[Kernel], Any]) -> int:
        key = kernel.name, kernel.key
        needed = self._temporaries.get(key)
        if needed is None:
            if key not in self._estimates:
                try:
                    found = self._estimated_bytes(function(kernel), kernel)
                except OverflowError:
                    found = _PER_NUMBER * sum(x.size for x in jax.tree.leaves(kernel.takes))
                self._estimates[key] = found
            share = self._shares.get((kernel.name, kernel.whole or kernel.key), 1.0)
            needed = round(share * self._estimates[key])
        # Equal kernels of different steps may run beside different bytes.
        return needed + kernel.beside_bytes

    def _estimated_bytes(self, function: Any, kernel: Kernel) -> int:
        """Estimates the bytes of a kernel's temporaries on each device."""
        takes = kernel.takes or ()
        jaxpr = jx.opened(function.trace(*takes).jaxpr)
        shardings = [x.sharding for x in jax.tree.leaves(takes)]
        rows = zip(jaxpr.invars, shardings, strict=True)
        # Slabs and examples are divided along their first axis.
        divided = {v: 0 for v, sharding in rows if not sharding.is_fully_replicated}
        num_devices = max((sharding.num_devices for sharding in shardings), default=1)
        return self._temporary_bytes(jaxpr, divided, num_devices)


def _largest_bytes(jaxpr: Any) -> int:
    """The bytes of the largest array that an open jaxpr computes."""
    own = (jx.num_bytes(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)
    inner = (_largest_bytes(jx.opened(j)) for eqn in jaxpr.eqns for j in jx.inner_jaxprs(eqn))
    return max((*own, *inner), default=0)


def _different(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each name and key."""
    return list({(kernel.name, kernel.key): kernel for kernel in kernels}.values())


def _compiled_stats(lowered: Any) -> Any:
    found = lowered.compile().memory_analysis()
    progressed()
    return found
