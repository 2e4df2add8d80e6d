"""The allocator of device memory that JAX uses, and its share of a GPU."""

import os
from importlib.util import find_spec

VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses to have both
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
CUDA_POOL = "cuda_async"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DEFAULT_FRACTION = 0.85
_JAXS_OWN = ("default", "bfc")


def fraction() -> float:
    """The share of a GPU's memory that JAX takes in a process that imports this library."""
    given = os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION)
    return float(given) if given else _DEFAULT_FRACTION


def keeps_lists() -> bool:
    """Whether JAX's own allocator takes its share of a GPU at once, and lists it in host memory.

    If it takes memory as it needs it, its lists are shorter, and no plan counts them.
    """
    return _preallocates() and os.environ.get(VARIABLE, "").lower() in _JAXS_OWN


def _preallocates() -> bool:
    return os.environ.get(PREALLOCATE) not in ("false", "False", "0")


def choose() -> None:
    """Lets CUDA's own memory pool allocate 85% of a GPU, unless a user chose otherwise.

    XLA's default allocator fails with memory left when none of its gaps is large enough, as 10 GiB
    of a GPU showed with 7.9 GiB planned; CUDA's maps pages from several gaps. It doesn't tell its
    limit where it isn't to preallocate, and then an automatic budget couldn't be found. JAX's
    default is 75% of the memory; of 10 GiB, 85% still leave CUDA and a desktop 1.5. Has an effect
    only before JAX's backend starts.
    """
    # Without CUDA there is nothing to set, and `environ` stays as it is.
    if not any(map(find_spec, _CUDA_PLUGINS)):
        return
    if _preallocates():
        os.environ.setdefault(VARIABLE, CUDA_POOL)
    if OLD_FRACTION not in os.environ:
        os.environ.setdefault(FRACTION, str(_DEFAULT_FRACTION))
