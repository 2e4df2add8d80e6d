"""The user's loss function, or function that predicts: its call, and checks of its result.

`loss_fn(model, batch)` or `loss_fn(model, batch, rng)` returns a loss or (loss, metrics). The `fn`
of `Trainer.predict` is called alike and returns arrays. Mistakes in the signature or the result are
reported here, with the name of the user's function.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.common.needed_values import NEEDS_VALUE, value_needed

# The names that every step's record uses itself, and the prefix of its evaluation's names.
RESERVED = ("loss", "grad_norm", "loss_scale", "seconds", "skipped", "step")
EVAL_PREFIX = "eval_"
_BATCHES = ("batch", "data")
_KEYS = ("rng", "key")
_UNPACK = "a batch is passed whole: unpack it inside, as in x, y = batch"


@dataclass(frozen=True)
class _Given:
    """A function that was not given as `loss_fn`, but as another argument."""

    argument: ClassVar[str]
    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Returns what the user's function does."""
        return self.fn(*args)


class Prediction(_Given):
    """What a step computes instead of a loss: the arrays of `fn`, with a row for each example."""

    argument = "fn"


class EvalLoss(_Given):
    """The run's `eval_loss_fn`: a loss whose errors have this name."""

    argument = "eval_loss_fn"


def argument_of(function: Callable[..., Any]) -> str:
    """The name of the user's argument that a loss, or a prediction, was given as."""
    return function.argument if isinstance(function, _Given) else "loss_fn"


