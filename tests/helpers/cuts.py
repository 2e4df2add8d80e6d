"""Cuts models on shapes alone, and says which blocks and stages that gives."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.loss.trace import TracedLoss, cut_loss, leaves_of, trace_loss
from nested import run_layer, zeros

TOKENS = {"tokens": np.zeros((2, 16), np.int32)}


def find(
    model: Any, loss_fn: Callable[..., Any], batch: Any
) -> tuple[TracedLoss, tuple[Leaf, ...]]:
    """The leaves of a model, with the blocks that they belong to."""
    adapted, _ = adapt(model, loss_fn, batch, 0)

    def loss(parameters, variables, batch, rng):
        return adapted.loss(loss_fn, parameters, variables, batch, rng, True)

    half = [jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for s in adapted.shapes]
    traced = trace_loss(loss, half, adapted.variable_shapes, batch)
    return traced, leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))


def cut(model: Any, loss_fn: Callable[..., Any], batch: Any) -> tuple[Program, dict[str, int]]:
    """The stages of a model, and the number of parameters each of them reads."""
    traced, leaves = find(model, loss_fn, batch)
    program = cut_loss(traced, leaves)
    read = {s.name: sum(math.prod(leaves[i].shape) for i in s.leaves) for s in program.stages}
    assert len(read) == len(program.stages)
    return program, read


def run_stages(program: Program, arrays: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    """Computes stage by stage what a cut loss gives, from its leaves and its other inputs."""
    out = jx.evaluate(program.prologue, [*program.prologue_consts, *data])
    values = dict(zip(program.prologue_values, out, strict=True))
    for stage in program.stages:
        args = [arrays[i] for i in stage.leaves] + [values[i] for i in stage.inputs]
        out = jx.evaluate(stage.jaxpr, [*stage.consts, *args])
        values.update(zip(stage.outputs, out, strict=True))
    return [values[i] for i in program.outputs]


def as_model(shapes: Any, forward: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """A tree of shapes and a loss for what its `forward` gives."""

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(forward(params, batch).astype(jnp.float32)))

    return lambda: zeros(shapes), loss_fn


def cut_tree(shapes: Any, forward: Callable[..., Any], batch: Any = TOKENS):
    return cut(*as_model(shapes, forward), batch)


def sizes(shapes: Any, forward: Callable[..., Any]) -> dict[str, int]:
    """Every block of a tree of shapes with its number of parameters, in order of name."""
    _, leaves = find(*as_model(shapes, forward), TOKENS)
    found: dict[str, int] = {}
    for leaf in leaves:
        if leaf.block:
            name = ".".join(map(str, leaf.block))
            found[name] = found.get(name, 0) + math.prod(leaf.shape)
    return dict(sorted(found.items()))


def blocks(program: Program) -> list[str]:
    return [stage.name for stage in program.stages if stage.is_block]


def names(template: str, *numbers: int) -> list[str]:
    """`names("a.{}.b.{}", 3, 1)`: the names for `b` 0 to 2 of `a` 0 and for `b` 0 of `a` 1."""
    return [template.format(i, j) for i, n in enumerate(numbers) for j in range(n)]


def run_all(layers, x):
    for p in layers:
        x = run_layer(p, x)
    return x
