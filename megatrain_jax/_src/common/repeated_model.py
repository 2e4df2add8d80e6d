"""A deep model, described by the same model with fewer of its equal blocks, for plans of it.

Tracing a model of 48 equal blocks takes ten times as long as tracing one of four, and says nothing
more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RepeatedModel:
    """A model, given to `plan`, that has the blocks of a smaller one several times.

    Example: the ten layers of a model are alike in pairs, one with a window and one without. The
    smaller model has six layers, and its layers 2 and 3 are there twice more in the whole one:
    `first` is 2, `period` 2 and `times` 2.

    Attributes:
        few: Function that builds the smaller model.
        whole: Function that builds the model.
        container: Path of the list of blocks, in both.
        first: Number of the first block that is repeated.
        period: Number of blocks that are repeated together. As many precede them, and at least one
            follows, which are like these but for the very first block, and then a last block.
        times: Number of times that they are there in addition.
    """

    few: Callable[[], Any]
    whole: Callable[[], Any]
    container: tuple[str, ...]
    first: int
    period: int
    times: int

    def __call__(self) -> Any:
        """Builds the model."""
        return self.whole()
