"""The steps of a run on batches: cut and scheduled once per batch shape, then dispatched."""

import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.engine.adapt.loss_function import Prediction
from megatrain_jax._src.engine.history import weighted_means
from megatrain_jax._src.engine.options.batch_checks import check_batch, check_like, other_arrays
from megatrain_jax._src.engine.options.inputs import check_data, check_loss
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.run_state import RunState
from megatrain_jax._src.engine.runtime.batch import joined_shapes, put_batch
from megatrain_jax._src.engine.runtime.evaluation import evaluate_batches
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.runtime.training import StepMetrics
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.budget import fit_new_shape_to_device
from megatrain_jax._src.engine.spec.host import fit_new_shape_to_host
from megatrain_jax._src.engine.spec.rescheduled import with_all_waves
from megatrain_jax._src.engine.spec.run_spec import batch_key


class RunSteps:
    """The steps of a run: training, evaluation and prediction, one per batch shape.

    Attributes:
        bound: The steps that were cut and scheduled, by batch shape, kind and loss.
    """

    def __init__(self, state: RunState, sample_batch: Any):
        """Starts with the training step of the first batch's shape.

        Args:
            state: The run.
            sample_batch: The first batch, or its shapes.
        """
        self._state = state
        self._sample = joined_shapes(sample_batch, 1)
        first = state.spec.first
        self.bound: dict[Hashable, BoundStep] = {first.key: first}

    def check(self, batch: Any) -> None:
        """Checks a batch to train on; see `Trainer.check_batch`."""
        state = self._state
        placement = state.store.placement
        num_devices, divides = len(placement.local_devices), placement.num_devices > 1
        of = f"the batch of training step {state.training.num_steps + 1}"
        number = state.spec.microbatches
        check_batch(batch, number, num_devices=num_devices, of=of, needs_rows=divides)
        check_like(batch, self._sample)
        state.spec.adapted.check_batch(batch)

    def check_evaluation(self, batch: Any) -> None:
        """Checks a batch to evaluate; see `Trainer.check_eval_batch`."""
        self._check_values(batch)
        spec, placement = self._state.spec, self._state.store.placement
        shapes = joined_shapes(batch, placement.processes.count)
        if _num_bytes(batch) > _num_bytes(self._sample):  # it may not fit
            self._bind(batch, train=False, loss_fn=spec.loss_fn)
            return
        with placement.outside_meshes(), _noting_arrays("an evaluation", batch, self._sample):
            spec.trace(shapes, train=False, loss_fn=spec.loss_fn)

    def train(self, batch: Any, *, by_hand: bool) -> StepMetrics:
        """Dispatches a training step; see `Trainer.step`.

        Args:
            batch: A batch.
            by_hand: Whether the step's record is added to the history when its results are known.
        """
        state, began = self._state, time.perf_counter()
        state.training.check_whole()
        self.check(batch)
        step = self._bind(batch, train=True, loss_fn=state.spec.loss_fn)
        # Otherwise steps would queue on the device without bound, each with its batch.
        state.training.limit_steps_in_flight()
        placement = state.store.placement
        where = f"training step {state.training.num_steps + 1}"
        with deferred_interrupt(), placement.outside_meshes():
            state.training.check_whole()
            placement.processes.agree(where, lambda: {"the shapes of a batch": batch_key(batch)})
            state.settle_saving()
            metrics = state.training.dispatch(step, put_batch(batch, step, placement))
            if by_hand:
                state.by_hand.add(began, metrics)
        return metrics

    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step and returns its metrics; see `Trainer.read`."""
        state = self._state
        try:
            values = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        except (TypeError, ValueError) as error:
            raise TypeError(checks.refused("metrics", "what `step` returned", metrics)) from error
        if isinstance(metrics, StepMetrics):
            is_finite = state.training.settle(metrics)
            state.record(keep=state.training.num_steps - metrics.step)
            if state.spec.optimizer.skips:
                values["skipped"] = float(not is_finite)
        return values

    def evaluate(
        self, batches: Iterable[Any], loss_fn: Callable[..., Any] | None
    ) -> dict[str, float]:
        """Computes loss and metrics of batches; see `Trainer.evaluate`."""
        if loss_fn is not None:
            check_loss(loss_fn)
        found = list(self._evaluated(batches, loss_fn or self._state.spec.loss_fn))
        rows, sizes = zip(*found, strict=True)
        return weighted_means(jax.device_get(rows), sizes)

    def predict(self, batches: Iterable[Any], fn: Callable[..., Any]) -> Any:
        """Computes arrays with a row for each example; see `Trainer.predict`."""
        check_loss(fn, "fn")
        here, found = self._state.store.placement.part_here, []
        for arrays, _ in self._evaluated(batches, Prediction(fn)):
            if found:
                found[-1] = jax.tree.map(here, found[-1])  # while this batch is computed
                _check_joinable(found[0], arrays, len(found) + 1)
            found.append(arrays)
        found[-1] = jax.tree.map(here, found[-1])
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _evaluated(
        self, batches: Iterable[Any], loss_fn: Callable[..., Any]
    ) -> Iterator[tuple[Any, int | None]]:
        """The results of batches, at least one; see `evaluate_batches`."""
        check_data("batches", batches, "to evaluate on one batch, pass [batch]")
        self._state.flush()

        def bind(batch: Any) -> BoundStep:
            self._check_values(batch)
            return self._bind(batch, train=False, loss_fn=loss_fn)

        found = evaluate_batches(self._state.engine, batches, bind)
        if (first := next(found, None)) is None:
            raise ValueError("`batches` gave no batch to evaluate")
        return itertools.chain([first], found)

    def _check_values(self, batch: Any) -> None:
        """Checks a batch to evaluate, which need not be like the first one to train on."""
        spec, placement = self._state.spec, self._state.store.placement
        check_batch(batch, needs_rows=spec.microbatches > 1 or placement.num_devices > 1)
        spec.adapted.check_batch(batch)

    def _bind(self, batch: Any, *, train: bool, loss_fn: Callable[..., Any]) -> BoundStep:
        """The step on batches of this shape, cut and scheduled when it is first needed."""
        state = self._state
        placement, spec = state.store.placement, state.spec
        shapes = joined_shapes(batch, placement.processes.count)
        # Losses are compared as functions: a new one, even with equal code, is cut again.
        key = (batch_key(shapes), train, loss_fn)
        if key not in self.bound:
            where = f"training step {state.training.num_steps + 1}" if train else "an evaluation"
            with placement.outside_meshes(), _noting_arrays(where, batch, self._sample):
                step = spec.bound_step(shapes, train=train, loss_fn=loss_fn)
                step = fit_new_shape_to_host(
                    step, spec, *placement.processes.spread, training=train
                )
                step = fit_new_shape_to_device(
                    step, spec, state.engine.kernels, placement, training=train
                )
                self.bound[key] = with_all_waves(step, training=train)
        return self.bound[key]


def _check_joinable(first: Any, other: Any, number: int) -> None:
    """Checks that the arrays of two batches differ in nothing but their number of rows."""
    before, now = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)
        for arrays in (first, other)
    )
    if before != now:
        raise ValueError(
            f"a row of what fn returned is {before} for the first of `batches` and {now} for batch "
            f"{number}, but the rows of all batches are joined: return rows of equal shapes, or "
            "call `predict` with one batch at a time"
        )


def _num_bytes(batch: Any) -> int:
    return sum(map(jx.num_bytes, jax.tree.leaves(batch)))


@contextlib.contextmanager
def _noting_arrays(where: str, batch: Any, sample: Any) -> Iterator[None]:
    """Adds to a step's error the arrays that differ from those of the first batch.

    The error may be JAX's own, about two shapes in the middle of the model, or the user's.
    """
    try:
        yield
    except Exception as error:
        if others := other_arrays(batch, sample):
            error.add_note(f"This came with the batch of {where}: {others}.")
        raise
