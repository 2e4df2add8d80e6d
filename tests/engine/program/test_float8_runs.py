"""Runs with products in float8, beside plain JAX with the same products; choices and refusals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from float8_specs import WIDE, layers, spec_with
from inside import spec_of
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import count_flops, is_product
from megatrain_jax._src.engine.program.loss import float8_stages
from megatrain_jax._src.engine.program.loss.float8_stages import (
    CONSTANT,
    ProductChoice,
    input_traits,
    leaf_traits,
)
from megatrain_jax._src.engine.program.loss.gradients import differentiated
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.work import forward_work
from megatrain_jax._src.engine.state import hardware
from messages import refuses, tells
from optimizers import OPTIMIZERS
from oracle import open_model, plain_jit, train_plain
from quantities import has_row
from runs import Run, check_close, check_same_bits, make_trainer, recording, train
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

EVERY = {"*": "float8"}
CODE = jnp.dtype(jnp.float8_e4m3fn)


def in_float8(function: Callable[..., Any], params: Any, *others: Any) -> Callable[..., Any]:
    """A function of parameters and other arrays with its products in float8, as one jaxpr."""
    traced = jx.trace(function, params, *others)
    num_consts, num_params = len(traced.consts), len(jax.tree.leaves(params))
    weights = [leaf_traits(i, True) for i in range(num_params)]
    rest = [input_traits(False, False)] * (len(traced.jaxpr.invars) - num_consts - num_params)
    inputs = [*[CONSTANT] * num_consts, *weights, *rest]
    choice = ProductChoice(itemsize=4, named=lambda path: True)
    search = float8_stages.ProductSearch(choice, [True] * num_params)
    after = [float8_stages.LaterUse.NONE] * len(traced.jaxpr.outvars)
    chosen = search.search(traced.jaxpr, inputs, after).chosen
    jaxpr = float8_stages.replaced(traced.jaxpr, chosen)

    def evaluated(*args):
        out = jx.evaluate(jaxpr, [*traced.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(traced.out_tree, out)

    return evaluated


def plain_gradient(case: Case, batch: Any) -> tuple[Any, Any]:
    """The first step's loss and gradients of plain JAX, with every product in float8."""
    model = open_model(case, batch)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)

    def loss(params, variables, batch, rng):
        return model.loss(params, variables, batch, rng)[0]

    inputs = model.params, model.variables, batch, key
    return plain_jit(jax.value_and_grad(in_float8(loss, *inputs)))(*inputs)


def is_float8(eqn: Any) -> bool:
    return is_product(eqn) and all(a.aval.dtype == CODE for a in eqn.invars)


def share(spec: RunSpec) -> float:
    """The share of the forward's product operations that is in float8."""
    jaxprs = [bound.stage.jaxpr for bound in spec.first.stages]
    found, every = (sum(count_flops(j, of) for j in jaxprs) for of in (is_float8, is_product))
    return found / every


# A model of each library, one with a tied embedding and one with scans and remats.
FEW = ["nnx_tied", "linen_scan_remat", "equinox"]
CASES_HERE = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in CASES]


# One test of all, since they share what is traced and compiled.
@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize("name", CASES_HERE)
def test_runs_agree_with_plain_jax_and_to_the_bit_with_each_other(name, tmp_path):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(3)]

    def trainer(budget: Any) -> mt.Trainer:
        optimizer = OPTIMIZERS["clip_adamw"]
        return make_trainer(case, optimizer, products=EVERY, budget=budget)

    streamed, resident = trainer("least"), trainer(10**12)
    assert share(spec_of(streamed)) > 0.5
    first = train(streamed, batches[:1], gradients=False)
    loss, _ = plain_gradient(case, batches[0])
    # One code that is rounded the other way would show, as in the towers, of which plain JAX codes
    # both together.
    rtol = 1e-4 if name == "sliced_towers" else 1e-6
    np.testing.assert_allclose(first.losses[0], loss, rtol=rtol)
    streamed.save(tmp_path / "1")
    rest = train(streamed, batches[1:], gradients=False)
    resumed = trainer("least")
    resumed.restore(tmp_path / "1")
    again = train(resumed, batches[1:], gradients=False)
    whole = train(resident, batches, gradients=False)
    assert first.losses + rest.losses == whole.losses and again.losses == rest.losses
    for run in (again, whole):
        check_same_bits(run.params, rest.params)
        check_same_bits(run.opt_state, rest.opt_state)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
