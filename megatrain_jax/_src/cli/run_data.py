"""The data of a run: read, mixed, held out, and compared with the steps that are asked for."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain_jax import data
from megatrain_jax._src.cli.training_settings import TrainingSettings

Read = Callable[[Sequence[str] | str, int | None], data.Dataset]


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        train: Batches to train on.
        held_out: Batches to evaluate on; None for none.
        steps: Number of steps.
    """

    train: data.Dataset | data.Mixture
    held_out: data.Dataset | data.Mixture | None
    steps: int

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that rendered conversations, the same for all of them."""
        return _parts(self.train)[0].chat_template

    @property
    def num_held_out(self) -> int | None:
        """Number of tokens that are held out."""
        if self.held_out is None:
            return None
        return sum(part.num_tokens for part in _parts(self.held_out))


def read(settings: TrainingSettings, dataset: Read) -> RunData:
    """Reads and tokenises the data.

    Args:
        settings: The settings.
        dataset: Function from files, and how often they are seen, to their batches.

    Raises:
        ValueError: If there are fewer batches than steps, or the data can't be used.
    """
    sources = [settings.data] if settings.weights is None else settings.sources
    parts = [dataset(source, settings.epochs) for source in sources]
    held: list[data.Dataset] = []
    if settings.eval_data is not None:
        held = [dataset(settings.eval_data, 1)]
    elif settings.held_out:
        split = [part.split(settings.held_out, settings.seed) for part in parts]
        parts, held = [train for train, _ in split], [rest for _, rest in split]
    for name, datasets in (("training", parts), ("held out", held)):
        for one in datasets:
            print(f"{name}: {one}", flush=True)
    train = parts[0] if settings.weights is None else data.mix(parts, settings.weights)
    held_out = data.mix(held) if len(held) > 1 else next(iter(held), None)
    if settings.epochs is None:
        assert settings.steps is not None
        return RunData(train, held_out, settings.steps)
    if settings.steps is not None and settings.steps > len(train):
        raise ValueError(
            f"`steps`={settings.steps} are more than the {len(train)} batches of "
            f"`epochs`={settings.epochs}: say fewer steps, more epochs, or `epochs`=null"
        )
    return RunData(train, held_out, settings.steps or len(train))


def common_options(settings: TrainingSettings, epochs: int | None, too_long: str) -> dict[str, Any]:
    """The options that all functions of `megatrain_jax.data` have.

    Args:
        settings: The settings.
        epochs: The number of times that all documents are seen; None for ever.
        too_long: Treatment of documents that are too long, where the settings leave it open.
    """
    return {
        "length": settings.length,
        "batch_size": settings.batch,
        "seed": settings.seed,
        "epochs": epochs,
        "too_long": settings.too_long or too_long,
        "invalid": settings.invalid,
        "workers": settings.workers,
        "progress": _has_bar(),
    }


def summarised(dataset: data.Dataset) -> data.Dataset:
    """The same dataset, after a summary of what was read where no progress bar has printed it."""
    if not _has_bar():
        print(dataset.summary, file=sys.stderr, flush=True)
    return dataset


def _has_bar() -> bool:
    return sys.stderr.isatty()


def _parts(train: data.Dataset | data.Mixture) -> Sequence[data.Dataset]:
    return train.datasets if isinstance(train, data.Mixture) else (train,)
