"""Runs the system under test on a case of the zoo, and compares runs with the oracle."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import megatrain_jax as mt
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel, adapt
from megatrain_jax._src.engine.options.options import DeviceBudget, Options
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.hardware import card
from oracle import PlainRun
from zoo_case import Case

NUM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a run of the system, on the host."""

    losses: tuple[float, ...]
    metrics: tuple[dict[str, float], ...]
    first_grads: Any
    params: Any
    opt_state: Any
    trainer: mt.Trainer


# A machine so slow at arithmetic that whatever spares some pays.
SLOW = dataclasses.replace(card("H200"), flops_per_s=1e6)


@functools.cache
def recording(optimizer: Any) -> Callable[[Any], optax.GradientTransformation]:
    """Puts a transformation in front that only keeps the last gradient in its state."""

    def make(params: Any) -> optax.GradientTransformation:
        return optax.chain(optax.trace(decay=0.0), optimizer(params))

    return make


# What is made twice counts as two different ones, for which nothing is shared.
@functools.lru_cache(maxsize=32)
def _adapted(case: Case) -> tuple[AdaptedModel, Any]:
    """A case's model without its arrays, and its first batch."""
    batch = case.batch(0)
    return adapt(case.build(), case.loss_fn, batch, 0)[0], batch


@functools.lru_cache(maxsize=32)
def _made(
    case: Case, optimizer: Callable[[Any], optax.GradientTransformation]
) -> optax.GradientTransformation:
    """An optimizer from the tree of the shapes of a model's parameters."""
    adapted, _ = _adapted(case)
    return optimizer(adapted.params_tree(adapted.shapes))


def make_spec(
    case: Case, optimizer: Callable[[Any], optax.GradientTransformation], **options: Any
) -> RunSpec:
    """The run spec of such a trainer, without arrays; see `make_trainer`."""
    adapted, batch = _adapted(case)
    given: dict[str, Any] = {"precision": mt.Precision(compute=jnp.float32), **options}
    return make_run_spec(adapted, case.loss_fn, _made(case, optimizer), batch, Options(**given))


def make_trainer(
    case: Case,
    optimizer: Callable[[Any], optax.GradientTransformation],
    *,
    microbatches: int = 1,
    budget: DeviceBudget = None,
    compute: Any = jnp.float32,
    frozen: Any = None,
    products: Any = None,
    precision: mt.Precision | None = None,
    sample: Any = None,
    **options: Any,
) -> mt.Trainer:
    """A trainer; the optimizer is made from the tree of the parameters' shapes."""
    return mt.Trainer(
        case.build(),
        case.loss_fn,
        _made(case, optimizer),
        case.batch(0) if sample is None else sample,
        microbatches=microbatches,
        device_budget=budget,
        precision=precision or mt.Precision(compute=compute, frozen=frozen, products=products),
        **options,
    )


def train(trainer: mt.Trainer, batches: Sequence[Any], *, gradients: bool = True) -> Run:
    """Takes a step per batch, without transfers that nobody asked for."""
    results, first = [], None
    for batch in batches:
        with jax.transfer_guard("disallow"):
            results.append(trainer.step(batch))
        if gradients and first is None:
            first = trainer.opt_state[0].trace
    metrics = tuple(trainer.read(m) for m in results)
    return Run(
        losses=tuple(m["loss"] for m in metrics),
        metrics=metrics,
        first_grads=first,
        params=trainer.params,
        opt_state=trainer.opt_state,
        trainer=trainer,
    )


def variables_of(model: Any) -> Any:
    """The variables of a model that are no parameters, as the oracle has them."""
    if isinstance(model, linen.Module):
        return {k: v for k, v in model.variables.items() if k != "params"}
    return nnx.state(model, nnx.Not(nnx.Param)) if isinstance(model, nnx.Module) else ()


def check_close(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    """Checks trees leaf by leaf, relative to each leaf's largest value."""
    ours = jax.tree_util.tree_leaves_with_path(actual)
    theirs = jax.tree_util.tree_leaves_with_path(expected)
    assert [p for p, _ in ours] == [p for p, _ in theirs]
    for (path, a), (_, e) in zip(ours, theirs, strict=True):
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, (what, jax.tree_util.keystr(path))
        error = np.abs(a - e).max(initial=0)
        largest = np.abs(e).max(initial=0)
        assert error <= tolerance * largest, (
            f"{what} {jax.tree_util.keystr(path)}: off by {error:.3g} of {largest:.3g}"
        )


def check_as_near(actual: Any, plain: Any, exact: Any, tolerance: float, what: str) -> None:
    """Checks that no leaf is farther from float64 than plain fp32 is, but for a tolerance.

    It is relative to each leaf's largest value.
    """
    ours, theirs, true = map(jax.tree_util.tree_leaves_with_path, (actual, plain, exact))
    assert [p for p, _ in ours] == [p for p, _ in theirs] == [p for p, _ in true]
    for (path, a), (_, b), (_, e) in zip(ours, theirs, true, strict=True):
        a, b, e = (np.asarray(x, np.float64) for x in (a, b, e))
        allowed = np.abs(b - e).max(initial=0) + tolerance * np.abs(e).max(initial=0)
        error = np.abs(a - e).max(initial=0)
        assert error <= allowed, (
            f"{what} {jax.tree_util.keystr(path)}: off by {error:.3g}, {allowed:.3g} are allowed"
        )


def check_same_bits(actual: Any, expected: Any) -> None:
    """Checks that two trees are equal bit for bit."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def check_each_continues_the_other(
    one: mt.Trainer, other: mt.Trainer, batch: Any, folder: Path
) -> None:
    """Trains, saves and restores in both directions, between runs that store state differently."""
    for first, second in ((one, other), (other, one)):
        train(first, [batch], gradients=False)
        path = folder / str(first is one)
        first.save(path)
        second.restore(path)
        check_same_bits(second.params, first.params)
        check_same_bits(second.opt_state, first.opt_state)


def leaves_with_names(tree: Any) -> list[tuple[str, np.ndarray]]:
    """The leaves of a tree as numpy arrays, with their paths in words."""
    return [
        (jax.tree_util.keystr(path), np.asarray(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def check_first_gradients(case: Case, run: PlainRun) -> None:
    """Checks of an oracle's run that its gradients can be compared: none of a leaf is tiny.

    They are zero only where the case says so, and their norm is the one among the metrics.
    """
    leaves = leaves_with_names(run.first_grads)
    sizes = [(path, np.abs(x).max()) for path, x in leaves]
    zeros = [path for path, size in sizes if size == 0]
    assert bool(zeros) == case.zero_gradients
    # A leaf whose gradient is only rounding can't be compared to any tolerance.
    largest = max(size for _, size in sizes)
    assert [path for path, size in sizes if 0 < size < 1e-4 * largest] == []
    norm = np.sqrt(sum(np.sum(x**2) for _, x in leaves))
    np.testing.assert_allclose(run.metrics[0]["grad_norm"], norm, rtol=1e-6)
