"""MLIR's contexts, in which JAX lowers programs: each thread makes one for many of them.

JAX makes a new one for every program, and tests' programs are so small that this takes three
quarters of lowering them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jax._src.interpreters import mlir

# A context keeps the constants of all its programs.
PROGRAMS = 100


class _Latest(threading.local):
    context: Any = None
    left = 0


@contextmanager
def shared_contexts() -> Iterator[None]:
    """Has JAX lower programs in contexts that it has already."""
    latest, make = _Latest(), mlir.make_ir_context

    def make_ir_context() -> Any:
        if not latest.left:
            latest.context, latest.left = make(), PROGRAMS
        latest.left -= 1
        return latest.context

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mlir, "make_ir_context", make_ir_context)
        yield
