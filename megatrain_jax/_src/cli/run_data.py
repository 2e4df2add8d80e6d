"""The data of a run: read, mixed, held out, and compared with the steps that are asked for."""

import glob
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatrain_jax import data
from megatrain_jax._src.cli.errors import AskedWronglyError, told
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
    def datasets(self) -> list[data.Dataset]:
        """All datasets, those held out last."""
        held = [] if self.held_out is None else _parts(self.held_out)
        return [*_parts(self.train), *held]

    @property
    def fingerprint(self) -> str:
        """A hash of what is trained on, in its order."""
        return self.train.fingerprint

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


def check_files(settings: TrainingSettings) -> None:
    """Checks that there are the files that the settings name, before they are read.

    Raises:
        FileNotFoundError: If a file or folder does not exist, or a pattern finds none.
    """
    evaluated = settings.eval_data or []
    evaluated = [evaluated] if isinstance(evaluated, str) else evaluated
    for option, given in (("data", settings.sources), ("eval_data", evaluated)):
        for source in given:
            path = os.path.expanduser(source)
            if os.path.exists(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True))):
                continue
            if glob.has_magic(path):
                raise FileNotFoundError(f"`{option}`: no file is found by the pattern {source}")
            raise FileNotFoundError(f"`{option}`: there is no file or folder {source}")


def read(settings: TrainingSettings, dataset: Read) -> RunData:
    """Reads and tokenises the data.

    Args:
        settings: The settings.
        dataset: Function from files, and how often they are seen, to their batches.

    Raises:
        ValueError: If there are fewer batches than steps, or the data can't be used.
        AskedWronglyError: If files can't be.
    """
    sources = [settings.data] if settings.weights is None else settings.sources
    # Steps that are given are made: without `epochs`, they see the data as often as they need.
    epochs = 1 if settings.steps is None and settings.epochs is None else settings.epochs
    with _called("data"):
        parts = [dataset(source, epochs) for source in sources]
    held: list[data.Dataset] = []
    if settings.eval_data is not None:
        with _called("eval_data"):
            held = [dataset(settings.eval_data, 1)]
    elif settings.held_out:
        split = [part.split(settings.held_out, settings.seed) for part in parts]
        parts, held = [train for train, _ in split], [rest for _, rest in split]
    for name, datasets in (("training", parts), ("held out", held)):
        for one in datasets:
            print(f"{name}: {one}", flush=True)
    train = parts[0] if settings.weights is None else data.mix(parts, settings.weights)
    held_out = data.mix(held) if len(held) > 1 else next(iter(held), None)
    steps = len(train) if settings.steps is None else settings.steps
    if epochs is not None and steps > len(train):
        raise ValueError(
            f"`steps`={steps} are more than the {len(train)} batches of `epochs`={epochs}: say "
            "fewer steps or more epochs, or leave `epochs` out to repeat the data"
        )
    names = ["data"] if settings.weights is None else settings.sources
    if isinstance(train, data.Mixture):
        used = train.rows_used(steps)
    else:
        used = [min(steps * settings.batch, train.rows.count or math.inf)]
    for name, part, rows in zip(names, parts, used, strict=True):
        print(f"{name}: {_usage(rows, part.num_rows)}", flush=True)
    return RunData(train, held_out, steps)


def _usage(used: float, rows: int) -> str:
    """The use of a training set, in words."""
    if used < rows:
        return f"{used:,} of {rows:,} rows are used, and {rows - used:,} are left"
    times = "once" if used == rows else f"{used / rows:.1f} times"
    return f"all {rows:,} rows are used, {times}"


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


@contextmanager
def _called(option: str) -> Iterator[None]:
    """Has errors call the argument `source` of `megatrain_jax.data` as the user knows it."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if "`source`" not in (text := told(error)):
            raise
        raise AskedWronglyError(text.replace("`source`", f"`{option}`")) from error


def _has_bar() -> bool:
    return sys.stderr.isatty()


def _parts(train: data.Dataset | data.Mixture) -> Sequence[data.Dataset]:
    return train.datasets if isinstance(train, data.Mixture) else (train,)
