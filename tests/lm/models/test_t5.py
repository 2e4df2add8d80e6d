"""T5-3B at its published sizes, on shapes: a foreign encoder and decoder with shared biases."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from t5_model import T5, Sizes, loss_fn

import megatrain_jax as mt

SIZES = Sizes(layers=24)


@pytest.mark.exhaustive
def test_t5_3b_is_cut_into_its_blocks_from_shapes():
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    batch = {"source": tokens, "target": tokens}
    plan = mt.plan(lambda: T5(SIZES, nnx.Rngs(0)), loss_fn, optax.sgd(1e-3), batch)
    assert not plan.warnings and 2.8e9 < plan.num_parameters < 2.9e9
    # The embedding, 24 blocks and the norm of each stack; the decoder's norm has the head.
    assert (plan.num_stages, plan.num_templates) == (2 * SIZES.layers + 3, 5)
    groups = {row.name: row.count for row in plan.groups}
    assert groups == {
        "shared": 1,
        "encoder.block.0.attention.bias": 1,
        "encoder.block.0 … encoder.block.23": SIZES.layers,
        "encoder.norm": 1,
        "decoder.block.0.attention.bias": 1,
        "decoder.block.0 … decoder.block.23": SIZES.layers,
        "decoder.norm": 1,
    }
