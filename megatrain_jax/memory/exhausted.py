"""Advice where the device's memory runs out although a plan said that it would not."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_ADVICE = (
    "If this is device memory: an allocator can fail with memory left when none of its gaps is "
    "large enough. Set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async before Python starts, which joins "
    'gaps, or use device_budget="least", more `microbatches` or smaller batches. The trainer '
    "can't go on; a new one resumes from the newest checkpoint."
)


@contextmanager
def advised() -> Iterator[None]:
    """Adds a note to JAX's error if memory runs out."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) and _ADVICE not in getattr(error, "__notes__", ()):
            error.add_note(_ADVICE)
        raise
