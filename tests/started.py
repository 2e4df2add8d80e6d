"""Runs of one model, loss, optimizer and options, traced and compiled once for a file of tests."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import optax
import pytest

from megatrain_jax._src import start, trainer
from megatrain_jax._src.adapt.adapters import AdaptedModel
from megatrain_jax._src.build.options import Options
from megatrain_jax._src.build.run_spec import RunSpec, batch_key, make_run_spec
from megatrain_jax._src.kernels.cache import KernelCache


class Started:
    """Run specs and compiled functions of the runs so far.

    A run is known again by its loss and its optimizer themselves, not by what they compute.
    """

    def __init__(self):
        self._known: dict[Hashable, tuple[RunSpec, KernelCache]] = {}
        self._newest = KernelCache()

    def make_run_spec(
        self,
        adapted: AdaptedModel,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        sample_batch: Any,
        options: Options,
    ) -> RunSpec:
        """The run spec of an equal run, if there was one; or else a new one."""
        model = adapted.params_tree(adapted.shapes), adapted.variable_shapes
        shapes = ((x.shape, x.dtype) for x in jax.tree.leaves(model))
        run = loss_fn, optimizer, options, batch_key(sample_batch)
        key = *run, jax.tree.structure(model), *shapes
        if key not in self._known:
            spec = make_run_spec(adapted, loss_fn, optimizer, sample_batch, options)
            self._known[key] = spec, KernelCache()
        spec, self._newest = self._known[key]
        return dataclasses.replace(spec, adapted=adapted)

    def kernels(self, compiler_options: Mapping[str, str]) -> KernelCache:
        """The compiled functions of the run whose spec was made last; a CPU has no options."""
        assert not compiler_options
        return self._newest

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has trainers start with what is known."""
        monkeypatch.setattr(trainer, "make_run_spec", self.make_run_spec)
        monkeypatch.setattr(start, "KernelCache", self.kernels)
