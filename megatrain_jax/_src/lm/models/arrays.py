"""Checks of the models' arguments: arrays (also JAX tracers), dtypes, and token ids on the host."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.checks import refused


def check_array(
    name: str, value: Any, axes: str, *, num_axes: int, of_integers: bool = False
) -> None:
    """Checks that an argument is an array with this number of axes.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        axes: Names of the axes, for the message.
        num_axes: Number of axes.
        of_integers: Whether its numbers must be integers.

    Raises:
        TypeError: If it is not an array, or not of integers where they are required.
        ValueError: If it has a different number of axes.
    """
    what = f"an array {axes}{' of integers' if of_integers else ''}"
    if not (hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")):
        raise TypeError(refused(name, what, value))
    if of_integers and not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be {what}, but is of {value.dtype}")
    if value.ndim != num_axes:
        raise ValueError(f"`{name}` must be {what}, but has shape {tuple(value.shape)}")


def check_floating(name: str, value: Any) -> None:
    """Checks that an argument is a floating-point dtype.

    Raises:
        TypeError: If it is not.
    """
    try:
        floating = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(refused(name, "a dtype of floating numbers", value))


def check_ids(batch: Any, vocab_size: int) -> None:
    """Checks the ids of a batch of `next_token_loss`.

    Args:
        batch: If a mapping has `tokens` and `labels` as NumPy integer arrays of equal shape, they
            are checked. Tokens must be at least 0; labels may be negative or, where `mask` is 0,
            anything, because they don't count. All remaining batches pass.
        vocab_size: Upper bound that all ids must stay below.

    Raises:
        ValueError: If an id is out of range. The message gives the array, the number of such ids
            and the place of the first.
    """
    if not isinstance(batch, Mapping):
        return
    tokens, labels, mask = (batch.get(name) for name in ("tokens", "labels", "mask"))
    if not _is_ids(tokens):
        return
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise _out_of_range("tokens", tokens, (tokens < 0) | (tokens >= vocab_size), vocab_size)
    if _is_ids(labels) and labels.shape == tokens.shape:
        if labels.size and labels.max() >= vocab_size:
            counts = True if mask is None else np.asarray(mask) != 0
            beyond = (labels >= vocab_size) & counts
            if beyond.any():
                raise _out_of_range("labels", labels, beyond, vocab_size)


def check_counts(batch: Any) -> None:
    """Checks that counts of a whole batch are the same in all of its rows.

    Args:
        batch: If a mapping has NumPy arrays whose names end in `_per_row`, they are checked. All
            remaining batches pass.

    Raises:
        ValueError: If rows differ, for example because each has its own number of labels.
    """
    for name, counts in batch.items() if isinstance(batch, Mapping) else ():
        if not (isinstance(name, str) and name.endswith("_per_row")):
            continue
        if isinstance(counts, np.ndarray) and counts.size and (counts != counts.flat[0]).any():
            raise ValueError(
                f"batch[{name!r}] must have one number for all rows, but has {counts.min():g} to "
                f"{counts.max():g}. It is the mean over the rows of the whole batch, so that "
                "microbatches with few labels don't count for more: fill it with the batch's count "
                "divided by its number of rows"
            )


def _is_ids(array: Any) -> TypeGuard[np.ndarray]:
    return isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.integer)


def _out_of_range(name: str, ids: np.ndarray, wrong: np.ndarray, vocab_size: int) -> ValueError:
    row, *position = (int(i) for i in np.argwhere(wrong)[0])
    place = f"row {row}" + "".join(f", position {i}" for i in position)
    found = ids[wrong]
    return ValueError(
        f"batch[{name!r}] has {found.size:,} of {ids.size:,} ids out of range, the smallest "
        f"{found.min()}, the largest {found.max()}, the first in {place}: the model's vocabulary "
        f"has {vocab_size:,} entries, 0 to {vocab_size - 1}. Usually the tokenizer has more "
        "entries than the model: use the tokenizer that the model was trained with"
    )
