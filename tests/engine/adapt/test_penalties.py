"""What a loss makes of parameters alone (penalties, norms, scales) leaves the model's cut alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from runs import check_close

DIM, DEPTH = 4, 3
BLOCKS = [f"blocks.{i}" for i in range(DEPTH)]
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
SCALES = [(), (1,), (DIM,)]


def init_params(rng):
    """Blocks with a matrix and a scale, a number as often as not, among parameters outside."""
    scales = [SCALES[k] for k in rng.integers(len(SCALES), size=2)]

    def block():
        found = {"w": rng.normal(size=(DIM, DIM)) / 2}
        return found | {name: np.ones(shape) for name, shape in zip("az", scales, strict=True)}

    params = {
        "embed": rng.normal(size=(DIM, DIM)),
        "blocks": [block() for _ in range(DEPTH)],
        "head": {"bias": np.ones(1), "kernel": rng.normal(size=(DIM, 1))},
    }
    return jax.tree.map(np.float32, params)


def forward(params, x):
    x = x @ params["embed"]
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["w"]) * block["a"] * block["z"]
    return (x @ params["head"]["kernel"] + params["head"]["bias"])[:, 0]


def squared(params, batch):
    return ((forward(params, batch["x"]) - batch["y"]) ** 2).mean()


def squares(params):
    return sum((x**2).sum() for x in jax.tree.leaves(params))


def penalty_before(params, batch):
    penalty = squares(params)
    return squared(params, batch) + 1e-2 * penalty


def penalty_after(params, batch):
    return squared(params, batch) + 1e-2 * squares(params)


def penalty_of_the_head_before(params, batch):
    penalty = squares(params["head"]) * params["blocks"][-1]["a"].sum()
    return squared(params, batch) + 1e-2 * penalty


def norm_printed(params, batch):
    jax.debug.print("{}", squares(params))
    return squared(params, batch)


# What gives numbers changes no cut; what gives weights, before the blocks, may.
WHOLE = [penalty_before, penalty_after, penalty_of_the_head_before, norm_printed]


def scaled_by_the_head(params, batch):
    norm = jnp.linalg.norm(params["head"]["kernel"])
    blocks = [{**block, "w": block["w"] / norm} for block in params["blocks"]]
    return squared({**params, "blocks": blocks}, batch)


def scaled_and_printed(params, batch):
    for block in params["blocks"]:
        jax.debug.print("{}", block["w"][0])
    return scaled_by_the_head(params, batch)


def batch_of(rng):
    return {
        "x": rng.normal(size=(8, DIM)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
    }


@pytest.mark.by_default("penalty_before-0", "scaled_by_the_head-0")
@pytest.mark.filterwarnings("ignore:the stage head holds:UserWarning")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_fn", [*WHOLE, scaled_by_the_head, scaled_and_printed])
def test_what_is_made_of_parameters_alone_trains_as_in_plain_jax(loss_fn, seed):
    rng = np.random.default_rng(seed)
    params, batches = init_params(rng), [batch_of(rng) for _ in range(3)]
    trainer = mt.Trainer(
        params, loss_fn, OPTIMIZER, batches[0],
        precision=mt.Precision(compute=jnp.float32), progress=False, device_budget="least",
    )  # fmt: skip
    assert all(stage.stage.jaxpr.eqns for stage in trainer.stages)
    if loss_fn in WHOLE:
        assert [stage.stage.name for stage in trainer.stages] == ["embedding", *BLOCKS, "head"]
    if loss_fn in (penalty_before, norm_printed):
        # Each block's stage computes the block's own part of the sum.
        assert len({len(stage.stage.jaxpr.eqns) for stage in trainer.stages[1:-1]}) == 1
    losses = [trainer.read(trainer.step(batch))["loss"] for batch in batches]
    expected, state = jax.tree.map(jnp.asarray, params), OPTIMIZER.init(params)
    differentiate = jax.jit(jax.value_and_grad(loss_fn))
    for loss, batch in zip(losses, batches, strict=True):
        value, gradient = differentiate(expected, batch)
        np.testing.assert_allclose(loss, value, rtol=5e-7)
        updates, state = OPTIMIZER.update(gradient, state, expected)
        expected = optax.apply_updates(expected, updates)
    check_close(trainer.params, expected, 5e-7, "parameters")
