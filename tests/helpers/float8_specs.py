"""Run specs of models with products in float8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import megatrain_jax as mt
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo_case import Case


def spec_with(case: Case, products: Any, **options: Any) -> RunSpec:
    precision = mt.Precision(products=products)
    return make_spec(case, OPTIMIZERS["adam"], precision=precision, **options)


WIDE = 4096


def layers(batch: int = 2, width: int = WIDE) -> Case:
    """Layers with one product of each sort, between a first and a last product."""

    def build():
        def layer():
            sizes = {"qkv": (3, width, width), "out": (width, width), "up": (width, 2 * width),
                     "router": (width, 8), "a": (width, 4), "b": (4, width), "gate": (width, width),
                     "exact": (width, width), "down": (2 * width, width)}  # fmt: skip
            return {name: jnp.ones(size) for name, size in sizes.items()}

        first, last = jnp.ones((width, width)), jnp.ones((width, 2 * width))
        return {"first": first, "layers": [layer() for _ in range(2)], "last": last}

    @jax.jit  # as many of `jnp`'s functions are
    def turned(weight):
        return weight.T.mT

    def loss_fn(model, batch):
        x = batch["x"].astype(model["first"].dtype) @ model["first"]
        for layer in model["layers"]:
            q, k, v = (x @ w for w in layer["qkv"])
            x = x + (jnp.tanh(q @ k.mT) @ v) @ layer["out"].T
            x = x + (x @ layer["a"]) @ layer["b"]
            chosen = jax.nn.softmax(x @ layer["router"])[..., :1]
            gate = x.astype(jnp.float32) @ layer["gate"].astype(jnp.float32)
            x = x + lax.dot(x[0], layer["exact"], precision=lax.Precision.HIGHEST)
            h = jax.checkpoint(lambda x, layer=layer: jax.nn.silu(x @ turned(layer["up"])))(x)
            x = x + ((h @ layer["down"]) * chosen * gate).astype(x.dtype)
        return (x @ model["last"]).astype(jnp.float32).mean()

    def rows(seed):
        return {"x": np.random.default_rng(seed).normal(size=(batch, 4, width)).astype(np.float32)}

    return Case(
        name="layers", build=lambda: build, loss_fn=loss_fn, blocks=2, templates=1, batch=rows
    )
