"""What gets no gradient by construction is named before anything is allocated, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from cut_cases import trace_case
from cuts import find
from inside import on_one_device
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss import gradients
from megatrain_jax._src.engine.program.loss.gradients import (
    leaves_read,
    refuse_no_gradient,
    traced_pullback,
)
from megatrain_jax._src.engine.program.loss.trace import cut_loss, leaves_of
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from messages import refuses, tells
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo import CASES

DIM, DEPTH = 4, 4
X = np.random.default_rng(0).normal(size=(8, DIM)).astype(np.float32)
BATCH = {"x": X}
FULL = mt.Precision(compute=jnp.float32)


@jax.custom_vjp
def blocked(w):
    return w


blocked.defvjp(lambda w: (w, None), lambda _, ct: (jnp.zeros_like(ct),))

# Ways in which a derivative ends.
CUTS = (
    jax.lax.stop_gradient,
    jnp.sign,
    blocked,
    lambda w: w.astype(jnp.int32).astype(w.dtype),
    lambda w: (w > 0).astype(w.dtype),
    lambda w: jnp.argmax(w, axis=-1, keepdims=True).astype(w.dtype) + 0 * jnp.ones_like(w),
    lambda w: jax.lax.stop_gradient(jnp.tanh(w)) + jnp.floor(w),
    jax.checkpoint(lambda w: jnp.round(jnp.sin(w))),
    jax.jit(lambda w: jax.lax.cond(w[0, 0] > 0, jnp.sign, jnp.round, w)),
)


def init_params():
    rng = np.random.default_rng(1)

    def normal():
        return rng.normal(size=(DIM, DIM)).astype(np.float32)

    blocks = [{"a": normal(), "b": normal(), "spare": normal()} for _ in range(DEPTH)]
    return {"blocks": blocks, "head": normal(), "stack": np.stack([normal() for _ in range(3)])}


def loss_with(cuts, stop):
    """A loss that ends the derivative of some parameters, and of all before block `stop`."""

    def keep(name, w):
        return cuts.get(name, lambda w: w)(w)

    def layer(x, w):
        return x + jnp.tanh(x @ keep("stack", w)), None

    def loss_fn(params, batch):
        x = batch["x"]
        for i, block in enumerate(params["blocks"]):
            if i == stop:
                x = jax.lax.stop_gradient(x)
            x = x + jnp.tanh(x @ keep(f"blocks/{i}/a", block["a"])) @ keep(
                f"blocks/{i}/b", block["b"]
            )
        x, _ = jax.lax.scan(layer, x, params["stack"])
        return ((x @ keep("head", params["head"])) ** 2).mean()

    return loss_fn


def zero_names(loss_fn, params):
    """The oracle: parameters whose gradient in plain JAX is zero everywhere."""
    grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss_fn))(params, BATCH))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, grad in grads
        if not np.asarray(grad).any()
    }


@pytest.mark.by_default("2")
@pytest.mark.parametrize("seed", range(8))
def test_the_plan_names_what_gets_no_gradient(seed):
    rng = np.random.default_rng(seed)
    params = init_params()
    names = [f"blocks/{i}/{k}" for i in range(DEPTH) for k in "ab"] + ["stack", "head"]
    chosen = rng.choice(names, size=rng.integers(0, 6), replace=False)
    cuts = {str(name): CUTS[rng.integers(len(CUTS))] for name in chosen}
    loss_fn = loss_with(cuts, int(rng.integers(0, 2 * DEPTH)))
    plan = mt.plan(params, loss_fn, optax.sgd(0.1), BATCH, precision=FULL)
    (warning,) = (w for w in plan.warnings if "gradient" in w)
    expected = zero_names(loss_fn, params)
    assert tells(warning, len(expected), 3 * DEPTH + 2)
    _, listed, _ = re.split(r"integers\): |\. The", warning)
    shown = listed.removesuffix(", ...").split(", ")
    assert set(shown) <= expected and len(shown) == min(6, len(expected))
    frozen = mt.plan(
        params, loss_fn, optax.sgd(0.1), BATCH, precision=FULL,
        trainable=lambda name: name not in expected,
    )  # fmt: skip
    assert not any("gradient" in w for w in frozen.warnings)


def test_a_gradient_that_only_the_last_of_equal_blocks_lacks_is_named():
    """Each block's second result reaches the loss by the next block, the last one's by nothing."""

    def loss_fn(params, batch):
        x = y = batch["x"]
        for block in params["blocks"]:
            x, y = jnp.tanh(x @ block["a"] + y), jnp.tanh(y @ block["b"])
        return (x @ params["head"]).mean() + jax.lax.stop_gradient(y).mean()

    params = init_params()
    params = {"blocks": [{k: b[k] for k in "ab"} for b in params["blocks"]], "head": params["head"]}
    assert zero_names(loss_fn, params) == {f"blocks/{DEPTH - 1}/b"}
    plan = mt.plan(params, loss_fn, optax.sgd(0.1), BATCH, precision=FULL)
    (warning,) = (w for w in plan.warnings if "no gradient" in w)
    assert f"reaches 1 of the {2 * DEPTH + 1} trained" in warning
    assert f": blocks/{DEPTH - 1}/b" in warning


@pytest.mark.by_default("0", "1", "3", "4", "7")
@pytest.mark.parametrize("cut", range(len(CUTS)))
def test_a_loss_without_any_gradient_is_refused(cut, monkeypatch):
    monkeypatch.setattr("megatrain_jax._src.engine.state.pool.reserve", pytest.fail)

    def loss_fn(params, batch):
        return sum((batch["x"] @ CUTS[cut](w)).mean() for w in jax.tree.leaves(params))

    params = init_params()
    params.pop("stack")
    assert not any(jax.tree.leaves(jax.tree.map(jnp.any, jax.grad(loss_fn)(params, BATCH))))
    for build in (mt.plan, mt.Trainer):
        with refuses(ValueError, "loss_fn", "gradient", "stop_gradient"):
            build(params, loss_fn, optax.sgd(0.1), BATCH, precision=FULL)


@pytest.mark.parametrize("outer", [jax.lax.stop_gradient, lambda x: jnp.sum(x > 0).astype("f4")])
def test_a_detached_loss_is_refused(outer):
    def loss_fn(params, batch):
        return outer(loss_with({}, -1)(params, batch))

    with refuses(ValueError, "gradient"):
        mt.plan(init_params(), loss_fn, optax.sgd(0.1), BATCH)


def test_training_only_what_the_loss_detaches_is_refused():
    cuts = {"blocks/1/a": jax.lax.stop_gradient, "blocks/1/b": jax.lax.stop_gradient}
    for pattern in ("blocks/1/", "spare", "blocks/1/|spare"):
        with pytest.raises(ValueError, match="gradient|`trainable`"):
            mt.plan(init_params(), loss_with(cuts, -1), optax.sgd(0.1), BATCH, trainable=pattern)


@pytest.mark.by_default(
    "unet",
    "unused",
    "dropout_nnx",
    "batchnorm_nnx",
    "metrics",
    "l2_regulariser",
    "mid_rest",
    "lax_scan_pytree",
    "last_axis",
    "scan_of_lists",
)
@pytest.mark.parametrize("name", CASES)
def test_models_of_the_zoo_are_warned_of_what_they_leave_out_alone(name):
    adapted, _, traced, _ = trace_case(CASES[name])
    leaves = leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))
    warning = refuse_no_gradient(cut_loss(traced, leaves), leaves)
    assert (warning is not None) == (name == "unused")
    if warning is not None:
        assert "blocks/0/spare" in warning


def test_a_backward_reads_the_leaves_that_change_its_results():
    """Also behind outputs without a cotangent: each stage passes on numbers and a mask of them."""

    def loss_fn(params, batch):
        x, mask = params["embed"][batch["tokens"]], batch["tokens"] > 3
        for layer in params["layers"]:
            y = jnp.tanh(x @ layer["w"])
            x = jnp.where(mask[..., None], x, y * layer["gain"]) + layer["bias"]
            mask = mask ^ (y[..., 0] > layer["least"][0])
        return jnp.mean((x @ params["head"]) ** 2 * mask[..., None])

    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = [
        {"w": draw(8, 8), "gain": draw(8), "bias": draw(8), "least": draw(1)} for _ in range(2)
    ]
    params = {"embed": draw(10, 8), "layers": layers, "head": draw(8, 5)}
    traced, leaves = find(params, loss_fn, {"tokens": np.zeros((2, 6), np.int32)})
    program, missing = cut_loss(traced, leaves), set()
    for stage in program.stages:
        if not any(stage.has_cotangent):
            continue
        missing |= {sum(stage.has_cotangent) < len(stage.outputs)}
        read = leaves_read(stage, stage.has_cotangent, give_outputs=False)
        pullback = traced_pullback(stage, stage.has_cotangent, give_outputs=False)
        given = [
            (rng.normal(size=v.aval.shape) * (rng.random(v.aval.shape) < 0.5)).astype(v.aval.dtype)
            for v in pullback.jaxpr.invars[len(pullback.consts) :]
        ]

        def pulled(given, pullback=pullback):
            return jx.evaluate(pullback.jaxpr, [*pullback.consts, *given])

        expected, first = pulled(given), sum(stage.has_cotangent)
        for i in range(len(stage.leaves)):
            changed = [2 * x + 1 if at == first + i else x for at, x in enumerate(given)]
            differs = [not np.array_equal(*x) for x in zip(expected, pulled(changed), strict=True)]
            assert read[i] == any(differs), (stage.name, i)
    assert True in missing


def test_kernels_take_the_derivatives_that_a_plan_has_traced(monkeypatch):
    calls, differentiated = [], gradients.differentiated

    def counted(*args, **options):
        calls.append(args)
        return differentiated(*args, **options)

    monkeypatch.setattr(gradients, "differentiated", counted)
    with remembering():
        spec = make_spec(CASES["builder"], OPTIMIZERS["adam"])
        planned = len(calls)
        kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device())
        for kernel in (kernel for kernel in kernels if kernel.name == "backward"):
            jx.trace(kernel.build(), *(kernel.takes or ()))
    assert planned == len(calls) > 0
