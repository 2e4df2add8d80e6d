"""Runs of one model, loss, optimizer and options, traced and compiled once for several tests."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import optax
import pytest

from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec, batch_key


class Started:
    """Run specs and compiled functions of the runs so far, whatever their budgets and machines.

    A run is known again by its loss and its optimizer themselves, not by what they compute, and by
    the shapes of its model.
    """

    def __init__(self):
        self._specs: dict[Hashable, RunSpec] = {}
        self._kernels: dict[Hashable, KernelCache] = {}
        self._newest = KernelCache()

    def make_run_spec(
        self,
        adapted: AdaptedModel,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        sample_batch: Any,
        options: Options,
    ) -> RunSpec:
        """The run spec of an equal run, if there was one, for this budget; or else a new one."""
        model = adapted.params_tree(adapted.shapes), adapted.variable_shapes
        shapes = ((x.shape, x.dtype) for x in jax.tree.leaves(model))
        program = loss_fn, optimizer, batch_key(sample_batch), jax.tree.structure(model), *shapes
        anywhere = dataclasses.replace(
            options, device_budget="least", hardware=None, disk_dir=None, disk_budget=None
        )
        # No function depends on the number of waves.
        kernels = dataclasses.replace(anywhere, waves=None), *program
        self._newest = self._kernels.setdefault(kernels, KernelCache())
        key = (anywhere, options.hardware, *program)
        if key not in self._specs:
            spec = make_run_spec(adapted, loss_fn, optimizer, sample_batch, options)
            self._specs[key] = spec
        return _with_budget(dataclasses.replace(self._specs[key], adapted=adapted), options)

    def kernels(
        self,
        compiler_options: Mapping[str, str] | None = None,
        platform: str = "cpu",
        *,
        code_passes: bool = False,
        with_triton: bool = False,
        device: Any = None,
        agree: Any = None,
    ) -> KernelCache:
        """The compiled functions of the run whose spec was made last; a CPU has no options.

        A run that pretends to have a GPU has estimates of its own.
        """
        assert not (compiler_options or code_passes or with_triton) or platform == "gpu"
        return self._newest if platform == "cpu" else KernelCache(platform=platform)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Has trainers start with what is known."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(start, "make_run_spec", self.make_run_spec)
            monkeypatch.setattr(start, "KernelCache", self.kernels)
            yield


def _with_budget(spec: RunSpec, options: Options) -> RunSpec:
    """A run spec scheduled for the budget of some options, which are else its own."""
    if options == spec.options:
        return spec
    budget = None if isinstance(options.device_budget, str) else options.device_budget
    schedule = find_schedule(spec.first.workload, budget, spec.first.selective)
    first = dataclasses.replace(spec.first, schedule=schedule)
    return dataclasses.replace(spec, options=options, budget_bytes=budget, first=first)
