"""Mixtures of several datasets, in fixed proportions of their rows."""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import grain

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.batches import Batches, counts
from megatrain_jax._src.lm.data.dataset import Dataset, DatasetIterator, as_grain


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
