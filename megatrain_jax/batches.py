"""Batches on their way to the device: checked under the user's own names, and put there early.

A wrong batch is named here, by its path, before it can become an error from inside the compiler.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from megatrain_jax import checks

# A step or two may be drawn ahead of the one that is saved.
_STATES_KEPT = 4
_END = object()
_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)


def check_batch(batch: Any, microbatches: int = 1, name: str = "batch") -> None:
    """Checks that `batch` is a pytree of arrays that can be cut into microbatches.

    Args:
        batch: A pytree of NumPy or JAX arrays (or their `jax.ShapeDtypeStruct`s) whose leading
            axes, one entry an example, all have the same size.
        microbatches: Into how many equal parts the leading axis will be cut.
        name: What the batch is called.

    Raises:
        TypeError: If it is no pytree, or a leaf is no array or holds something a device can't
            compute with.
        ValueError: If there are no leaves, or the leading axes are missing, empty, unequal or not
            divisible by `microbatches`.
    """
    leaves = checks.leaves(name, batch)
    if not leaves:
        raise ValueError(f"`{name}` holds no arrays")
    for path, leaf in leaves:
        _check_leaf(_name(path, name), leaf)
    (first_path, first), *others = leaves
    examples = first.shape[0]
    for path, leaf in others:
        if leaf.shape[0] != examples:
            raise ValueError(
                f"the arrays of a batch must agree in their leading axis (the examples), but "
                f"{_name(first_path, name)} has shape {first.shape} and {_name(path, name)} has "
                f"shape {leaf.shape}"
            )
    if examples % microbatches:
        raise ValueError(
            f"`microbatches`={microbatches} does not divide the {examples} examples of the batch: "
            f"{_name(first_path, name)} has shape {first.shape}"
        )


def check_like(batch: Any, sample: Any) -> None:
    """Checks that `batch` has the tree structure and the dtypes of `sample`; shapes may differ.

    Both must have passed `check_batch`. Dtypes are compared as JAX will see them: without
    ``jax_enable_x64``, int64 and int32 are the same.

    Raises:
        ValueError: If a path is missing, is new, or has another dtype.
    """
    ours, theirs = (
        {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (batch, sample)
    )
    missing = [name for name in theirs if name not in ours]
    added = [name for name in ours if name not in theirs]
    if missing or added:
        raise ValueError(
            "the batch is built differently from the first one: "
            f"missing: {', '.join(missing) or 'nothing'}; new: {', '.join(added) or 'nothing'}"
        )
    structure, expected = jax.tree.structure(batch), jax.tree.structure(sample)
    if structure != expected:
        raise ValueError(f"the batch has the structure {structure}, but the first had {expected}")
    for name, leaf in ours.items():
        dtype, wanted = _dtype(leaf), _dtype(theirs[name])
        if dtype != wanted:
            raise ValueError(f"{name} has dtype {dtype}, but in the first batch it had {wanted}")


def batch_size(batch: Any) -> tuple[int, str]:
    """Says how much work a checked batch is, for the progress bar.

    Returns:
        The size and its unit. An integer array of two axes is taken for token ids (the largest,
        if there are several), and its entries are counted as ``"tokens"``; without one the
        leading axis is counted as ``"examples"``.
    """
    leaves = jax.tree.leaves(batch)
    tokens = [
        leaf.size for leaf in leaves if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return (max(tokens), "tokens") if tokens else (leaves[0].shape[0], "examples")


class Source(Iterator[Any]):
    """The user's iterator, and how to get back to where it was.

    An iterator with `get_state` and `set_state`, as Grain's have them, is asked for its state
    after each batch; of any other one the batches are counted.

    Attributes:
        count: How many batches it gave since the data's start.
    """

    def __init__(self, data: Iterable[Any]):
        """Starts iterating; draws nothing yet."""
        self._iterator: Any = iter(data)
        self.count = 0
        self._states: dict[int, Any] = {}

    def __next__(self) -> Any:
        """Gives the next batch."""
        batch = next(self._iterator)
        self.count += 1
        if hasattr(self._iterator, "get_state"):
            self._states[self.count] = self._iterator.get_state()
            self._states.pop(self.count - _STATES_KEPT, None)
        return batch

    def position(self, count: int) -> dict[str, Any]:
        """Where the data was after `count` batches, one of the last few, as JSON."""
        state = self._states.get(count)
        if isinstance(state, bytes):
            return {"batches": count, "bytes": base64.b64encode(state).decode()}
        return {"batches": count, "state": state}

    def go_to(self, position: Mapping[str, Any], progress: bool) -> None:
        """Goes to where the data was, by its state or by skipping batches.

        Raises:
            ValueError: If the data ends before.
        """
        state = position.get("state")
        if "bytes" in position:
            state = base64.b64decode(position["bytes"])
        if state is not None and hasattr(self._iterator, "set_state"):
            self._iterator.set_state(state)
            self.count = position["batches"]
            return
        skipped = range(self.count, position["batches"])
        for _ in tqdm(skipped, "skipping batches", unit="batch", disable=not progress):
            if next(self, _END) is _END:
                raise ValueError(
                    f"`data` gave {self.count} batches, but {position['batches']} were used before "
                    "the checkpoint: it is other data, or shorter"
                )


def is_state(position: Mapping[str, Any]) -> bool:
    """Whether a position is the iterator's own state, not a number of batches."""
    return position.get("state") is not None or "bytes" in position


