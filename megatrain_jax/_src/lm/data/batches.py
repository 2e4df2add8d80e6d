"""Batches of one or several corpora, with random access by number.

With several corpora, each row belongs to one of them, and rows are dealt out in exact proportions.
"""

import sys
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.corpus import Corpus
from megatrain_jax._src.lm.data.image_batches import most_images, pixels_of
from megatrain_jax._src.lm.data.packing import (
    Batch,
    Epoch,
    Packing,
    batch,
    draw_epoch,
    own_rows,
    spread,
    with_counts,
)

# The minimum and maximum of each option; larger values would fit no machine.
_BOUNDS = {
    "length": (2, 2**22),
    "batch_size": (1, 2**20),
    "epochs": (1, 2**31 - 1),
    "workers": (0, 2**10),
    "seed": (0, None),
}
# The current epoch, and the next one if a batch or a thread reaches into it.
_EPOCHS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The options of a dataset: how documents become batches.

    Attributes:
        length: Tokens of a row.
        batch_size: Rows of a batch.
        seed: The seed of the order.
        shuffle: Whether the order is drawn at random, anew every epoch.
        epochs: How often every document is seen; None continues for ever.
        workers: Number of threads that build batches ahead; with 0 each is built on request.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = 1
    workers: int = 0

    def __post_init__(self) -> None:
        """Checks each option.

        Raises:
            TypeError: If one has a wrong type.
            ValueError: If one is out of range.
        """
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name != "epochs":
                checks.integer(name, value, least=least, most=most)
        checks.boolean("shuffle", self.shuffle)


class Rows:
    """The rows of a packed corpus by number, epoch after epoch; thread-safe.

    Attributes:
        corpus: The tokens.
        most_units: The maximum number of units in a row.
        most_images: The maximum number of images in a row, whatever order is drawn.
    """

    def __init__(
        self,
        corpus: Corpus,
        chosen: Int32[np.ndarray, " n"],
        packing: Packing,
        options: DatasetOptions,
    ):
        """Makes the rows of some units; an epoch is drawn on request.

        Args:
            corpus: The tokens.
            chosen: The units of the corpus that are used.
            packing: Packing of the lengths of these units.
            options: Options for making rows from them.
        """
        self.corpus = corpus
        self.most_units = int(np.diff(packing.offsets).max())
        self.most_images = most_images(corpus, chosen, packing)
        self._chosen = chosen
        self._packing = packing
        self._options = options
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int | None:
        """The number of rows of all epochs; None if they never end."""
        epochs = self._options.epochs
        return None if epochs is None else epochs * self._packing.num_rows

    def __getitem__(self, number: int) -> np.ndarray:
        """The units of a row."""
        epoch, row = divmod(number, self._packing.num_rows)
        (units,) = self._epoch(epoch).rows(row, row + 1)
        return self._chosen[units]

    def _epoch(self, number: int) -> Epoch:
        with self._lock:
            if number not in self._epochs:
                lengths = self.corpus.unit_lengths[self._chosen]
                seed = self._options.seed if self._options.shuffle else None
                self._epochs[number] = draw_epoch(self._packing, lengths, seed, number)
                # Threads may reach back as well as ahead, so the epoch just drawn is always kept.
                for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                    if old != number:
                        del self._epochs[old]
            return self._epochs[number]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the lock and the drawn epochs, for another process."""
        return {**self.__dict__, "_lock": None, "_epochs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of `__getstate__`, with a new lock."""
        self.__dict__.update(state, _lock=threading.Lock())


class Batches:
    """All batches by number, in the form that Grain reads.

    A batch takes the next rows, even across epochs; only the last one may have too few. The batches
    end when a corpus has no row left for its turn.

    Attributes:
        size: Rows of a batch.
        num_rows: Rows of all batches; None if they never end.
    """

    def __init__(
        self, parts: Sequence[Rows], proportions: Sequence[int], length: int, batch_size: int
    ):
        """Makes the batches of some corpora; each is built on request.

        Args:
            parts: The rows of each corpus.
            proportions: For each corpus, its number of rows per sum of all proportions.
            length: Tokens of a row.
            batch_size: Rows of a batch.
        """
        self._parts = tuple(parts)
        self._proportions = tuple(proportions)
        self._length, self.size = length, batch_size
        # Units are numbered across all corpora, so a unit's number identifies its corpus.
        self._first = np.cumsum([0, *(len(part.corpus.unit_starts) for part in parts)])
        self._num_pairs = max(part.most_units for part in parts)
        self._num_images = max(part.most_images for part in parts)
        self.num_rows = self._count()

    def __len__(self) -> int:
        """The number of batches; the largest integer that `len` can return if they never end."""
        return sys.maxsize if self.num_rows is None else -(-self.num_rows // self.size)

    def __getitem__(self, index: int) -> Batch:
        """Builds one batch."""
        stop = (index + 1) * self.size
        if self.num_rows is not None:
            stop = min(stop, self.num_rows)
        rows, before = [], counts(index * self.size, self._proportions)
        for number in range(index * self.size + 1, stop + 1):
            # From one number to the next, exactly one corpus's count grows; the row belongs to it.
            after = counts(number, self._proportions)
            (turn,) = (
                i for i, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1
            )
            rows.append(self._parts[turn][before[turn]] + self._first[turn])
            before = after
        # Counted over the whole batch, before each process takes its own rows.
        whole = with_counts(self._arrays(spread(rows, self.size)))
        return {name: array[own_rows(self.size)] for name, array in whole.items()}

    def _arrays(self, rows: list[np.ndarray]) -> Batch:
        whose = [
            np.searchsorted(self._first, row[0], "right") - 1 if len(row) else 0 for row in rows
        ]
        whole: Batch = {}
        for turn, part in enumerate(self._parts):
            here = np.flatnonzero(np.array(whose) == turn)
            own = [rows[i] - self._first[turn] for i in here]
            if not any(len(row) for row in own):
                continue
            arrays = batch(part.corpus, own, self._length, self._num_pairs)
            if part.corpus.processor is not None:
                arrays["pixel_values"] = pixels_of(part.corpus, own, self._num_images)
            for name, array in arrays.items():
                # Allocated for the first corpus that has rows; all corpora have the same kinds of
                # arrays.
                if name not in whole:
                    whole[name] = np.zeros((len(rows), *array.shape[1:]), array.dtype)
                whole[name][here] = array
        return whole

    def _count(self) -> int | None:
        """The number of rows until a corpus has no row left when its turn comes."""
        ends = []
        for turn, part in enumerate(self._parts):
            if part.count is not None:
                # Counts only grow, so bisection finds the first row that this corpus can't give.
                numbers = range((part.count + 2) * sum(self._proportions))
                ends.append(
                    bisect_left(
                        numbers,
                        part.count + 1,
                        key=lambda n, t=turn: counts(n, self._proportions)[t],
                    )
                    - 1
                )
        return min(ends, default=None)


def counts(number: int, proportions: Sequence[int]) -> list[int]:
    """The number of rows from each corpus among the first `number` rows of a mixture.

    For example, with proportions 1 and 2 the first four rows come from corpora 0, 1, 1 and 0: the
    counts after them are [1, 0], [1, 1], [1, 2] and [2, 2]. After each complete round the counts
    are exactly proportional; in between, each row goes to one corpus.

    Args:
        number: Number of rows.
        proportions: For each corpus, its number of rows per sum of all proportions.
    """
    result, left, total = [], number, sum(proportions)
    for proportion in proportions:
        others = left * (total - proportion) // total
        result.append(left - others)
        left, total = others, total - proportion
    return result
