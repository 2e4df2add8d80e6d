"""The products that are computed in float8, by a model's equations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import megatrain_jax as mt
from float8_specs import spec_with
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.kernels.bound_stage import find_residuals
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.work import forward_work
from messages import tells
from optimizers import OPTIMIZERS
from zoo_case import Case

WIDE, TOKENS, VOCABULARY = 2400, 6, 5000


def case_of(loss_fn: Callable[..., Any], **sizes: tuple[int, ...]) -> Case:
    """Two residual layers of one product each way, and further parameters of the given sizes."""

    def build():
        def layer():
            return {"up": jnp.ones((WIDE, 2 * WIDE)), "down": jnp.ones((2 * WIDE, WIDE))}

        further = {name: jnp.ones(size) for name, size in sizes.items()}
        return {"embed": jnp.ones((VOCABULARY, WIDE)), "layers": [layer(), layer()], **further}

    def rows(seed):
        rng = np.random.default_rng(seed)
        return {name: rng.integers(0, 5, (2, TOKENS)) for name in ("tokens", "labels")}

    return Case(
        name="choice", build=lambda: build, loss_fn=loss_fn, blocks=2, templates=1, batch=rows
    )


def hidden(model: Any, batch: Any) -> jax.Array:
    x = model["embed"][batch["tokens"]]
    for layer in model["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plain_head(model, batch):
    return cross_entropy(hidden(model, batch) @ model["head"], batch["labels"])


def tied_head(model, batch):
    return cross_entropy(hidden(model, batch) @ model["embed"].T, batch["labels"])


@jax.custom_vjp
def ruled(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(x @ head.T, labels)


def ruled_forward(x, head, labels):
    """Its rule computes the gradients while the logits are there."""

    def of_pair(x, head):
        return cross_entropy(x @ head.T, labels)

    return jax.value_and_grad(of_pair, (0, 1))(x, head)


ruled.defvjp(ruled_forward, lambda found, cotangent: (*(g * cotangent for g in found), None))


def ruled_head(model, batch):
    return ruled(hidden(model, batch), model["head"], batch["labels"])


def chunked_head(model, batch):
    def add(total, rows):
        x, labels = rows
        return total + cross_entropy(x @ model["head"], labels), None

    return lax.scan(jax.checkpoint(add), jnp.float32(0), (hidden(model, batch), batch["labels"]))[0]


def two_heads(model, batch):
    x = hidden(model, batch)
    early = jnp.tanh(x @ model["early"])
    guess = (x @ model["head"]).argmax(-1)
    return cross_entropy(early @ model["late"], batch["labels"]), {"sure": guess.mean()}


def normalised_head(model, batch):
    """Its weight is computed, so that it could not be in float8 anyway."""
    head = model["head"] * lax.rsqrt(jnp.sum(model["head"] ** 2, axis=0))
    return cross_entropy(hidden(model, batch) @ head, batch["labels"])


def router(model, batch):
    x = hidden(model, batch)
    chances = jax.nn.softmax(x @ model["router"])
    shares, chosen = lax.top_k(chances, 2)
    x = x + (jnp.tanh(x @ model["in"])[..., :2] * shares * chosen).sum(-1, keepdims=True)
    # What is compared before a choice of tokens is no router.
    like = jnp.einsum("bqd,bkd->bqk", x @ model["near"], x)
    x = x + lax.top_k(like, 2)[1].sum(-1, keepdims=True)
    return cross_entropy(x @ model["head"], batch["labels"])


def largest(model, batch):
    """Only the two largest numbers count, and not their positions, so that nothing is chosen."""
    x = hidden(model, batch)
    x = x + lax.top_k(x @ model["in"], 2)[0].sum(-1, keepdims=True)
    return cross_entropy(x @ model["head"], batch["labels"])


def turns(model, batch):
    """A product whose result is used in the next turn of a loop only."""

    def turn(carry, _):
        x, added = carry
        return (x + jnp.tanh(added), x @ model["in"]), None

    x = hidden(model, batch)
    x = lax.scan(turn, (x, x), length=3)[0][0]
    return cross_entropy(x @ model["head"], batch["labels"])


def found(spec: RunSpec) -> set[str]:
    return {path_name(spec.leaves[i].path) for i in spec.first.program.in_float8}


LAYERS = {f"layers/{i}/{name}" for i in (0, 1) for name in ("up", "down")}
HEAD = (WIDE, VOCABULARY)
MODELS: list[tuple[Callable[..., Any], Any, set[str]]] = [
    (plain_head, {"head": HEAD}, LAYERS),
    (plain_head, {"head": (WIDE, 5)}, LAYERS),  # too narrow anyway
    (tied_head, {}, LAYERS),
    (ruled_head, {"head": HEAD[::-1]}, LAYERS),
    (chunked_head, {"head": HEAD}, LAYERS),
    (two_heads, {"head": HEAD, "early": (WIDE, WIDE), "late": HEAD}, {*LAYERS, "early"}),
    (normalised_head, {"head": HEAD}, LAYERS),
    (
        router,
        {"head": HEAD} | dict.fromkeys(("router", "in", "near"), (WIDE, WIDE)),
        {*LAYERS, "in", "near"},
    ),
    (largest, {"head": HEAD, "in": (WIDE, WIDE)}, {*LAYERS, "in"}),
    (turns, {"head": HEAD, "in": (WIDE, WIDE)}, {*LAYERS, "in"}),
    (lambda model, batch: hidden(model, batch).mean(), {}, LAYERS - {"layers/1/down"}),
]


@pytest.mark.by_default(
    "1 plain_head", "3 ruled_head", "9 turns", "10 <lambda>", "0 plain_head", "7 router"
)
@pytest.mark.parametrize(
    ("loss_fn", "sizes", "expected"),
    [pytest.param(*row, id=f"{i} {row[0].__name__}") for i, row in enumerate(MODELS)],
)
def test_only_the_head_and_routers_stay_as_they_are(loss_fn, sizes, expected):
    spec = spec_with(case_of(loss_fn, **sizes), "float8")
    assert found(spec) == expected
    blocks = {b.stage.key for b in spec.first.stages if b.stage.is_block}
    assert len(blocks) == (1 if expected >= LAYERS else 2)


RANK = 2304  # of adapters that float8 would make faster


def beside_factors(model, batch):
    """Layers with two more factors each, whose product is added to that of the first matrix."""
    x = model["embed"][batch["tokens"]]
    for layer in model["layers"]:
        added = jnp.tanh(x).astype(x.dtype) @ layer["A"] @ layer["B"].T
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"] + 2.0 * added) @ layer["down"]
    return cross_entropy(x @ model["head"], batch["labels"])


def with_factors(loss_fn: Callable[..., Any]) -> Case:
    def build():
        model = case_of(plain_head, head=HEAD).build()()
        for layer in model["layers"]:
            layer["A"], layer["B"] = jnp.ones((WIDE, RANK)), jnp.ones((2 * WIDE, RANK))
            layer["bias"] = jnp.ones(2 * WIDE)
        return model

    return dataclasses.replace(case_of(loss_fn), build=lambda: build)


FACTORS = {f"layers/{i}/{name}" for i in (0, 1) for name in "AB"}


@pytest.mark.usefixtures("traced_once")
@pytest.mark.by_default("named")
@pytest.mark.parametrize("products", ["float8", {"layers/*": "float8"}], ids=["float8", "named"])
def test_factors_of_adapters_stay_as_they_are(products):
    case = with_factors(beside_factors)
    assert found(spec_with(case, products, trainable="/[AB]$")) == LAYERS
    # Without a frozen matrix beside them they are no adapter's.
    assert found(spec_with(case, products)) == {*LAYERS, *FACTORS}


@pytest.mark.usefixtures("traced_once")
def test_factors_beside_a_trained_matrix_or_frozen_ones_are_in_float8():
    case = with_factors(beside_factors)
    for trained in ("/(A|up)$", "/down$"):
        assert found(spec_with(case, "float8", trainable=trained)) == {*LAYERS, *FACTORS}


def gated_by_factors(model, batch):
    """Trained factors whose product multiplies that of a frozen matrix."""
    x = model["embed"][batch["tokens"]]
    for layer in model["layers"]:
        y = x @ layer["up"]
        x = x + (y + y * (x @ layer["A"] @ layer["B"].T)) @ layer["down"]
    return cross_entropy(x @ model["head"], batch["labels"])


def bottleneck(model, batch):
    """A trained network that is wider inside, beside a frozen matrix."""
    x = model["embed"][batch["tokens"]]
    for layer in model["layers"]:
        x = x + (x @ layer["up"]) @ layer["down"] + (x @ layer["A"]) @ layer["A"].T
    return cross_entropy(x @ model["head"], batch["labels"])


def test_trained_factors_elsewhere_are_in_float8():
    spec = spec_with(with_factors(gated_by_factors), "float8", trainable="/[AB]$")
    assert found(spec) == {*LAYERS, *FACTORS}
    # Trained `up` and `down` are wider inside than outside.
    spec = spec_with(with_factors(bottleneck), "float8", trainable="/(up|down)$")
    assert found(spec) == {*LAYERS, "layers/0/A", "layers/1/A"}


@pytest.mark.usefixtures("traced_once")
def test_a_pattern_without_a_product_beside_one_with_some_is_named():
    def loss_fn(model, batch):
        return ruled_head(model, batch) + model["tail"].sum()  # a parameter of no product, the last

    case = case_of(loss_fn, head=HEAD[::-1], tail=(8,))
    given = case.build(), case.loss_fn, OPTIMIZERS["adam"](None), case.batch(0)

    def warnings(products: Any) -> tuple[str, ...]:
        return mt.plan(*given, precision=mt.Precision(products=products)).warnings

    assert not warnings({"*/up": "float8"}) and not warnings("float8")
    (text,) = warnings({"head": "float8", "layers/*": "float8", "e*": "float8", "h*": "float8"})
    assert tells(text, "'e*'", "'head'") and not tells(text, "'layers/*'")
    assert not warnings({"head": None, "*": "float8"})


def gated(model, x):
    for layer in model["layers"]:
        x = x + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
    return x


def attention_products(model, x):
    for layer in model["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x


# From plain JAX on an H100, forward and backward with all codes, beside bfloat16.
MEASURED = [
    (gated, 32768, 5120, 13824, 1.69),
    (gated, 32768, 2048, 11008, 1.39),
    (gated, 16384, 12288, 28672, 1.80),
    (attention_products, 32768, 5120, 7168, 1.56),
    (attention_products, 32768, 2048, 2560, 1.04),
    (attention_products, 16384, 12288, 14336, 1.77),
]


@pytest.mark.by_default(
    "attention_products-32768-5120-7168-1.56", "attention_products-32768-2048-2560-1.04"
)
@pytest.mark.parametrize(("layers", "tokens", "width", "inner", "gain"), MEASURED)
def test_the_clock_and_the_choice_follow_measured_rates(layers, tokens, width, inner, gain):
    def build():
        names = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        if layers is attention_products:
            del names["gate"]
        every = [{n: jnp.ones(s) for n, s in names.items()} for _ in range(2)]
        return {"first": jnp.ones((8, width)), "layers": every, "last": jnp.ones((width, 8))}

    def loss_fn(model, batch):
        return (
            layers(model, batch["x"].astype(model["first"].dtype) @ model["first"]) @ model["last"]
        ).mean()

    case = Case(
        name="measured", build=lambda: build, loss_fn=loss_fn, blocks=2, templates=1,
        batch=lambda seed: {"x": np.zeros((tokens, 8), np.float32)},
    )  # fmt: skip
    # The bfloat16 products that these rates are compared with reached 728 TFLOP/s.
    hardware = dataclasses.replace(mt.card("H100"), flops_per_s=728e12)
    wide, narrow = (forward_work([block_of(spec_with(case, p))])[0] for p in (None, "float8"))
    seconds = [work.seconds(hardware) for work in (wide, narrow)]
    if gain < 1.1:
        assert narrow.float8 == 0
    else:
        assert narrow.float8 > 0.99 * wide.flops
        assert seconds[0] / seconds[1] == pytest.approx(gain, rel=0.06)


def block_of(spec: RunSpec) -> Stage:
    return next(bound.stage for bound in spec.first.stages if bound.stage.is_block)


def twice(model, batch):
    """Layers with two products of the same operands."""
    x = model["embed"][batch["tokens"]]
    for layer in model["layers"]:
        x = x + (jnp.tanh(x @ layer["up"]) * (x @ layer["up"])) @ layer["down"]
    return cross_entropy(x @ model["head"], batch["labels"])


def test_scales_of_forward_are_saved_for_a_backward_that_keeps_products():
    residuals = find_residuals(block_of(spec_with(case_of(twice, head=HEAD), "float8")))
    assert residuals is not None
    # Scales of the operands of `up` and `down`, and of both weights, and the scales' inverses.
    assert sum(not aval.shape for aval in residuals.avals) == 8
