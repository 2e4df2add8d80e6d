"""The hyperparameters of an optimizer: those in its state, and the numbers that its functions hold.

`optax.inject_hyperparams` keeps hyperparameters in the state, such as a scheduled learning rate.

The remaining ones have names in Optax.

A traced update has numbers without names. The functions inside `optax.adamw(1e-3)` close over both
names and numbers: `b1`, `eps`, `weight_decay` and so on. So messages can name the numbers.
"""

import functools
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.fingerprint import closed_over
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut

# The name that `optax.inject_hyperparams` gives to the field of its state with their values.
_FIELD = "hyperparams"


def find_hyperparameters(cut: OptimizerCut) -> dict[str, int]:
    """Finds the hyperparameters that `optax.inject_hyperparams` keeps in the global state.

    Example: the state of `chain(clip(1.0), inject_hyperparams(adam)(schedule))` has the leaf
    `1.hyperparams.learning_rate`, and its name here is "learning_rate". If two transformations have
    a hyperparameter of one name, the names are "1.learning_rate" and "2.learning_rate".

    Args:
        cut: The optimizer.

    Returns:
        For each name, the position of its value in `cut.globals`.
    """
    found: list[tuple[str, tuple[str, ...], int]] = []
    for position, leaf in enumerate(cut.globals):
        shape, path = cut.state_shapes[leaf.leaf], cut.state_paths[leaf.leaf]
        is_number = shape.shape == () and jnp.issubdtype(shape.dtype, jnp.number)
        if is_number and len(path) > 1 and path[-2] == _FIELD:
            found.append((path[-1], path[:-2], position))
    number_of = Counter(name for name, *_ in found)
    return {
        name if number_of[name] == 1 else ".".join([*before, name]): position
        for name, before, position in found
    }


def injected(state: Any) -> list[dict[str, Any]]:
    """The hyperparameters in Optax's state, of each `optax.inject_hyperparams` in it."""

    def of(part: Any) -> Any:
        return getattr(part, _FIELD, None)

    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(of(part), dict))
    return [of(part) for part in parts if isinstance(of(part), dict)]


def find_kept(cut: OptimizerCut) -> dict[str, int]:
    """Those of `find_hyperparameters` without a schedule.

    An update copies such a value from the previous state, which therefore determines it.
    """
    combine = cut.combine
    first = len(combine.consts) + 1 + cut.is_scaled  # after the loss and its scale
    states = combine.jaxpr.invars[first:]
    updated = combine.jaxpr.outvars[cut.num_messages :]

    def is_kept(position: int) -> bool:
        return updated[position] in jx.dependent(combine.jaxpr, [states[position]])

    return {name: n for name, n in find_hyperparameters(cut).items() if is_kept(n)}


def kept_hyperparameters(cut: OptimizerCut) -> dict[str, float]:
    """The hyperparameters of `find_kept`, with their initial values."""
    if not (kept := find_kept(cut)):
        return {}
    initial = cut.initial_globals
    # A user's transfer guard does not concern these constants of the optimizer.
    with jax.transfer_guard("allow"):
        first = jax.device_get(jx.evaluate(initial.jaxpr, initial.consts))
    # As the user wrote them: 0.001 is 0.0010000000474974513 in fp32.
    return {name: float(f"{float(first[position]):.7g}") for name, position in kept.items()}


# A deeper or larger object is data, not an optimizer.
_DEPTH, _MOST = 16, 200
_INFINITE = 1e300
# The name of the number in `optax.scale(-0.1)`, which `optax.scale_by_learning_rate(0.1)` calls.
_STEP = "step_size"

Numbers = Sequence[Sequence[Any]]


def named_numbers(function: Any) -> list[tuple[str, float]]:
    """The numbers that a function and the functions it is made of close over.

    Args:
        function: An optimizer's `update`.

    Returns:
        Names and values in the order of the functions, each object once; the first 200.

    Examples:
        >>> import optax
        >>> named_numbers(optax.sgd(0.1, momentum=0.9).update)
        [('decay', 0.9), ('learning_rate', 0.1)]
    """
    found = _numbers("", function, 0, set())
    return [row for row, _ in zip(found, range(_MOST), strict=False)]


def changed_numbers(before: Numbers, now: Numbers) -> str:
    """A clause on the numbers that differ, such as `learning_rate 0.001 -> 0.002`.

    Args:
        before: Names and values.
        now: Names and values to compare; if the names differ, the clause is empty.
    """
    if [name for name, _ in before] != [name for name, _ in now]:
        return ""
    rows = [
        f"{name} {old:.6g} -> {new:.6g}"
        for (name, old), (_, new) in zip(before, now, strict=True)
        if old != new
    ]
    # Two functions may close over one number.
    return ", ".join(dict.fromkeys(rows))


def _numbers(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | np.bool_) or depth > _DEPTH:
        return
    if isinstance(value, int | float | np.integer | np.floating):
        is_rate = name == _STEP and value < 0
        if abs(value) < _INFINITE:  # not NaN either, which JSON does not have
            yield ("learning_rate", -float(value)) if is_rate else (name, float(value))
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in _parts(name, value):
            yield from _numbers(key, item, depth + 1, seen)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The named values that a function of any kind holds, or a list or a mapping of them."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple | list):
        yield from ((name, item) for item in value)
    elif isinstance(value, types.FunctionType):
        yield from closed_over(value)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield "", value.args
        yield "", value.keywords
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
        yield from getattr(value.__self__, "__dict__", {}).items()
    elif callable(value) and not isinstance(value, type):
        # A schedule that is an object, or a function that another one wraps, as `__wrapped__`.
        yield from getattr(value, "__dict__", {}).items()
