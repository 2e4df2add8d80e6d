"""The oracle: the plain training loop that JAX, Flax and Optax give without anything of ours.

Everything stays on the device, the whole loss is differentiated at once, and the optimizer sees
the whole tree. The one rule shared with the system under test is where a microbatch's random
key comes from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import isfunction, signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from zoo_case import Case

Optimizer = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]

# Tiny models spend their time in the CPU's code generator; this halves it.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """A user's model as trees and a pure loss.

    Attributes:
        params: what Optax sees: an `nnx.State`, Linen's "params", or the inexact arrays.
        variables: everything else that changes from step to step.
        loss: (params, variables, batch, rng) -> (loss, (metrics, new variables)).
    """

    params: Any
    variables: Any
    loss: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """The results of a plain run; but for random keys they are on the host.

    Attributes:
        losses: one a step, the mean over microbatches.
        first_grads: the first step's fp32 gradients, averaged over microbatches, as numpy arrays.
        params: the fp32 parameters after the last step, as numpy arrays.
        opt_state: Optax's state after the last step, as numpy arrays.
        metrics: one dict a step: the loss function's own metrics and "grad_norm".
        variables: the other variables after the last step, as numpy arrays.
    """

    losses: tuple[float, ...]
    first_grads: Any
    params: Any
    opt_state: Any
    metrics: tuple[dict[str, float], ...]
    variables: Any


def _call(loss_fn: Callable[..., Any], model: Any, batch: Any, rng: jax.Array) -> Any:
    takes_rng = len(signature(loss_fn).parameters) == 3
    return loss_fn(model, batch, rng) if takes_rng else loss_fn(model, batch)


def _with_metrics(result: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    return result if isinstance(result, tuple) else (result, {})


def _open_nnx(model: nnx.Module, loss_fn: Callable[..., Any]) -> PlainModel:
    graphdef, params, variables = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, variables: Any, batch: Any, rng: jax.Array) -> Any:
        merged = nnx.merge(graphdef, params, variables, copy=True)
        value, metrics = _with_metrics(_call(loss_fn, merged, batch, rng))
        return value, (metrics, nnx.state(merged, nnx.Not(nnx.Param)))

    return PlainModel(params=params, variables=variables, loss=loss)


def _open_linen(
    module: linen.Module, loss_fn: Callable[..., Any], batch: Any, seed: int
) -> PlainModel:
    def bound(model: Any, batch: Any, rng: jax.Array) -> Any:
        return _call(loss_fn, model, batch, rng)

    key = jax.random.key(seed)
    variables = dict(linen.init(bound, module)(key, batch, key))
    params = variables.pop("params")

    def loss(params: Any, variables: Any, batch: Any, rng: jax.Array) -> Any:
        apply = linen.apply(bound, module, mutable=list(variables))
        result, variables = apply({"params": params, **variables}, batch, rng, rngs={"params": rng})
        value, metrics = _with_metrics(result)
        return value, (metrics, dict(variables))

    return PlainModel(params=params, variables=variables, loss=loss)


def _open_pytree(tree: Any, loss_fn: Callable[..., Any]) -> PlainModel:
    def inexact(x: Any) -> bool:
        return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)

    params = jax.tree.map(lambda x: jnp.asarray(x) if inexact(x) else None, tree)
    static = jax.tree.map(lambda x: None if inexact(x) else x, tree)

    def loss(params: Any, variables: Any, batch: Any, rng: jax.Array) -> Any:
        model = jax.tree.map(
            lambda p, s: s if p is None else p, params, static, is_leaf=lambda x: x is None
        )
        value, metrics = _with_metrics(_call(loss_fn, model, batch, rng))
        return value, (metrics, variables)

    return PlainModel(params=params, variables=(), loss=loss)


def open_model(case: Case, batch: Any, seed: int = 0) -> PlainModel:
    """Return the case's model, initialised eagerly, as trees and a pure loss."""
    model = case.build()
    if isfunction(model):
        model = model()
    if isinstance(model, nnx.Module):
        return _open_nnx(model, case.loss_fn)
    if isinstance(model, linen.Module):
        return _open_linen(model, case.loss_fn, batch, seed)
    return _open_pytree(model, case.loss_fn)


def split_batch(batch: Any, microbatches: int) -> list[Any]:
    """Return the batch cut into equal runs of consecutive examples."""

    def part(x: np.ndarray, m: int) -> np.ndarray:
        size = x.shape[0] // microbatches
        return x[m * size : (m + 1) * size]

    return [jax.tree.map(lambda x, m=m: part(x, m), batch) for m in range(microbatches)]


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def plain_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `jax.jit` of the function, told to compile fast on a CPU."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options=FAST_COMPILE if on_cpu else None)


