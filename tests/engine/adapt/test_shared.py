"""Small parameters that lie in one block and that other blocks read, as T5's position biases."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from cuts import as_model, cut, find
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import check_close, make_trainer, recording, train
from zoo_case import DIM, HEADS, HIDDEN, NUM_EXAMPLES, SEQ, VOCAB, Case, next_token_loss

NUM_LAYERS = 4
BUCKETS = np.clip(np.arange(SEQ)[:, None] - np.arange(SEQ), -3, 4) + 3


class Decoder:
    """A decoder of T5's kind: its first layer has the position biases of all."""

    def __init__(self, params: Any):
        self.params = params

    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers = self.params["layers"]
        x = self.params["embed"][tokens]
        for layer in layers:
            heads = (*x.shape[:-1], HEADS, DIM // HEADS)
            q, k, v = (y.reshape(heads) for y in jnp.split(x @ layer["qkv"], 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            scores += layers[0]["bias"][BUCKETS].transpose(2, 0, 1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            x = x + mixed.reshape(x.shape) @ layer["out"]
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x @ self.params["head"]


def build(num_layers: int = NUM_LAYERS) -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    shapes = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    layers = [{name: normal(*s) for name, s in shapes.items()} for _ in range(num_layers)]
    layers[0]["bias"] = normal(8, HEADS)
    return {"embed": normal(VOCAB, DIM), "layers": layers, "head": normal(DIM, VOCAB)}


def loss_fn(params, batch):
    return next_token_loss(Decoder(params), batch)


CASE = Case(name="shared bias", build=build, loss_fn=loss_fn, blocks=NUM_LAYERS, templates=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("optimizer", "microbatches"), [("adam", 1), ("clip_adamw", 2)])
def test_a_small_parameter_that_all_blocks_read_is_in_none(optimizer, microbatches):
    batches = [CASE.batch(seed) for seed in range(3)]
    plain = train_plain(CASE, OPTIMIZERS[optimizer], batches, microbatches=microbatches)
    trainer = make_trainer(
        CASE, recording(OPTIMIZERS[optimizer]), microbatches=microbatches, budget="least"
    )
    blocks = [s.stage for s in trainer.stages if s.stage.is_block]
    assert len(trainer.stages) == NUM_LAYERS + 2 and len(blocks) == NUM_LAYERS
    assert len({stage.key for stage in blocks}) == 1
    run = train(trainer, batches)
    check_close(run.first_grads, plain.first_grads, 2e-6, "gradient")
    check_close(run.params, plain.params, 2e-6, "parameter")


def test_its_group_has_its_own_name():
    batch = {"tokens": jax.ShapeDtypeStruct((NUM_EXAMPLES, SEQ + 1), jnp.int32)}
    plan = mt.plan(build, loss_fn, optax.adam(1e-3), batch)
    shown = [line.split()[0] for line in str(plan).splitlines() if line.startswith("layers.")]
    assert shown == ["layers.0.bias", "layers.0"]  # the second row is of all layers


LAYER = {"up": (16, 32), "down": (32, 16)}
ARRAYS = np.zeros((2, 16), np.float32)


def shared_of(first: Any, read: Any, num_layers: int = 3) -> set[str]:
    """Names of what is shared of the first layer's parameters, where each layer reads them so."""
    shapes = {"layers": [LAYER | first, *[LAYER] * (num_layers - 1)]}

    def forward(p, x):
        for layer in p["layers"]:
            x = x + read(p["layers"][0], layer, x)
        return x

    model, loss = as_model(shapes, forward)
    _, leaves = find(model, loss, ARRAYS)
    return {leaves[i].name for i in cut(model, loss, ARRAYS)[0].shared}


def branch(layer: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ layer["up"]) @ layer["down"]


def within(first: Any, layer: Any, x: jax.Array) -> jax.Array:
    h = x @ layer["up"]
    for name in first.keys() - LAYER.keys():
        h = h * first[name]
    return h @ layer["down"]


@pytest.mark.parametrize(
    ("first", "read", "shared"),
    [
        ({"a": (32,), "b": (32,)}, within, {"layers/0/a", "layers/0/b"}),
        # One equation reads it together with a layer's own matrix.
        ({"a": (32,)}, lambda f, p, x: (x @ (p["up"] * f["a"])) @ p["down"], {"layers/0/a"}),
        # Between two layers, not within one.
        ({"a": (16,)}, lambda f, p, x: f["a"] * branch(p, x), {"layers/0/a"}),
        # A matrix that is as large as a layer's own stays in its block.
        ({"a": (16, 16)}, lambda f, p, x: branch(p, x @ f["a"]), set()),
        # The whole first layer is applied again and again.
        ({"a": (16,)}, lambda f, p, x: branch(p, x) + f["a"] * branch(f, x), set()),
    ],
    ids=["two", "one equation", "between", "large", "applied again"],
)
def test_what_is_shared_is_small_and_read_elsewhere(first, read, shared):
    assert shared_of(first, read) == shared