def of_user(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function."""
    return function.fn if isinstance(function, _Given) else function


def name_of(function: Callable[..., Any]) -> str:
    """A function's name as the user wrote it."""
    function = of_user(function)
    return getattr(function, "__name__", repr(function))


def takes_rng(loss_fn: Callable[..., Any], name: str = "loss_fn") -> bool:
    """Whether a function, the argument `name` of the user's call, takes a random key.

    Raises:
        TypeError: it can't be called with (model, batch) or (model, batch, key).
    """
    expected = f"{name} must be a function {name}(model, batch) or {name}(model, batch, rng)"
    if not callable(loss_fn):
        raise TypeError(f"{expected}, not a {type(loss_fn).__qualname__}.")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError as error:
        raise TypeError(f"{expected}; {name_of(loss_fn)} has no signature to read.") from error
    every = signature.parameters.values()
    positional = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named_rng = len(positional) > 2 and positional[2].name in _KEYS
    num_required = sum(p.default is p.empty for p in positional)
    # An optional third argument may be anything; only the name `rng` or `key` makes it a key.
    takes_rng = named_rng or num_required > 2
    try:
        # Bound instead of counted, because defaults and `*args` allow more calls than there are
        # names.
        signature.bind(*(None,) * (3 if takes_rng else 2))
    except TypeError as error:
        raise TypeError(
            f"{expected}, but {name_of(loss_fn)} is called as {signature}; {_UNPACK}."
        ) from error
    names = [p.name for p in positional[:2]]
    if names[1:] == ["model"] and names[0] in _BATCHES:
        raise TypeError(
            f"{expected}, but {name_of(loss_fn)} takes `{names[0]}` first: the model comes first."
        )
    keywords = [p.name for p in every if p.kind is p.KEYWORD_ONLY and p.name in _KEYS]
    if keywords:
        raise TypeError(
            f"{expected}, but {name_of(loss_fn)} takes `{keywords[0]}` by its name only: a random "
            "key is passed as the third argument."
        )
    # A third argument is a key, so whatever else it is meant to be would be missing.
    if takes_rng and positional[2:] and not named_rng:
        raise TypeError(
            f"{expected}, but {name_of(loss_fn)} has `{positional[2].name}` in place of a random "
            f"key; {_UNPACK}."
        )
    return takes_rng


def check_loss(loss_fn: Any, name: str = "loss_fn") -> None:
    """Checks that a function of model and batch takes the right arguments and is hashable.

    Raises:
        TypeError: If it isn't; `name` is its argument in the message.
    """
    takes_rng(loss_fn, name)
    try:
        hash(loss_fn)
    except TypeError as error:
        raise TypeError(
            refused(name, "hashable, since compiled steps are kept by it", loss_fn)
        ) from error


def loss_arguments(loss_fn: Callable[..., Any], batch: Any, rng: jax.Array) -> tuple[Any, ...]:
    """The arguments of a loss function after the model: the batch, and a key if it takes one."""
    return (batch, rng) if takes_rng(of_user(loss_fn), argument_of(loss_fn)) else (batch,)


@contextlib.contextmanager
def explaining_concretization(loss_fn: Callable[..., Any]) -> Iterator[None]:
    """Explains JAX's error for code that asks for the value of an array while it is traced.

    Raises:
        TypeError: The function, or the model, has such code.
    """
    try:
        yield
    except NEEDS_VALUE as error:
        who = f"{argument_of(loss_fn)} ({name_of(loss_fn)})"
        is_loss = not isinstance(loss_fn, Prediction)
        advice = 'return it as a metric, (loss, {"name": number}), or ' if is_loss else ""
        look = f"To look at one, {advice}print it with jax.debug.print. "
        raise value_needed(who, error, look) from None


def checked_result(
    loss_fn: Callable[..., Any], result: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Checks a loss function's result and returns it as (loss, metrics).

    Raises:
        ValueError: It is not a scalar loss with scalar metrics, or a metric's name is reserved.
    """
    name = f"{argument_of(loss_fn)} ({name_of(loss_fn)})"
    if isinstance(result, tuple) and len(result) != 2:
        raise ValueError(
            f"{name} must return a loss or (loss, metrics), not a tuple of {len(result)} values; "
            'put further values into the metrics, as in (loss, {"accuracy": accuracy}).'
        )
    value, metrics = result if isinstance(result, tuple) else (result, {})
    loss = _as_number(value)
    if loss is None or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"{name} must return a scalar floating-point loss, not {_describe(value)}; take the "
            "mean over the batch."
        )
    if not isinstance(metrics, dict) or not all(isinstance(key, str) for key in metrics):
        raise ValueError(
            f"{name} must return a loss or (loss, metrics) with a dict from str to scalars, as in "
            f'(loss, {{"accuracy": accuracy}}), but its metrics are {_describe(metrics)}.'
        )
    reserved = sorted(key for key in metrics if key in RESERVED or key.startswith(EVAL_PREFIX))
    if reserved:
        raise ValueError(
            f"{name} may not name a metric {reserved[0]!r}: every step's record uses this name "
            f"itself. Reserved are {', '.join(RESERVED)} and names that begin with {EVAL_PREFIX}; "
            "rename the metric."
        )
    numbers = {}
    for key, metric in metrics.items():
        number = _as_number(metric)
        if number is None or number.shape != ():
            raise ValueError(
                f"{name} must return scalar numbers as metrics; {key!r} is {_describe(metric)}."
            )
        numbers[key] = number
    return loss, numbers


def checked_rows(fn: Callable[..., Any], result: Any, batch: Any) -> Any:
    """Checks what the `fn` of `Trainer.predict` returned, and returns it with arrays of JAX.

    Args:
        fn: The user's function.
        result: Its result.
        batch: The batch that it was called with.

    Raises:
        ValueError: It is not a pytree of arrays with rows for the examples of the batch.
    """
    # The arrays of a graph have several sizes: of nodes and of edges.
    sizes = list(dict.fromkeys(x.shape[0] for x in jax.tree.leaves(batch)))
    rule = (
        f"fn ({name_of(fn)}) must return a pytree of arrays whose first axis has the "
        f"{' or '.join(map(str, sizes))} examples of the batch that it is called with"
    )
    found = jax.tree_util.tree_leaves_with_path(result)
    if not found:
        raise ValueError(f"{rule}, but its result, {_describe(result)}, holds no arrays.")
    for path, value in found:
        number = _as_number(value)
        if number is None or not number.shape or number.shape[0] not in sizes:
            name = f"result{jax.tree_util.keystr(path)}"
            raise ValueError(f"{rule}, but its {name} is {_describe(value)}.")
    return jax.tree.map(jnp.asarray, result)


def _as_number(value: Any) -> jax.Array | None:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float):
        return None
    # Python numbers are as good a loss as arrays.
    dtype = jnp.result_type(value)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
    return jnp.asarray(value) if is_real else None


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"a {type(value).__qualname__}"
