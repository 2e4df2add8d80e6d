"""The precision of a run: the dtypes that parameters have in the host and in the model.

One small record, because master copies and compute copies are chosen together.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run.

    Attributes:
        master: dtype of the parameters that the optimizer updates and the host keeps.
        compute: dtype that parameters are cast to before the model sees them.
        frozen: dtype in which the host keeps parameters that are not trained; None for that of the
            masters. With bfloat16 they take half the memory and half the time on the link.

    Raises:
        ValueError: a dtype is no real floating-point dtype, or is one of 64 bits while JAX
            has 64-bit types switched off.
    """

    master: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.bfloat16
    frozen: DTypeLike | None = None

    def __post_init__(self) -> None:
        """Checks the dtypes and stores them in their canonical form."""
        for name in ("master", "compute", "frozen"):
            given = getattr(self, name)
            if given is None and name == "frozen":
                continue
            try:
                if given is None:
                    raise TypeError("NumPy takes None for float64")
                dtype = jnp.dtype(given)
            except Exception as error:  # NumPy reads strings of several kinds
                raise ValueError(f"Precision({name}={given!r}) is no dtype.") from error
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"Precision({name}={dtype.name}) must be a real floating dtype.")
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"Precision({name}={dtype.name}) needs 64-bit types, which JAX has switched "
                    "off; set jax_enable_x64 or choose a smaller dtype."
                )
            object.__setattr__(self, name, dtype)

    def stored(self, trainable: bool) -> DTypeLike:
        """The dtype in which the host keeps a parameter."""
        return self.master if trainable or self.frozen is None else self.frozen
