"""Random functions of a few arrays, made of the operations that models are made of.

The operations are drawn while a function is traced, from a seed, so that a function is the same
each time. Values are kept near 1, and small in number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS, WIDTH = 2, 8, 6
NUM_STEPS = 10
MOST_ELEMENTS = 2048


def inputs(seed: int) -> tuple[Any, ...]:
    """The arguments of each random function: x, w, ids and a key."""
    rng = np.random.default_rng([seed, 1])
    x = jnp.asarray(rng.normal(size=(ROWS, TOKENS, WIDTH)))
    w = jnp.asarray(rng.normal(size=(WIDTH, 4)))
    ids = jnp.asarray(rng.integers(0, 4, (ROWS, TOKENS)), jnp.int32)
    return x, w, ids, jax.random.key(seed)


def random_function(seed: int) -> Callable[..., Any]:
    """A function of `inputs` that gives gradients by x and w, and all that it has computed."""

    def values(x, w, ids, key):
        rng = np.random.default_rng(seed)
        pool = [x, jnp.tanh(x @ w), x.reshape(-1, WIDTH)]
        for step in range(NUM_STEPS):
            operation = OPERATIONS[rng.integers(len(OPERATIONS))]
            of = pool[rng.integers(len(pool))]
            made = operation(rng, of, pool, ids, jax.random.fold_in(key, step))
            if 0 < made.size <= MOST_ELEMENTS and made.ndim <= 4:
                pool.append(jnp.tanh(made) if step % 2 else made / (1 + jnp.abs(made)))
        return sum(jnp.mean(v * v) for v in pool), pool[3:]

    def function(x, w, ids, key):
        return jax.value_and_grad(values, argnums=(0, 1), has_aux=True)(x, w, ids, key)

    return function


def axis_of(rng, v):
    return int(rng.integers(v.ndim))


def alike(rng, v, pool):
    found = [u for u in pool if u.shape == v.shape]
    return found[rng.integers(len(found))]


def reduced(rng, v, pool, ids, key):
    reduction = (jnp.sum, jnp.max, jnp.min, jnp.mean, jnp.prod)[rng.integers(5)]
    axis, keeps = axis_of(rng, v), bool(rng.integers(2)) or v.ndim == 1
    return reduction(jax.nn.sigmoid(v), axis, keepdims=keeps) * (1 if keeps else 2)


def spread(rng, v, pool, ids, key):
    axis = axis_of(rng, v)
    return v - jnp.mean(v, axis, keepdims=True)


def turned(rng, v, pool, ids, key):
    return jnp.transpose(v, rng.permutation(v.ndim))


def regrouped(rng, v, pool, ids, key):
    axis = axis_of(rng, v)
    before, after = v.shape[:axis], v.shape[axis + 1 :]
    if v.shape[axis] % 2 == 0 and v.ndim < 4 and rng.integers(2):
        return v.reshape(*before, v.shape[axis] // 2, 2, *after)
    return v.reshape(*before, -1, *after[1:]) if after else v.reshape(-1)


def multiplied(rng, v, pool, ids, key):
    u = pool[rng.integers(len(pool))]
    pairs = [(a, b) for a in range(v.ndim) for b in range(u.ndim) if v.shape[a] == u.shape[b]]
    if not pairs:
        return v * 2
    pair = pairs[rng.integers(len(pairs))]
    others = [p for p in pairs if p[0] != pair[0] and p[1] != pair[1]]
    batch = [others[0]] if others and rng.integers(2) else []
    numbers = (
        ((pair[0],), (pair[1],)),
        (tuple(a for a, _ in batch), tuple(b for _, b in batch)),
    )
    return jax.lax.dot_general(v, u, numbers)


def taken(rng, v, pool, ids, key):
    axis = axis_of(rng, v)
    if v.ndim > 2:
        return jnp.take_along_axis(v, jnp.argsort(v, axis)[..., ::-1], axis)
    return jnp.take(v, ids % v.shape[axis], axis)


def scattered(rng, v, pool, ids, key):
    rows = v if v.shape[:2] == ids.shape else alike(rng, pool[0], pool)
    return jnp.zeros((5, *rows.shape[2:])).at[ids].add(rows)


def along(rng, v, pool, ids, key):
    axis = axis_of(rng, v)
    functions = (
        lambda v: jnp.sort(v, axis),
        lambda v: jnp.cumsum(v, axis),
        lambda v: jnp.flip(v, axis),
        lambda v: jax.lax.top_k(v, min(2, v.shape[-1]))[0],
        lambda v: jax.nn.softmax(v, axis),
        lambda v: jnp.concatenate([v, 2 * v], axis),
        lambda v: jnp.pad(v, [(1, 0) if a == axis else (0, 0) for a in range(v.ndim)]),
        lambda v: jax.lax.slice_in_dim(v, 0, max(1, v.shape[axis] - 1), axis=axis),
        lambda v: v + jax.lax.broadcasted_iota(v.dtype, v.shape, axis),
        lambda v: jax.nn.one_hot(jnp.argmax(v, axis), v.shape[axis]) * v.sum(),
        lambda v: jnp.split(v, [v.shape[axis] // 2], axis)[1],
        lambda v: jax.lax.dynamic_slice_in_dim(v, ids[0, 0], 1, axis),
    )
    return functions[rng.integers(len(functions))](v)


def chosen(rng, v, pool, ids, key):
    return jnp.where(alike(rng, v, pool) > 0.1, v, alike(rng, v, pool))


def dropped(rng, v, pool, ids, key):
    return jnp.where(jax.random.bernoulli(key, 0.7, v.shape), v / 0.7, 0)


def wrapped(rng, v, pool, ids, key):
    u = alike(rng, v, pool)
    wrappers = (jax.checkpoint, jax.jit, lambda f: lambda v, u: jax.nn.silu(f(v, u)))
    return wrappers[rng.integers(3)](lambda v, u: jnp.sin(v) * u)(v, u)


def whole(rng, v, pool, ids, key):
    if rng.integers(2):
        return jax.lax.cond(v.sum() > 0, jnp.sin, jnp.cos, v)
    return jax.lax.scan(lambda c, row: (c + row, c * row), 0 * v[0], v)[1]


def convolved(rng, v, pool, ids, key):
    if v.ndim != 3:
        return v * 0.5
    kernel = jnp.ones((v.shape[2], v.shape[2], 3)) * jnp.arange(3)
    return jax.lax.conv_general_dilated(v, kernel, (1,), "SAME", dimension_numbers=("NWC", "IOW", "NWC"))  # fmt: skip # noqa: E501


OPERATIONS = (
    reduced, spread, turned, regrouped, multiplied, multiplied, taken, scattered, along, along,
    along, chosen, dropped, wrapped, whole, convolved,
)  # fmt: skip
