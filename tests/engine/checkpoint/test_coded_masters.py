"""Masters in 8 bits: updates are those of plain Optax, rounded at random onto the code's levels."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.checkpoint.contents import (
    ArrayEntry,
    SmallArrays,
    StorePlace,
    arrays_to_convert,
    coding_of,
    entries_of,
)
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.report import run_warnings
from megatrain_jax._src.engine.spec.codecs import master_codecs
from megatrain_jax._src.engine.state.codec import Blockwise, Plain
from messages import refuses, tells, warns
from optimizers import OPTIMIZERS
from oracle import open_model
from runs import check_same_bits, train
from zoo import CASES

CASE = CASES["nnx_tied"]
BLOCK = Blockwise.block


def make(optimizer="adam", case=CASE, state=None, **options):
    return mt.Trainer(
        case.build(), case.loss_fn, OPTIMIZERS[optimizer](None), case.batch(0), progress=False,
        precision=mt.Precision(master="int8", state=state, compute=jnp.float32), **options,
    )  # fmt: skip


@pytest.mark.parametrize("there", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("here", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("holder", [Key(Kind.OPTIMIZER_STATE, 0), SmallArrays.OPTIMIZER])
def test_only_narrow_floats_of_groups_are_converted(holder, here, there):
    """Any other change of a dtype is a mistake."""
    place, path = StorePlace(holder=holder, position=0), ("opt_state", "mu", "w")
    entry = ArrayEntry(path=path, array=path, whole=(3,), shape=(3,), dtype=here, places=(place,))
    saved: Any = {path: SimpleNamespace(shape=(3,), dtype=there)}
    found = arrays_to_convert([entry], {}, saved, {})
    narrow = {here, there} == {"float32", "bfloat16"}
    assert list(found) == ([path] if narrow and place.group == 0 else [])


def levels(x):
    """The distance between two levels of the code, for each number of a parameter."""
    flat = np.abs(np.asarray(x, np.float64).reshape(-1))
    rows = np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(rows.max(axis=1), BLOCK)[: flat.size].reshape(np.shape(x)) / 127


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("adamw_schedule", None),
        ("muon", "int8"),
        ("clip_adamw", "int4"),
        pytest.param("lion", "int4", marks=pytest.mark.long),
    ],
)
def test_updates_are_those_of_optax_rounded_without_bias(optimizer, state):
    """Whole-tree Optax goes on from what a run holds; the run's next parameters surround that."""
    batches = [CASE.batch(seed) for seed in range(3)]
    trainer, plain = make(optimizer, state=state), open_model(CASE, batches[0])
    update = jax.jit(OPTIMIZERS[optimizer](None).update)

    def loss(params, batch):
        return plain.loss(params, plain.variables, batch, jax.random.key(0))[0]

    rounded = []
    for batch in batches:
        params, opt_state = trainer.params, trainer.opt_state
        # Narrow state is widened before an update.
        opt_state = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            opt_state,
        )
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
        updates, _ = update(gradients, opt_state, params)
        exact = optax.apply_updates(params, updates)
        run = train(trainer, [batch], gradients=False)
        np.testing.assert_allclose(run.losses[0], value, rtol=1e-5)
        leaves = map(jax.tree.leaves, (run.params, exact, params))
        for held, right, before in zip(*leaves, strict=True):
            assert held.dtype == jnp.float32
            if held.ndim < 2:  # norms and biases are held in fp32
                np.testing.assert_allclose(held, right, rtol=1e-4, atol=1e-6)
                continue
            gap = levels(right)
            off = (np.asarray(held, np.float64) - right)[gap > 0] / gap[gap > 0]
            assert np.abs(off).max() < 1.01
            rounded.append(off)
            # A block's largest number is exact: its scale.
            largest = np.abs(right).argmax()
            np.testing.assert_allclose(
                held.reshape(-1)[largest], np.reshape(right, -1)[largest], rtol=1e-5, atol=1e-6
            )
            assert np.any(held != before)
    off = np.concatenate(rounded)
    assert abs(off.mean()) < 5 * off.std() / np.sqrt(off.size)
    assert np.abs(off).max() > 0.6, "rounded at random, not to nearest"


@pytest.mark.exhaustive
def test_matrices_are_coded_and_vectors_are_not():
    trainer = make(state="int8")
    coded = coding_of(spec_of(trainer), entries_of(spec_of(trainer)))
    masters = {path: row for path, row in coded.items() if path.startswith("params/")}
    matrices = {path for path, x in _by_path(trainer.params).items() if x.ndim >= 2}
    assert {path.removeprefix("params/") for path in masters} == matrices and matrices
    assert {(row["code"], row["bits"], row["signed"]) for row in masters.values()} == {
        ("linear", 8, True)
    }
    everything = mt.Precision(master={"*": "int8"}, compute=jnp.float32)
    trainer = mt.Trainer(
        CASE.build(), CASE.loss_fn, OPTIMIZERS["adam"](None), CASE.batch(0), progress=False,
        precision=everything,
    )  # fmt: skip
    coded = coding_of(spec_of(trainer), entries_of(spec_of(trainer)))
    assert {path.removeprefix("params/") for path in coded} == set(_by_path(trainer.params))


def _by_path(params):
    found = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    return {n.removesuffix("/value"): x for n, (_, x) in zip(names, found, strict=True)}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
