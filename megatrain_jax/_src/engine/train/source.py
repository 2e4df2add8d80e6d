"""Draws batches from the user's data, and puts them on the device ahead of time.

The state of a data iterator becomes JSON, and comes back with the same types.

Numbers, strings, lists and dicts with string keys are written unchanged. JSON has no form for the
remaining types, so each such value becomes a dict with a special key::

    {"i": np.int64(3), "at": (1, 2)}

    {"i": {"megatrain_jax": ["scalar", "<i8", [], "AwAAAAAAAAA="]},
     "at": {"megatrain_jax": ["tuple", [1, 2]]}}
"""

import base64
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from operator import length_hint
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.activity import doing
from megatrain_jax._src.common.errors import noting
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.options.inputs import eval_batches
from megatrain_jax._src.engine.options.options import EvalData, LoopOptions
from megatrain_jax._src.engine.runtime.evaluation import owned
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.state.processes import Processes
from megatrain_jax._src.engine.train.result import EMPTY

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


# ---- batches

# Number of saved states: one or two batches may be drawn beyond the step that is saved.
_STATES_KEPT = 4
_END = object()


def length_of(data: Any) -> int | None:
    """The number of batches in data; None if it is unknown, as of a generator."""
    try:
        # An iterator may know how much is left, as the iterator of a list does.
        length = length_hint(data, -1)
    # A data set may have the method and raise an error of its own, if its batches never end.
    except Exception:
        return None
    return None if length < 0 else length


def length_of_pass(data: Any) -> int | None:
    """The number of batches of data that can be iterated over anew; None if it is unknown."""
    return None if isinstance(data, Iterator) else length_of(data)


def in_epochs(data: Any, options: LoopOptions) -> tuple[Any, LoopOptions]:
    """The data repeated for `epochs`, and the options with the number of steps instead.

    Without `eval_every`, evaluation data is evaluated after each epoch.

    Args:
        data: The user's data.
        options: The options, unchanged if they have no `epochs`.

    Raises:
        TypeError: If the data has no length, or can't be iterated over anew.
        ValueError: If the data is empty.
    """
    epochs = options.epochs
    if epochs is None:
        return data, options
    length = length_of_pass(data)
    if length is None:
        raise TypeError(
            f"`epochs`={epochs} needs `data` with a length that can be iterated over anew, such as "
            f"a list, but it is of type {type(data).__name__}: give `steps` instead"
        )
    if not length:
        raise ValueError(EMPTY)
    every = length if options.eval_data is not None else None
    changes = {"steps": epochs * length, "eval_every": options.eval_every or every}
    return _Epochs(data, epochs), replace(options, epochs=None, **changes)


class _Epochs:
    """Data that is iterated over several times."""

    def __init__(self, data: Iterable[Any], epochs: int):
        self._data, self._epochs = data, epochs
        self.end_tokens = _end_tokens(data)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._epochs):
            yield from self._data


class Source(Iterator[Any]):
    """The user's data as an iterator with a position that can be saved and restored.

    If the run saves checkpoints and the iterator has `get_state` and `set_state`, as Grain's do,
    its state is read after each batch. Without these methods batches are counted.

    Attributes:
        count: Number of batches drawn since the data's start.
        length: Number of batches from its start to its end; None if unknown.
        first: Hash of the data's first batch, so that a resumed run can recognise its data; None
            for a run that does not compare it.
        end_tokens: Ids of the tokens that end the data's texts, if the data knows them.
    """

    def __init__(self, data: Iterable[Any], *, saved: bool):
        """Starts iterating; draws nothing yet.

        Args:
            data: The user's data.
            saved: Whether the run saves the position in its checkpoints.
        """
        self.length = length_of(data)
        self.end_tokens = _end_tokens(data)
        self._iterator: Any = iter(data)
        methods = "get_state", "set_state"
        self._has_state = saved and all(hasattr(self._iterator, name) for name in methods)
        self.count = 0
        self.first: str | None = None
        self._states: dict[int, Any] = {}

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            TypeError: If the iterator's state can't be saved, but the run must save it.
        """
        batch = next(self._iterator)
        self.count += 1
        if self._has_state:
            # After each batch, because it is not known yet which step will be saved. Copied at
            # once, because an iterator may return the same dict each time and change it.
            self._states[self.count] = encoded_state(self._iterator.get_state())
            self._states.pop(self.count - _STATES_KEPT, None)
        return batch

    def position(self, count: int) -> dict[str, Any]:
        """The data's position after `count` batches, one of the last few, as JSON."""
        found: dict[str, Any] = {"batches": count}
        if self.first is not None:
            found["first"] = self.first
        return {**found, "state": self._states.get(count)}

    def is_data_of(self, position: Mapping[str, Any]) -> bool:
        """Whether a position may belong to this data, judged by the first batch."""
        first = position.get("first")
        return first is None or self.first is None or first == self.first

    def go_to(self, position: Mapping[str, Any], progress: bool, once: bool) -> None:
        """Moves to a position, by the iterator's state or by skipping batches.

        Args:
            position: The position.
            progress: Whether to show progress.
            once: Whether this is one pass over the user's data, because no number was given.

        Raises:
            ValueError: If the data ends before.
        """
        state = decoded_state(position.get("state"))
        # Skipping works for any data; it draws and drops all batches used before.
        if state is not None and hasattr(self._iterator, "set_state"):
            self._iterator.set_state(state)
            self.count = position["batches"]
            return
        skipped = range(self.count, position["batches"])
        for _ in tqdm(skipped, "skipping batches", unit="batch", disable=not progress):
            if next(self, _END) is _END:
                missing = ", or `epochs` or `steps` is missing" if once else ""
                raise ValueError(
                    f"`data` ended after {self.count} of the {position['batches']} batches that "
                    f"were used before the checkpoint: it is different data, or shorter{missing}"
                )


