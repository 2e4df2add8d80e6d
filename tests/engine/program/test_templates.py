"""Blocks that compute the same are one template, whatever stands between them and their likes."""

from collections.abc import Callable

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cut_cases import cut_case
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.structural_key import structural_key
from repeated_blocks import (
    DIM,
    TIME,
    TOKENS,
    VOCAB,
    Forward,
    assert_computes_the_loss,
    assert_one_template,
    block_keys,
    cut_forward,
    mlp,
    norm,
)
from zoo_case import Case, next_token_loss

MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
SHARDING = NamedSharding(MESH, PartitionSpec("data"))


def dropout(x: jax.Array, key: jax.Array, i: int) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0)


def constrained(x: jax.Array) -> jax.Array:
    return lax.with_sharding_constraint(x, SHARDING)


# What may stand before or after a block: f(parameters, x, tokens, key, index of the block).
BORDERS = {
    "dropout": lambda p, x, t, key, i: dropout(x, key, i),
    "constraint": lambda p, x, t, key, i: constrained(x),
    "scale": lambda p, x, t, key, i: 0.5 * x,
    "index": lambda p, x, t, key, i: x / (i + 1),
    "gather": lambda p, x, t, key, i: x + p["table"][t],
    "gate": lambda p, x, t, key, i: x * jax.nn.sigmoid(p["table"][t]),
    "norm": lambda p, x, t, key, i: norm(x, p["scale"]),
    "clip": lambda p, x, t, key, i: jnp.clip(x, -10.0, 10.0),
    "barrier": lambda p, x, t, key, i: lax.optimization_barrier(x),
    "constant": lambda p, x, t, key, i: x + np.full(DIM, i, np.float32),
    "transposes": lambda p, x, t, key, i: jnp.swapaxes(jnp.swapaxes(x, 0, 1), 0, 1),
}
# What may stand within one, on the branch.
BRANCHES = {
    "dropout": lambda h, key, i: dropout(h, key, 100 + i),
    "depth": lambda h, key, i: h * (1 / np.sqrt(2 * (i + 1))),
    "layer drop": lambda h, key, i: jnp.where(
        jax.random.bernoulli(jax.random.fold_in(key, 200 + i), 1 - 0.1 * i), h, 0
    ),
    "constraint": lambda h, key, i: constrained(h),
    "cast": lambda h, key, i: h.astype(jnp.bfloat16).astype(jnp.float32),
    "mask": lambda h, key, i: jnp.where(jnp.arange(TIME)[:, None] < 2 + i % 2, h, 0),
}


def composed(
    *,
    embedded: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    branch: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    remat: bool = False,
) -> Forward:
    """A decoder with some of these after its embedding, around blocks, within, and at the end."""

    def forward(p, t, key):
        def border(names, x, i):
            for name in names:
                x = BORDERS[name](p, x, t, key, i)
            return x

        def apply(i, block, x, key):
            h = mlp(block, x)
            for name in branch:
                h = BRANCHES[name](h, key, i)
            return x + h

        x = border(embedded, p["embed"][t], 50)
        for i, block in enumerate(p["blocks"]):
            function = lambda b, x, key, i=i: apply(i, b, x, key)  # noqa: E731
            function = jax.checkpoint(function) if remat else function
            x = border(after, function(block, border(before, x, i), key), i)
        return border(last, x, 60) @ p["head"]

    return forward


