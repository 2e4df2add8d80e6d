"""Converts the state of a data iterator to JSON, and back with the same types.

Numbers, strings, lists and dicts with string keys are written unchanged. JSON has no form for the
remaining types, so each such value becomes a dict with a special key::

    {"i": np.int64(3), "at": (1, 2)}

    {"i": {"megatrain_jax": ["scalar", "<i8", [], "AwAAAAAAAAA="]},
     "at": {"megatrain_jax": ["tuple", [1, 2]]}}
"""

import base64
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TAG = "megatrain_jax"
_PLAIN = frozenset((bool, int, float, str, type(None)))
# Kinds of dtypes that a short string describes: numbers, dates and text.
_KINDS = "?biufcmMSU"
_MOST_NESTED = 100
_ACCEPTED = (
    "None, numbers, strings, bytes, NumPy scalars and arrays, JAX arrays, and lists, tuples and "
    "dicts of these"
)


def encoded_state(state: Any, path: str = "state", inside: tuple[int, ...] = ()) -> Any:
    """A copy of an iterator's state, in JSON types.

    Args:
        state: The state, as returned by the iterator's `get_state`.
        path: The expression that leads to it, for messages.
        inside: Ids of the lists, tuples and dicts that contain it.

    Raises:
        TypeError: If part of it can't be converted, or would come back with another type.
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is np.ndarray or isinstance(state, np.generic | jax.Array):
        return _array_as_json(state, path)
    if kind is bytes or kind is bytearray:
        return {_TAG: [kind.__name__, base64.b64encode(state).decode()]}
    if kind not in (list, tuple, dict, OrderedDict):
        same = next((base for base in kind.__mro__[1:] if base in _KEPT), None)
        also = "" if same is None else f", which would come back as {_KEPT[same]}; convert it"
        raise _refused(path, f"of type {kind.__name__}{also}")
    if id(state) in inside:
        raise _refused(path, "a value that contains itself")
    if len(inside) == _MOST_NESTED:
        raise _refused(path, f"nested more than {_MOST_NESTED} deep")
    inside = (*inside, id(state))
    if kind is list or kind is tuple:
        items = [encoded_state(item, f"{path}[{i}]", inside) for i, item in enumerate(state)]
        return items if kind is list else {_TAG: ["tuple", items]}
    rows = [(key, encoded_state(value, f"{path}[{key!r}]", inside)) for key, value in state.items()]
    if kind is dict and all(type(key) is str for key in state) and _TAG not in state:
        return dict(rows)
    keyed = [[encoded_state(key, f"a key of {path}", inside), row] for key, row in rows]
    return {_TAG: [kind.__name__, keyed]}


def decoded_state(found: Any) -> Any:
    """The inverse of `encoded_state`."""
    if isinstance(found, list):
        return [decoded_state(item) for item in found]
    if not isinstance(found, dict):
        return found
    if found.keys() != {_TAG}:
        return {key: decoded_state(value) for key, value in found.items()}
    kind, *values = found[_TAG]
    if kind in _BYTES:
        return _BYTES[kind](base64.b64decode(values[0]))
    if kind == "tuple":
        return tuple(decoded_state(values[0]))
    if kind in _DICTS:
        return _DICTS[kind]((decoded_state(key), decoded_state(value)) for key, value in values[0])
    dtype, shape, text = values
    # A copy, because an iterator may change its state in place.
    array = np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    if kind == "jax":
        return jnp.asarray(array)
    return array[()] if kind == "scalar" else array


_BYTES = {"bytes": bytes, "bytearray": bytearray}
_DICTS = {"dict": dict, "OrderedDict": OrderedDict}
# Types whose subclasses are refused, because they would be restored as this type.
_KEPT = {t: t.__name__ for t in (*_PLAIN, bytes, list, tuple, dict)} | {np.ndarray: "a plain array"}


def _array_as_json(state: Any, path: str) -> dict[str, Any]:
    dtype = state.dtype
    if isinstance(state, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.extended):
        raise _refused(path, f"a JAX array of {dtype}; keep `jax.random.key_data` of a key instead")
    if dtype.kind not in _KINDS or dtype.names is not None:
        raise _refused(path, f"an array of dtype {dtype}")
    if isinstance(state, jax.Array) and not state.is_fully_addressable:
        raise _refused(path, "a JAX array of which other processes hold a part")
    array = np.asarray(state)
    kinds = {np.generic: "scalar", np.ndarray: "array", jax.Array: "jax"}
    kind = next(kind for base, kind in kinds.items() if isinstance(state, base))
    text = base64.b64encode(array.tobytes()).decode()
    return {_TAG: [kind, dtype.str, list(array.shape), text]}


def _refused(path: str, given: str) -> TypeError:
    return TypeError(
        f"the position of `data` can't be saved: `get_state` of its iterator returned a state in "
        f"which {path} is {given}. A state may consist of {_ACCEPTED}. Without `get_state`, "
        "batches are counted instead"
    )
