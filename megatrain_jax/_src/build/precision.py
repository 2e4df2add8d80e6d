"""The precision of a run: the dtypes that parameters and optimizer state have, and where.

One small record, because what is held, what computes and what the optimizer sees belong together.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megatrain_jax._src.common.checks import refused

Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run.

    The optimizer itself computes in fp32, or in float64 where masters have that: what is held in a
    narrower dtype is widened before an update and rounded after it.

    Attributes:
        master: dtype in which the host keeps the parameters that are trained: bfloat16, float32 or,
            with 64-bit types switched on, float64.
        compute: dtype that parameters are cast to before the model sees them.
        frozen: dtype in which the host keeps parameters that are not trained; None for that of the
            masters. With bfloat16 they take half the memory and half the time on the link.
        state: how the host keeps optimizer state that has a number for each of a parameter's, such
            as Adam's moments: bfloat16, or None (or float32) as the optimizer makes it.
        rounding: how an update rounds what is kept in bfloat16: "stochastic", up or down at random
            so that the mean is right, or "nearest", which loses updates smaller than half of the
            gap between two numbers (1/256 to 1/512 of a number). Random bits follow from the
            seed, the step and the parameter's group.

    Raises:
        TypeError: `rounding` is no string.
        ValueError: a dtype is no real floating-point dtype, or one that masters or state can't
            have, or is one of 64 bits while JAX has 64-bit types switched off; or `rounding` is
            unknown.
    """

    master: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.bfloat16
    frozen: DTypeLike | None = None
    state: DTypeLike | None = None
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        """Checks the dtypes and stores them in their canonical form."""
        for name in ("master", "compute", "frozen", "state"):
            given = getattr(self, name)
            if given is not None or name in ("master", "compute"):
                object.__setattr__(self, name, _dtype(name, given))
        _check_held("master", self.master, (jnp.bfloat16, jnp.float32, jnp.float64))
        if self.state is not None:
            _check_held("state", self.state, (jnp.bfloat16, jnp.float32))
            object.__setattr__(self, "state", None if self.state == jnp.float32 else self.state)
        allowed = get_args(Rounding)
        if not isinstance(self.rounding, str):
            raise TypeError(refused("Precision.rounding", " or ".join(allowed), self.rounding))
        if self.rounding not in allowed:
            raise ValueError(f"Precision(rounding={self.rounding!r}) must be one of {allowed}.")

    @property
    def update(self) -> Any:
        """The dtype that the optimizer sees: fp32, or the masters' where that is wider."""
        return jnp.promote_types(self.master, jnp.float32)

    def held(self, trainable: bool) -> DTypeLike:
        """The dtype in which the host keeps a parameter."""
        return self.master if trainable or self.frozen is None else self.frozen


def _dtype(name: str, given: Any) -> Any:
    """A dtype that was given, in its canonical form.

    Raises:
        ValueError: It is none of real floating-point numbers, or JAX has it switched off.
    """
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
    return dtype


def _check_held(name: str, dtype: Any, allowed: tuple[Any, ...]) -> None:
    if dtype not in allowed:
        names = ", ".join(jnp.dtype(x).name for x in allowed)
        raise ValueError(
            f"Precision({name}={dtype.name}) must be one of {names}: what an optimizer updates "
            "needs fp32's range of exponents, or small numbers are lost and large ones overflow."
        )
