"""A model's state of its own: with any number of microbatches a step is one call of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import megatrain_jax as mt
from messages import refuses
from oracle import train_plain
from runs import check_close, make_trainer, train, variables_of
from zoo_case import Case

DIM = 8
NUM_STEPS = 3


def batch_of(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, DIM)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def square_loss(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


class SpectralNet(nnx.Module):
    """NNX's spectral norm: a power iteration a call."""

    def __init__(self, rngs, rate=0.0):
        def layer():
            return nnx.SpectralNorm(nnx.Linear(DIM, DIM, rngs=rngs), rngs=rngs, n_steps=1)

        self.blocks = nnx.List([layer() for _ in range(3)])
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + self.dropout(jnp.tanh(block(x, update_stats=True)))
        return self.head(x)


class LinenSpectralNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            layer = linen.SpectralNorm(linen.Dense(DIM), n_steps=1)
            x = x + jnp.tanh(layer(x, update_stats=True))
        return linen.Dense(1)(x)


class TeacherNet(nnx.Module):
    """Keeps a moving average of its blocks, whose rate depends on a count of steps."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(DIM, 1, rngs=rngs)
        self.count = nnx.Variable(jnp.array(0, jnp.int32))
        self.teacher = nnx.List(
            [nnx.Variable(jnp.array(block.kernel[...])) for block in self.blocks]
        )

    def __call__(self, x):
        decay = jnp.minimum(0.9, (1 + self.count[...]) / (10 + self.count[...]))
        y = x
        for block, teacher in zip(self.blocks, self.teacher, strict=True):
            x = x + self.dropout(jnp.tanh(block(x)))
            y = y + jnp.tanh(y @ teacher[...])
            teacher[...] = decay * teacher[...] + (1 - decay) * block.kernel[...]
        self.count[...] += 1
        return self.head(x) + ((x - jax.lax.stop_gradient(y)) ** 2).mean()


def case_of(name, build):
    return Case(name=name, build=build, loss_fn=square_loss, blocks=3, templates=1, batch=batch_of)


CASES = {
    "spectral": case_of("spectral", lambda: SpectralNet(nnx.Rngs(0))),
    "dropout": case_of("dropout", lambda: SpectralNet(nnx.Rngs(0), rate=0.3)),
    "linen": case_of("linen", LinenSpectralNet),
    "teacher": case_of("teacher", lambda: TeacherNet(nnx.Rngs(0))),
}


@pytest.mark.by_default("teacher-1")
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("spectral", 2), ("dropout", 4), ("linen", 2), ("teacher", 1), ("teacher", 4)],
)
def test_state_of_parameters_changes_once_a_step(name, microbatches):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    updates_at_once, budget = microbatches == 2, None if microbatches == 4 else "least"
    optimizer = optax.adamw(1e-2)
    if not updates_at_once:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    plain = train_plain(case, optimizer, batches, microbatches=microbatches)
    options = {"microbatches": microbatches, "budget": budget, "progress": False}
    run = train(make_trainer(case, lambda _: optimizer, **options), batches, gradients=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=2e-6)
    check_close(run.params, plain.params, 2e-5, "parameter")
    check_close(variables_of(run.trainer.model), plain.variables, 2e-5, "variable")


def test_a_step_does_the_same_to_state_with_any_number_of_microbatches():
    states = []
    for microbatches in (1, 4):
        options = {"microbatches": microbatches, "progress": False}
        trainer = make_trainer(CASES["teacher"], lambda _: optax.sgd(0.1), **options)
        trainer.step(batch_of(0))
        state = nnx.state(trainer.model, nnx.Not(nnx.Param))
        flat = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(state)}
        assert int(flat["count"][...]) == 1
        assert int(flat["dropout/rngs/count"][...]) == 3 * microbatches
        states.append([v[...] for name, v in flat.items() if name.startswith("teacher")])
    check_close(states[1], states[0], 1e-6, "teacher")


class Warming(nnx.Module):
    """Its outputs grow from step to step."""

    def __init__(self):
        self.weight, self.count = nnx.Param(jnp.ones((3, 2))), nnx.Variable(jnp.array(0.0))

    def __call__(self, x):
        self.count[...] += 1
        return self.count[...] * (x @ self.weight[...])


def test_all_microbatches_of_a_step_read_the_same_state():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for microbatches in (1, 2):
        trainer = mt.Trainer(
            Warming(), lambda model, x: model(x).mean(), optax.sgd(0.0), x,
            microbatches=microbatches, precision="float32", progress=False,
        )  # fmt: skip
        for count in (1, 2):
            loss = trainer.read(trainer.step(x))["loss"]
            np.testing.assert_allclose(loss, count * x.sum(1).mean(), rtol=1e-6)


class Tracking(SpectralNet):
    """State that depends on the batch, through one value or another."""

    def __init__(self, rngs, path):
        super().__init__(rngs)
        self.path = path
        self.seen = nnx.Variable(jnp.array(0.0))
        self.noise = nnx.Variable(jax.random.key(0))

    def __call__(self, x):
        out = super().__call__(x)
        if self.path == "noise":
            spread = jnp.int32(jnp.abs(self.head.kernel[...]).sum())
            out += 0.1 * jax.random.normal(self.noise[...], out.shape)
            self.noise[...] = jax.random.fold_in(self.noise[...], spread)
        else:
            self.seen[...] += {"input": x, "output": out, "both": x @ self.head.kernel[...]}[
                self.path
            ].mean()
        return out


@pytest.mark.by_default("both")
@pytest.mark.parametrize("path", ["input", "output", "both", "noise"])
def test_state_that_the_parts_of_a_batch_cant_agree_on_is_refused(path):
    def build():
        return Tracking(nnx.Rngs(0), path)

    arguments = build, square_loss, optax.sgd(0.1), batch_of(0)
    precision = mt.Precision(compute=jnp.float32)
    cause = ["noise", "parameters"] if path == "noise" else ["seen"]
    with refuses(ValueError, "microbatches", "state", *cause):
        mt.plan(*arguments, microbatches=2, precision=precision)
    mt.plan(*arguments, precision=precision)