@pytest.mark.parametrize("name", BORDERS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_stands_between_blocks_belongs_to_all_of_them_alike(place, name):
    names = (name,)
    model = composed(before=names) if place == "before" else composed(after=names)
    assert_one_template(cut_forward(model)[1])


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", BRANCHES)
def test_literals_that_differ_by_layer_are_inputs_of_one_template(name, remat):
    assert_one_template(cut_forward(composed(branch=(name,), remat=remat))[1])


def random_model(seed: int) -> Forward:
    rng = np.random.default_rng(seed)

    def some(names):
        return tuple(rng.choice(list(names), rng.integers(0, 3), replace=False).tolist())

    ends = ["dropout", "scale", "clip", "barrier"]
    return composed(
        embedded=some(ends), before=some(BORDERS), branch=some(BRANCHES), after=some(BORDERS),
        last=some(ends), remat=bool(rng.integers(2)),
    )  # fmt: skip


@pytest.mark.by_default(*map(str, range(12)))
@pytest.mark.parametrize("seed", range(24))
def test_blocks_of_random_ingredients_are_one_template(seed):
    assert_one_template(cut_forward(random_model(seed))[1])


@pytest.mark.by_default("0")
@pytest.mark.parametrize("seed", range(3))
def test_their_stages_together_compute_the_loss_and_its_gradient(seed):
    assert_computes_the_loss(*cut_forward(random_model(seed)))


class RematBlock(nn.Module):
    """Draws from a key that Linen makes of a hash of the module's path, within the remat."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x))))
        return nn.Dropout(0.1, deterministic=False)(x + h)


class RematDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=False)(nn.Embed(VOCAB, DIM, name="embed")(tokens))
        for _ in range(4):
            x = nn.remat(RematBlock)()(x)
        return nn.Dense(VOCAB, name="head")(x)


class ValueBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(DIM, rngs=rngs, param_dtype=jnp.bfloat16)
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs, param_dtype=jnp.bfloat16)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, value: jax.Array, first: jax.Array) -> jax.Array:
        x = x + 0.1 * first
        return self.dropout(x + self.linear(self.norm(x)) * value)


class ValueDecoder(nnx.Module):
    """bf16 parameters; every block looks a shared table up and adds the embedding itself."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs, param_dtype=jnp.bfloat16)
        self.values = nnx.Embed(VOCAB, DIM, rngs=rngs, param_dtype=jnp.bfloat16)
        self.blocks = nnx.List([ValueBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.values(tokens), first)
        return self.head(x)


@pytest.mark.parametrize("build", [RematDecoder, lambda: ValueDecoder(nnx.Rngs(0))])
def test_modules_of_flax_share_a_template(build):
    case = Case(name="", build=build, loss_fn=next_token_loss, blocks=4, templates=1)
    assert_one_template(cut_case(case)[1])


def alive_at_borders(program: Program) -> list[int]:
    """Bytes of what one stage makes and a later one reads, after each stage but the last."""
    made = {i: s for s, stage in enumerate(program.stages) for i in stage.outputs}
    last = {i: s for s, stage in enumerate(program.stages) for i in stage.inputs}
    size = {i: program.values[i].size * program.values[i].dtype.itemsize for i in made}
    return [
        sum(size[i] for i, start in made.items() if start <= s < last.get(i, -1))
        for s in range(len(program.stages) - 1)
    ]


X = TOKENS["tokens"][:, 1:].size * DIM * 4  # bytes of one activation in fp32


def test_a_border_carries_more_than_the_fewest_bytes_once_at_most():
    def forward(p, t, key):
        x = first = p["embed"][t]
        for block in p["blocks"]:
            x = x + 0.1 * first
            x = x + mlp(block, x)
        return x @ p["head"]

    program = cut_forward(forward)[1]
    assert_one_template(program)
    # Before the last block the sum would be X; it is 2 X everywhere between blocks.
    assert alive_at_borders(program) == [X, 2 * X, 2 * X, 2 * X, X]


def test_blocks_are_no_template_where_it_would_cost_bytes_at_every_border():
    def forward(p, t, key):
        x = p["embed"][t]
        for block in p["blocks"]:
            x = x.astype(jnp.bfloat16)
            x = x + mlp(block, x)
        return x @ p["head"]

    program = cut_forward(forward)[1]
    assert alive_at_borders(program) == [X // 2, X // 2, X // 2, X // 2, X]
    assert len(set(block_keys(program))) == 2


@pytest.mark.parametrize("literals", [(0, 1), (1, 0)])
def test_a_literal_that_decides_what_is_computed_stays_in_the_template(literals):
    branches = (jnp.tanh, jnp.sin)

    def forward(p, t, key):
        x = p["embed"][t]
        for i, block in enumerate(p["blocks"]):
            x = x + lax.switch(literals[i % 2], branches, mlp(block, x))
        return x @ p["head"]

    assert len(set(block_keys(cut_forward(forward)[1]))) == 2


def rule_of(slope: float) -> Callable[..., jax.Array]:
    """Return `tanh(x * angle)` with a rule that refuses a derivative by the angle."""

    @eqx.filter_custom_vjp
    def rule(x, angle):
        return jnp.tanh(x * angle)

    @rule.def_fwd
    def forward(perturbed, x, angle):
        return rule(x, angle), None

    @rule.def_bwd
    def backward(residuals, cotangent, perturbed, x, angle):
        return slope * cotangent * angle * (1 - jnp.tanh(x * angle) ** 2)

    return lambda x, angle: rule(x, angle=angle)


def looped(x: jax.Array, angle: jax.Array) -> jax.Array:
    """A loop whose derivative is its own rule, on an array that must not be differentiated."""
    angle = eqxi.nondifferentiable(angle)
    step = lambda y: jnp.tanh(y * angle)  # noqa: E731
    more = lambda y: jnp.sum(y**2) > 1e-3  # noqa: E731
    return eqxi.while_loop(more, step, x, max_steps=2, kind="checkpointed")


def with_rules(rules: list[Callable[..., jax.Array]]) -> Forward:
    def forward(p, t, key):
        angle = jnp.cos(t)[..., None]  # data, with which the loss is not differentiated
        x = p["embed"][t]
        for block, rule in zip(p["blocks"], rules, strict=True):
            x = x + rule(mlp(block, x), angle)
        return x @ p["head"]

    return forward


def test_stages_with_rules_compute_the_loss():
    assert_computes_the_loss(*cut_forward(with_rules([rule_of(1.0)] * 4)))


def test_rules_are_compared_with_what_the_loss_differentiates_by():
    assert_one_template(cut_forward(with_rules([rule_of(1.0)] * 4))[1])
    assert_one_template(cut_forward(with_rules([looped] * 4))[1])


def test_rules_that_differ_are_two_templates():
    program = cut_forward(with_rules([rule_of(1.0), rule_of(2.0)] * 2))[1]
    keys = block_keys(program)
    assert keys[0] is keys[2] and keys[1] is keys[3] and keys[0] is not keys[1]


@pytest.mark.parametrize(
    "rule", [rule_of(1.0), lambda x, angle: jnp.tanh(x * angle)], ids=["rule", "none"]
)
def test_constants_are_compared_with_rules_and_without(rule):
    def scaled(scale, x, angle):
        return scale * rule(x, angle)

    jaxpr = jax.make_jaxpr(scaled)(*[jnp.ones(3)] * 3).jaxpr
    one, other, equal = (
        structural_key(jaxpr, [np.array(values, np.float32)], [True, False])
        for values in ([1, 2, 3], [1, 2, 4], [1, 2, 3])
    )
    assert one is equal and one is not other


def test_a_rule_that_allows_no_derivative_is_no_template():
    @jax.custom_jvp
    def refused(x):
        return jnp.tanh(x)

    @refused.defjvp
    def jvp(primals, tangents):
        raise TypeError("there is no derivative")

    rules = [lambda x, angle: refused(x)] * 4
    assert len(set(block_keys(cut_forward(with_rules(rules))[1]))) == 4
