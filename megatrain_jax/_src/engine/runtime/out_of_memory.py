"""Advice for a run that exhausts device memory although its plan fits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from megatrain_jax._src.engine.startup.allocator import CUDA_POOL, PREALLOCATE, VARIABLE


@contextmanager
def with_memory_advice() -> Iterator[None]:
    """Adds a note with advice to JAX's error if the body runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            note = _advice(os.environ.get(VARIABLE))
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _advice(allocator: str | None) -> str:
    """Returns the note for a process that uses this allocator of device memory."""
    if allocator == CUDA_POOL:
        # Measured with 234 GiB of pinned memory: 7 GiB were not found with 34 of 67 GiB free.
        other = (
            "If the error shows that much memory is free, CUDA's memory pool did not find it: set "
            f"{VARIABLE}=default before Python starts, and JAX's own allocator takes all of it "
            "at the start."
        )
    else:
        other = (
            "JAX's own allocator fails with memory left when none of its gaps is large enough. "
            f"With {VARIABLE} unset and {PREALLOCATE} not false, importing megatrain_jax before "
            "JAX's first computation chooses CUDA's memory pool, which joins gaps."
        )
    return (
        'If this is device memory: use device_budget="minimum", more `microbatches` or smaller '
        f"batches. {other} The trainer can't go on; a new one resumes from the newest checkpoint."
    )
