"""A dataset: an iterable of packed batches whose iterators can be saved and restored, on Grain."""

import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from megatrain_jax._src.common import checks
from megatrain_jax._src.data.corpus import Corpus
from megatrain_jax._src.data.packing import (
    Batch,
    Epoch,
    Packing,
    batch,
    draw_epoch,
    own_rows,
    pack,
    spread,
)
from megatrain_jax._src.data.report import Summary

# The least and the most of each option; beyond them a batch fits no machine.
_BOUNDS = {
    "length": (2, 2**22),
    "batch_size": (1, 2**20),
    "epochs": (1, 2**31 - 1),
    "workers": (0, 2**10),
    "seed": (0, None),
}
# The epoch at hand, and the next one where a batch or a thread reaches into it.
_EPOCHS_KEPT = 2


class Batches:
    """All batches of a dataset by number, as Grain reads them; any thread may ask.

    A batch takes the next rows, be it from two epochs; only the last one may have too few.
    """

    def __init__(
        self,
        corpus: Corpus,
        chosen: Int32[np.ndarray, " n"],
        packing: Packing,
        options: "DatasetOptions",
    ):
        """Makes the batches of some pieces; each is built when it is asked for.

        Args:
            corpus: The tokens.
            chosen: The pieces of the corpus that are used.
            packing: Packing of the lengths of these pieces.
            options: Options by which they become batches.
        """
        self._corpus = corpus
        self._chosen = chosen
        self._packing = packing
        self._options = options
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of batches; the largest integer that `len` may return if epochs never end."""
        rows = self._num_rows
        return sys.maxsize if rows is None else -(-rows // self._options.batch_size)

    def __getitem__(self, index: int) -> Batch:
        """Builds one batch."""
        size = self._options.batch_size
        stop = (index + 1) * size
        if self._num_rows is not None:
            stop = min(stop, self._num_rows)
        at, rows = index * size, []
        while at < stop:
            epoch, row = divmod(at, self._packing.num_rows)
            end = min(row + stop - at, self._packing.num_rows)
            rows += [self._chosen[pieces] for pieces in self._epoch(epoch).rows(row, end)]
            at += end - row
        whole = batch(self._corpus, spread(rows, size), self._options.length)
        return {name: array[own_rows(size)] for name, array in whole.items()}

    @property
    def _num_rows(self) -> int | None:
        epochs = self._options.epochs
        return None if epochs is None else epochs * self._packing.num_rows

    def _epoch(self, number: int) -> Epoch:
        with self._lock:
            if number not in self._epochs:
                lengths = self._corpus.lengths[self._chosen]
                seed = self._options.seed if self._options.shuffle else None
                self._epochs[number] = draw_epoch(self._packing, lengths, seed, number)
                for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                    if old != number:
                        del self._epochs[old]
            return self._epochs[number]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the lock and the drawn epochs, for another process."""
        return {**self.__dict__, "_lock": None, "_epochs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of `__getstate__`, with a lock of its own."""
        self.__dict__.update(state, _lock=threading.Lock())


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The options of a dataset: how documents become batches.

    Attributes:
        length: Tokens of a row.
        batch_size: Rows of a batch.
        seed: The seed of the order.
        shuffle: Whether the order is drawn, anew every epoch.
        epochs: The number of times that every document is seen; None goes on for ever.
        workers: Number of threads that build batches ahead; with 0 each is built when asked for.
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
            TypeError: If one has another type.
            ValueError: If one is out of its range.
        """
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name != "epochs":
                checks.integer(name, value, least=least, most=most)
        checks.boolean("shuffle", self.shuffle)


class Dataset:
    """Packed batches of documents, as often as one iterates over it.

    A batch is a dict of NumPy arrays of shape (batch_size, length): `tokens`, `labels` (the next
    token), `segments` (the document's number in its row, from 1; 0 is padding) and `positions`
    (from 0 in each document) are int32, `mask` (where the loss counts the label) is bool. Beside
    them is `learned_per_row`, float32 (batch_size,): the labels of the batch that count, over its
    rows. A document never leaves its row, and is cut only where `too_long` said so.

    A batch takes rows as they come, be it the last of one epoch and the first of the next. If the
    last batch of all has too few, their documents are spread over as many rows as it needs.

    Where several processes share a run (`jax.distributed`), each gets its equal part of a batch's
    rows, so that `batch_size` is still that of the whole batch.

    Its iterators have Grain's `get_state` and `set_state`, so that `megatrain_jax.fit` resumes a
    run on the batch it would have come to.

    Attributes:
        summary: Summary of the rows it was made from.
    """

    def __init__(
        self, corpus: Corpus, summary: Summary, options: DatasetOptions, documents: Any = None
    ):
        """Makes a dataset of a corpus that `chat` or `text` has read.

        Args:
            corpus: The tokens, which other datasets may share.
            summary: Summary of the rows that the whole corpus was made from.
            options: Options by which it becomes batches.
            documents: Documents of the corpus that it has; None takes all.
        """
        self.summary = summary
        self._corpus = corpus
        self._options = options
        if documents is None:
            self._chosen = np.arange(len(corpus.lengths), dtype=np.int32)
        else:
            self._chosen = np.flatnonzero(np.isin(corpus.documents, documents)).astype(np.int32)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(np.unique(self._corpus.documents[self._chosen]))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of an epoch, without padding."""
        return int(self._corpus.lengths[self._chosen].sum())

    @property
    def num_rows(self) -> int:
        """The number of rows of an epoch."""
        return self._packing.num_rows

    @property
    def fill(self) -> float:
        """The share of an epoch's rows that is tokens rather than padding."""
        return self.num_tokens / (self.num_rows * self._options.length)

    def __len__(self) -> int:
        """The number of batches of all epochs.

        Raises:
            TypeError: If epochs never end.
        """
        if self._options.epochs is None:
            raise TypeError("with `epochs`=None the batches never end")
        return len(self._batches)

    def __iter__(self) -> "DatasetIterator":
        """Starts with the first batch."""
        return DatasetIterator(self.grain(), self._fingerprint)

    def __str__(self) -> str:
        """Describes an epoch."""
        options = self._options
        epochs = "epochs without end" if options.epochs is None else f"{len(self):,} batches"
        return (
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {self.num_rows:,} "
            f"rows of {options.length:,} ({self.fill:.1%} full); {epochs} of "
            f"{options.batch_size:,} rows"
        )

    def __repr__(self) -> str:
        """Shows documents, tokens, rows and batches."""
        return f"Dataset({self})"

    def grain(self) -> grain.IterDataset:
        """The same batches as a `grain.IterDataset`, to which further steps can be added."""
        source: Any = self._batches
        read = grain.ReadOptions(
            num_threads=self._options.workers, prefetch_buffer_size=2 * self._options.workers
        )
        return grain.MapDataset.source(source).to_iter_dataset(read)

    def split(self, fraction: float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Holds some documents out, drawn by a seed.

        All pieces of a document go to the same side, and so do documents of the same tokens. Both
        sides share the tokens in memory.

        Args:
            fraction: Share of the documents that is held out; at least one is, and one is not.
            seed: Seed of the draw.

        Returns:
            Two datasets. The first is to be trained on. The second is held out, and has each of its
            documents once, in the order they were read, since an evaluation has no use for another.

        Raises:
            TypeError: If an argument has another type.
            ValueError: If `fraction` is not between 0 and 1, or there are no two different
                documents.
        """
        checks.integer("seed", seed, least=0)
        if not 0 < checks.number("fraction", fraction) < 1:
            raise ValueError(f"`fraction` must be between 0 and 1, but is {fraction}")
        documents, groups = self._groups()
        if groups.max() == 0:
            raise ValueError(
                "there are no two different documents to split (a .txt file is one document)"
            )
        order = np.random.default_rng([seed, len(documents)]).permutation(groups.max() + 1)
        sizes = np.cumsum(np.bincount(groups)[order])
        num_groups = 1 + int(np.searchsorted(sizes, fraction * len(documents), "left"))
        held = np.isin(groups, order[: min(num_groups, len(order) - 1)])
        options = replace(self._options, shuffle=False, epochs=1)
        return (
            Dataset(self._corpus, self.summary, self._options, documents[~held]),
            Dataset(self._corpus, self.summary, options, documents[held]),
        )

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents, and a number for each that those of the same tokens share."""
        corpus, chosen = self._corpus, self._chosen
        stops = corpus.starts[chosen] + corpus.lengths[chosen]
        documents, first = np.unique(corpus.documents[chosen], return_index=True)
        last = np.append(first[1:], len(chosen)) - 1
        digests = [
            hashlib.blake2b(corpus.tokens[a:b].tobytes(), digest_size=16).digest()
            for a, b in zip(corpus.starts[chosen[first]], stops[last], strict=True)
        ]
        # Numbered as they first appear.
        numbers: dict[bytes, int] = {}
        groups = [numbers.setdefault(digest, len(numbers)) for digest in digests]
        return documents, np.array(groups)

    @cached_property
    def _packing(self) -> Packing:
        return pack(self._corpus.lengths[self._chosen], self._options.length)

    @cached_property
    def _batches(self) -> Batches:
        return Batches(self._corpus, self._chosen, self._packing, self._options)

    @cached_property
    def _fingerprint(self) -> str:
        options = self._options
        digest = hashlib.blake2b(self._corpus.digest, digest_size=8)
        digest.update(self._chosen.tobytes())
        order = (options.length, options.batch_size, options.seed, options.shuffle)
        digest.update(repr(order).encode())
        return digest.hexdigest()


class DatasetIterator(Iterator[Batch]):
    """An iterator of a dataset's batches, whose state says which data it belongs to."""

    def __init__(self, batches: grain.IterDataset, fingerprint: str):
        """Starts with the first batch.

        Args:
            batches: Batches to iterate over.
            fingerprint: A hash of the data and of the order of its batches.
        """
        self._iterator: Any = iter(batches)
        self._fingerprint = fingerprint

    def __next__(self) -> Batch:
        """Gives the next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of the next batch, as JSON can hold it."""
        return {**self._iterator.get_state(), "data": self._fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `get_state` was called.

        Raises:
            ValueError: If that was on other data, or with another order of batches.
        """
        state = dict(state)
        if state.pop("data", None) != self._fingerprint:
            raise ValueError(
                "the state is of other batches: the files, the tokenizer, `length`, `batch_size`, "
                "`seed`, `shuffle` and `train_on` have to be what they were when it was saved"
            )
        self._iterator.set_state(state)