def test_devices_share_one_scale_within_any_budget():
    case, optimizer = CASES["equinox"], OPTIMIZERS["clip_adamw"]
    batches = [case.batch(seed) for seed in range(2)]

    def run(number: int, budget: Any = None) -> Run:
        mesh = jax.make_mesh((number,), ("data",), devices=jax.devices()[:number])
        options = {"products": EVERY, "mesh": mesh}
        if budget is None:  # with residuals, a backward rounds differently
            probe = spec_of(make_trainer(case, optimizer, **options))
            budget = all_resident_bytes(probe.first.workload)
        trainer = make_trainer(case, optimizer, budget=budget, **options)
        return train(trainer, batches, gradients=False)

    alone, both, streamed = run(1), run(2), run(2, "least")
    np.testing.assert_allclose(both.losses, alone.losses, rtol=1e-6)
    check_close(both.params, alone.params, 1e-5, "parameter")
    assert streamed.losses == both.losses
    check_same_bits(streamed.params, both.params)


def weights(spec: RunSpec) -> list[list[tuple[int, ...]]]:
    """The shapes of the right operands of each stage's float8 products, in order."""

    def found(jaxpr):
        for eqn in jaxpr.eqns:
            if is_float8(eqn):
                yield eqn.invars[1].aval.shape
            for inner in jx.inner_jaxprs(eqn):
                yield from found(inner)

    return [list(found(bound.stage.jaxpr)) for bound in spec.first.stages]


SQUARE, UP, DOWN = (WIDE, WIDE), (WIDE, 2 * WIDE), (2 * WIDE, WIDE)


def test_products_that_would_not_gain_or_are_sensitive_stay_as_they_are():
    spec = spec_with(layers(), "float8")
    assert weights(spec) == [[], *[[*[SQUARE] * 4, UP, DOWN]] * 2, []]
    assert len({bound.stage.key for bound in spec.first.stages}) == 3
    assert not any(map(any, weights(spec_with(layers(width=1024), "float8"))))


def test_narrow_products_count_beside_a_wide_one_with_the_same_data():
    def widths(*outputs):
        def build():
            layer = [jnp.ones((WIDE, n)) for n in outputs]
            return {
                "first": jnp.ones((8, WIDE)),
                "layers": [layer] * 2,
                "last": jnp.ones((WIDE, 8)),
            }

        def loss_fn(model, batch):
            x = batch["x"].astype(model["first"].dtype) @ model["first"]
            for layer in model["layers"]:
                x = x + sum((x @ w).mean(-1, keepdims=True) for w in layer)
            return (x @ model["last"]).mean()

        case = Case(
            name="narrow", build=lambda: build, loss_fn=loss_fn, blocks=2, templates=1,
            batch=lambda seed: {"x": np.zeros((4, 8), np.float32)},
        )  # fmt: skip
        return [shape[1] for row in weights(spec_with(case, "float8")) for shape in row]

    assert widths(WIDE, 512, 256) == [WIDE, 512] * 2
    assert not widths(1000, 1000)


@pytest.mark.usefixtures("traced_once")
def test_a_mapping_names_exactly_the_products_in_float8():
    case = layers()
    narrow = {"*/router": "float8", "layers/1/up": "float8", "last": "float8", "first": "float8"}
    last = (WIDE, 2 * WIDE)
    spec = spec_with(case, narrow)
    assert weights(spec) == [[SQUARE], [(WIDE, 8)], [(WIDE, 8), UP], [last]]
    assert len({bound.stage.key for bound in spec.first.stages}) == 4
    but = {"*/[abr]*": None, "*/qkv": None, "layers/*": "float8"}
    assert weights(spec_with(case, but)) == [[], *[[SQUARE, UP, DOWN]] * 2, []]
    with refuses(ValueError, "products", "'layer/*'"):
        spec_with(case, {"layer/*": "float8"})


