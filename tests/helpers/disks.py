"""Runs whose state rests on disks, whatever memory the host has."""

import dataclasses
import math
import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.spec.disk import classes_of
from megatrain_jax._src.engine.spec.rescheduled import (
    with_state_on_disk,
    workload_with_recomputed_spans,
)
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state import drive
from zoo_case import DIM, VOCAB, Case, cross_entropy


def _build() -> Any:
    rng = np.random.default_rng(0)
    layers = [{"w": rng.normal(size=(DIM, DIM)) / 4, "b": np.zeros(DIM)} for _ in range(4)]
    return {"embed": rng.normal(size=(VOCAB, DIM)), "layers": layers}


def _loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["tokens"][:, :-1]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ params["embed"].T, batch["tokens"][:, 1:])


CASE = Case(name="residual", build=_build, loss_fn=_loss, blocks=4, templates=1)


def _skipping_loss(params: Any, batch: Any) -> jax.Array:
    first = x = params["embed"][batch["tokens"][:, :-1]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return cross_entropy((x + first) @ params["embed"].T, batch["tokens"][:, 1:])


# The embedding waits for the head, also in an evaluation.
SKIPPING = dataclasses.replace(CASE, name="skipping", loss_fn=_skipping_loss)

ALL = (Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.MASTERS, Kind.ACTIVATION)


def parts_on_disk(
    spec: RunSpec, kinds: Collection[Kind], again: frozenset[int] = frozenset()
) -> dict[Key, int]:
    """All parts of some kinds, with their classes."""
    classes = [keys for keys in classes_of(spec, again) if keys[0].kind in kinds]
    return {key: number for number, keys in enumerate(classes) for key in keys}


@contextmanager
def state_on_disk(kinds: Collection[Kind] = ALL, *, span: int = 1) -> Iterator[None]:
    """Runs that start in this context have all parts of some kinds in their `disk_dir`.

    Of each `span` blocks, all but one are computed again.
    """

    def fitted(spec: RunSpec, *_: Any) -> RunSpec:
        again = workload_with_recomputed_spans(spec.first, span).again
        on_disk = parts_on_disk(spec, kinds, again)
        assert on_disk
        first = with_state_on_disk(spec.first, on_disk, again, spec.budget_bytes, math.inf)
        return dataclasses.replace(spec, first=first, on_disk=on_disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "fit_to_host", fitted)
        patch.setattr(start, "in_memory", lambda folder: False)  # where tests write to a tmpfs
        yield


@contextmanager
def timed_briefly() -> Iterator[None]:
    """Runs write little to time drives, not half a GiB for seconds, since no test needs rates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "_MEASURED_BYTES", 2**20)
        patch.setattr(drive, "_MEASURED_SECONDS", 1e-9)
        yield


class Reads:
    """The bytes that are read from drives beside steps, and how many of these are in memory."""

    total = now = most = 0

    def add(self, part: np.ndarray) -> None:
        """Counts an array until nobody has it."""
        self.total += part.nbytes
        self.now += part.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(part, self._end, part.nbytes)

    def _end(self, num_bytes: int) -> None:
        self.now -= num_bytes


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Counts what is read from drives beside steps."""
    found, read_part = Reads(), drive.Drives.read_part

    def counted(*args: Any) -> np.ndarray:
        found.add(part := read_part(*args))
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive.Drives, "read_part", counted)
        yield found


class ShuffledThreads:
    """Runs the jobs of a thread pool in a random order, one at a time."""

    def __init__(self, seed: int):
        self._rng, self._jobs, self._ended = random.Random(seed), [], False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        future: Future = Future()
        with self._changed:
            self._jobs.append((future, function, args))
            self._changed.notify()
        return future

    def shutdown(self, **_: Any) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ended)
                if not self._jobs:
                    return
                job = self._jobs.pop(self._rng.randrange(len(self._jobs)))
            future, function, args = job
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)


@contextmanager
def shuffled_disks(seed: int) -> Iterator[None]:
    """Drives that are made meanwhile read and write in random orders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "ThreadPoolExecutor", lambda *_, **__: ShuffledThreads(seed))
        yield