def _end_tokens(data: Any) -> tuple[int, ...]:
    """The attribute `end_tokens` of data, as this library's datasets have it."""
    found = getattr(data, "end_tokens", None)
    return found if isinstance(found, tuple) and all(type(i) is int for i in found) else ()


def is_state(position: Mapping[str, Any]) -> bool:
    """Whether a position is the iterator's own state, not a number of batches."""
    return position.get("state") is not None or "parts" in position


def joined_positions(position: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """The position of a run's data: each process's position, or the one that they share."""
    if processes.is_alone:  # the states of other processes are not known
        return {**position, "state": None}
    parts = processes.gather("the position of `data`", position)
    if all(part == parts[0] for part in parts):
        return position
    return {"batches": position["batches"], "parts": parts}


def own_position(position: Mapping[str, Any], processes: Processes) -> Mapping[str, Any]:
    """This process's position in its data, from the result of `joined_positions`.

    A different number of processes divides the data differently, so batches are counted instead.
    """
    parts = position.get("parts", [position] * processes.count)
    return (
        parts[processes.index]
        if len(parts) == processes.count
        else {"batches": position["batches"]}
    )


def first_evaluation(eval_data: EvalData) -> tuple[Any, Iterable[Any]]:
    """The first batch to evaluate, and the batches of the first evaluation, with it.

    The result of a function also serves the first evaluation, because a second call may go on in
    the same data.

    Raises:
        ValueError: If there is no batch.
        TypeError: If a function did not return batches.
    """
    batches = eval_batches(eval_data)
    with deferred_interrupt(second_interrupts=True):
        iterator = iter(batches)
        first = next(iterator, _END)
    if first is _END:
        raise ValueError("`eval_data` gave no batch to evaluate")
    # An iterator's first batch can't be drawn again.
    return first, chain([first], iterator) if iterator is batches else batches


def naming_evaluation() -> AbstractContextManager[None]:
    """Adds to an error that it is about the first batch of `eval_data`."""
    return noting("The first batch of `eval_data` is checked before the first step.")


class Prefetch(Iterator[Any]):
    """Iterates over `data` with the next batch already on the device.

    Call `fill` after a step has been dispatched: making the next batch and transferring it to the
    device then overlap with that step. Batches are transferred with an explicit `jax.device_put`,
    which `jax.transfer_guard` permits.

    It draws from the iterable only on `fill` and on `next`, never more than one batch ahead. If
    several processes each have a part of the data, the data ends for all with the first that ends.

    Attributes:
        seconds: Of each process, the seconds between its last two batches in which it did not wait
            for messages of other processes.
    """

    def __init__(
        self,
        data: Iterable[Any],
        check: Callable[[Any], None],
        processes: Processes,
        first: int = 0,
    ):
        """Starts iterating; draws nothing yet.

        Args:
            data: An iterable of batches.
            check: Raises a `TypeError` or `ValueError` if a batch, still on the host, is wrong.
            processes: The processes that each have a part of the data.
            first: Number of batches before this data, for messages.
        """
        self._source = iter(data)
        self._ready: Any = _END
        self._check, self._processes = check, processes
        self._drawn = first
        self._ended = False
        self.seconds: list[float] = []
        self._began, self._waited = time.perf_counter(), processes.waited

    def fill(self) -> None:
        """Draws a batch unless one is ready or the data has ended.

        Raises:
            TypeError: If the batch is of a wrong kind.
            ValueError: If the batch is wrong.
            PeerEndedError: If another process has ended.
        """
        if self._ended or not self.exhausted:
            return
        with doing(f"drawing batch {self._drawn + 1} of `data`", of_user=True):
            batch = next(self._source, _END)
        if batch is not _END:
            self._drawn += 1
            with naming_batch(self._drawn):
                self._check(batch)
            # With several processes, none has the whole batch.
            if self._processes.count == 1:
                batch = jax.device_put(owned(batch))
            self._ready = batch
        # A message cut off halfway would be mistaken for the next one.
        with deferred_interrupt():
            self._agree_on_end(batch is _END)

    def _agree_on_end(self, ended: bool) -> None:
        """Ends the data for all processes once it has ended for one."""
        own = time.perf_counter() - self._began - (self._processes.waited - self._waited)
        found = self._processes.gather("the next batch of `data`", [ended, round(own, 4)])
        self._began, self._waited = time.perf_counter(), self._processes.waited
        rows, self.seconds = [row for row, _ in found], [seconds for _, seconds in found]
        self._ended = any(rows)
        if self._ended:
            self._ready = _END
        if self._ended and not all(rows) and self._processes.is_first:
            first = [i for i, row in enumerate(rows) if row]
            warn_user(
                f"`data` has ended in {len(first)} of {len(rows)} processes, the first of them "
                f"process {first[0]}: the batches left in all remaining processes are not used.",
            )

    @property
    def exhausted(self) -> bool:
        """Whether no batch is ready; after `fill`, whether the data has ended."""
        return self._ready is _END

    def __next__(self) -> Any:
        """Returns the batch that is ready, or draws one."""
        self.fill()
        if self.exhausted:
            raise StopIteration
        batch, self._ready = self._ready, _END
        return batch


def naming_batch(number: int) -> AbstractContextManager[None]:
    """Adds the number of a batch to an error about it."""
    return noting(f"This was batch {number} of `data` (counted from 1).", TypeError, ValueError)
