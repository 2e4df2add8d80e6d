"""The precision of a run: the forms that parameters and optimizer state have, and where.

One small record, because what is held, what computes and what the optimizer sees belong together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megatrain_jax._src.common.checks import refused

Rounding = Literal["stochastic", "nearest"]
_COMPUTING = ("bfloat16", "float32", "float64")
_MASTERS = (*_COMPUTING, "int8")
_FLOAT32 = jnp.dtype("float32")
_SUMS = ("bfloat16", "float32")
_STATES = ("bfloat16", "float32", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run.

    The optimizer itself computes in fp32, or in float64 where masters have that: what is held in a
    narrower form is widened before an update and rounded after it.

    Where a mapping is allowed, its keys are patterns of paths, as a checkpoint has them (`"*"`
    stands for any text, `"layers/*/bias"` or, for state, `"*/nu/*"`); the first that fits decides,
    and what none fits is held in fp32. A pattern that fits nothing is refused.

    Attributes:
        master: dtype in which the host keeps the parameters that are trained: bfloat16, float32 or,
            with 64-bit types switched on, float64; "int8", codes in blocks of 128 with a scale
            each; or a mapping from paths to bfloat16, float32 or "int8". Without a mapping,
            parameters of one axis (norms, biases) are not coded but stay in fp32.
        compute: dtype that parameters are cast to before the model sees them: bfloat16, float32 or
            float64. Narrower ranges, as float16's, would need the loss to be scaled.
        frozen: dtype in which the host keeps parameters that are not trained; None for that of the
            masters. With bfloat16 they take half the memory and half the time on the link, with
            int8, in blocks of 128 with a scale each, norms and biases among them, a quarter.
        state: how the host keeps optimizer state that has a number for each of a parameter's, such
            as Adam's moments: bfloat16; "int8" or "int4", codes in blocks of 128 with a scale each;
            None (or float32) as the optimizer makes it; or a mapping from paths to these. Without
            a mapping, codes are for matrices: the state of parameters of one axis (norms, biases)
            stays in fp32 then, as does state whose difference an optimizer takes the root of, and
            what begins as a copy of parameters is held in bfloat16.
        sums: dtype in which sums of gradients wait, where a step has several microbatches or a
            parameter is read by several blocks: float32, or bfloat16, with half the memory and half
            the time on the link. They are summed in fp32 within a wave and rounded at its end, so
            that the number of waves changes results.
        rounding: how an update rounds what is held narrower: "stochastic", up or down at random so
            that the mean is right, or "nearest", which loses updates smaller than half of the gap
            between two numbers (in bfloat16 1/256 to 1/512 of a number). Random bits follow from
            the seed, the step, the parameter's group, which may be a part of a block where the
            device is small, and the number of devices.

    Raises:
        TypeError: `rounding` is no string, or a path is none.
        ValueError: a dtype is none that the attribute may have, or is one of 64 bits while JAX has
            64-bit types switched off; a mapping is empty; `rounding` is unknown; or masters in
            codes are to be rounded to nearest.
    """

    master: DTypeLike | Mapping[str, DTypeLike] = jnp.float32
    compute: DTypeLike = jnp.bfloat16
    frozen: DTypeLike | None = None
    state: DTypeLike | Mapping[str, DTypeLike] | None = None
    sums: DTypeLike = jnp.float32
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        """Checks the dtypes and stores them in their canonical form, mappings as pairs."""
        state = None if self.state is None else _held("state", self.state, _STATES)
        canonical = {
            "master": _held("master", self.master, _MASTERS),
            "compute": _computing(_dtype("compute", self.compute)),
            "frozen": None if self.frozen is None else _frozen(self.frozen),
            # What optimizers make of fp32 masters is fp32 already: nothing to code.
            "state": None if state == _FLOAT32 else state,
            "sums": _sums(self.sums),
        }
        # Pairs in place of mappings keep the record hashable, and the order in which they decide.
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        allowed = get_args(Rounding)
        if not isinstance(self.rounding, str):
            raise TypeError(refused("Precision.rounding", " or ".join(allowed), self.rounding))
        if self.rounding not in allowed:
            raise ValueError(f"Precision(rounding={self.rounding!r}) must be one of {allowed}.")
        forms = self.master if isinstance(self.master, tuple) else (("*", self.master),)
        if self.rounding == "nearest" and any(form == jnp.dtype("int8") for _, form in forms):
            raise ValueError(
                "Precision(master='int8', rounding='nearest') would not train: an update smaller "
                "than 1/254 of the largest number in its block is lost. Use rounding='stochastic'."
            )

    @classmethod
    def compact(
        cls, compute: DTypeLike = jnp.bfloat16, sums: DTypeLike = jnp.float32
    ) -> "Precision":
        """Four bytes a parameter with Adam: masters in bfloat16, moments in 8 bits.

        Args:
            compute: dtype that parameters are cast to before the model sees them.
            sums: dtype in which sums of gradients wait.
        """
        return cls(master=jnp.bfloat16, state=jnp.int8, compute=compute, sums=sums)

    @property
    def update(self) -> Any:
        """The dtype that the optimizer sees: fp32, or the masters' where that is wider."""
        return self.master if self.master == jnp.dtype("float64") else _FLOAT32

    def master_of(self, path: str) -> Any:
        """The dtype in which the host keeps a trained parameter of this path."""
        return _chosen(self.master, path)

    def state_of(self, path: str) -> Any | None:
        """The form of a state array of this path that mirrors a parameter; None for its own."""
        found = None if self.state is None else _chosen(self.state, path)
        return None if found == _FLOAT32 else found


