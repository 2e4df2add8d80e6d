"""Models of blocks that are alike but for one thing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cuts import run_stages
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.loss.trace import TracedLoss, cut_loss, leaves_of, trace_loss

DIM, VOCAB, TIME = 8, 16, 4


TOKENS = {"tokens": np.arange(5 * (TIME + 1), dtype=np.int32).reshape(5, -1) % VOCAB}


Forward = Callable[[Any, jax.Array, jax.Array], jax.Array]


def loss_of(forward: Forward) -> Callable[..., Any]:
    """Return the loss of a pytree's forward function in the form that is traced."""

    def loss(parameters, variables, batch, rng):
        logits = forward(jax.tree.unflatten(TREE, parameters), batch["tokens"][:, :-1], rng)
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        targets = batch["tokens"][:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(logprobs, targets, axis=-1)), {}, []

    return loss


def init(seed: int = 0, num_blocks: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "embed": normal(VOCAB, DIM),
        "table": normal(VOCAB, DIM),
        "blocks": [
            {"norm": normal(DIM) + 1, "up": normal(DIM, 2 * DIM), "down": normal(2 * DIM, DIM)}
            for _ in range(num_blocks)
        ],
        "scale": normal(DIM) + 1,
        "head": normal(DIM, VOCAB),
    }


TREE = jax.tree.structure(init())


def cut_forward(forward: Forward) -> tuple[TracedLoss, Program, list[Any]]:
    flat, _ = jax.tree.flatten_with_path(init())
    paths = [tuple(k.key if hasattr(k, "key") else k.idx for k in path) for path, _ in flat]
    arrays = [a for _, a in flat]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    traced = trace_loss(loss_of(forward), shapes, [], TOKENS)
    leaves = leaves_of(traced, paths, shapes, [True] * len(paths))
    program = cut_loss(traced, leaves)
    order = [arrays[leaf.parameter] for leaf in leaves]
    return traced, program, order


def block_keys(program: Program) -> list[Any]:
    return [stage.key for stage in program.stages if stage.is_block]


def assert_one_template(program: Program, num_blocks: int = 4) -> None:
    keys = block_keys(program)
    sizes = [(stage.name, len(stage.jaxpr.eqns)) for stage in program.stages]
    assert len(keys) == num_blocks and len(set(keys)) == 1, sizes
    assert len({id(stage.jaxpr) for stage in program.stages if stage.is_block}) == 1


def assert_computes_the_loss(traced: TracedLoss, program: Program, arrays: list[Any]) -> None:
    data = [*jax.tree.leaves(TOKENS), jax.random.key(3)]

    def staged(arrays):
        return run_stages(program, arrays, data)[0]

    def whole(arrays):
        return jx.evaluate(traced.traced.jaxpr, [*traced.traced.consts, *arrays, *data])[0]

    ours = jax.jit(jax.value_and_grad(staged))(arrays)
    theirs = jax.jit(jax.value_and_grad(whole))(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def mlp(block: dict[str, Any], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(norm(x, block["norm"]) @ block["up"]) @ block["down"]
