"""Packed batches of one or several corpora, with random access by number.

The lengths that share a row are found once, by best fit; the documents that take these places are
drawn anew every epoch. So every epoch has the same number of rows. With several corpora, each row
belongs to one of them, and rows are dealt out in exact proportions.
"""

import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32, Int64

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.corpus import Corpus
from megatrain_jax._src.lm.data.image_files import ImageRoom

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A packing: which lengths share a row.

    Attributes:
        ranks: Row after row, the rank of each unit by length (the longest unit has rank 0).
        offsets: The start of each row in `ranks`, and the end of the last.
    """

    ranks: Int32[np.ndarray, " units"]
    offsets: Int64[np.ndarray, " rows+1"]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch's rows: which units are in which row.

    Attributes:
        units: The units, row after row.
        offsets: The start of each row in `units`, and the end of the last.
    """

    units: Int32[np.ndarray, " units"]
    offsets: Int64[np.ndarray, " rows+1"]

    def __getitem__(self, row: int) -> Int32[np.ndarray, " n"]:
        """The units of a row."""
        return self.units[self.offsets[row] : self.offsets[row + 1]]


def pack(lengths: Int32[np.ndarray, " units"], length: int) -> Packing:
    """Packs by best fit, longest first: each unit goes to the fullest row that has space for it.

    For example, lengths 5, 3, 3, 2 and 1 in rows of 8: 5 begins row 0 and 3 fills it; the second 3
    begins row 1, followed by 2 and 1. So `ranks` are [0, 1, 2, 3, 4] and `offsets` [0, 2, 5].

    Args:
        lengths: The units' lengths, from 1 to `length`, in any order.
        length: Tokens of a row.
    """
    row_of = np.empty(len(lengths), np.int32)
    # Rows by their free space, and the sorted sizes of free space that some row has.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    num_rows = 0
    for rank, size in enumerate(np.sort(lengths)[::-1].tolist()):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, row = length, num_rows
            num_rows += 1
        row_of[rank] = row
        # A full row is never looked at again.
        if left := room - size:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    ranks = np.argsort(row_of, kind="stable").astype(np.int32)
    counts = np.bincount(row_of, minlength=num_rows)
    return Packing(ranks=ranks, offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def draw_epoch(
    packing: Packing, lengths: Int32[np.ndarray, " units"], seed: int | None, epoch: int
) -> Epoch:
    """Assigns units to the lengths of a packing, and orders its rows.

    Args:
        packing: Packing of `lengths`.
        lengths: The units' lengths, as given to `pack`.
        seed: Seed of the order, new in every epoch; None keeps the order of `lengths`, as far as
            packing allows.
        epoch: Number of the epoch, from 0.
    """
    rng = np.random.default_rng([seed, epoch]) if seed is not None else None
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    # Units of one length stay in drawn order, because the sort by length is stable.
    by_rank = order[np.argsort(-lengths[order], kind="stable")]
    units = by_rank[packing.ranks]
    starts, counts = packing.offsets[:-1], np.diff(packing.offsets)
    if rng is None:
        # A row comes where its first unit would.
        rows = np.argsort(np.minimum.reduceat(units, starts), kind="stable")
    else:
        rows = rng.permutation(packing.num_rows)
    offsets = np.concatenate([[0], np.cumsum(counts[rows])])
    moved = np.repeat(starts[rows] - offsets[:-1], counts[rows]) + np.arange(len(units))
    return Epoch(units=units[moved].astype(np.int32), offsets=offsets)


def spread(rows: list[np.ndarray], wanted: int) -> list[np.ndarray]:
    """Spreads the units of too few rows over `wanted` rows, leaving none empty if possible.

    A loss that divides by a count is then defined on every part of the last batch.
    """
    rows = list(rows)
    # The fullest row is halved repeatedly: the last batch has fewer documents per row, not fewer
    # rows.
    while len(rows) < wanted:
        index = max(range(len(rows)), key=lambda i: len(rows[i]))
        row = rows[index]
        middle = (len(row) + 1) // 2
        rows[index] = row[:middle]
        rows.append(row[middle:])
    return rows


def batch(corpus: Corpus, rows: list[np.ndarray], length: int, num_pairs: int = 0) -> Batch:
    """Builds the arrays of some rows of a batch.

    Args:
        corpus: The tokens.
        rows: The units of each row; together no longer than `length`.
        length: Tokens of a row.
        num_pairs: The maximum number of pairs in a row, if units are pairs.

    Returns:
        `tokens`, `labels`, `segments` and `positions`, int32 (rows, length), and `mask`, bool
        (rows, length). `labels` is the next token, 0 if the document has none; `mask` is True if
        the loss counts it. `segments` counts the pieces of a row from 1 and `positions` the tokens
        of a piece from 0. All are 0 in the padding. If units are pairs, `pairs`, bool (rows,
        num_pairs), marks the pairs that a row has, and their values have the same shape. Values of
        tokens have the shape (rows, length, k).
    """
    shape = (len(rows), length)
    counts = [len(row) * corpus.pieces_per_unit for row in rows]
    pieces = corpus.pieces_of(np.concatenate(rows))
    sizes = corpus.lengths[pieces].astype(np.int64)
    row_of = np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    # The first piece of each row starts at column 0, whatever came before in the batch.
    first = np.cumsum([0, *counts])
    before = np.concatenate([begins, ends[-1:]])[first[:-1]]
    columns = begins - np.repeat(before, counts)
    along = np.arange(ends[-1] if len(ends) else 0)
    positions = along - np.repeat(begins, sizes)
    here = np.repeat(row_of * length + columns, sizes) + positions
    # Each token's place in the corpus; `here` is its place in the flat batch.
    source = np.repeat(corpus.starts[pieces], sizes) + positions
    number = np.arange(len(pieces)) - np.repeat(first[:-1], counts) + 1
    # The next token in the corpus is the label, within a document.
    labels = corpus.tokens[source + 1]
    labels[ends[~corpus.goes_on[pieces]] - 1] = 0
    values: dict[str, Any] = {
        "tokens": corpus.tokens[source],
        "labels": labels,
        "mask": corpus.learned[source + 1],
        "segments": np.repeat(number, sizes),
        "positions": positions,
    }
    result: Batch = {}
    for name, value in values.items():
        flat = np.zeros(shape, np.bool_ if name == "mask" else np.int32)
        flat.reshape(-1)[here] = value
        result[name] = flat
    for name, of_tokens in corpus.token_values.items():
        flat = np.zeros((*shape, of_tokens.shape[1]), of_tokens.dtype)
        flat.reshape(-1, of_tokens.shape[1])[here] = of_tokens[source]
        result[name] = flat
    if corpus.pieces_per_unit > 1:
        result["pairs"] = np.arange(num_pairs) < np.array([len(row) for row in rows])[:, None]
    for name, of_units in corpus.unit_values.items():
        result[name] = np.zeros((len(rows), num_pairs), of_units.dtype)
        result[name][result["pairs"]] = of_units[np.concatenate(rows)]
    return result


def with_counts(whole: Batch) -> Batch:
    """Adds counts over all rows of a batch, so that each microbatch knows them.

    Returns:
        The batch with counts divided by the number of rows, all float32 (rows,):
        `learned_per_row`, the counted labels; if it has pairs, `pairs_per_row`; with labels of
        answers, `desirable_per_row`; without them, `chosen_learned_per_row` and
        `chosen_tokens_per_row`, the chosen conversations' counted labels and labels.
    """
    sums = {"learned": whole["mask"].sum()}
    if "pairs" in whole:
        sums["pairs"] = whole["pairs"].sum()
    if "desirable" in whole:
        sums["desirable"] = whole["desirable"].sum()
    elif "pairs" in whole:
        segments = whole["segments"]
        chosen = segments % 2 == 1
        follows = segments[:, 1:] == segments[:, :-1]
        sums["chosen_learned"] = (whole["mask"] & chosen).sum()
        sums["chosen_tokens"] = (follows & chosen[:, 1:]).sum()
    num_rows = len(whole["tokens"])
    means = {
        f"{name}_per_row": np.full(num_rows, total / max(1, num_rows), np.float32)
        for name, total in sums.items()
    }
    return {**whole, **means}


def own_rows(batch_size: int) -> slice:
    """The rows of a batch that this process passes, if several JAX processes share a run.

    Raises:
        ValueError: If they can't share them evenly.
    """
    if not jax.distributed.is_initialized():
        return slice(None)
    share, left = divmod(batch_size, jax.process_count())
    if left:
        raise ValueError(
            f"`batch_size`={batch_size} is that of all processes together: a multiple of their "
            f"number, {jax.process_count()}"
        )
    return slice(jax.process_index() * share, (jax.process_index() + 1) * share)


def room_for_images(corpus: Corpus, chosen: Int32[np.ndarray, " n"], packing: Packing) -> ImageRoom:
    """Returns the maximum of images in a row, in all epochs; 0 if documents have none.

    Every epoch assigns units of the same length to a place of a row, so a place counts with the
    maximum number of images among units of its length.

    Args:
        corpus: The documents; each is one unit.
        chosen: The units that are used.
        packing: Packing of their lengths.
    """
    if corpus.processor is None:
        return ImageRoom(0, 0)
    lengths = corpus.unit_lengths[chosen]
    taken = [ImageRoom.of(corpus.images[n]) for n in corpus.unit_documents[chosen]]

    def room(counts: Sequence[int]) -> int:
        most = np.zeros(lengths.max() + 1, np.int64)
        np.maximum.at(most, lengths, counts)
        places = most[np.sort(lengths)[::-1]][packing.ranks]
        # Batches without any image have the arrays, too.
        return max(1, int(np.add.reduceat(places, packing.offsets[:-1]).max()))

    return ImageRoom(*(room(counts) for counts in zip(*taken, strict=True)))


# The minimum and maximum of each option; larger values would fit no machine.
_BOUNDS = {
    "length": {"least": 2, "most": 2**22},
    "batch_size": {"most": 2**20},
    "epochs": {"most": 2**31 - 1},
    "workers": {"least": 0, "most": 2**10},
    "seed": {"least": 0},
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
        checks.numbers(self, DatasetOptions, **_BOUNDS)


class Rows:
    """The rows of a packed corpus by number, epoch after epoch; thread-safe.

    Attributes:
        corpus: The tokens.
        most_units: The maximum number of units in a row.
        room: The maximum of images in a row, whatever order is drawn.
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
        self.room = room_for_images(corpus, chosen, packing)
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
        return self._chosen[self._epoch(epoch)[row]]

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
        self._room = ImageRoom(*map(max, zip(*(part.room for part in parts), strict=True)))
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
                corpus = part.corpus
                documents = [corpus.unit_documents[units] for units in own]
                images = [[image for n in some for image in corpus.images[n]] for some in documents]
                arrays |= part.corpus.processor.arrays(images, self._room)
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
