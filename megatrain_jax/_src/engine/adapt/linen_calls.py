"""The calls of a Linen module by the loss, as JSON, so that a checkpoint can say what they were.

A Linen module has no arrays before it is called. `load` has no loss: it repeats these calls, on
shapes, to find the arrays that belong to a module.

Example: `model(x, train=True)`, with `x` of shape (4, 3), is recorded as

    ["__call__", {"tuple": [{"array": [[4, 3], "float32"]}]}, {"dict": [["train", true]]}]
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

_CONTAINERS = {"tuple": tuple, "list": list}
_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def recording(calls: list[Any]) -> Iterator[None]:
    """Adds the calls of a module, other than those that it makes itself, to a list.

    A call that JSON can't describe, or of a part of the module, adds None.
    """
    depth = 0

    def note(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal depth
        if depth == 0 and context.method_name != "setup":
            whole = not context.module.path
            calls.append(_call(context.method_name, args, kwargs) if whole else None)
        depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            depth -= 1

    with linen.intercept_methods(note):
        yield


def repeated(calls: Sequence[Any]) -> tuple[Callable[[linen.Module, Any], Any], Any]:
    """A loss that makes recorded calls, and the shapes of its batch."""
    batch: list[jax.ShapeDtypeStruct] = []
    made = [(name, _value(args, batch), _value(kwargs, batch)) for name, args, kwargs in calls]

    def loss(module: linen.Module, batch: Any) -> jax.Array:
        for name, args, kwargs in made:
            getattr(module, name)(*args(batch), **kwargs(batch))
        return jnp.float32(0)

    return loss, batch


def _call(name: str, args: Any, kwargs: Any) -> Any:
    try:
        return [name, _form(args), _form(kwargs)]
    except TypeError:
        return None


def _form(value: Any) -> Any:
    """A value as JSON, arrays as their shapes and dtypes.

    Raises:
        TypeError: If it is anything but numbers, text and arrays in tuples, lists and dicts.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, jax.Array | np.ndarray):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError("random keys have no dtype of NumPy")
        return {"array": [list(value.shape), value.dtype.name]}
    if type(value) is dict:
        return {"dict": [[_form(key), _form(item)] for key, item in value.items()]}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [_form(item) for item in value]}
    raise TypeError(f"{value!r} has no form in JSON")


def _value(form: Any, batch: list[jax.ShapeDtypeStruct]) -> Callable[[Any], Any]:
    """A function from the arrays of a batch to the value of a form; adds its arrays to `batch`."""
    if not isinstance(form, dict):
        return lambda arrays: form
    ((kind, content),) = form.items()
    if kind == "array":
        index = len(batch)
        batch.append(jax.ShapeDtypeStruct(tuple(content[0]), jnp.dtype(content[1])))
        return lambda arrays: arrays[index]
    if kind == "dict":
        rows = [(_value(key, batch), _value(item, batch)) for key, item in content]
        return lambda arrays: {key(arrays): item(arrays) for key, item in rows}
    items = [_value(item, batch) for item in content]
    return lambda arrays: _CONTAINERS[kind](item(arrays) for item in items)