def test_a_plan_counts_float8_products_and_their_rate():
    case, optimizer = layers(), optax.sgd(0.1)
    machine = dataclasses.replace(mt.card("H100"), memory_bytes_per_s=1e30)

    both = {"as they are": mt.Precision(), "float8": mt.Precision(products="float8")}
    given = case.build(), case.loss_fn, optimizer, case.batch(0)
    options = {"hardware": machine, "device_budget": "minimum"}  # nothing is saved for backward
    rows = mt.compare_plans(*given, over={"precision": both}, **options)
    plain, ours = (row.plan for row in rows)
    assert plain is not None and ours is not None
    # Each layer's eight rows pass 8 squares forward, again in backward, and twice as many there.
    flops = 2 * 4 * 2 * 8 * 8 * WIDE**2
    assert plain.float8_flops_per_step == 0 and ours.float8_flops_per_step == flops
    assert has_row(
        str(ours), [ours.float8_flops_per_step, ours.float8_flops_per_step / ours.flops_per_step]
    )
    assert tells(str(ours), 1395, "float8")
    assert "float8" not in str(plain)
    spared = flops * (1 / machine.flops_per_s - 1 / 1395e12)
    counted = ours.flops_per_step - plain.flops_per_step  # to code operands
    coding = counted / (machine.sustained * machine.flops_per_s)
    more = (plain.seconds_compute or 0) + coding - spared
    assert ours.seconds_compute == pytest.approx(more)


@pytest.mark.usefixtures("traced_once")
def test_a_plan_without_float8_products_warns_if_some_are_asked_for():
    case, machine = layers(), mt.card("H100")
    given = case.build(), case.loss_fn, optax.sgd(0.1), case.batch(0)
    unasked = mt.Precision(products={"layers/0/out": None})
    assert not mt.plan(*given, hardware=machine, precision=unasked).warnings
    none = mt.Precision(products={"*": None, "layers/0/out": "float8"})
    (warning,) = mt.plan(*given, hardware=machine, precision=none).warnings
    assert tells(warning, "no product")


def test_codes_take_time_in_memory():
    spec = spec_with(layers(), "float8")
    work = forward_work([bound.stage for bound in spec.first.stages])[1]
    # Queries, keys and values are products with the same data.
    numbers = 8 * WIDE * (2 + 1 + 2) + 8 * WIDE**2 + 8 * WIDE * (4 + 2 + 1)
    assert work.coded == 2.5 * numbers
    slow, fast = (
        dataclasses.replace(mt.card("H100"), memory_bytes_per_s=rate) for rate in (1.0, 1e30)
    )
    assert work.seconds(slow) - work.seconds(fast) == pytest.approx(work.coded)


@pytest.mark.parametrize(("trainable", "keeps"), [(None, True), ("/[ab]$", False)])
def test_no_codes_of_inputs_are_kept_for_frozen_weights(trainable, keeps):
    stage = spec_with(layers(), "float8", trainable=trainable).first.stages[1].stage
    shapes = [jx.shape_of(v.aval) for v in stage.jaxpr.invars[len(stage.consts) :]]
    leaves, inputs = shapes[: len(stage.leaves)], shapes[len(stage.leaves) :]

    def pullback(leaves, inputs):
        return differentiated(stage, stage.has_cotangent, leaves, inputs)[1]

    saved = jax.tree.leaves(jax.eval_shape(pullback, leaves, inputs))
    codes = {x.ndim for x in saved if x.dtype == CODE}
    assert codes == ({2, 3} if keeps else {2})


def penalised(params: Any, batch: Any) -> jax.Array:
    """A loss of a function's derivatives by its input: forward-mode, and a gradient's norm."""

    def model(x):
        return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"], axis=-1)

    x = batch["x"]
    value, tangent = jax.jvp(model, (x,), (jnp.ones_like(x),))
    slope = jax.grad(lambda x: model(x).sum())(x)
    return jnp.mean(value**2 + tangent**2) + jnp.mean(slope**2)


