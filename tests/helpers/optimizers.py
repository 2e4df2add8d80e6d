"""The optimizers that training has to agree with whole-tree Optax on, by name.

Each entry takes the tree of parameters, since some masks and labels are built from it. Epsilons
are large enough that rounding in a small gradient stays as small in the update.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

LEARNING_RATE = 3e-3
EPS = 1e-3


def decayed(params: Any) -> Any:
    """Return a tree of bools: matrices whose path doesn't name the embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ndim(x) >= 2 and "embed" not in jax.tree_util.keystr(path), params
    )


def labels(params: Any) -> Any:
    """Return a tree of labels by path and rank: frozen, matrix or vector."""

    def label(path: Any, x: Any) -> str:
        if "embed" in jax.tree_util.keystr(path):
            return "frozen"
        return "matrix" if jnp.ndim(x) >= 2 else "vector"

    return jax.tree_util.tree_map_with_path(label, params)


def schedule() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(1e-3, LEARNING_RATE, 2, 8)


def adamw(learning_rate: Any = LEARNING_RATE, **kwargs: Any) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, eps=EPS, weight_decay=0.1, **kwargs)


def multi_transform(params: Any) -> optax.GradientTransformation:
    del params  # the labels are a function here, called by Optax itself
    transforms: dict[Any, Any] = {
        "frozen": optax.set_to_zero(),
        "matrix": adamw(),
        "vector": optax.sgd(LEARNING_RATE),
    }
    return optax.multi_transform(transforms, labels)


def once(make: Callable[[Any], optax.GradientTransformation]) -> Callable[[Any], Any]:
    """Return a function that gives one and the same transformation, whatever the parameters.

    A run is known again by its optimizer's own functions.
    """
    made = functools.cache(lambda: make(None))
    return lambda _: made()


_MAKERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adam": lambda _: optax.adam(LEARNING_RATE, eps=EPS),
    "adamw_schedule": lambda _: adamw(schedule()),
    "clip_adamw": lambda _: optax.chain(optax.clip_by_global_norm(0.1), adamw()),
    "lion": lambda _: optax.lion(1e-3),
    "adafactor": lambda _: optax.adafactor(LEARNING_RATE, min_dim_size_to_factor=8),
    "lamb": lambda _: optax.lamb(LEARNING_RATE, eps=EPS, weight_decay=0.1),
    "muon": lambda _: contrib.muon(1e-3, eps=EPS),
    "masked_path": lambda _: adamw(mask=decayed),
    "masked_tree": lambda params: adamw(mask=decayed(params)),
    "multi_transform": multi_transform,
    "inject_hyperparams": lambda _: optax.inject_hyperparams(optax.adamw)(
        learning_rate=schedule(), eps=EPS, weight_decay=0.1
    ),
    "multi_steps": lambda _: optax.MultiSteps(adamw(), 2).gradient_transformation(),
    "apply_if_finite": lambda _: optax.apply_if_finite(optax.adam(LEARNING_RATE, eps=EPS), 2),
    "add_noise": lambda _: optax.chain(
        optax.clip_by_global_norm(1.0), optax.add_noise(0.01, 0.5, key=1), optax.sgd(0.1)
    ),
    "add_noise_alone": lambda _: optax.chain(optax.add_noise(0.01, 0.5, key=1), optax.sgd(0.1)),
    "normalize": lambda _: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "adaptive_grad_clip": lambda _: optax.chain(
        optax.adaptive_grad_clip(0.05), optax.sgd(0.1, momentum=0.9)
    ),
    "schedule_free": lambda _: contrib.schedule_free_adamw(LEARNING_RATE, 2, eps=EPS),
    "sgd_momentum": lambda _: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "polyak_sgd": lambda _: optax.polyak_sgd(max_learning_rate=0.1),
}
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    name: m if name == "masked_tree" else once(m) for name, m in _MAKERS.items()
}

# An update needs a scalar of all gradients, so it has to wait for the whole backward pass.
DEFERRED = frozenset({"clip_adamw", "apply_if_finite", "add_noise", "normalize", "polyak_sgd"})

# Blow up a gradient that is only rounding, whatever their epsilon.
SIGN_LIKE = frozenset({"lion", "adafactor"})
