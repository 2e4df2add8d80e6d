"""What a plan warns of is said by every run, once, at the line of the user that started it."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
import small
from messages import tells, warns
from places import HELPERS

FP32 = mt.Precision(compute=jnp.float32)


def wide(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"].astype(jnp.float32))
    return jnp.mean(x**2)


# Nothing of this model is frozen.
NF4 = mt.Precision(frozen="nf4")


def fit(**options):
    given = small.params(), small.loss_fn, [small.batch(0)], optax.sgd(0.1)
    return mt.fit(*given, precision=NF4, **options)


def make(**options):
    given = small.params(), small.loss_fn, optax.sgd(0.1), small.batch(0)
    return mt.Trainer(*given, **{"precision": NF4, **options})


@pytest.mark.parametrize("run", [fit, make])
def test_a_run_warns_once_at_its_users_line(run):
    with warns(mt.PlanWarning, "bfloat16") as caught:
        run(progress=False)
    (warning,) = caught
    assert warning.filename == __file__


def test_going_on_with_a_trainer_does_not_say_it_again():
    with pytest.warns(mt.PlanWarning):
        trainer = make(progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.train(trainer, [small.batch(1)], progress=False)


def test_nothing_is_said_of_what_was_asked_for():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(progress=False, precision=FP32)
    assert not caught


PRODUCTS_WITH_WEIGHTS = {
    "narrow weights": lambda x, w: x @ w,
    "einsum": lambda x, w: jnp.einsum("bi,ij->bj", x, w),
    "narrow weights on the left": lambda x, w: (w.T @ x.T).T,
}


@pytest.mark.by_default("auto-narrow weights", "auto-einsum", "auto-narrow weights on the left")
@pytest.mark.parametrize("product", PRODUCTS_WITH_WEIGHTS.values(), ids=list(PRODUCTS_WITH_WEIGHTS))
@pytest.mark.parametrize("precision", ["auto", mt.Precision(products={"*": "float8"})])
def test_products_of_wide_and_narrow_operands_are_wide(product, precision):
    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(product(x, layer["w"]))
        return jnp.mean(x**2)

    params = [{"w": np.ones((512, 512), np.float32)} for _ in range(2)]
    batch = {"x": jax.ShapeDtypeStruct((2**18, 512), jnp.float32)}
    (said,) = mt.plan(params, loss_fn, optax.sgd(0.1), batch, precision=precision).warnings
    assert tells(said, "100%", "batch", "float32")
    narrow = {"x": jax.ShapeDtypeStruct((2**18, 512), jnp.bfloat16)}
    assert not mt.plan(params, loss_fn, optax.sgd(0.1), narrow, precision=precision).warnings


@pytest.mark.parametrize("microbatches", [1, 2])
def test_wide_products_are_warned_of_where_they_cost_time(microbatches):
    """The threshold is 1e12 operations; each layer of this model takes 4 · 2 · 2¹⁸ per row."""

    def planned(rows, **options):
        params = [{"w": np.ones((512, 512), np.float32)} for _ in range(2)]
        batch = {"x": jax.ShapeDtypeStruct((rows, 512), jnp.float32)}
        return mt.plan(params, wide, optax.sgd(0.1), batch, **options).warnings

    (said,) = planned(2**18, microbatches=microbatches)
    assert tells(said, "bfloat16", 'precision="float32"')
    assert not planned(2**17) and not planned(2**18, precision="float32")


class Tokens(nnx.Module):
    """Embedded tokens, two blocks and a head, whose products are in one dtype."""

    def __init__(self, rngs: nnx.Rngs, dtype=None):
        self.embed = nnx.Embed(64, 32, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([nnx.Linear(32, 32, dtype=dtype, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.mean(self.embed.attend(x).astype(jnp.float32) ** 2)


def tokens_plan(precision, dtype=None):
    def model():
        return Tokens(nnx.Rngs(0), dtype)

    batch = {"tokens": jax.ShapeDtypeStruct((4, 8), jnp.int32)}
    given = model, lambda m, batch: m(batch["tokens"]), optax.sgd(0.1), batch
    return mt.plan(*given, precision=precision).warnings


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("precision", "dtype", "named"),
    [
        ("auto", None, ("100%", "bfloat16", "`embed/embedding`", "float32")),
        ("auto", jnp.bfloat16, ("products", "bfloat16")),
        ("float32", None, ("products", "float32")),
        ("float32", jnp.bfloat16, ("100%", "bfloat16", "float32")),
        ("bfloat16", jnp.float16, ("100%", "float16", "bfloat16")),
        (mt.Precision(compute="bfloat16"), None, ()),  # a warning says it
    ],
)
def test_a_run_begins_with_the_dtype_of_its_products(precision, dtype, named, capsys):
    given = lambda m, batch: m(batch["tokens"]), optax.sgd(0.1)  # noqa: E731
    batch = {"tokens": np.zeros((4, 8), np.int32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mt.PlanWarning)
        for progress in (True, False):
            mt.Trainer(
                Tokens(nnx.Rngs(0), dtype), *given, batch, precision=precision, progress=progress
            )
            lines = [
                x for x in capsys.readouterr().err.splitlines() if "matrix products" in x.lower()
            ]
            assert len(lines) == bool(named and progress)
            assert (
                not lines
                or tells(lines[0], *named)
                and tells(lines[0], "100%") == (named[0] == "100%")
            )


EVERYWHERE = mt.Precision(products={"*": "float8"})


@pytest.mark.parametrize("precision", [EVERYWHERE, mt.Precision(compute="bfloat16")])
def test_a_layer_that_widens_the_products_is_named(precision):
    (said,) = tokens_plan(precision)
    assert tells(said, "100%", "bfloat16", "`embed/embedding`", "float32")
    assert tells(said, "float8") == (precision is EVERYWHERE)
    assert "products={" not in said, "what was asked for already"
    assert not tokens_plan(precision, dtype=jnp.bfloat16)


def test_the_cause_of_wide_products_is_found_in_batches_blocks_and_losses():
    def planned(loss_fn, dtype=jnp.bfloat16):
        params = {"layers": [{"w": np.ones((8, 8), np.float32)} for _ in range(3)]}
        batch = {"x": jax.ShapeDtypeStruct((4, 8), dtype)}
        what = params, loss_fn, optax.sgd(0.1), batch
        return mt.plan(*what, precision="bfloat16").warnings

    def widened(at):
        def loss_fn(params, batch):
            x = batch["x"]
            for i, layer in enumerate(params["layers"]):
                x = x.astype(jnp.float32) if i == at else x
                x = jnp.tanh(x @ layer["w"].astype(x.dtype))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return loss_fn

    def in_block(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            w = layer["w"].T.astype(jnp.float32)
            x = jnp.tanh(w @ x.astype(jnp.float32).T).T.astype(jnp.bfloat16)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    (said,) = planned(widened(None), jnp.float32)
    assert tells(said, "batch", "float32", "layers.0")
    (said,) = planned(widened(1))
    assert tells(said, "67%", "numbers", "float32", "layers.1")
    (said,) = planned(in_block)
    assert tells(said, "`layers/0/w`", "float32", "layers.0")
    # One of three products is a choice.
    assert not planned(widened(2)) and not planned(widened(None))


class Shifted(nnx.Module):
    """Four layers; without a change before the first one, a table is added before the second."""

    def __init__(self, shift=None, *, narrow=False):
        self.table = nnx.Cache(jnp.ones((4, 8))) if shift is None else None
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(4)])
        self.shift, self.narrow = shift, narrow

    def __call__(self, x):
        x = x if self.shift is None else self.shift(x)
        x = self.layers[0](x)
        x = x if self.table is None else x + self.table[...]
        for layer in self.layers[1:]:
            x = x.astype(jnp.bfloat16).astype(jnp.float32) if self.narrow else x
            x = jnp.where(x > 9, 9.0, jnp.tanh(layer(x)))
        return jnp.mean(x.astype(jnp.float32) ** 2)


def noise(x):
    return x + 2 * jax.random.normal(jax.random.key(0), (4, 8))


def test_the_cause_of_wide_products_may_be_a_variable_or_what_the_loss_draws():
    def planned(*options, **more):
        batch = {"x": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)}
        parts = lambda m, batch: m(batch["x"]), optax.sgd(0.1), batch  # noqa: E731
        return mt.plan(lambda: Shifted(*options, **more), *parts, precision="bfloat16").warnings

    (said,) = planned()
    assert tells(said, "75%", "`table`", "float32") and not tells(said, "further")
    (said,) = planned(noise)
    assert tells(said, "100%", "loss computes", "float32")
    assert not tells(said, "an array of the batch")
    # Each layer widens its input again.
    (said,) = planned(noise, narrow=True)
    assert tells(said, "100%", "3 further places")


SCRIPT = """
import optax, small, test_plan_warnings
import megatrain_jax as mt
given = small.params(), small.loss_fn, [small.batch(0)], optax.sgd(0.1)
mt.fit(*given, precision=test_plan_warnings.NF4)
"""


@pytest.mark.exhaustive
def test_a_terminal_shows_it_on_lines_of_its_own_beside_the_progress_bar(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(HELPERS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=environment
    )
    lines = done.stderr.replace("\r", "\n").splitlines()
    (shown,) = (line for line in lines if "PlanWarning" in line)
    assert shown.startswith(f"{script}:5: PlanWarning: Precision(frozen=")
    assert any("step/s" in line for line in lines), "a progress bar"
