"""Advice for the case that device memory runs out against the plan."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from megatrain_jax._src.startup.allocator import PREALLOCATE, VARIABLE

_ADVICE = (
    'If this is device memory: use device_budget="least", more `microbatches` or smaller batches. '
    f"And import megatrain_jax before JAX's first computation, with {VARIABLE} unset and "
    f"{PREALLOCATE} not false: other allocators fail with memory left when none of their gaps is "
    "large enough. The trainer can't go on; a new one resumes from the newest checkpoint."
)


@contextmanager
def advised() -> Iterator[None]:
    """Adds a note with advice to JAX's error if memory runs out."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) and _ADVICE not in getattr(error, "__notes__", ()):
            error.add_note(_ADVICE)
        raise
