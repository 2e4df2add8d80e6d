"""The training steps of a run, from dispatch until their results are known and recorded.

A step's metrics are read late, so that the device never waits for Python. A number that was not
finite is noticed only after a step or two more have been dispatched. Updates do nothing while the
store's `ok` is false, so these later steps have changed nothing and are forgotten. To settle a step
is to wait for its result and to act on it.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.kernels.steps import can_be_halved
from megatrain_jax._src.engine.program.optimizer.hyperparameters import find_hyperparameters
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.startup.allocator import CUDA_POOL, PREALLOCATE, VARIABLE


class TooManySkippedError(FloatingPointError):
    """Raised if the maximum number of consecutive steps was skipped; all of them are settled."""


class StepMetrics(dict[str, jax.Array]):
    """The metrics of one step by name, as device scalars that may not be ready yet.

    The keys are "loss", "grad_norm", the loss function's own metrics, the hyperparameters that
    `optax.inject_hyperparams` used in the step and, in float16, "loss_scale". The attributes let
    `Trainer.read` decide whether the step was finite.

    Attributes:
        step: Number of the step, from 1.
        healthy: Whether all numbers have been finite up to its end, or in it if steps are skipped.
        group_ok: For each group, in order of its gradient, whether it and all earlier ones were
            finite.
    """

    step: int
    healthy: jax.Array
    group_ok: list[tuple[int, jax.Array]]


class Training:
    """Dispatches, counts and settles a run's training steps; tracks whether its state is valid.

    Attributes:
        num_steps: Steps dispatched so far.
        num_skipped: Settled steps that were skipped.
        skipped_in_row: Number of consecutive skipped steps up to the last settled one.
        lost: The reason why the state is lost; None if it is not.
        partial: A sentence about a partially applied step in the state; None after whole steps.
    """

    def __init__(self, engine: Engine, names: tuple[str, ...], max_skipped: int):
        """Starts before the first step.

        Args:
            engine: The engine that runs the steps.
            names: Name of each group, for messages.
            max_skipped: Number of consecutive skipped steps that is an error.
        """
        self.num_steps = self.num_skipped = self.skipped_in_row = 0
        self.lost: str | None = None
        self.partial: str | None = None
        self._engine, self._names, self._max_skipped = engine, names, max_skipped
        self._hyperparameters = find_hyperparameters(engine.optimizer)
        self._in_flight: deque[StepMetrics] = deque()
        self._has_warned = False

    def check_whole(self) -> None:
        """Checks that the state is not lost.

        Raises:
            RuntimeError: If an error has interrupted a step or a restore.
        """
        if self.lost is not None:
            raise RuntimeError(
                f"this trainer's state is lost: {self.lost}. Restore a checkpoint with "
                "`trainer.restore(path)`, or make a new trainer."
            )

    def dispatch(self, step: BoundStep, batch: Sequence[jax.Array]) -> StepMetrics:
        """Dispatches a step on a batch that is on the device."""
        with self._lost_unless_done(f"step {self.num_steps + 1} off while it was dispatched"):
            metrics = StepMetrics(self._engine.train(step, batch))
        self.partial = None
        self.num_steps += 1
        for name, position in self._hyperparameters.items():
            shown = name if name not in metrics else f"hyperparams.{name}"
            metrics[shown] = self._engine.store.globals[position]
        metrics.step = self.num_steps
        metrics.healthy, metrics.group_ok = self._engine.store.ok, self._engine.group_ok
        self._in_flight.append(metrics)
        return metrics

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest; see `Engine.flush`.

        Raises:
            RuntimeError: See `check_whole`.
        """
        self.check_whole()
        with self._lost_unless_done(f"the updates of step {self.num_steps} off"):
            self._engine.flush()

    @contextmanager
    def _lost_unless_done(self, what: str) -> Iterator[None]:
        """Marks the state as lost if the body doesn't end: nobody knows which groups it updated."""
        self.lost = f"an error cut {what}"
        yield
        self.lost = None

    def limit_steps_in_flight(self) -> None:
        """Waits until at most one step is in flight.

        Two steps may overlap, no more: steps that run ahead hold device memory.

        Raises:
            FloatingPointError: See `settle`.
        """
        while len(self._in_flight) > 1:
            self._settle_oldest()

    def settle(self, metrics: StepMetrics) -> bool:
        """Waits for a step and earlier ones; returns whether its numbers were finite.

        Raises:
            FloatingPointError: See `Trainer.read`.
        """
        while self._in_flight and self._in_flight[0].step <= metrics.step:
            self._settle_oldest()
        healthy = bool(jax.device_get(metrics.healthy))
        if not healthy and not self._engine.optimizer.skips:
            raise FloatingPointError(f"step {metrics.step} or one before it was not finite")
        return healthy

    def settle_all(self) -> None:
        """Waits for all steps; see `settle`."""
        while self._in_flight:
            self._settle_oldest()

    def lose(self, reason: str) -> None:
        """Marks the state as lost, with a reason, and forgets the steps in flight."""
        self._in_flight.clear()
        self.lost = reason

    def restore_counts(self, facts: Mapping[str, Any]) -> None:
        """Takes the step counts from the facts of a restored checkpoint."""
        self.lost, self.partial = None, facts["partial"]
        self.num_steps, self.num_skipped = facts["step"], facts["skipped"]
        self.skipped_in_row = facts["skipped_in_row"]

    def _settle_oldest(self) -> None:
        metrics = self._in_flight[0]
        healthy = bool(jax.device_get(metrics.healthy))
        if not healthy and not self._engine.optimizer.skips:
            self._fail(metrics)
        # Not earlier, so that a step whose wait was interrupted is settled later.
        self._in_flight.popleft()
        self.skipped_in_row = 0 if healthy else self.skipped_in_row + 1
        self.num_skipped += not healthy
        # The count can exceed the maximum: a resumed run may allow fewer steps, and steps that
        # halve the scale of the loss are allowed.
        if self.skipped_in_row >= self._max_skipped and not _overflows_by_scale(metrics):
            self.skipped_in_row = 0  # a caller who continues has the full number again
            raise TooManySkippedError(
                f"a loss or a gradient of each step from {metrics.step - self._max_skipped + 1} to "
                f"{metrics.step} was not finite. They were skipped, as many in a row as "
                f"`max_skipped`={self._max_skipped} allows; parameters and optimizer state are as "
                "before them."
            )
        if healthy and not self._has_warned:
            self._warn_of_nothing(metrics)

    def _warn_of_nothing(self, metrics: StepMetrics) -> None:
        """Warns, once per run, of a step with weight 0, such as a batch with all labels masked."""
        if "weight" not in metrics or float(jax.device_get(metrics["weight"])) != 0:
            return
        self._has_warned = True
        warn_user(
            f'nothing counted in the batch of step {metrics.step}: the loss\'s metric "weight" is '
            "0, as where all labels are masked. The step updated nevertheless, by weight decay and "
            "momentum alone. Leave such batches out. Further steps like it have the weight 0 in "
            "their records, without a warning.",
        )

    def _fail(self, metrics: StepMetrics) -> None:
        """Raises the error of a step that was not finite, after dropping the step and its updates.

        Training can then continue from the state described in the message.
        """
        loss, flags = jax.device_get((metrics["loss"], metrics.group_ok))
        names, deferred = self._names, self._engine.optimizer.deferred
        # `ok` stays false once it is, so these are all groups before the first that wasn't finite;
        # immediate updates have already changed them.
        updated = [names[g] for g, ok in flags if ok]
        touched = bool(updated) and bool(np.isfinite(loss)) and not deferred
        self._in_flight.clear()
        with self._engine.store.placement.outside_meshes():
            self._recover(metrics, touched)
        step = f"step {metrics.step}"
        if touched:
            self.partial = f"{step} was done in part, since a gradient was not finite"
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of {step} is {loss}; nothing was updated")
        if deferred:
            raise FloatingPointError(f"a gradient of {step} is not finite; nothing was updated")
        guilty = next(names[g] for g, ok in flags if not ok)
        raise FloatingPointError(
            f"the gradient of {guilty} is not finite in {step}. Updated before it was found: "
            f"{', '.join(updated) or 'nothing'}; the remaining parameters are as before the step."
        )

    def _recover(self, metrics: StepMetrics, touched: bool) -> None:
        """Restores the state before a step that was not finite, unless the step has changed it."""
        self._engine.recover()
        # Steps dispatched after this one did nothing. A step that has changed something counts.
        self.num_steps = metrics.step if touched else metrics.step - 1
        self._engine.set_step(self.num_steps)


