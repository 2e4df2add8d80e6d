"""The zoo's plain pytrees, one of them an Equinox module: JAX's own ways to wrap and wire blocks.

Scans, jit, checkpoint, loops, captured constants and custom derivatives are all easiest here.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zoo_case import DIM, HIDDEN, VOCAB, Case, causal_attention, cross_entropy

Params = dict[str, Any]


def init_block(rng: np.random.Generator) -> Params:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return {
        "norm": jnp.ones((DIM,)),
        "qkv": normal(DIM, 3 * DIM),
        "out": normal(DIM, DIM),
        "up": normal(DIM, HIDDEN),
        "down": normal(HIDDEN, DIM),
        "bias": jnp.asarray(0.1 * rng.normal(size=DIM), jnp.float32),
    }


def init_decoder(num_blocks: int) -> Params:
    rng = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(0.5 * rng.normal(size=(VOCAB, DIM)), jnp.float32),
        "blocks": [init_block(rng) for _ in range(num_blocks)],
        "norm": jnp.ones((DIM,)),
        "head": jnp.asarray(rng.normal(size=(DIM, VOCAB)) / np.sqrt(DIM), jnp.float32),
    }


def init_stacked() -> Params:
    """Return the decoder with each block parameter stacked along a first axis."""
    params = init_decoder(3)
    return params | {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"])}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def apply_block(
    params: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu
) -> jax.Array:
    q, k, v = jnp.split(rms_norm(x, params["norm"]) @ params["qkv"], 3, axis=-1)
    x = x + causal_attention(q, k, v) @ params["out"]
    return x + activation(x @ params["up"]) @ params["down"] + params["bias"]


def apply_head(params: Params, x: jax.Array) -> jax.Array:
    return rms_norm(x, params["norm"]) @ params["head"]


def forward_list(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for block in params["blocks"]:
        x = apply_block(block, x)
    return apply_head(params, x)


def forward_scan(params: Params, tokens: jax.Array) -> jax.Array:
    def body(x: jax.Array, block: Params) -> tuple[jax.Array, None]:
        return apply_block(block, x), None

    x, _ = lax.scan(body, params["embed"][tokens], params["blocks"])
    return apply_head(params, x)


def init_towers() -> Params:
    """Return two decoders in a list, and a head for what they make together."""
    params = init_decoder(4)
    towers = [
        {"embed": params["embed"][::step], "blocks": pair, "norm": params["norm"]}
        for step, pair in ((1, params["blocks"][:2]), (-1, params["blocks"][2:]))
    ]
    return {"towers": towers, "head": params["head"]}


def forward_towers(params: Params, tokens: jax.Array) -> jax.Array:
    made = []
    for tower in params["towers"]:
        x = tower["embed"][tokens]
        for block in tower["blocks"]:
            x = apply_block(block, x)
        made.append(rms_norm(x, tower["norm"]))
    return (made[0] * made[1]) @ params["head"]


def init_groups() -> Params:
    """Return a decoder of two stacked groups: a list of two blocks and a matrix in front of it."""
    params = init_decoder(4)
    rng = np.random.default_rng(1)
    groups = [
        {"bridge": jnp.asarray(rng.normal(size=(DIM, DIM)) / 4, jnp.float32), "blocks": pair}
        for pair in (params["blocks"][:2], params["blocks"][2:])
    ]
    del params["blocks"]
    return params | {"groups": jax.tree.map(lambda *xs: jnp.stack(xs), *groups)}


def forward_groups(params: Params, tokens: jax.Array) -> jax.Array:
    def body(x: jax.Array, group: Params) -> tuple[jax.Array, None]:
        x = x @ group["bridge"]
        for block in group["blocks"]:
            x = apply_block(block, x)
        return x, None

    x, _ = lax.scan(jax.checkpoint(body), params["embed"][tokens], params["groups"])
    return apply_head(params, x)


def init_last() -> Params:
    """Return the stacked decoder with layers last to first, along the last axis."""
    params = init_stacked()
    last = jax.tree.map(lambda w: jnp.moveaxis(w[::-1], 0, -1), params["blocks"])
    return params | {"blocks": last}


def forward_last(params: Params, tokens: jax.Array) -> jax.Array:
    first = jax.tree.map(lambda w: jnp.moveaxis(w, -1, 0)[::-1], params["blocks"])
    return forward_scan(params | {"blocks": first}, tokens)


def init_sliced() -> Params:
    """Return the decoder with four blocks, two in each of two stacks."""
    params = init_decoder(4)
    stack = lambda rows: jax.tree.map(lambda *xs: jnp.stack(xs), *rows)  # noqa: E731
    first, second = stack(params["blocks"][:2]), stack(params["blocks"][2:])
    return params | {"blocks": {"first": first, "second": second}}


def forward_sliced(params: Params, tokens: jax.Array) -> jax.Array:
    """Slice one stack by hand and the other by the number of a loop's iteration."""
    first, second = params["blocks"]["first"], params["blocks"]["second"]
    x = params["embed"][tokens]
    for i in range(2):
        x = apply_block(jax.tree.map(lambda w, i=i: w[i], first), x)
    x = lax.fori_loop(0, 2, lambda i, x: apply_block(jax.tree.map(lambda w: w[i], second), x), x)
    return apply_head(params, x)