class Prefetch(Iterator[Any]):
    """Iterates over `data` with the next batches already on the device.

    Call `fill` once a step has been dispatched: what the iterable does to make the next batch,
    and the batch's way to the device, then hide under that step. Batches are put there with an
    explicit `jax.device_put`, which `jax.transfer_guard` permits.

    It draws from the iterable only on `fill` and on `next`, never beyond `depth` batches ahead.
    """

    def __init__(
        self,
        data: Iterable[Any],
        check: Callable[[Any], None],
        depth: int = 1,
    ):
        """Starts iterating; draws nothing yet.

        Args:
            data: An iterable of batches.
            check: Raises a `TypeError` or `ValueError` if a batch, which is on the host yet, is
                wrong.
            depth: How many batches `fill` draws ahead.

        Raises:
            ValueError: If `depth` is less than 1.
        """
        if depth < 1:
            raise ValueError(f"`depth` must be at least 1, but is {depth}")
        self._source = iter(data)
        self._depth = depth
        self._ready: deque[Any] = deque()
        self._check = check
        self._drawn = 0

    def fill(self) -> None:
        """Draws batches until `depth` of them are ready or the data has ended.

        Raises:
            TypeError: If a batch is of a wrong kind.
            ValueError: If a batch is wrong.
        """
        while len(self._ready) < self._depth:
            try:
                batch = next(self._source)
            except StopIteration:
                return
            self._drawn += 1
            with numbered(self._drawn):
                self._check(batch)
            self._ready.append(jax.device_put(batch))

    @property
    def exhausted(self) -> bool:
        """Whether no batch is ready; after `fill`, whether the data has ended."""
        return not self._ready

    def __next__(self) -> Any:
        """Gives the oldest batch that is ready, drawing one if none is."""
        if not self._ready:
            self.fill()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Tells with an error which batch of `data` it was about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"This was batch {number} of `data` (counted from 1).")
        raise


def _check_leaf(name: str, leaf: Any) -> None:
    if not isinstance(leaf, _ARRAYS):
        raise TypeError(
            f"a batch must be a pytree of NumPy or JAX arrays, but {name} is of type "
            f"{type(leaf).__name__}; convert it with np.asarray"
        )
    known = (np.number, np.bool_, jax.dtypes.extended)
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in known):
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which can't go to a device; a batch holds numbers "
            "only (object arrays usually come from lists of unequal lengths: pad them)"
        )
    if not leaf.shape:
        raise ValueError(
            f"{name} is a scalar; every array of a batch needs a leading axis of examples"
        )
    if not leaf.shape[0]:
        raise ValueError(f"{name} has shape {leaf.shape}: there are no examples in it")


def _name(path: tuple[Any, ...], batch: str = "batch") -> str:
    return f"{batch}{jax.tree_util.keystr(path)}"


def _dtype(leaf: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
