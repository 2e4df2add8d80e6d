"""What allocates device memory."""

import os
from importlib.util import find_spec

VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def choose() -> None:
    """Lets CUDA's own memory pool allocate, unless an allocator was chosen.

    XLA's default allocator fails with memory left when none of its gaps is large enough, as 10 GiB
    of a GPU showed with 7.9 GiB planned; CUDA's maps pages from several gaps. Has an effect only
    before JAX's backend starts.
    """
    if any(map(find_spec, _CUDA_PLUGINS)):
        os.environ.setdefault(VARIABLE, "cuda_async")