# Two pairs of arrays that are equal in value and not the same object.
SHIFTS = tuple(
    np.random.default_rng(seed).normal(size=DIM).astype(np.float32) for seed in (0, 1, 0, 1)
)


def forward_shifted(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for block, shift in zip(params["blocks"], SHIFTS, strict=True):
        x = apply_block(block, x + jnp.asarray(shift, x.dtype))
    return apply_head(params, x)


def make_vjp_rule(factor: float) -> Callable[[jax.Array], jax.Array]:
    """Return tanh with a hand-written pullback that is `factor` times the true one."""

    @jax.custom_vjp
    def activation(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.tanh(x)
        return y, y

    def backward(y, cotangent):
        return (factor * cotangent * (1 - y * y),)

    activation.defvjp(forward, backward)
    return activation


def make_jvp_rule(factor: float) -> Callable[[jax.Array], jax.Array]:
    """Return tanh with a hand-written derivative that is `factor` times the true one."""

    @jax.custom_jvp
    def activation(x):
        return jnp.tanh(x)

    @activation.defjvp
    def derivative(primals, tangents):
        y = jnp.tanh(primals[0])
        return y, factor * (1 - y * y) * tangents[0]

    return activation


VJP_RULES = (make_vjp_rule(1.0), make_vjp_rule(0.5))
JVP_RULES = (make_jvp_rule(1.0), make_jvp_rule(0.5))
RULES = (*VJP_RULES, VJP_RULES[0], *JVP_RULES, JVP_RULES[0])


def forward_rules(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for block, rule in zip(params["blocks"], RULES, strict=True):
        x = apply_block(block, x, rule)
    return apply_head(params, x)


def forward_fori(params: Params, tokens: jax.Array) -> jax.Array:
    """Run the middle two blocks in turn in a loop whose trip count is static: a scan."""
    first, second, third, last = params["blocks"]

    def body(_: jax.Array, x: jax.Array) -> jax.Array:
        return apply_block(third, apply_block(second, x))

    x = apply_block(first, params["embed"][tokens])
    x = lax.fori_loop(0, 2, body, x)
    return apply_head(params, apply_block(last, x))


def forward_while(params: Params, tokens: jax.Array) -> jax.Array:
    """Iterate the middle two blocks, data-dependently often, without a gradient; then once with."""
    first, second, third, last = params["blocks"]
    fixed = lax.stop_gradient((second, third))
    num_iterations = 2 + jnp.max(tokens) // VOCAB  # 2, but only the data says so

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, y = carry
        return i + 1, jnp.tanh(apply_block(fixed[1], apply_block(fixed[0], y)))

    x = apply_block(first, params["embed"][tokens])
    start = (jnp.zeros((), tokens.dtype), lax.stop_gradient(x))
    _, y = lax.while_loop(lambda carry: carry[0] < num_iterations, body, start)
    x = apply_block(third, apply_block(second, x + y))
    return apply_head(params, apply_block(last, x))


def loss_of(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, batch: dict[str, Any]) -> jax.Array:
        tokens = batch["tokens"]
        return cross_entropy(forward(params, tokens[:, :-1]), tokens[:, 1:])

    return loss_fn


class EquinoxBlock(eqx.Module):
    """An MLP block with leaves that aren't trained: an array of integers, and its activation."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    order: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        up_key, down_key = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(DIM)
        self.up = eqx.nn.Linear(DIM, HIDDEN, key=up_key)
        self.down = eqx.nn.Linear(HIDDEN, DIM, key=down_key)
        self.order = jax.random.permutation(key, HIDDEN)
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.activation(self.up(self.norm(x)))[self.order])


class EquinoxDecoder(eqx.Module):
    """Takes a single token, as Equinox models take a single example; the loss maps it."""

    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, num_blocks: int = 3):
        embed_key, head_key, *block_keys = jax.random.split(key, num_blocks + 2)
        self.embed = eqx.nn.Embedding(VOCAB, DIM, key=embed_key)
        self.blocks = [EquinoxBlock(block_key) for block_key in block_keys]
        self.head = eqx.nn.Linear(DIM, VOCAB, key=head_key)

    def __call__(self, token: jax.Array) -> jax.Array:
        x = self.embed(token)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def forward_equinox(model: EquinoxDecoder, tokens: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(model))(tokens)


CASES = (
    Case(
        name="lax_scan_pytree",
        build=init_stacked,
        loss_fn=loss_of(forward_scan),
        blocks=3,
        templates=1,
    ),
    Case(
        name="last_axis",
        build=init_last,
        loss_fn=loss_of(forward_last),
        blocks=3,
        templates=1,
    ),
    Case(
        name="sliced_towers",
        build=init_sliced,
        loss_fn=loss_of(forward_sliced),
        blocks=4,
        templates=1,
    ),
    Case(
        name="jit_whole",
        build=lambda: init_decoder(3),
        loss_fn=jax.jit(loss_of(forward_list)),
        blocks=3,
        templates=1,
    ),
    Case(
        name="checkpoint_whole",
        build=lambda: init_decoder(3),
        loss_fn=loss_of(jax.checkpoint(forward_list)),
        blocks=3,
        templates=1,
    ),
    Case(
        name="array_constant",
        build=lambda: init_decoder(len(SHIFTS)),
        loss_fn=loss_of(forward_shifted),
        blocks=4,
        templates=1,
    ),
    Case(
        name="custom_rule",
        build=lambda: init_decoder(len(RULES)),
        loss_fn=loss_of(forward_rules),
        blocks=6,
        templates=4,
    ),
    Case(
        name="fori_two",
        build=lambda: init_decoder(4),
        loss_fn=loss_of(forward_fori),
        blocks=3,  # the loop is one of them
        templates=2,
        warns=True,
    ),
    Case(
        name="while_two",
        build=lambda: init_decoder(4),
        loss_fn=loss_of(forward_while),
        blocks=5,  # the loop, and every block once
        templates=2,
        warns=True,
    ),
    Case(
        name="equinox",
        build=lambda: EquinoxDecoder(jax.random.key(0)),
        loss_fn=loss_of(forward_equinox),
        blocks=3,
        templates=1,
    ),
    Case(
        name="two_towers",
        build=init_towers,
        loss_fn=loss_of(forward_towers),
        blocks=4,
        templates=1,
    ),
    Case(
        name="scan_of_lists",
        build=init_groups,
        loss_fn=loss_of(forward_groups),
        blocks=4,
        templates=1,
    ),
)
