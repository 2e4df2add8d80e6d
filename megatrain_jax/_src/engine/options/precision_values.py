"""The values that a precision's attributes may have, and their canonical form."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.checks import either, refused

_FLOAT32 = jnp.dtype("float32")
NF4 = "nf4"
_ALLOWED = {
    "master": ("float32", "bfloat16", "int8", "float64"),
    "compute": ("bfloat16", "float16", "float32", "float64"),
    "frozen": ("float32", "bfloat16", "float16", "int8", NF4),
    "state": ("float32", "bfloat16", "int8", "int4"),
    "sums": ("float32", "bfloat16"),
}
_MEANT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
_MEANT |= {"f32": "float32", "fp64": "float64"} | {name: name for name in (NF4, "int8", "int4")}
FLOAT8_NAMES = ("float8", "fp8", "f8", "float8_e4m3fn", "float8_e5m2")
FLOAT8_HINT = 'for matrix products in float8, write Precision(products="float8")'


def canonical(given: Any) -> dict[str, Any]:
    """The canonical forms of the attributes of a `Precision` by name; mappings become pairs.

    Raises:
        TypeError: A path is not a string.
        ValueError: A value is not allowed, a mapping is empty, or float8 goes with float64.
    """
    state = None if given.state is None else _held("state", given.state)
    return {
        "master": _held("master", given.master),
        "compute": None if given.compute is None else _computing(given.compute),
        "frozen": None if given.frozen is None else _frozen(given.frozen),
        # Optimizer state of fp32 masters is fp32 anyway.
        "state": None if state == _FLOAT32 else state,
        "sums": _allowed("sums", "", _dtype("sums", given.sums), _ALLOWED["sums"]),
        "products": _products(given.products, given.compute),
    }


def _by_path(name: str, given: Any) -> tuple[tuple[str, Any], ...] | None:
    """The pairs of a mapping from paths; None if one value is given for all.

    Raises:
        TypeError: A path is not a string.
        ValueError: The mapping is empty.
    """
    if isinstance(given, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in given):
        given = dict(given)  # the canonical form itself
    if not isinstance(given, Mapping):
        return None
    if not given:
        raise ValueError(f"Precision({name}={{}}) must name at least one path; '*' is any.")
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(refused(name, "a mapping whose paths are strings", pattern))
    return tuple(given.items())


def _held(name: str, given: Any) -> Any:
    """The canonical form of a dtype, or of a mapping from paths to dtypes."""
    pairs, allowed = _by_path(name, given), _ALLOWED[name]
    if pairs is None:
        return _allowed(name, str(given), _dtype(name, given), allowed)
    found = []
    for pattern, form in pairs:
        shown = f"{{{pattern!r}: {form}}}"
        if form is None or isinstance(form, Mapping | tuple):
            raise ValueError(
                f"Precision({name}={shown}) must map paths to dtypes; float32 is wide."
            )
        # Float64 is for all masters or none: the optimizer computes in one dtype.
        in_mapping = tuple(x for x in allowed if x != "float64")
        found.append((pattern, _allowed(name, shown, _dtype(name, form), in_mapping)))
    return tuple(found)


def _allowed(name: str, shown: str, dtype: Any, allowed: tuple[str, ...]) -> Any:
    if dtype.name in allowed:
        return _enabled(name, dtype)
    shown = shown if shown.startswith("{") else dtype.name
    why = ""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _FLOAT32.itemsize:
        why = (
            ": it has fewer exponents than fp32, so that small numbers would be lost and large "
            "ones overflow"
        )
    raise ValueError(f"Precision({name}={shown}) must be one of {', '.join(allowed)}{why}.")


def _frozen(given: Any) -> Any:
    if isinstance(given, str) and given == NF4:
        return given  # JAX has no such dtype
    dtype = _dtype("frozen", given)
    if dtype == jnp.dtype("int8"):
        return dtype
    return _floating("frozen", dtype, ", int8 or nf4")


def _products(given: Any, compute: Any) -> Any:
    """The canonical form of `products`."""
    pairs = _by_path("products", given)
    given = given if pairs is None else dict(pairs)
    forms = [given] if pairs is None else given.values()
    for form in forms:
        if form is not None and not (isinstance(form, str) and form == "float8"):
            allowed = "'float8', None, or a mapping from paths to these"
            raise ValueError(f"Precision(products={given!r}) must be {allowed}.")
    is_wide = compute is not None and jnp.dtype(compute) == jnp.dtype("float64")
    if any(forms) and is_wide:
        raise ValueError(
            f"Precision(compute=float64, products={given!r}) contradicts itself: float8 has 3 bits "
            "of mantissa. Compute in bfloat16 or float32."
        )
    return given if pairs is None else pairs


def _computing(given: Any) -> Any:
    dtype = _floating("compute", _dtype("compute", given))
    # Gradients have the compute dtype, and 8 bits need a scale for each tensor, not one for all.
    if dtype.name not in _ALLOWED["compute"]:
        raise ValueError(
            f"Precision(compute={dtype.name}) is not supported: its range is too narrow for "
            f"gradients, even with a scaled loss. Use bfloat16, float16 or float32; {FLOAT8_HINT}."
        )
    return dtype


def _floating(name: str, dtype: Any, other: str = "") -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return _enabled(name, dtype)
    raise ValueError(f"Precision({name}={dtype.name}) must be a real floating dtype{other}.")


def _dtype(name: str, given: Any) -> Any:
    """The canonical form of a dtype.

    Raises:
        ValueError: It is not a dtype.
    """
    try:
        if given is None:
            raise TypeError("NumPy takes None for float64")
        dtype = jnp.dtype(given)
        if dtype.type is np.void:
            raise TypeError("NumPy takes an empty dict or list for a structure without fields")
    except Exception as error:  # NumPy reads strings of several kinds
        meant = _MEANT.get(given.lower()) if isinstance(given, str) else None
        meant = f'; did you mean "{meant}"?' if meant in _ALLOWED[name] else "."
        meant = f"; {FLOAT8_HINT}." if name == "compute" and given in FLOAT8_NAMES else meant
        raise ValueError(
            f"Precision({name}={given!r}) is no dtype: give {either(_ALLOWED[name])}, or a dtype "
            f"such as jnp.float32{meant}"
        ) from error
    return dtype


def _enabled(name: str, dtype: Any) -> Any:
    """Returns an allowed dtype, or raises a ValueError if JAX has it switched off."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"Precision({name}={dtype.name}) needs 64-bit types, which JAX has switched "
            "off; set jax_enable_x64 or choose a smaller dtype."
        )
    return dtype
