"""`Dataset` and `Mixture`: iterables of packed batches, with Grain iterators that can be saved."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import grain
import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.batches import (
    Batch,
    Batches,
    DatasetOptions,
    Packing,
    Rows,
    counts,
    pack,
)
from megatrain_jax._src.lm.data.corpus import Corpus
from megatrain_jax._src.lm.data.report import Summary


class Dataset:
    """Packed batches of documents; each iteration starts anew.

    A batch is a dict of NumPy arrays of shape (batch_size, length): `tokens`, `labels` (the next
    token), `segments` (the document's number in its row, from 1; 0 is padding) and `positions`
    (from 0 in each document) are int32; `mask` (whether the loss counts the label) is bool. In
    addition, `learned_per_row`, float32 (batch_size,), is the batch's number of counted labels
    divided by its rows. A document never leaves its row, and is cut only if `too_long` allowed it.

    For `preferences`, a document is a pair: segment 2k + 1 of a row (from k = 0) is the chosen
    conversation of its pair k, and segment 2k + 2 the rejected one; `mask` is True on their
    answers. In addition, `pairs`, bool (batch_size, maximum pairs per row), is True if the row has
    a pair k. Further counts of the batch are divided by its rows, as float32 (batch_size,):
    `pairs_per_row`, its pairs; `chosen_learned_per_row`, the counted labels of its chosen answers;
    and `chosen_tokens_per_row`, all labels of its chosen conversations.

    For `distillation`, `topk_token_ids`, int32, and `topk_logprobs`, float32, have the shape
    (batch_size, length, topk).

    With `margins`, the array `margins`, float32 in the shape of `pairs`, has each pair's margin.

    For `unpaired`, segment 2k + 1 is the conversation with the labelled answer, and segment 2k + 2
    the same prompt with another row's answer. `desirable`, bool in the shape of `pairs`, is the
    label, and `desirable_per_row` the batch's number of desirable answers divided by its rows, in
    place of the counts of chosen conversations.

    For `image_chat`, `pixel_values` has the images of each row, and, if sizes vary,
    `image_grid_thw` their sizes or `image_position_ids` the places of their patches. For videos of
    Qwen2.5-VL, `second_per_grid_ts` has the time between patches.

    A batch takes rows in order, even the last of one epoch and the first of the next. If the very
    last batch has too few rows, their documents are spread over the full number of rows.

    If several processes share a run (`jax.distributed`), each gets an equal part of a batch's rows;
    `batch_size` is still the size of the whole batch.

    Its iterators have Grain's `get_state` and `set_state`, so `megatrain_jax.fit` resumes a run at
    the right batch.

    Attributes:
        summary: Summary of the rows it was made from.
        options: Options for making batches from its documents.
        chat_template: The Jinja template that rendered conversations; None for plain text.
    """

    def __init__(
        self,
        corpus: Corpus,
        summary: Summary,
        options: DatasetOptions,
        chat_template: str | None = None,
        chosen: np.ndarray | None = None,
    ):
        """Makes a dataset from a corpus that `chat`, `preferences` or `text` has read.

        Args:
            corpus: The tokens; several datasets may share them.
            summary: Summary of the rows that the whole corpus was made from.
            options: Options for making batches.
            chat_template: The Jinja template that rendered conversations.
            chosen: Indices of the corpus's pieces of documents to use; None for all.
        """
        self.summary = summary
        self.chat_template = chat_template
        self._corpus = corpus
        self.options = options
        if chosen is None:
            chosen = np.arange(len(corpus.unit_starts), dtype=np.int32)
        self._chosen = chosen

    @property
    def kind(self) -> tuple[str, ...]:
        """Names of its batches' arrays beside the common ones."""
        pairs = ("pairs",) if self._corpus.pieces_per_unit > 1 else ()
        sizes = {name: array.shape[1] for name, array in self._corpus.token_values.items()}
        entries = (f"{name} ({size})" for name, size in sizes.items())
        images = ("images",) if self._corpus.processor is not None else ()
        return (*pairs, *images, *self._corpus.unit_values, *entries)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer or a text, and that a model learns to stop at."""
        return tuple(self.summary.end_tokens)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(np.unique(self._corpus.unit_documents[self._chosen]))

    @property
    def num_tokens(self) -> int:
        """The number of tokens in an epoch, without padding."""
        return int(self._corpus.unit_lengths[self._chosen].sum(dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        return self._packing.num_rows

    @property
    def fill(self) -> float:
        """The fraction of an epoch's rows that is tokens, not padding."""
        return self.num_tokens / (self.num_rows * self.options.length)

    def __len__(self) -> int:
        """The number of batches in all epochs."""
        if self.options.epochs is None:
            raise TypeError("with `epochs`=None the batches never end")
        return len(self._batches)

    def __iter__(self) -> "DatasetIterator":
        """Starts with the first batch."""
        return DatasetIterator(self.grain(), self.fingerprint, self.end_tokens)

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
        """The same batches as a `grain.IterDataset`, to which more steps can be added."""
        return as_grain(self._batches, self.options.workers)

    def split(self, fraction: float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Splits off an evaluation set, drawn by a seed.

        All pieces of a document go to the same side, and so do documents with equal tokens. Of a
        single document, the last pieces are held out. Both sides share the tokens in memory.

        Args:
            fraction: Fraction of the documents, or of one document's pieces, to hold out; each side
                gets at least one.
            seed: Seed of the draw.

        Returns:
            Two datasets: the training set, and the evaluation set, which has each of its documents
                once, in the order in which they were read.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If `fraction` is not between 0 and 1, or there is only one document, in one
                piece, or several equal ones.
        """
        checks.integer("seed", seed, least=0)
        checks.number("fraction", fraction, above=0, below=1)
        (documents, groups), chosen = self._groups(), self._chosen
        if len(documents) == 1 < len(chosen):
            number = min(math.ceil(fraction * len(chosen)), len(chosen) - 1)
            held = np.arange(len(chosen)) >= len(chosen) - number
        elif groups.max() == 0:
            raise ValueError(
                "there are no two different documents to split, nor one that is longer than a row "
                "(a .txt file is one document)"
            )
        else:
            order = np.random.default_rng([seed, len(documents)]).permutation(groups.max() + 1)
            sizes = np.cumsum(np.bincount(groups)[order])
            # Groups in their drawn order until the fraction is reached; one stays for training.
            num_groups = 1 + int(np.searchsorted(sizes, fraction * len(documents), "left"))
            drawn = np.isin(groups, order[: min(num_groups, len(order) - 1)])
            held = np.isin(self._corpus.unit_documents[chosen], documents[drawn])
        options = replace(self.options, shuffle=False, epochs=1)
        shared = (self._corpus, self.summary)
        return (
            Dataset(*shared, self.options, self.chat_template, chosen[~held]),
            Dataset(*shared, options, self.chat_template, chosen[held]),
        )

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents, and for each a group number shared by documents with equal tokens."""
        corpus, chosen = self._corpus, self._chosen
        starts = corpus.unit_starts[chosen]
        stops = starts + corpus.unit_lengths[chosen]
        documents, first = np.unique(corpus.unit_documents[chosen], return_index=True)
        last = np.append(first[1:], len(chosen)) - 1
        digests = [
            hashlib.blake2b(corpus.tokens[a:b].tobytes(), digest_size=16).digest()
            for a, b in zip(starts[first], stops[last], strict=True)
        ]
        if corpus.processor is not None:
            # Equal questions about different images are different documents.
            own = (corpus.images[document] for document in documents)
            images = (b"".join(image.digest for image in given) for given in own)
            digests = [one + other for one, other in zip(digests, images, strict=True)]
        # Numbered in order of first appearance.
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
        """A hash of the tokens and of everything that determines the order of batches."""
        options = self.options
        # Exactly these determine the meaning of a position in the data; the numbers of workers and
        # of epochs don't.
        digest = hashlib.blake2b(self._corpus.digest, digest_size=8)
        digest.update(self._chosen.tobytes())
        order = (options.length, options.batch_size, options.seed, options.shuffle)
        digest.update(repr(order).encode())
        return digest.hexdigest()


def as_grain(batches: Batches, workers: int) -> grain.IterDataset:
    """The batches as a `grain.IterDataset`, built ahead by this many threads."""
    source: Any = batches
    read = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    return grain.MapDataset.source(source).to_iter_dataset(read)


class DatasetIterator(Iterator[Batch]):
    """An iterator over a dataset's batches; its state names the data it belongs to."""

    def __init__(
        self, batches: grain.IterDataset, fingerprint: str, end_tokens: tuple[int, ...] = ()
    ):
        """Starts with the first batch.

        Args:
            batches: Batches to iterate over.
            fingerprint: A hash of the data and of the order of its batches.
            end_tokens: See `Dataset`.
        """
        self._iterator: Any = iter(batches)
        self.fingerprint, self.end_tokens = fingerprint, end_tokens

    def __next__(self) -> Batch:
        """Returns the next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of the next batch, as JSON."""
        return {**self._iterator.get_state(), "data": self.fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called.

        Raises:
            ValueError: If the state belongs to different data, or a different order of batches.
        """
        state = dict(state)
        if state.pop("data", None) != self.fingerprint:
            raise ValueError(
                "the state belongs to different batches: the files, the tokenizer, `length`, "
                "`batch_size`, `seed`, `shuffle`, `train_on` and the arguments of `split` must be "
                "the same as when it was saved"
            )
        self._iterator.set_state(state)


class Mixture:
    """Batches with rows from several datasets, in exact proportions.

    It is iterated like a `Dataset`, its batches have the same arrays, and its iterators can be
    saved and restored in the same way. Each row comes from one dataset. Each dataset draws its own
    order, epoch after epoch; the mixture ends when a dataset has no row left for its turn.

    Attributes:
        datasets: The datasets.
        proportions: For each dataset, its number of rows per sum of all proportions.
    """

    def __init__(self, datasets: Sequence[Dataset], proportions: Sequence[int]):
        """Makes a mixture; `mix` checks its arguments."""
        self.datasets = tuple(datasets)
        self.proportions = tuple(proportions)

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            TypeError: If they never end.
        """
        if self._batches.num_rows is None:
            raise TypeError("with `epochs`=None in all datasets the batches never end")
        return len(self._batches)

    def __iter__(self) -> DatasetIterator:
        """Starts with the first batch."""
        return DatasetIterator(self.grain(), self.fingerprint, self.end_tokens)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The end tokens of all datasets."""
        return tuple(sorted({token for dataset in self.datasets for token in dataset.end_tokens}))

    def __repr__(self) -> str:
        """Shows each dataset with its fraction of the rows."""
        total = sum(self.proportions)
        shares = [
            f"{proportion / total:.1%} from {dataset.num_rows:,} rows"
            for proportion, dataset in zip(self.proportions, self.datasets, strict=True)
        ]
        return f"Mixture({', '.join(shares)})"

    def rows_used(self, num_batches: int | None = None) -> list[int]:
        """Counts the rows taken from each dataset, which may be fewer or more than it has.

        Args:
            num_batches: Number of batches from the start; None for all.

        Raises:
            TypeError: If it has a wrong type, or is None and the batches never end.
            ValueError: If it is negative.
        """
        if num_batches is None:
            num_batches = len(self)
        num_rows = checks.integer("num_batches", num_batches, least=0) * self._batches.size
        if self._batches.num_rows is not None:
            num_rows = min(num_rows, self._batches.num_rows)
        return counts(num_rows, self.proportions)

    def grain(self) -> grain.IterDataset:
        """The same batches as a `grain.IterDataset`, to which more steps can be added."""
        return as_grain(self._batches, max(data.options.workers for data in self.datasets))

    @cached_property
    def _batches(self) -> Batches:
        options = self.datasets[0].options
        # Each dataset draws its own epochs; the batches only choose the dataset of each row.
        rows = [dataset.rows for dataset in self.datasets]
        return Batches(rows, self.proportions, options.length, options.batch_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the proportions and of the datasets' fingerprints."""
        digest = hashlib.blake2b(repr(self.proportions).encode(), digest_size=8)
        for dataset in self.datasets:
            digest.update(dataset.fingerprint.encode())
        return digest.hexdigest()


def mix(datasets: Sequence[Dataset], weights: Sequence[float] | None = None) -> Mixture:
    """Mixes datasets, such as conversations with plain text, in proportions of their rows.

    Rows are almost full of tokens, so proportions of rows are proportions of tokens. They are
    exact: with weights 0.7 and 0.3, seven of every ten rows come from the first dataset.

    Args:
        datasets: Two or more, with equal `length` and `batch_size`. Their `epochs` limit how often
            each is repeated.
        weights: The proportion of rows from each, in any unit. None uses the number of its rows in
            all epochs, so that all end together; if epochs never end, in one epoch.

    Returns:
        The mixture. Split off an evaluation set before: ``train, held_out = chats.split(0.1)``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the datasets don't match each other, or the weights don't match them.
    """
    if isinstance(datasets, Dataset) or not all(isinstance(one, Dataset) for one in datasets):
        raise TypeError(checks.refused("datasets", "a list of datasets of this module", datasets))
    datasets = list(datasets)
    if len(datasets) < 2:
        raise ValueError(f"`datasets` must be two or more, but are {len(datasets)}")
    for name in ("length", "batch_size"):
        values = [getattr(dataset.options, name) for dataset in datasets]
        if len(set(values)) > 1:
            raise ValueError(f"`datasets` must have the same `{name}`, but have {values}")
    if len({dataset.kind for dataset in datasets}) > 1:
        raise ValueError(
            "`datasets` must all be preferences, all labelled answers, all of one `topk`, all from "
            "`image_chat`, or none of these: their batches have different arrays"
        )
    if weights is None:
        ends = [dataset.rows.count for dataset in datasets]
        own = [dataset.num_rows for dataset in datasets]
        # An endless dataset has no end to share with the rest.
        return Mixture(datasets, own if None in ends else [end for end in ends if end])
    given = [checks.number(f"weights[{i}]", weight, above=0) for i, weight in enumerate(weights)]
    if len(given) != len(datasets):
        raise ValueError(
            f"`weights` must be one for each of the {len(datasets)} datasets, but are {len(given)}"
        )
    # As decimals: 0.7 is seven tenths, not the nearest binary fraction.
    exact = [Fraction(repr(weight)) for weight in given]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    return Mixture(datasets, [number // math.gcd(*whole) for number in whole])