def _overflows_by_scale(metrics: StepMetrics) -> bool:
    """Whether a smaller scale may make a skipped step finite.

    It may if the loss was finite, because only gradients are computed with the scale.
    """
    if "loss_scale" not in metrics:
        return False
    loss, scale = jax.device_get((metrics["loss"], metrics["loss_scale"]))
    return bool(np.isfinite(loss)) and can_be_halved(float(scale))


class UnrecordedSteps:
    """The steps of `Trainer.step` that have no record yet, in order.

    Example: steps 7 and 8 were dispatched, and 9 is next. `records(keep=1)` waits for 7 alone and
    yields its record; `records()` waits for both.
    """

    def __init__(self, skips: bool):
        """Starts without steps.

        Args:
            skips: Whether a step with numbers that are not finite is skipped and counted; otherwise
                it ends in an error and has no record.
        """
        self._skips = skips
        self._waiting: deque[tuple[float, StepMetrics]] = deque()

    def add(self, began: float, metrics: StepMetrics) -> None:
        """Adds a step that began at a time of `time.perf_counter`."""
        self._waiting.append((began, metrics))

    @property
    def are_waiting(self) -> bool:
        """Whether there are steps without a record."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Forgets all steps without a record."""
        self._waiting.clear()

    def records(self, keep: int = 0) -> Iterator[dict[str, Any]]:
        """Yields the records of all but the newest `keep` steps, and forgets these steps.

        A step lasts until the next one begins, the newest until its record is requested.
        """
        while len(self._waiting) > keep:
            began, metrics = self._waiting[0]
            healthy, values = jax.device_get((metrics.healthy, dict(metrics)))
            # Not earlier: after an interrupted wait, the next call records the step.
            self._waiting.popleft()
            if not (healthy or self._skips):
                continue
            after = self._waiting[0][0] if self._waiting else time.perf_counter()
            values = {name: float(value) for name, value in values.items()}
            if self._skips:
                values["skipped"] = float(not healthy)
            yield {"step": metrics.step, "loss": values["loss"], **values, "seconds": after - began}


@contextmanager
def with_memory_advice() -> Iterator[None]:
    """Adds a note with advice to JAX's error if the body runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            note = _advice(os.environ.get(VARIABLE))
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _advice(allocator: str | None) -> str:
    """Returns the note for a process that uses this allocator of device memory."""
    if allocator == CUDA_POOL:
        # Measured with 234 GiB of pinned memory: 7 GiB were not found with 34 of 67 GiB free.
        other = (
            "If the error shows that much memory is free, CUDA's memory pool did not find it: set "
            f"{VARIABLE}=default before Python starts, and JAX's own allocator takes all of it "
            "at the start."
        )
    else:
        other = (
            "JAX's own allocator fails with memory left when none of its gaps is large enough. "
            f"With {VARIABLE} unset and {PREALLOCATE} not false, importing megatrain_jax before "
            "JAX's first computation chooses CUDA's memory pool, which joins gaps."
        )
    return (
        'If this is device memory: use device_budget="minimum", more `microbatches` or smaller '
        f"batches. {other} The trainer can't go on; a new one resumes from the newest checkpoint."
    )
