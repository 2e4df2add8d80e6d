"""A dataset: an iterable of packed batches whose iterators can be saved and restored, on Grain."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import grain
import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.data.batches import Batches, DatasetOptions, Rows
from megatrain_jax._src.data.corpus import Corpus
from megatrain_jax._src.data.packing import Batch, Packing, pack
from megatrain_jax._src.data.report import Summary


class Dataset:
    """Packed batches of documents, as often as one iterates over it.

    A batch is a dict of NumPy arrays of shape (batch_size, length): `tokens`, `labels` (the next
    token), `segments` (the document's number in its row, from 1; 0 is padding) and `positions`
    (from 0 in each document) are int32, `mask` (where the loss counts the label) is bool. Beside
    them is `learned_per_row`, float32 (batch_size,): the labels of the batch that count, over its
    rows. A document never leaves its row, and is cut only where `too_long` said so.

    Of `preferences`, a document is a pair: segment 2k + 1 of a row (from k = 0) is the chosen
    conversation of its pair k, and segment 2k + 2 the rejected one; `mask` is True on their
    answers. Beside the arrays above are `pairs`, bool (batch_size, most pairs of a row), True where
    the row has a pair k, and `pairs_per_row`, float32 (batch_size,): the pairs of the batch, over
    its rows.

    A batch takes rows as they come, be it the last of one epoch and the first of the next. If the
    last batch of all has too few, their documents are spread over as many rows as it needs.

    Where several processes share a run (`jax.distributed`), each gets its equal part of a batch's
    rows, so that `batch_size` is still that of the whole batch.

    Its iterators have Grain's `get_state` and `set_state`, so that `megatrain_jax.fit` resumes a
    run on the batch it would have come to.

    Attributes:
        summary: Summary of the rows it was made from.
        options: Options by which its documents become batches.
        chat_template: The Jinja template that rendered conversations; None for plain text.
    """

    def __init__(
        self,
        corpus: Corpus,
        summary: Summary,
        options: DatasetOptions,
        chat_template: str | None = None,
        documents: Any = None,
    ):
        """Makes a dataset of a corpus that `chat`, `preferences` or `text` has read.

        Args:
            corpus: The tokens, which other datasets may share.
            summary: Summary of the rows that the whole corpus was made from.
            options: Options by which it becomes batches.
            chat_template: The Jinja template that rendered conversations.
            documents: Documents of the corpus that it has; None takes all.
        """
        self.summary = summary
        self.chat_template = chat_template
        self._corpus = corpus
        self.options = options
        if documents is None:
            self._chosen = np.arange(len(corpus.unit_starts), dtype=np.int32)
        else:
            kept = np.isin(corpus.unit_documents, documents)
            self._chosen = np.flatnonzero(kept).astype(np.int32)

    @property
    def has_pairs(self) -> bool:
        """Whether its documents are pairs of conversations, as `preferences` makes them."""
        return self._corpus.pieces_per_unit > 1

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(np.unique(self._corpus.unit_documents[self._chosen]))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of an epoch, without padding."""
        return int(self._corpus.unit_lengths[self._chosen].sum(dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """The number of rows of an epoch."""
        return self._packing.num_rows

    @property
    def fill(self) -> float:
        """The share of an epoch's rows that is tokens rather than padding."""
        return self.num_tokens / (self.num_rows * self.options.length)

    def __len__(self) -> int:
        """The number of batches of all epochs.

        Raises:
            TypeError: If epochs never end.
        """
        if self.options.epochs is None:
            raise TypeError("with `epochs`=None the batches never end")
        return len(self._batches)

    def __iter__(self) -> "DatasetIterator":
        """Starts with the first batch."""
        return DatasetIterator(self.grain(), self.fingerprint)

    def __str__(self) -> str:
        """Describes an epoch."""
        options = self.options
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
        return as_grain(self._batches, self.options.workers)

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
        # Groups in their drawn order until the held-out share is reached; one always stays.
        num_groups = 1 + int(np.searchsorted(sizes, fraction * len(documents), "left"))
        held = np.isin(groups, order[: min(num_groups, len(order) - 1)])
        options = replace(self.options, shuffle=False, epochs=1)
        shared = (self._corpus, self.summary)
        return (
            Dataset(*shared, self.options, self.chat_template, documents[~held]),
            Dataset(*shared, options, self.chat_template, documents[held]),
        )

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents, and a number for each that those of the same tokens share."""
        corpus, chosen = self._corpus, self._chosen
        starts = corpus.unit_starts[chosen]
        stops = starts + corpus.unit_lengths[chosen]
        documents, first = np.unique(corpus.unit_documents[chosen], return_index=True)
        last = np.append(first[1:], len(chosen)) - 1
        digests = [
            hashlib.blake2b(corpus.tokens[a:b].tobytes(), digest_size=16).digest()
            for a, b in zip(starts[first], stops[last], strict=True)
        ]
        # Numbered as they first appear.
        numbers: dict[bytes, int] = {}
        groups = [numbers.setdefault(digest, len(numbers)) for digest in digests]
        return documents, np.array(groups)

    @cached_property
    def _packing(self) -> Packing:
        return pack(self._corpus.unit_lengths[self._chosen], self.options.length)

    @cached_property
    def rows(self) -> Rows:
        """The rows of all epochs by number."""
        return Rows(self._corpus, self._chosen, self._packing, self.options)

    @cached_property
    def _batches(self) -> Batches:
        return Batches([self.rows], [1], self.options.length, self.options.batch_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and of all that decides on the order of batches."""
        options = self.options
        # What the position in the data means depends on all of this, and on nothing else: neither
        # the number of workers nor of epochs is in it.
        digest = hashlib.blake2b(self._corpus.digest, digest_size=8)
        digest.update(self._chosen.tobytes())
        order = (options.length, options.batch_size, options.seed, options.shuffle)
        digest.update(repr(order).encode())
        return digest.hexdigest()


def as_grain(batches: Batches, workers: int) -> grain.IterDataset:
    """The batches as a `grain.IterDataset`, built ahead by so many threads."""
    source: Any = batches
    read = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    return grain.MapDataset.source(source).to_iter_dataset(read)


class DatasetIterator(Iterator[Batch]):
    """An iterator of a dataset's batches, whose state says which data it belongs to."""

    def __init__(self, batches: grain.IterDataset, fingerprint: str):
        """Starts with the first batch.

        Args:
            batches: Batches to iterate over.
            fingerprint: A hash of the data and of the order of its batches.
        """
        self._iterator: Any = iter(batches)
        self.fingerprint = fingerprint

    def __next__(self) -> Batch:
        """Gives the next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of the next batch, as JSON can hold it."""
        return {**self._iterator.get_state(), "data": self.fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `get_state` was called.

        Raises:
            ValueError: If that was on other data, or with another order of batches.
        """
        state = dict(state)
        if state.pop("data", None) != self.fingerprint:
            raise ValueError(
                "the state is of other batches: the files, the tokenizer, `length`, `batch_size`, "
                "`seed`, `shuffle`, `train_on` and what `split` was given have to be what they "
                "were when it was saved"
            )
        self._iterator.set_state(state)
