"""Converts the state of a data iterator to JSON, and back with its Python and NumPy types.

Numbers, strings, lists and dicts with string keys are written unchanged. JSON has no form for the
remaining types, so each such value becomes a dict with a special key::

    {"i": np.int64(3), "at": (1, 2)}

    {"i": {"megatrain_jax": ["scalar", "<i8", [], "AwAAAAAAAAA="]},
     "at": {"megatrain_jax": ["tuple", [1, 2]]}}
"""

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TAG = "megatrain_jax"
_PLAIN = (bool, int, float, str, type(None))
# Kinds of dtypes that a short string describes: numbers, dates and text.
_KINDS = "?biufcmMSU"
_ACCEPTED = (
    "None, numbers, strings, bytes, NumPy scalars and arrays, and lists, tuples and dicts of these"
)


def encoded_state(state: Any, path: str = "state") -> Any:
    """A copy of an iterator's state, in JSON types.

    Args:
        state: The state, as returned by the iterator's `get_state`.
        path: The expression that leads to it, for messages.

    Raises:
        TypeError: If part of it can't be converted.
    """
    if isinstance(state, np.ndarray | np.generic | jax.Array):
        return _array_as_json(state, path)
    if isinstance(state, _PLAIN):
        return state
    if isinstance(state, bytes | bytearray):
        return {_TAG: ["bytes", base64.b64encode(state).decode()]}
    if isinstance(state, list | tuple):
        items = [encoded_state(item, f"{path}[{i}]") for i, item in enumerate(state)]
        return items if isinstance(state, list) else {_TAG: ["tuple", items]}
    if isinstance(state, dict):
        rows = [(key, encoded_state(value, f"{path}[{key!r}]")) for key, value in state.items()]
        if all(isinstance(key, str) for key in state) and _TAG not in state:
            return dict(rows)
        return {_TAG: ["dict", [[encoded_state(k, f"a key of {path}"), row] for k, row in rows]]}
    raise _refused(path, f"of type {type(state).__name__}")


def decoded_state(found: Any) -> Any:
    """The inverse of `encoded_state`, with JAX arrays as NumPy arrays."""
    if isinstance(found, list):
        return [decoded_state(item) for item in found]
    if not isinstance(found, dict):
        return found
    if found.keys() != {_TAG}:
        return {key: decoded_state(value) for key, value in found.items()}
    kind, *values = found[_TAG]
    if kind == "bytes":
        return base64.b64decode(values[0])
    if kind == "tuple":
        return tuple(decoded_state(values[0]))
    if kind == "dict":
        return {decoded_state(key): decoded_state(value) for key, value in values[0]}
    dtype, shape, text = values
    # A copy, because an iterator may change its state in place.
    array = np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if kind == "scalar" else array


def _array_as_json(state: Any, path: str) -> dict[str, Any]:
    dtype = state.dtype
    if isinstance(state, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.extended):
        raise _refused(path, f"a JAX array of {dtype}; keep `jax.random.key_data` of a key instead")
    if dtype.kind not in _KINDS or dtype.names is not None:
        raise _refused(path, f"an array of dtype {dtype}")
    array = np.asarray(state)
    kind = "scalar" if isinstance(state, np.generic) else "array"
    text = base64.b64encode(array.tobytes()).decode()
    return {_TAG: [kind, dtype.str, list(array.shape), text]}


def _refused(path: str, given: str) -> TypeError:
    return TypeError(
        f"the position of `data` can't be saved: `get_state` of its iterator returned a state in "
        f"which {path} is {given}. A state may consist of {_ACCEPTED}. Without `get_state`, "
        "batches are counted instead"
    )