def precision_of(name: str, value: Any) -> Precision:
    """Returns the argument for a precision as a record, also where it is a name.

    "compact" is `Precision.compact()`. "float32" and "bfloat16" are dtypes of the computation, as
    after `--compute` on the command line; masters and optimizer state are fp32.

    Args:
        name: Name of the argument.
        value: The value given.

    Raises:
        TypeError: If it is neither a precision nor text.
        ValueError: If no precision has this name.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value == "compact":
        return Precision.compact()
    if isinstance(value, str) and value in ("float32", "bfloat16"):
        return Precision(compute=value)
    allowed = 'a megatrain_jax.Precision, "compact", "float32" or "bfloat16"'
    hint = "pass for example Precision(compute=jnp.bfloat16)"
    error = ValueError if isinstance(value, str) else TypeError
    raise error(refused(name, allowed, value, hint))


def _chosen(given: Any, path: str) -> Any:
    if not isinstance(given, tuple):
        return given
    fits = (dtype for pattern, dtype in given if fnmatchcase(path, pattern))
    return next(fits, _FLOAT32)


def _held(name: str, given: Any, allowed: tuple[str, ...]) -> Any:
    """A dtype or a mapping that was given, in its canonical form: a mapping as pairs.

    Raises:
        TypeError: A path is no string.
        ValueError: A dtype is none of those that are allowed, or a mapping is empty.
    """
    if isinstance(given, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in given):
        given = dict(given)  # the canonical form itself
    if not isinstance(given, Mapping):
        return _allowed(name, str(given), _dtype(name, given), allowed)
    if not given:
        raise ValueError(f"Precision({name}={{}}) must name at least one path; '*' is any.")
    pairs = []
    for pattern, form in given.items():
        if not isinstance(pattern, str):
            raise TypeError(refused(name, "a mapping whose paths are strings", pattern))
        shown = f"{{{pattern!r}: {form}}}"
        if form is None or isinstance(form, Mapping | tuple):
            raise ValueError(
                f"Precision({name}={shown}) must map paths to dtypes; float32 is wide."
            )
        # Float64 is for all masters or none: the optimizer computes in one dtype.
        in_mapping = tuple(x for x in allowed if x != "float64")
        pairs.append((pattern, _allowed(name, shown, _dtype(name, form), in_mapping)))
    return tuple(pairs)


def _allowed(name: str, shown: str, dtype: Any, allowed: tuple[str, ...]) -> Any:
    if dtype.name in allowed:
        return dtype
    shown = shown if shown.startswith("{") else dtype.name
    why = ""
    if jnp.issubdtype(dtype, jnp.floating):
        why = (
            ": what an optimizer updates needs fp32's range of exponents, or small numbers are "
            "lost and large ones overflow"
        )
    raise ValueError(f"Precision({name}={shown}) must be one of {', '.join(allowed)}{why}.")


def _frozen(given: Any) -> Any:
    dtype = _dtype("frozen", given)
    if dtype == jnp.dtype("int8"):
        return dtype
    return _floating("frozen", dtype, " or int8")


def _sums(given: Any) -> Any:
    dtype = _dtype("sums", given)
    return _allowed("sums", dtype.name, dtype, _SUMS)


def _computing(dtype: Any) -> Any:
    dtype = _floating("compute", dtype)
    # Gradients have the dtype that is computed in. Without a scaled loss, small ones become zero
    # in a dtype whose exponents have a narrower range than fp32's.
    if dtype.name not in _COMPUTING:
        raise ValueError(
            f"Precision(compute={dtype.name}) is not supported: losses are not scaled, so small "
            "gradients would become zero. Use bfloat16, which has fp32's range, or float32."
        )
    return dtype


def _floating(name: str, dtype: Any, other: str = "") -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise ValueError(f"Precision({name}={dtype.name}) must be a real floating dtype{other}.")


def _dtype(name: str, given: Any) -> Any:
    """A dtype that was given, in its canonical form.

    Raises:
        ValueError: It is none, or JAX has it switched off.
    """
    try:
        if given is None:
            raise TypeError("NumPy takes None for float64")
        dtype = jnp.dtype(given)
    except Exception as error:  # NumPy reads strings of several kinds
        codes = " or of codes, 'int8'" + (" and 'int4'" if name == "state" else "")
        known = f"such as 'float32' or 'bfloat16'{'' if name == 'compute' else codes}"
        raise ValueError(
            f"Precision({name}={given!r}) is no dtype: give the name of one {known}."
        ) from error
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"Precision({name}={dtype.name}) needs 64-bit types, which JAX has switched "
            "off; set jax_enable_x64 or choose a smaller dtype."
        )
    return dtype
