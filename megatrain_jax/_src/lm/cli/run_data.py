"""Reads the data of a run: mixes it, splits off an evaluation set, and checks its size."""

import glob
import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain_jax import data, distributed
from megatrain_jax._src.lm.cli.errors import CommandError, error_text
from megatrain_jax._src.lm.cli.run_settings import TrainingSettings, listed
from megatrain_jax._src.lm.common.hub import hub_rows
from megatrain_jax._src.lm.data.sources import find_files

# A keyword in a message of `megatrain_jax.data`: `length=`, `invalid="drop"` or `tail=True`.
_KEYWORD = re.compile(r'`(\w+)=(?:"?(\w+)"?)?`')

Read = Callable[[Sequence[str] | str, int | None], data.Dataset]


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        train: Training batches.
        held_out: Evaluation batches; None for none.
        steps: Number of steps.
    """

    train: data.Dataset | data.Mixture
    held_out: data.Dataset | data.Mixture | None
    steps: int

    @property
    def datasets(self) -> list[data.Dataset]:
        """All datasets, evaluation sets last."""
        held = [] if self.held_out is None else _parts(self.held_out)
        return [*_parts(self.train), *held]

    @property
    def fingerprint(self) -> str:
        """A hash of the training data, in its order."""
        return self.train.fingerprint

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that rendered conversations, the same for all of them."""
        return _parts(self.train)[0].chat_template

    @property
    def num_held_out(self) -> int | None:
        """Number of tokens in the evaluation set."""
        if self.held_out is None:
            return None
        return sum(part.num_tokens for part in _parts(self.held_out))


def check_files(settings: TrainingSettings) -> None:
    """Checks that the files named in the settings exist, before they are read.

    Raises:
        CommandError: If a file or folder does not exist, or a pattern has no match.
        ImportError: If a dataset on the Hugging Face Hub can't be read without a package.
    """
    for option, given in _given(settings).items():
        for source in given:
            if hub_rows(source) is None:
                with errors_name_option(option):
                    find_files(source, texts=True)
            elif find_spec("datasets") is None:
                raise ImportError(
                    f"`{option}` = {source} is a dataset on the Hugging Face Hub, which is read by "
                    "`datasets`: pip install datasets"
                )


def file_stamps(settings: TrainingSettings) -> dict[str, str]:
    """A hash of the paths, sizes and times of change of each option's files, if it has any."""
    found = {}
    for option, given in _given(settings).items():
        stats = [(str(file), file.stat()) for source in given for file in _files_at(source)]
        rows = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
        if rows:
            joined = "\n".join(rows).encode(errors="surrogateescape")
            found[option] = hashlib.sha256(joined).hexdigest()
    return found


def _given(settings: TrainingSettings) -> dict[str, list[str]]:
    """The files, folders and patterns of each option that names data."""
    return {"data": settings.sources, "eval_data": listed(settings.eval_data)}


def _files_at(source: str) -> list[Path]:
    """The files that a path, folder or pattern selects."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = path.rglob("*")
    elif path.exists():
        found = [path]
    else:
        found = map(Path, glob.iglob(str(path), recursive=True))
    return sorted(file for file in found if file.is_file())


def read(settings: TrainingSettings, dataset: Read) -> RunData:
    """Reads and tokenises the data.

    Args:
        settings: The settings.
        dataset: Function from files and the number of epochs to their batches.

    Raises:
        ValueError: If there are fewer batches than steps, or the data can't be used.
        CommandError: If the files can't be used.
    """
    sources = [settings.data] if settings.weights is None else settings.sources
    # `steps` without `epochs`: the data repeats as often as needed.
    epochs = 1 if settings.steps is None and settings.epochs is None else settings.epochs
    with errors_name_option("data"):
        parts = [dataset(source, epochs) for source in sources]
    held: list[data.Dataset] = []
    if settings.eval_data is not None:
        with errors_name_option("eval_data"):
            held = [dataset(settings.eval_data, 1)]
    elif settings.held_out:
        split = [part.split(settings.held_out, settings.seed) for part in parts]
        parts, held = [train for train, _ in split], [rest for _, rest in split]
    for name, datasets in (("training", parts), ("held out", held)):
        # Several datasets are the entries of `data`, in order.
        for i, one in enumerate(datasets):
            entry = f" from {settings.sources[i]}" if len(datasets) > 1 else ""
            print(f"{name}{entry}: {one}", flush=True)
    train = parts[0] if settings.weights is None else data.mix(parts, settings.weights)
    held_out = data.mix(held) if len(held) > 1 else next(iter(held), None)
    steps = len(train) if settings.steps is None else settings.steps
    if epochs is not None and steps > len(train):
        raise ValueError(
            f"`steps`={steps} are more than the {len(train)} batches of `epochs`={epochs}: set "
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
    """The fraction of a training set that is used, in words."""
    if used < rows:
        return f"{used:,} of {rows:,} rows are used, and {rows - used:,} are left"
    times = "once" if used == rows else f"{used / rows:.1f} times"
    return f"all {rows:,} rows are used, {times}"


def common_options(settings: TrainingSettings, epochs: int | None, too_long: str) -> dict[str, Any]:
    """The options that all functions of `megatrain_jax.data` share.

    Args:
        settings: The settings.
        epochs: How often all documents are seen; None for ever.
        too_long: Treatment of documents that are too long, if the settings leave it open.
    """
    return {
        "length": settings.length,
        "batch_size": settings.batch,
        "seed": settings.seed,
        "epochs": epochs,
        "too_long": settings.too_long or too_long,
        "invalid": settings.invalid,
        "columns": settings.columns,
        "workers": settings.workers,
        "progress": has_bar(),
        "cache": _token_cache(settings.data_cache),
    }


def _token_cache(given: str | None) -> Path | None:
    """The folder of tokenised data; None for none, or if the default can't be written."""
    if given is not None:
        return None if given == "none" else Path(given).expanduser()
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "megatrain_jax" / "tokens"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def summarised(dataset: data.Dataset) -> data.Dataset:
    """Prints a summary of the dataset if no progress bar has printed it; returns the dataset."""
    if not has_bar() and distributed.is_first():
        print(dataset.summary, file=sys.stderr, flush=True)
    return dataset


@contextmanager
def errors_name_option(option: str) -> Iterator[None]:
    """Makes errors name arguments of `megatrain_jax.data` as options of the command."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        text = re.sub(_KEYWORD, _as_option, error_text(error)).replace("`source`", f"`{option}`")
        text = text.replace("`cache`", "`data_cache`")
        raise CommandError(text) from error


def _as_option(keyword: re.Match[str]) -> str:
    """A keyword of Python, such as `invalid="drop"`, as an option of the command."""
    name, value = keyword.groups()
    return " ".join([f"`--{name.replace('_', '-')}", *([value.lower()] if value else [])]) + "`"


def has_bar() -> bool:
    """Whether progress bars are shown, by this process."""
    return sys.stderr.isatty() and distributed.is_first()


def _parts(train: data.Dataset | data.Mixture) -> Sequence[data.Dataset]:
    return train.datasets if isinstance(train, data.Mixture) else (train,)