def test_parameters_read_given_and_saved_are_those_that_train(tmp_path):
    """Decoded numbers have the same codes again, so that nothing is lost on the way."""
    trainer, batches = make(), [CASE.batch(seed) for seed in range(3)]
    train(trainer, batches[:2], gradients=False)
    plain = open_model(CASE, batches[2])
    expected = plain.loss(trainer.params, plain.variables, batches[2], jax.random.key(0))[0]
    np.testing.assert_allclose(trainer.evaluate([batches[2]])["loss"], expected, rtol=1e-5)
    given = make(params=trainer.params)
    check_same_bits(given.params, trainer.params)
    trainer.save(tmp_path / "parameters", params_only=True)
    check_same_bits(make(params=tmp_path / "parameters").params, trainer.params)
    trainer.save(tmp_path / "run")
    other = make("adam", seed=1)
    other.restore(tmp_path / "run")
    check_same_bits(other.params, trainer.params)


def test_frozen_parameters_of_coded_masters_stay_as_they_are():
    with warns(mt.PlanWarning, "trained", "8 bits"):
        trainer = make(trainable="bias")
    before = trainer.params
    run = train(trainer, [CASE.batch(seed) for seed in range(2)], gradients=False)
    for path, x in _by_path(run.params).items():
        assert np.array_equal(x, _by_path(before)[path]) == ("bias" not in path), path


def leaf(*shape: int, is_trainable: bool = True) -> Leaf:
    return Leaf(
        path=("w",), parameter=0, index=(), shape=shape, dtype=jnp.float32, block=None,
        is_trainable=is_trainable,
    )  # fmt: skip


def test_codes_of_masters_have_even_levels_and_unbiased_rounding_where_they_are_trained():
    coded, given = mt.Precision(master="int8"), mt.Precision(master={"*": "int8"})
    even = Blockwise(code="linear", stochastic=True)
    for precision, of_vector in ((coded, Plain()), (given, even)):
        dtype, codecs = master_codecs(precision, [leaf(4, 8), leaf(8)])
        assert (dtype, codecs) == (jnp.float32, [even, of_vector])
    assert master_codecs(coded, [leaf(4, 8, is_trainable=False)])[1] == [Blockwise(code="linear")]


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"master": "int8"}, True),
        ({"master": "int8", "frozen": "int8"}, False),
        ({"master": "int8", "frozen": "float32"}, False),
        ({"master": {"*": "int8"}}, False),
        ({"master": "bfloat16"}, False),
    ],
)
def test_frozen_matrices_in_the_codes_of_masters_are_counted_in_a_warning(options, is_warned):
    leaves = leaf(4, 8, is_trainable=False), leaf(8, is_trainable=False), leaf(4, 8)
    spec: Any = SimpleNamespace(precision=mt.Precision(**options), leaves=leaves)
    said = run_warnings._coded_frozen(spec)
    assert [text.split()[0] for text in said] == ["32"] * is_warned
    spec.leaves = leaves[2:]
    assert not run_warnings._coded_frozen(spec)


@pytest.mark.exhaustive
def test_frozen_parameters_are_rounded_with_a_warning_unless_their_form_is_given():
    def planned(trainable: str | None = "bias", master: Any = "int8", **options: Any):
        precision = mt.Precision(master=master, compute=jnp.float32, **options)
        given = CASE.build, CASE.loss_fn, OPTIMIZERS["adam"](None), CASE.batch(0)
        return mt.plan(*given, precision=precision, trainable=trainable)

    (text,) = planned().warnings
    params = open_model(CASE, CASE.batch(0)).params
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    assert tells(text, f"{sum(x.size for x in matrices):,}", "trained")
    exact = planned(frozen="float32")
    assert exact.frozen_bytes > planned(frozen="int8").frozen_bytes
    for plan in (
        exact,
        planned(frozen="int8"),
        planned(master={"*": "int8"}),
        planned(master="bfloat16"),
        planned(trainable=None),
    ):
        assert not plan.warnings


def test_an_update_that_is_skipped_rounds_nothing():
    rng = np.random.default_rng(0)
    params = [{"w": rng.normal(size=(32, 32)).astype(np.float32) / 6} for _ in range(3)]

    def loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean((x - 1) ** 2)

    batch = {"x": rng.normal(size=(8, 32)).astype(np.float32)}
    trainer = mt.Trainer(
        params, loss, OPTIMIZERS["adam"](None), batch, progress=False, on_nonfinite="skip",
        precision=mt.Precision(master="int8", compute=jnp.float32),
    )  # fmt: skip
    trainer.step(batch)
    before = trainer.params
    metrics = trainer.step({"x": np.full_like(batch["x"], np.nan)})
    assert trainer.read(metrics)["skipped"] == 1
    check_same_bits(trainer.params, before)
    trainer.step(batch)
    assert not np.array_equal(trainer.params[0]["w"], before[0]["w"])


@pytest.mark.parametrize(
    ("name", "master", "state"), [("compact", "bfloat16", "int8"), ("two_bytes", "int8", "int4")]
)
def test_names_of_precisions_are_masters_and_moments_in_few_bits(name, master, state):
    short: Any = getattr(mt.Precision, name)
    given: Any = {"compute": jnp.float32, "sums": "bfloat16", "products": "float8"}
    assert short(**given) == mt.Precision(master=master, state=state, **given)
    assert short() == mt.Precision(master=master, state=state) == mt.Precision.of(name)


@pytest.mark.parametrize("master", ["int8", {"*": "int8"}, {"*/kernel": "int8", "*": "bfloat16"}])
def test_rounding_to_nearest_is_refused(master):
    with refuses(ValueError, "master='int8', rounding='nearest'", "train"):
        mt.Precision(master=master, rounding="nearest")
