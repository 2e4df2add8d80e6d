"""Traits of optimizer state that are read off equations, against what state does hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.optimizer.cut import cut_optimizer
from megatrain_jax._src.engine.program.optimizer.traits import state_traits
from optimizers import OPTIMIZERS

PARAMS: Any = {"a": jnp.ones((6, 4)) / 3, "b": jnp.ones((4, 4)) / 5}
MORE = (optax.amsgrad, optax.adabelief, optax.adagrad, optax.rmsprop, optax.yogi, optax.adan)
EVERY = OPTIMIZERS | {f.__name__: lambda _, make=f: make(1e-2) for f in MORE}
# `1 - b2` of a traced b2 and a difference of squares may be below zero, as far as signs tell.
UNTOLD = {"adafactor", "inject_hyperparams", "yogi"}


def traits_of(optimizer):
    leaves = [
        Leaf(path=(k,), parameter=i, index=(), shape=v.shape, dtype=v.dtype, block=None)
        for i, (k, v) in enumerate(PARAMS.items())
    ]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in PARAMS.values()]

    def tree(arrays):
        return dict(zip(PARAMS, arrays, strict=True))

    cut = cut_optimizer(optimizer, tree, shapes, leaves, [0, 0], 1)
    traits = state_traits(cut.initial_state[0], cut.apply[0], 2)
    return [row for row in zip(cut.state[0], traits, strict=True) if row[0].mirrors is not None]


def lowest_state(optimizer):
    """The least value that each element of a flat state has had in some random steps."""
    optimizer, rng = optax.with_extra_args_support(optimizer), np.random.default_rng(0)
    params: Any = PARAMS
    state = optimizer.init(params)
    lowest = jax.tree.leaves(state)
    for _ in range(6):
        gradients = {k: jnp.asarray(rng.normal(size=v.shape), v.dtype) for k, v in params.items()}
        updates, state = optimizer.update(gradients, state, params, value=jnp.float32(1))
        params = optax.apply_updates(params, updates)
        lowest = [
            jnp.minimum(a, b) if b.dtype == jnp.float32 else b
            for a, b in zip(lowest, jax.tree.leaves(state), strict=True)
        ]
    return lowest


@pytest.mark.parametrize("name", EVERY)
def test_traits_are_what_state_does(name):
    optimizer = EVERY[name](PARAMS)
    lowest = lowest_state(optimizer)
    for leaf, traits in traits_of(optimizer):
        negative = bool((lowest[leaf.leaf] < 0).any())
        if name in UNTOLD:
            assert not (negative and traits.never_negative)
        elif not traits.like_parameters:
            assert negative != traits.never_negative, leaf.name
        assert traits.is_mixed == (name == "muon"), leaf.name
        assert traits.like_parameters == (".z[" in leaf.name), leaf.name
        assert not traits.is_paired, leaf.name


def test_what_begins_below_zero_may_be_below_zero():
    """Though an update makes a square of it; and what depends on such state may be, too."""

    def init(params):
        return {"a": jax.tree.map(lambda x: -x, params), "b": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        b = jax.tree.map(jnp.add, state["a"], state["b"])
        return updates, {"a": jax.tree.map(jnp.square, updates), "b": b}

    found = traits_of(optax.GradientTransformation(init, update))
    assert len(found) == 4
    assert not any(traits.never_negative for _, traits in found)


def test_what_differs_under_a_root_is_paired():
    """Centred RMSProp: nu - mu ** 2, whatever is chained to it; its momentum is no part of that."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.rmsprop(1e-2, centered=True, momentum=0.9)
    )
    found = {leaf.name: traits.is_paired for leaf, traits in traits_of(optimizer)}
    assert len(found) == 6
    assert all(is_paired == (".trace[" not in name) for name, is_paired in found.items())
