"""Experts and the gated delta rule as a Hopper GPU's kernels compute them: all but the kernels.

Without such a GPU the primitives are computed by JAX's operations, so these tests find errors in
sorting, padding, gradients, choices and counts.
"""

import dataclasses
import functools
import sys
import tomllib
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common.kernel_primitives import kernel_costs
from megatrain_jax._src.engine.kernels.gpu_memory import gpu_temporary_bytes
from megatrain_jax._src.engine.program.flops import count_flops, count_loops
from megatrain_jax._src.engine.program.trace_target import traced_for
from megatrain_jax._src.engine.state import layout
from megatrain_jax._src.lm.models import (
    delta_rule,
    grouped_products,
    kernel_checks,
    linear_attention,
)
from megatrain_jax._src.lm.models.delta_rule import delta_rule_and_state
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.mixtures import _clamped
from megatrain_jax._src.lm.models.grouped_products import grouped_outer, grouped_product
from megatrain_jax._src.lm.models.moe import LowRank, gated, gated_fused
from messages import warns
from places import ROOT
from runs import make_spec
from zoo_case import Case


@pytest.fixture
def kernels(monkeypatch):
    """Calls the primitives here, also in fp32 and for few rows and odd sizes."""
    monkeypatch.setattr(kernel_checks, "may_be_called", lambda: True)
    monkeypatch.setattr(kernel_checks, "has_grouped_products", lambda: True)
    monkeypatch.setattr(kernel_checks, "has_delta_rule", lambda: True)
    monkeypatch.setattr(grouped_products, "DTYPES", (jnp.bfloat16, jnp.float32))
    monkeypatch.setattr(grouped_products, "LEAST_ROWS", 1)
    monkeypatch.setattr(grouped_products, "_MOST_PADDING", np.inf)
    monkeypatch.setattr(delta_rule, "_DTYPES", (jnp.float32,))
    monkeypatch.setattr(delta_rule, "_WIDTHS", range(300))


