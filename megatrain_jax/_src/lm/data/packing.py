"""Packs documents into rows: which documents share a row, and the arrays of a batch.

The lengths that share a row are found once, by best fit; the documents that take these places are
drawn anew every epoch. So every epoch has the same number of rows.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32, Int64

from megatrain_jax._src.lm.data.corpus import Corpus

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

    def rows(self, start: int, stop: int) -> list[np.ndarray]:
        """The units of some rows."""
        bounds = self.offsets[start : stop + 1]
        return [self.units[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


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
