"""Log-probabilities of the reference model, for preference learning that trains all parameters.

The reference is the initial model, which is gone after the first training step. So the
log-probabilities of all answers are computed before training, and stored in the run's folder. An
answer is found by a hash of its tokens and its mask, in any row of any epoch. A file is valid for
one checkpoint, identified by its content, and one precision.
"""

import gc
import hashlib
import itertools
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import megatrain_jax as mt
from megatrain_jax import data, distributed, objectives
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.unfinished import replaced_file
from megatrain_jax._src.lm.cli.recipe import Job
from megatrain_jax._src.lm.cli.run_data import has_bar
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.common.hf_folder import regular_file

_SIZE = 16
_Batch = Mapping[str, np.ndarray]


@dataclass
class ReferenceLogProbs:
    """The log-probabilities of answers under the initial model.

    Attributes:
        path: The run's file with the log-probabilities. Of several processes, each after the first
            writes what it has computed into a file of its own beside it.
        key: The checkpoint and the precision that they belong to.
        values: The log-probability of each answer, by its digest.
    """

    path: Path
    key: str
    values: dict[bytes, float] = field(default_factory=dict)

    def load(self) -> None:
        """Loads the files that belong to the same checkpoint and are intact."""
        for path in sorted(self.path.parent.glob(f"{self.path.stem}*{self.path.suffix}")):
            try:
                with np.load(path) as file:
                    key, digests, values = str(file["key"]), file["digests"], file["values"]
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                continue  # missing or damaged: everything is recomputed
            if key == self.key:
                self.values |= dict(zip(map(bytes, digests), map(float, values), strict=True))

    def save(self) -> None:
        """Writes this process's file atomically."""
        path = self.path
        if number := jax.process_index():
            path = path.with_stem(f"{path.stem}-{number}")
        digests = np.frombuffer(b"".join(self.values), np.uint8).reshape(-1, _SIZE)
        values = np.array(list(self.values.values()), np.float32)
        with replaced_file(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, key=self.key, digests=digests, values=values)

    def missing(self, batch: _Batch) -> bool:
        """Whether it lacks an answer of a batch."""
        return any(digest not in self.values for _, _, digest in answers_of(batch))

    def take(self, batch: _Batch, found: np.ndarray) -> None:
        """Stores the log-probabilities of a batch's answers, (rows, twice the pairs)."""
        self.values |= {digest: float(found[r, i]) for r, i, digest in answers_of(batch)}

    def joined(self, batch: _Batch) -> dict[str, np.ndarray]:
        """A batch with `reference`: the log-probability of each answer, 0 for missing pairs."""
        rows, pairs = batch["pairs"].shape
        reference = np.zeros((rows, 2 * pairs), np.float32)
        for r, i, digest in answers_of(batch):
            reference[r, i] = self.values[digest]
        return {**batch, "reference": reference}


def answers_of(batch: _Batch) -> Iterator[tuple[int, int, bytes]]:
    """The answers of a batch: row, column (chosen, rejected, chosen, ...) and digest of each."""
    for r, segments in enumerate(batch["segments"]):
        # Segments count from 1, contiguously; 0 is padding.
        ends = [*np.flatnonzero(np.diff(segments)) + 1, len(segments)]
        start = 0
        for i in range(2 * int(batch["pairs"][r].sum())):
            here, start = slice(start, ends[i]), ends[i]
            content = batch["tokens"][r, here].tobytes() + batch["mask"][r, here].tobytes()
            yield r, i, hashlib.blake2b(content, digest_size=_SIZE).digest()


@dataclass(frozen=True)
class BatchesWithReference:
    """Batches with their answers' log-probabilities, iterated like the dataset.

    Attributes:
        batches: The dataset.
        reference: The log-probabilities of all its answers.
    """

    batches: data.Dataset | data.Mixture
    reference: ReferenceLogProbs

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The dataset's end tokens."""
        return self.batches.end_tokens

    def __iter__(self) -> "_JoinedIterator":
        """Starts with the first batch."""
        return _JoinedIterator(iter(self.batches), self.reference)