@pytest.mark.usefixtures("started_once_in_test")
def test_losses_of_derivatives_train_in_float8():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(8, 16)) / 3, "down": rng.normal(size=(16, 8)) / 4}
    params = jax.tree.map(np.float32, params)
    case = Case(
        name="penalised",
        build=lambda: params,
        loss_fn=penalised,
        blocks=1,
        templates=1,
        batch=lambda seed: {
            "x": np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)
        },
    )
    batches = [case.batch(0)]
    trainer = make_trainer(case, recording(OPTIMIZERS["adam"]), products=EVERY)
    run = train(trainer, batches)
    loss, gradients = plain_gradient(case, batches[0])
    np.testing.assert_allclose(run.losses[0], loss, rtol=1e-6)
    check_close(run.first_grads, gradients, 1e-5, "gradient")


def test_gradients_are_as_near_as_three_bits_of_mantissa_allow():
    """An operand is off by up to 1/16, 3% on average; a gradient has passed a dozen products."""
    case = CASES["equinox"]
    batch = case.batch(0)
    plain = train_plain(case, OPTIMIZERS["sgd_momentum"], [batch])
    _, ours = plain_gradient(case, batch)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(plain.first_grads), strict=True)
    errors = [float(jnp.linalg.norm(a - e) / jnp.linalg.norm(e)) for a, e in pairs]
    assert 0.01 < np.mean(errors) < 0.2 and max(errors) < 0.3


@pytest.mark.parametrize("given", ["float9", jnp.float8_e4m3fn, {"*": "bfloat16"}, True, {}])
def test_other_products_are_refused(given):
    with pytest.raises(ValueError, match=r"Precision\(products="):
        mt.Precision(products=given)


def test_float8_is_refused_in_float64_and_on_a_card_without_it():
    with jax.enable_x64(True), refuses(ValueError, "float64", "float8"):
        mt.Precision(compute=jnp.float64, products="float8")
    precision = mt.Precision(products="float8")
    for name in ("A100", "RTX 3090", "T4"):
        with refuses(ValueError, "products='float8'", "8.9"):
            Options(precision=precision, hardware=name)
    for name in ("H100", "RTX 4090", "L4", "B200"):
        Options(precision=precision, hardware=name)
    Options(precision=mt.Precision(products={"head/*": None}), hardware="A100")
    own = mt.Hardware(name="own", link_bytes_per_s=3e10, flops_per_s=1e15)
    with refuses(ValueError, "own", "`float8_flops_per_s`"):
        Options(precision=precision, hardware=own)
    Options(precision=precision, hardware=dataclasses.replace(own, float8_flops_per_s=2e15))


def test_float8_in_another_place_is_refused_with_the_right_one():
    wrong: Any = "fp8"
    for make in (
        lambda: Options(precision=wrong),
        lambda: mt.Precision(compute="float8"),
        lambda: mt.Precision(compute=jnp.float8_e4m3fn),
    ):
        with refuses(ValueError, 'Precision(products="float8")'):
            make()
    with refuses(TypeError, "'fp8'", "`products`"):
        mt.Precision(fp8=True)  # pyright: ignore[reportCallIssue]


class FakeDevice:
    """A GPU that no table knows."""

    device_kind, platform = "NVIDIA Unheard-of", "gpu"

    def __init__(self, capability: str):
        self.compute_capability = capability

    def memory_stats(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("capability", "has_units"), [("8.6", False), ("8.9", True), ("12.0", True)]
)
def test_an_unknown_gpu_has_float8_by_its_compute_capability(monkeypatch, capability, has_units):
    monkeypatch.setattr(hardware, "default_device", lambda: FakeDevice(capability))
    machine = mt.this_machine()
    assert machine is not None and (machine.float8_flops_per_s is not None) == has_units


def test_scales_of_operands_are_saved_with_what_a_stage_saves():
    """A scale is the largest number of a whole array, which would be read once more for it."""
    stages = spec_with(layers(), "float8").first.stages
    saved = [bound.residuals.avals for bound in stages if bound.residuals and bound.residuals.avals]
    assert saved and all(any(aval.shape == () for aval in avals) for avals in saved)
