"""Errors about the user's code that needs the value of an array while it is traced."""

import traceback
from pathlib import Path

import jax

from megatrain_jax._src.common.user_tracebacks import frames_of_user

# Raised where Python needs the number of an array, as by `float`, `if` or NumPy.
NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def value_needed(who: str, error: Exception, look: str = "") -> TypeError:
    """The explanation of one of JAX's errors, which has the frames of the user's code.

    Args:
        who: The user's argument.
        error: The error, one of `NEEDS_VALUE`.
        look: A sentence that says how to look at a value.
    """
    users = frames_of_user(error.__traceback__)
    lines = [line for line in traceback.extract_tb(users) if not line.filename.startswith("<")]
    last = next(reversed(lines), None)
    place = last and f", at {Path(last.filename).name}:{last.lineno}, `{last.line}`"
    return TypeError(
        f"{who} needs the value of an array{place or ''}. It is traced once, on shapes, before any "
        "array has a value: float(), .item(), NumPy and `if` can't be used on one. "
        f"{look}Compute with jax.numpy, and choose by jnp.where"
    ).with_traceback(users or error.__traceback__)