class _JoinedIterator(Iterator[dict[str, np.ndarray]]):
    """An iterator over these batches, with the state of the dataset's iterator."""

    def __init__(self, iterator: Any, reference: ReferenceLogProbs):
        self._iterator, self._reference = iterator, reference
        self.get_state, self.set_state = iterator.get_state, iterator.set_state

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch."""
        return self._reference.joined(next(self._iterator))


def load_or_compute_reference(
    folder: RunFolder, datasets: Sequence[data.Dataset], job: Job, options: Mapping[str, Any]
) -> ReferenceLogProbs | None:
    """Loads the log-probabilities of all answers from the run's folder, or computes missing ones.

    Args:
        folder: The folder of the run.
        datasets: The datasets with the answers.
        job: The model, its parameters and the loss.
        options: Options of the run.

    Returns:
        The reference; None if the loss needs none.

    Raises:
        ValueError: If the run has made steps with a different checkpoint as reference.
    """
    if not job.reference:
        return None
    precision = options["precision"].on(options["hardware"])
    arithmetic = f"{precision.compute} {precision.master} {precision.frozen} {job.trainable}"
    if precision.products is not None:
        arithmetic += f" {precision.products}"
    reference = ReferenceLogProbs(
        folder.reference, f"{' '.join(map(_digest, job.reference))} {arithmetic}"
    )

    def has_changed() -> bool:
        return folder.has_checkpoints and folder.note("reference") != reference.key

    if distributed.in_first(has_changed):
        raise ValueError(
            f"`model` = {' with '.join(job.reference)} has changed since {folder.path} began, but "
            "it is the reference of all steps. Restore that checkpoint, or choose another `out`"
        )
    reference.load()
    # A batch is computed by all processes, if one of them lacks an answer of its rows.
    lacks = distributed.gather([reference.missing(batch) for batch in _batches(datasets)])
    lacking = itertools.compress(_batches(datasets), map(any, zip(*lacks, strict=True)))
    if (first := next(lacking, None)) is not None:
        try:
            for batch, found in _computed(itertools.chain([first], lacking), first, job, options):
                reference.take(batch, found)
        finally:  # saves partial results of an interrupted process too
            reference.save()
        distributed.gather(None)  # all have saved
        reference.load()
        print(f"reference: {len(reference.values):,} answers, {reference.path}", flush=True)
    if len(set(distributed.gather(len(reference.values)))) > 1:
        raise ValueError(f"`out` = {folder.path} must be a folder that all processes see")
    folder.take_note("reference", reference.key)
    return reference


def _batches(datasets: Sequence[data.Dataset]) -> Iterator[_Batch]:
    """Batches that cover each document of some datasets."""
    for each in datasets:
        yield from itertools.islice(each, -(-each.num_rows // each.options.batch_size))


def _computed(
    batches: Iterable[_Batch], sample: _Batch, job: Job, options: Mapping[str, Any]
) -> Iterator[tuple[_Batch, np.ndarray]]:
    """Batches with the log-probabilities of their answers, under the initial model."""
    rows, pairs = sample["pairs"].shape
    # An optimizer without state, because the model is only evaluated.
    trainer = mt.Trainer(
        job.model,
        job.counted_loss,
        optax.sgd(0.0),
        {**sample, "reference": np.zeros((rows, 2 * pairs), np.float32)},
        params=job.params,
        progress=has_bar(),
        **options,
    )
    try:
        for batch in tqdm(batches, "reference", unit="batch", disable=not has_bar()):
            yield batch, trainer.predict([batch], objectives.answer_log_probabilities)
    finally:
        del trainer
        gc.collect()  # frees its host memory for the run


def _digest(model: str) -> str:
    """A hash of a checkpoint's full content, or of adapters'."""
    folder = Path(model).expanduser()
    configurations = (folder / "config.json", folder / "adapter_config.json")
    paths = (*folder.glob("*.safetensors"), *configurations)
    names = sorted(path.name for path in paths)
    files = [file for name in names if (file := regular_file(folder, name)) is not None]

    def of_file(path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(of_file, files))).hexdigest()