def names(function, *args):
    """The primitives of a trace, also within calls."""
    found, todo = [], [jax.make_jaxpr(function)(*args)]
    while todo:
        jaxpr = todo.pop()
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found.append(eqn.primitive.name)
            todo += [v for v in eqn.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
    return found


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def weights_of(kind, num, width, inside):
    """Experts' weights and their function, in every layout that families have."""
    if kind == "gate, up and down":
        gate, up = normal(0, num, inside, width), normal(1, num, inside, width)
        return (gate, up, normal(2, num, width, inside)), gated(jax.nn.silu)
    if kind == "columns":
        both, down = normal(0, num, width, 2 * inside), normal(1, num, inside, width)
        return (both, down), gated_fused(jax.nn.silu, out_first=False)
    if kind == "biases":
        both, down = normal(0, num, width, 2 * inside), normal(1, num, inside, width)
        biases = normal(2, num, 2 * inside), normal(3, num, width)
        return (both, biases[0], down, biases[1]), _clamped(1.7, 7.0)
    both, down = normal(0, num, 2 * inside, width), normal(1, num, width, inside)
    low = LowRank(both, normal(2, num, 3, width), 0.1 * normal(3, num, 2 * inside, 3))
    return (low, down), gated_fused(jax.nn.silu)


def gradients(x, logits, weights, expert, per_token):
    def total(x, logits, weights):
        shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
        mixed = mix(x, chosen, shares, weights, expert)
        return jnp.sum(jnp.sin(0.1 * mixed.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, logits, weights)


@pytest.mark.by_default("gate, up and down-4-2-40", "columns-4-1-13")
@pytest.mark.parametrize(
    ("kind", "num", "per_token", "tokens"),
    [
        ("gate, up and down", 4, 2, 40),
        ("gate, up and down", 32, 3, 7),  # experts without rows, and rows of padding
        ("columns", 4, 1, 13),
        ("biases", 5, 2, 20),
        ("low rank", 4, 2, 20),
    ],
)
def test_experts_by_grouped_products_are_those_of_the_loop(kind, num, per_token, tokens, request):
    weights, expert = weights_of(kind, num, 6, 5)
    given = normal(7, tokens, 6), 3 * normal(8, tokens, num), weights, expert, per_token
    expected = gradients(*given)
    request.getfixturevalue("kernels")
    found = gradients(*given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.by_default("130")
@pytest.mark.parametrize("width", [5, 130])  # padded to 128 and 256, beside 128 of the rows
def test_gradients_of_scaled_products_are_those_of_each_row(width, kernels):
    sizes, owner = jnp.array([3, 0, 4]), np.repeat([0, 2], [3, 4])
    operands = normal(0, 7, 6), normal(1, 3, width, 6), normal(2, 7)

    def by_row(x, matrices, shares):
        return shares[:, None] * jnp.einsum("ri,roi->ro", x, matrices[owner])

    def by_group(x, matrices, shares):
        return grouped_products.product_within(sizes, shares)(x, matrices)

    def gradients(compute):
        return jax.vjp(compute, *operands)[1](normal(3, 7, width))

    for a, b in zip(gradients(by_group), gradients(by_row), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_experts_in_bf16_sum_in_fp32(kernels):
    weights, expert = weights_of("gate, up and down", 4, 160, 130)
    weights = jax.tree.map(lambda w: 0.1 * w, weights)
    given: list = [0.1 * normal(7, 300, 160), normal(8, 300, 4), weights]
    exact = gradients(given[0], given[1], given[2], expert, 2)
    rounded: list = jax.tree.map(lambda x: x.astype(jnp.bfloat16), given)
    found = gradients(rounded[0], rounded[1], rounded[2], expert, 2)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        error = np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)
        assert error < 0.02


@pytest.mark.exhaustive
def test_what_maps_over_rows_maps_over_kernels(kernels):
    weights, expert = weights_of("gate, up and down", 4, 6, 5)
    x, chosen = normal(7, 3, 16, 6), jax.random.randint(jax.random.key(8), (3, 16, 2), 0, 4)
    shares = jnp.ones((3, 16, 2))

    def one(x, chosen, shares):
        return mix(x, chosen, shares, weights, expert)

    found = jax.vmap(one)(x, chosen, shares)
    expected = jnp.stack([one(*row) for row in zip(x, chosen, shares, strict=True)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


DOCUMENTS = jnp.asarray([[0] * 70 + [1] * 80, [3] * 149 + [4]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("segments", [None, DOCUMENTS])
def test_the_delta_rule_by_primitives_is_that_by_chunks(segments, kernels):
    q, k, v = normal(0, 2, 150, 1, 16), normal(1, 2, 150, 1, 16), normal(2, 2, 150, 2, 8)
    log_decay, rate = -jnp.abs(normal(3, 2, 150, 2)), jax.nn.sigmoid(normal(4, 2, 150, 2))

    def differentiated(rule):
        def total(*args):
            return jnp.sum(jnp.sin(rule(*args, segments)))

        return jax.jit(jax.value_and_grad(total, range(5)))(q, k, v, log_decay, rate)

    found = differentiated(linear_attention.gated_delta_rule)
    expected = differentiated(lambda *args: delta_rule_and_state(*args)[0])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    traced = names(linear_attention.gated_delta_rule, q, k, v, log_decay, rate, segments)
    assert "delta_rule_forward" in traced and "scan" not in traced
    # Sums without corrections have no such kernel.
    assert "scan" in names(linear_attention.gated_delta_rule, q, k, v, log_decay, None, segments)


def config_of(**options):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    sizes |= {"full_attention_interval": 2}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    linear |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return models.DecoderConfig.from_hf({"model_type": "qwen3_next", **sizes, **linear, **options})


@pytest.mark.exhaustive
def test_a_model_is_cut_and_trained_with_kernels_as_without_being_cut(kernels, monkeypatch):
    monkeypatch.setattr(layout, "LEAST_APART", 4 * 24 * 32)
    config, optimizer = config_of(), optax.adamw(1e-2)
    rows = jax.random.randint(jax.random.key(0), (3, 2, 40), 1, 64)
    segments = jnp.repeat(jnp.asarray([[1] * 20 + [2] * 20]), 2, axis=0)
    batches = [{"tokens": r, "labels": r, "segments": segments} for r in rows]
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def loss(params, batch):
        return models.next_token_loss(nnx.merge(graphdef, params), batch)[0]

    assert {"grouped_product", "delta_rule_forward"} <= set(names(loss, params, batches[0]))

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, expected = optimizer.init(params), []
    trainer = mt.Trainer(
        model,
        models.next_token_loss,
        optimizer,
        batches[0],
        precision=mt.Precision(compute=jnp.float32),
    )
    for batch in batches:
        params, state, value = step(params, state, batch)
        expected.append(float(value))
    found = [float(trainer.step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.by_default("True")
@pytest.mark.parametrize("by_kernels", [True, False])
def test_matrices_that_kernels_read_are_arrays_of_their_own(by_kernels, monkeypatch):
    """Kernels would read copies of what lies in a slab, also in a single microbatch."""
    monkeypatch.setattr(layout, "LEAST_APART", 2 * 8 * 8)
    sizes = jnp.array([3, 5])

    def loss(params, x):
        for layer in params["layers"]:
            product = x @ layer["w"][0]
            if by_kernels:
                product = grouped_products.product_within(sizes, None)(x, layer["w"])
            x = x + jnp.tanh(product + layer["b"])
        return jnp.mean(x**2)

    layers = [{"w": normal(i, 2, 8, 8), "b": jnp.zeros(8)} for i in range(3)]
    batch = np.ones((8, 8), np.float32)
    case = Case(
        name="grouped", build=lambda: {"layers": layers}, loss_fn=loss, blocks=3, templates=1,
        batch=lambda seed: batch,  # type: ignore
    )  # fmt: skip
    spec = make_spec(case, lambda params: optax.sgd(0.1))
    apart = [
        s for layout in spec.layouts for s in layout.master.segments if s.stop - s.start == 128
    ]
    assert len(apart) == (3 if by_kernels else 0), [layout.master for layout in spec.layouts]


def test_kernels_are_called_on_one_hopper_gpu_or_planned_for_it(monkeypatch):
    monkeypatch.setattr(kernel_checks, "is_installed", lambda: True)
    assert not kernel_checks.may_be_called()
    for name, right in (("NVIDIA H100 80GB", True), ("NVIDIA GH200 480GB", True), ("A100", False)):
        with traced_for(card=name):
            assert kernel_checks.may_be_called() == right
            with traced_for(num_devices=2):
                assert not kernel_checks.may_be_called()
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert kernel_checks.may_be_called()
    device.compute_capability = "10.0"
    assert not kernel_checks.may_be_called()
    monkeypatch.setattr(kernel_checks, "is_installed", lambda: False)
    assert not kernel_checks.may_be_called()
    with traced_for(card="NVIDIA H200"):
        assert kernel_checks.may_be_called(), "a plan says that the machine needs them"


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_sizes_beyond_the_kernels_are_left_to_the_loop():
    def fits(tokens=256, width=256, inside=128, num=8, dtype=jnp.bfloat16):
        weights = shape(num, inside, width, dtype=dtype), shape(num, width, inside, dtype=dtype)
        return grouped_products.fits(shape(tokens, width), tokens, weights)

    assert fits() and fits(width=2880, inside=2880) and fits(num=512)
    assert not fits(tokens=120) and not fits(num=513) and not fits(dtype=jnp.float32)
    assert not fits(inside=160)  # padded to 256

    def linear(key, value, *channels, dtype=jnp.bfloat16):
        keys, values = shape(1, 64, 2, key, dtype=dtype), shape(1, 64, 4, value, dtype=dtype)
        return delta_rule.fits(keys, keys, values, shape(1, 64, 4, *channels))

    assert linear(128, 64) and not linear(256, 64) and not linear(64, 64, dtype=jnp.float32)
    assert not linear(128, 64, 128)  # a decay for each channel


@pytest.mark.exhaustive
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(kernel_checks, "may_be_called", lambda: True)
    for cached in (kernel_checks._products_agree, kernel_checks._delta_rules_agree):
        cached.cache_clear()
    # JAX's operations compute the primitives here.
    assert kernel_checks.has_grouped_products() and kernel_checks.has_delta_rule()
    kernel_checks._products_agree.cache_clear()
    monkeypatch.setattr(
        kernel_checks, "grouped_outer", lambda a, b, sizes: 1.1 * grouped_outer(a, b, sizes)
    )
    with warns(UserWarning, "experts", "results"):
        assert not kernel_checks.has_grouped_products()

    def failing(*args, **options):
        raise RuntimeError("no such instruction")

    kernel_checks._products_agree.cache_clear()
    monkeypatch.setattr(kernel_checks, "grouped_product", failing)
    with warns(UserWarning, "fail", "RuntimeError: no such instruction"):
        assert not jax.jit(lambda: kernel_checks.has_grouped_products())()
    assert not kernel_checks.has_grouped_products()  # without a second check and warning
    kernel_checks._products_agree.cache_clear()


def test_a_kernel_of_which_one_result_differs_is_not_used():
    expected = [np.ones((4, 8)), np.arange(1.0, 9)]
    for wrong in (0, 1):
        found = [x * (1.1 if i == wrong else 1.0) for i, x in enumerate(expected)]
        with pytest.warns(UserWarning, match="other results"):
            assert not kernel_checks._agree("experts", lambda found=found: (found, expected), 0.01)
        found[wrong] = np.full_like(expected[wrong], np.nan)
        with pytest.warns(UserWarning, match="other results"):
            assert not kernel_checks._agree("experts", lambda found=found: (found, expected), 0.01)
    assert kernel_checks._agree("experts", lambda: (expected, expected), 0.01)


def test_a_version_without_a_kernel_is_not_used_and_named(monkeypatch):
    monkeypatch.setattr(kernel_checks, "may_be_called", lambda: True)
    kernel_checks._products_agree.cache_clear()
    # As another version of the library, on a GPU: a module without the function.
    other: Any = ModuleType("jla.ops.mosaic_gpu")
    other.ragged_dot = SimpleNamespace(select_config=lambda k, n: None)
    monkeypatch.setitem(sys.modules, "jla.ops.mosaic_gpu", other)
    monkeypatch.setattr(kernel_checks, "grouped_product", grouped_products._product_on_gpu)
    monkeypatch.setattr(metadata, "version", lambda name: "0.2.0")
    with warns(UserWarning, "fail", "AttributeError:", "0.2.0", "0.1.0"):
        assert not kernel_checks.has_grouped_products()
    kernel_checks._products_agree.cache_clear()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (needed,) = extras["project"]["optional-dependencies"]["kernels"]
    assert f"== {kernel_checks.TESTED_VERSION};" in needed


def test_products_count_what_their_rows_need(kernels):
    tokens, num, per_token, width, inside = 512, 16, 4, 128, 256
    weights = shape(num, inside, width), shape(num, inside, width), shape(num, width, inside)
    chosen, shares = (shape(tokens, per_token, dtype=d) for d in (jnp.int32, jnp.float32))
    args: list = [shape(tokens, width), chosen, shares, weights]
    jaxpr = jax.make_jaxpr(functools.partial(mix, expert=gated(jax.nn.silu)))(*args)
    products = 3 * 2 * tokens * per_token * width * inside
    assert products <= count_flops(jaxpr) < 1.02 * products
    assert count_loops(jaxpr).kernels == 0
    sizes = shape(num, dtype=jnp.int32)
    outer = jax.make_jaxpr(grouped_outer)(shape(2048, width), shape(2048, inside), sizes)
    assert count_flops(outer) == products // 3
    inner = jax.make_jaxpr(lambda *a: grouped_product(*a, out_first=True))
    assert count_flops(inner(shape(2048, width), weights[0], sizes)) == products // 3


def test_the_gradient_of_the_delta_rule_counts_its_states(kernels):
    q, v = shape(1, 8192, 16, 128, dtype=jnp.float32), shape(1, 8192, 32, 128, dtype=jnp.float32)
    numbers = shape(1, 8192, 32, dtype=jnp.float32)

    def gradient(*args):
        return jax.vjp(delta_rule.delta_rule, *args, None)[1](args[2])[:5]

    jaxpr = jax.make_jaxpr(gradient)(q, q, v, numbers, numbers)
    states = 2 * 32 * 128 * 128 * 128 * 4
    assert states < gpu_temporary_bytes(jaxpr) < 4 * states
    forward = jax.make_jaxpr(delta_rule.delta_rule)(q, q, v, numbers, numbers, None)
    chunks = 128 * 32 * (4 * 64 * 64 * 256 + 6 * 64 * 128 * 128)
    assert count_flops(forward) == chunks
    assert count_flops(jaxpr) == 4 * chunks
    # XLA's figures on an H200, in bf16.
    q, v = (x.update(dtype=jnp.bfloat16) for x in (q, v))
    forward, backward = jax.make_jaxpr(gradient)(q, q, v, numbers, numbers).eqns
    for eqn, mebibytes in ((forward.params["call_jaxpr"].eqns[0], 98), (backward, 389)):
        costs = kernel_costs(eqn)
        assert costs and costs.workspace(eqn) / 2**20 == pytest.approx(mebibytes, rel=0.03)


@pytest.mark.exhaustive
def test_a_plan_for_a_hopper_gpu_counts_its_kernels_and_says_so(monkeypatch):
    experts = models.Experts(
        num=16, per_token=2, intermediate_size=128, normalize=True, layers=(0, 1)
    )
    config = models.DecoderConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        rope=models.Rope(dim=64, base=1e4),
        experts=experts,
    )
    tokens = shape(4, 512, dtype=jnp.int32)

    def planned(hardware):
        return mt.plan(
            lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
            models.next_token_loss,
            optax.adamw(1e-3),
            {"tokens": tokens, "labels": tokens},
            hardware=hardware,
        )

    # Plans say what they count, and need no kernels on the machine that makes them.
    monkeypatch.setattr(kernel_checks, "is_installed", lambda: False)
    found, other = (
        planned(mt.card("H100")),
        planned(dataclasses.replace(mt.card("H100"), name="another card")),
    )
    assert found.loop_kernels_per_step < other.loop_kernels_per_step / 4
    assert found.by_kernels == ("experts",) and not other.by_kernels
    assert "`kernels`" in str(found) and "`kernels`" not in str(other)
