"""Adapters beside products in float8."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from float8_specs import spec_with
from megatrain_jax import models
from megatrain_jax._src.common.trees import path_name
from zoo_case import Case

WIDE, VOCABULARY = 2400, 5000
RANK = 2304  # of adapters that float8 would make faster


@pytest.mark.by_default("{}")
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dropout": 0.1}], ids=str)
def test_adapters_of_the_library_stay_as_they_are(options):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDE, 2 * WIDE, rngs=rngs)
            self.down = nnx.Linear(2 * WIDE, WIDE, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(VOCABULARY, WIDE, dtype=jnp.bfloat16, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDE, VOCABULARY, rngs=rngs)

    def loss_fn(model, batch):
        x = model.embed(batch["tokens"])
        for layer in model.layers:
            x = x + layer.down(jnp.tanh(layer.up(x)))
        logits = model.head(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def rows(seed: int) -> dict[str, Any]:
        return dict.fromkeys(("tokens", "labels"), np.zeros((2, 6), np.int32))

    adapted = models.lora(lambda: Model(), targets="layers/", rank=RANK, **options)
    case = Case(
        name="adapters", build=lambda: adapted.model, loss_fn=loss_fn, blocks=2, templates=1,
        batch=rows,
    )  # fmt: skip
    spec = spec_with(case, "float8", trainable=adapted.trainable)
    found = {path_name(spec.leaves[i].path) for i in spec.first.program.in_float8}
    assert found == {f"layers/{i}/{name}/kernel" for i in (0, 1) for name in ("up", "down")}