def _to_host(tree: Any) -> Any:
    """Return numpy arrays; random keys, which have no numpy form, stay as they are."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree
    )


@dataclass(frozen=True)
class _Loss:
    """A model's loss, equal to every other one of its case."""

    case: Case
    function: Callable[..., Any] = field(compare=False)


# Of a case's runs only the first compiles. What is kept holds no arrays.
@lru_cache(maxsize=32)
def _differentiate(loss: _Loss) -> Callable[..., Any]:
    return plain_jit(jax.value_and_grad(loss.function, has_aux=True))


# Apart from `_differentiate`: in one program XLA might skip rounding to the gradients' dtype.
@lru_cache(maxsize=32)
def _accumulate(microbatches: int, dtype: Any) -> Callable[..., Any]:
    def accumulate(sums: Any, terms: Any) -> Any:
        terms = jax.tree.map(lambda x: x / microbatches, cast(terms, dtype))
        return terms if sums is None else jax.tree.map(jnp.add, sums, terms)

    return plain_jit(accumulate)


def _mean_gradients(
    loss: _Loss, params: Any, variables: Any, parts: Sequence[Any], step_key: jax.Array, dtype: Any
) -> tuple[jax.Array, Any, dict[str, jax.Array], Any]:
    """Return means over the microbatches: loss, gradients, metrics; and the new variables.

    Those are what the first microbatch gives, but for the state of random numbers, which goes on.
    """
    sums, first, current = None, None, variables
    for m, part in enumerate(parts):
        rng = jax.random.fold_in(step_key, m)
        (value, (metrics, new)), grads = _differentiate(loss)(params, current, part, rng)
        sums = _accumulate(len(parts), dtype)(sums, (value, grads, metrics))
        first = new if first is None else first
        current, first = _with_random_state(variables, new), _with_random_state(first, new)
    assert sums is not None
    return (*sums, first)


def _with_random_state(variables: Any, new: Any) -> Any:
    """Return the variables with NNX's keys, and counts of keys, from others."""
    return jax.tree.map(
        lambda old, new: new if isinstance(new, nnx.RngState) else old,
        variables,
        new,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def train_plain(
    case: Case,
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    microbatches: int = 1,
    seed: int = 0,
    compute: Any = jnp.float32,
) -> PlainRun:
    """Train one step a batch.

    The key of microbatch m of step t is `fold_in(fold_in(key(seed), t), m)`, both from 0.

    Args:
        case: the model, its loss and how to initialise it.
        optimizer: a transformation, or a function of the parameters' tree that returns one.
        batches: one batch a step, as numpy arrays.
        microbatches: into how many runs of consecutive examples a batch is cut.
        seed: of Linen's initialisation and of the keys.
        compute: the dtype that parameters are cast to before the loss is differentiated with
            respect to them; parameters and optimizer state stay in fp32.
    """
    batches = list(batches)
    model = open_model(case, batches[0], seed)
    return _train(case, model, optimizer, batches, microbatches, seed, compute, jnp.float32)


def train_exact(case: Case, optimizer: Optimizer, batches: Iterable[Any]) -> PlainRun:
    """Train as `train_plain` does, in float64 throughout, from the same initial parameters.

    What it tells: how far from the truth results in fp32 may be. Of no use where random numbers
    are drawn, as JAX draws other ones in float64.
    """
    batches = list(batches)
    model = open_model(case, batches[0])
    with jax.enable_x64(True):
        return _train(case, model, optimizer, batches, 1, 0, jnp.float64, jnp.float64)


def _train(
    case: Case,
    model: PlainModel,
    optimizer: Optimizer,
    batches: Sequence[Any],
    microbatches: int,
    seed: int,
    compute: Any,
    masters: Any,
) -> PlainRun:
    """Train an initialised model; its masters, gradients and optimizer state have one dtype."""
    params, variables = cast(model.params, masters), model.variables
    made = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(params)
    tx = optax.with_extra_args_support(made)
    to_compute = plain_jit(lambda params: cast(params, compute))

    @plain_jit
    def update(grads: Any, state: Any, params: Any, loss: jax.Array) -> Any:
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    state = plain_jit(tx.init)(params)
    losses, history, first_grads = [], [], None
    for t, batch in enumerate(batches):
        step_key = jax.random.fold_in(jax.random.key(seed), t)
        parts = split_batch(batch, microbatches)
        loss, grads, metrics, variables = _mean_gradients(
            _Loss(case, model.loss), to_compute(params), variables, parts, step_key, masters
        )
        if t == 0:
            first_grads = _to_host(grads)
        params, state, norm = update(grads, state, params, loss)
        losses.append(float(loss))
        history.append({k: float(v) for k, v in (metrics | {"grad_norm": norm}).items()})
    return PlainRun(
        losses=tuple(losses),
        first_grads=first_grads,
        params=_to_host(params),
        opt_state=_to_host(state),
        metrics=tuple(history),
        variables=_to_host(variables),
    )
