"""Adapters: exact beside merged matrices, small in a plan, and those of PEFT to its own numbers."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from device_values import state_on_device, values_on_device
from inside import engine_of, spec_of, store_of
from megatrain_jax import models
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.kernels import steps as step_kernels
from megatrain_jax._src.lm.models.generation.caches import _matrix_of
from megatrain_jax._src.lm.models.lora import Matrix, adapted_modules, merged_matrix
from messages import refuses
from optimizers import EPS
from oracle import train_plain
from runs import check_close, make_trainer, train
from small_decoders import EXPERTS, SMALL, TINY, batch, packed_loss
from zoo_case import Case

MIXED = dataclasses.replace(TINY, experts=dataclasses.replace(EXPERTS, layers=(1,)))


class Attending(nnx.Module):
    """A model of nothing but Flax's own modules, two of them in a stack."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.general = nnx.LinearGeneral((2, 8), (3, 4), axis=(0, -1), rngs=rngs)
        split = nnx.split_rngs(splits=2)
        make = split(nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs)))
        self.stack = make(rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        x, _ = nnx.scan(lambda x, layer: (jnp.tanh(layer(x)), None), in_axes=(nnx.Carry, 0))(
            x, self.stack
        )
        return self.general(x.reshape(2, -1, 8))


def decoder(config=MIXED):
    return models.Decoder(config, rngs=nnx.Rngs(0))


def is_adapter(path, _):
    return path[-1] in ("lora_A", "lora_B")


def randomised(model, seed=0):
    """Gives all adapters random numbers; fresh ones add nothing."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if is_adapter(path, variable):
            variable.set_value(jnp.asarray(rng.normal(size=variable.shape), jnp.float32) * 0.3)
    return model


TOKENS = np.random.default_rng(1).integers(0, 40, (2, 9)).astype(np.int32)
INPUTS = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 16)), jnp.float32)
MODELS = {
    "decoder": (decoder, lambda m: m(TOKENS), r"layers/"),
    "flax": (Attending, lambda m: m(INPUTS), r"kernel"),
}


def outputs(call, model):
    """The outputs of a model, compiled in one go, which takes less time than one by one."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state: call(nnx.merge(graphdef, state)))(state)


@pytest.mark.by_default("flax-True")
@pytest.mark.parametrize(("name", "rslora"), [("decoder", False), ("flax", True)])
def test_values_and_gradients_are_those_of_the_merged_matrices(name, rslora):
    make, call, targets = MODELS[name]
    base = make()
    adapted = models.lora(base, targets=targets, rank=2, alpha=3.0, rslora=rslora)
    expected = outputs(call, base)
    np.testing.assert_array_equal(outputs(call, adapted.model), expected)  # fresh: no change
    model = randomised(adapted.model)
    merged = models.merge_lora(model)
    without = models.without_lora(model)
    np.testing.assert_array_equal(outputs(call, without), expected)
    assert dict(leaves_of(without)).keys() == dict(leaves_of(base)).keys()
    np.testing.assert_array_equal(outputs(call, base), expected)
    values = outputs(call, model)
    assert np.abs(values - expected).max() > 0.1
    np.testing.assert_allclose(outputs(call, merged), values, rtol=2e-5, atol=2e-5)
    scale = 3.0 / (2**0.5 if rslora else 2)
    graphdef, adapters, others = nnx.split(model, is_adapter, ...)
    plain = nnx.split(base)[0]

    def loss(adapters):
        return jnp.sum(jnp.sin(call(nnx.merge(graphdef, adapters, others, copy=True))))

    def of_merged(adapters):
        factors, flat = dict(nnx.to_flat_state(adapters)), dict(nnx.to_flat_state(others))
        for name in adapted.targets:
            path = tuple(int(key) if key.isdigit() else key for key in name.split("/"))
            a, b = (factors[*path[:-1], key][...] for key in ("lora_A", "lora_B"))
            added = scale * (b @ a if path[-1] == "weight" else jnp.swapaxes(b @ a, -1, -2))
            weight = flat[path][...]
            flat[path] = flat[path].replace(weight + added.reshape(weight.shape))
        return jnp.sum(jnp.sin(call(nnx.merge(plain, nnx.from_flat_state(flat), copy=True))))

    found, wanted = (jax.jit(jax.grad(f))(adapters) for f in (loss, of_merged))
    check_close(nnx.to_pure_dict(found), nnx.to_pure_dict(wanted), 5e-5, "gradient")


@pytest.mark.exhaustive
def test_training_agrees_with_plain_jax_and_only_adapters_have_state():
    adapted = models.lora(decoder, targets=r"layers/", rank=2, alpha=4.0, seed=3)
    case = Case(
        name="lora",
        build=lambda: adapted.model,
        loss_fn=packed_loss,
        blocks=2,
        templates=2,
        batch=lambda seed: batch(seed, 12, 2),
    )

    def masked(params):
        names = jax.tree_util.tree_map_with_path(lambda p, _: "lora_" in str(p), params)
        frozen = jax.tree.map(lambda trains: not trains, names)
        adam = optax.masked(optax.adamw(1e-2, eps=1e-4), names)
        return optax.chain(adam, optax.masked(optax.set_to_zero(), frozen))

    batches = [case.batch(seed) for seed in range(3)]
    plain = train_plain(case, masked, batches)
    trainer = make_trainer(case, lambda _: optax.adamw(1e-2, eps=1e-4), trainable=adapted.trainable)
    run = train(trainer, batches, gradients=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=2e-6)
    check_close(run.params, plain.params, 2e-5, "parameter")
    spec = spec_of(trainer)
    sizes = [layout.sizes(None)[Kind.OPTIMIZER_STATE] for layout in spec.layouts]
    assert {g for g, size in enumerate(sizes) if not size} == spec.grouping.frozen
    adapters = sum(x.size for p, x in leaves_of(trainer.model) if str(p[-1]).startswith("lora_"))
    assert trainer.plan.num_parameters - trainer.plan.num_frozen == adapters


def leaves_of(model):
    return [(p, v[...]) for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]


@pytest.mark.parametrize("out_first", [False, True])
def test_the_axes_of_each_side_of_a_matrix_are_flattened(out_first):
    for num_in, num_out in itertools.product((1, 2), repeat=2):
        into, out = (2, 3)[:num_in], (5, 7)[:num_out]
        rows = np.arange(math.prod((*out, *into))).reshape(math.prod(out), math.prod(into))
        shape = (*out, *into) if out_first else (*into, *out)
        matrix = Matrix(name="kernel", num_in=num_in, num_out=num_out, out_first=out_first)
        weight = (rows if out_first else rows.T).reshape(shape)
        np.testing.assert_array_equal(matrix.rows(weight), rows)
        a, b = matrix.shapes((6, *shape), 4)
        assert (a, b) == ((6, 4, rows.shape[1]), (6, rows.shape[0], 4)), "of a stack of six"


def test_rows_of_zeros_have_finite_gradients_in_dora():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    model.kernel[...] = model.kernel[...].at[:, 1].set(0)
    adapted = models.lora(model, targets="kernel", rank=2, dora=True).model
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    np.testing.assert_allclose(adapted(x), model(x), atol=1e-6)
    gradients = nnx.grad(lambda m: (m(x) ** 2).sum())(adapted)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    assert np.abs(gradients.lora_B[...]).max() > 0
    merged: Any = models.merge_lora(adapted)
    np.testing.assert_allclose(merged.kernel[...], model.kernel[...], atol=1e-6)


@pytest.mark.exhaustive
def test_dropout_is_drawn_anew_in_training_and_left_out_of_evaluations():
    adapted = models.lora(lambda: decoder(TINY), targets=r"_proj", rank=2, dropout=0.5)
    made = batch()
    trainer = mt.Trainer(
        adapted.model,
        packed_loss,
        optax.sgd(0.0),
        made,
        trainable=adapted.trainable,
        params=jax.tree.map(
            np.asarray, nnx.to_pure_dict(nnx.state(randomised(adapted.model()), nnx.Param))
        ),
        precision=mt.Precision(compute=jnp.float32),
    )
    first, second = (trainer.read(trainer.step(made))["loss"] for _ in range(2))
    evaluated = [trainer.evaluate([made])["loss"] for _ in range(2)]
    assert len({first, second, evaluated[0]}) == 3 and evaluated[0] == evaluated[1]
    merged = jax.tree.map(jnp.asarray, models.merge_lora(trainer))
    np.testing.assert_allclose(evaluated[0], packed_loss(merged, made), rtol=1e-5)
    layers = [row for row in trainer.plan.groups if "frozen" not in row.name]
    assert len({row.template for row in layers}) == 1


def fresh_factors(model):
    return {p: x for p, x in leaves_of(model) if p[-1] == "lora_A"}


def test_fresh_factors_are_drawn_apart_for_each_matrix_and_alike_whatever_else_has_some():
    adapted = models.lora(decoder, targets="layers/", rank=4)
    found = fresh_factors(adapted.model())
    # Nothing is drawn twice, neither in two matrices nor in two experts.
    numbers = np.concatenate([np.ravel(x) for x in found.values()])
    assert np.unique(numbers).size > 0.999 * numbers.size
    fewer = fresh_factors(models.lora(decoder(), targets="q_proj", rank=4).model)
    assert fewer and all(np.array_equal(found[path], array) for path, array in fewer.items())
    given = nnx.to_pure_dict(nnx.state(decoder(), nnx.Param))
    completed = models.lora(decoder, targets="layers/", rank=4, params=given)
    for path, array in found.items():
        node: Any = completed.params
        for key in path:
            node = node[str(key)]
        np.testing.assert_array_equal(np.asarray(node), array)
        # As PyTorch draws them: Kaiming's, a = sqrt(5), is uniform within 1 / sqrt(in).
        bound = array.shape[-1] ** -0.5
        assert np.abs(array).max() <= bound and np.std(array) > 0.5 * bound
    other = fresh_factors(models.lora(decoder(), targets="layers/", rank=4, seed=1).model)
    assert not any(np.array_equal(other[path], array) for path, array in found.items())


def test_indexers_have_no_adapters_as_they_are_not_trained():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 16}
    config = models.DecoderConfig.from_hf({"model_type": "deepseek_v32", **sizes})
    made = models.lora(lambda: models.Decoder(config, rngs=nnx.Rngs(0)), targets="layers/.*_proj")
    names = {"/".join(name.split("/")[2:]) for name in made.targets}
    assert "self_attn/q_a_proj/weight" in names and not any("indexer" in name for name in names)


def test_merged_matrices_are_rounded_once():
    """A change below what a bfloat16 weight resolves still decides how the sum is rounded."""
    model = models.lora(
        Attending(), targets="(stack|general|query).kernel", rank=2, alpha=0.05
    ).model
    model = randomised(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model))
    merged = dict(leaves_of(models.merge_lora(model)))
    for path, module in adapted_modules(model):
        weight, a, b = (
            np.asarray(x[...], np.float64) for x in (module.kernel, module.lora_A, module.lora_B)
        )
        exact = weight + (0.025 * np.swapaxes(b @ a, -1, -2)).reshape(weight.shape)
        found = merged[*path, "kernel"]
        assert found.dtype == jnp.bfloat16
        nearest = np.abs(exact.astype(jnp.bfloat16).astype(np.float64) - exact)
        assert (np.abs(found.astype(np.float64) - exact) <= nearest + 1e-6 * np.abs(exact)).all()
        assert (found != module.kernel[...]).mean() > 0.1
        # Files of wider numbers have all of it.
        np.testing.assert_allclose(merged_matrix(module), exact, rtol=2e-6, atol=2e-7)


@pytest.mark.exhaustive
def test_a_model_of_70b_is_planned_with_adapters_without_making_it():
    config = dataclasses.replace(
        SMALL, hidden_size=8192, intermediate_size=28672, num_heads=64, num_kv_heads=8, head_dim=128
    )
    config = dataclasses.replace(config, rope=models.Rope(dim=128), vocab_size=128_256)
    adapted = models.lora(lambda: decoder(config), targets=r"layers/", rank=16)
    frozen = {"precision": mt.Precision(frozen="bfloat16"), "trainable": adapted.trainable}
    plan = mt.plan(adapted.model, packed_loss, optax.adamw(1e-4), batch(), **frozen)
    trained = plan.num_parameters - plan.num_frozen
    assert trained < 0.005 * plan.num_frozen
    assert plan.frozen_bytes == pytest.approx(2 * plan.num_frozen, rel=1e-3)
    assert len({row.template for row in plan.groups if row.name.startswith("layers.")}) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"targets": "nothing"}, ValueError, "nothing.*layers/0/mlp"),
        ({"targets": "embed"}, ValueError, "embed_tokens/weight"),
        ({"targets": "lm_head"}, ValueError, "lm_head/weight.*losses"),
        ({"targets": "("}, ValueError, "`targets`.*regular"),
        ({"targets": "a{99999999999}"}, ValueError, "`targets`.*regular"),
        ({"targets": 3}, TypeError, "`targets` .*regular .*function"),
        ({"targets": "layers", "dropout": 0.1}, ValueError, "`dropout` .*adapters of ex"),
        ({"targets": "layers", "dropout": 1.0}, ValueError, "`dropout` .*1"),
        ({"targets": "layers", "rank": 0}, ValueError, "`rank` .*1.*0"),
        ({"targets": "layers", "params": "folder"}, TypeError, "`params` .*dicts"),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        models.lora(decoder, **options)


def test_a_model_has_adapters_once():
    adapted = models.lora(decoder, targets="layers")
    with refuses(ValueError, "adapters", "already"):
        models.lora(adapted.model, targets="layers")
    with refuses(ValueError, "adapters"):
        models.merge_lora(decoder())
    with refuses(TypeError, "`model`", "nnx.Module", "function"):
        models.lora(3, targets="layers")  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_plan_of_adapters_has_the_bytes_of_their_run(dora, monkeypatch):
    def build():
        return decoder(TINY)

    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(build(), nnx.Param)))
    adapted = models.lora(build, targets="_proj", rank=2, dora=dora, params=params)
    given = packed_loss, optax.adamw(1e-3), batch()
    options = {
        "trainable": adapted.trainable,
        "precision": mt.Precision(compute=jnp.float32, frozen="bfloat16"),
        "device_budget": "least",
        "hardware": mt.card("H100"),
    }
    # Made of shapes alone, as the command plans.
    plan = mt.plan(models.lora(build, targets="_proj", rank=2, dora=dora).model, *given, **options)
    trainer = mt.Trainer(adapted.model, *given, params=adapted.params, **options)
    spec, store, engine = spec_of(trainer), store_of(trainer), engine_of(trainer)
    before, seen, obey = state_on_device(trainer) + values_on_device(trainer, None), [], engine.obey

    def watched(instruction, step):
        obey(instruction, step)
        here = state_on_device(trainer) + values_on_device(trainer, step)
        seen.append(here - before)

    monkeypatch.setattr(engine, "obey", watched)
    for _ in range(2):
        trainer.step(batch())
    trainer.flush()
    held = {key: sum(x.nbytes for x in slabs) for key, slabs in store.host.items()}
    frozen = [Key(Kind.MASTERS, g) for g in spec.grouping.frozen]
    assert plan.host_bytes == sum(held.values())
    assert plan.frozen_bytes == sum(held[key] for key in frozen) > 0
    parts = ("cold", "steady", "flush")
    ledger = [row for part in parts for row in trainer.schedule.ledger[part]]
    assert plan.device_state_bytes == max(ledger)
    shares = [actual / allowed for actual, allowed in zip(seen, ledger, strict=True) if allowed]
    # The schedule counts slabs of less than 64 numbers, too, and slabs that leave until they land.
    assert 0.95 <= max(shares) <= 1
    assert plan.device_state_bytes == trainer.plan.device_state_bytes
    assert plan.device_other_bytes == trainer.plan.device_other_bytes


def adapted_decoder() -> Any:
    return models.lora(models.Decoder(TINY, rngs=nnx.Rngs(0)), targets="layers/", rank=2).model


@pytest.mark.long
def test_adapters_of_a_decoder_learn_in_float16_as_in_float32(monkeypatch):
    monkeypatch.setattr(step_kernels, "_FIRST", 2.0**10)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (4, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    rows = []
    for precision in ("float16", "float32"):
        trainer = mt.Trainer(
            adapted_decoder,
            models.next_token_loss,
            optax.adamw(1e-2, eps=EPS),
            batch,
            precision=precision,
            trainable=".*lora_",
            progress=False,
        )
        rows.append([trainer.read(trainer.step(batch)) for _ in range(3)])
    for ours, exact in zip(*rows, strict=True):
        assert not ours["skipped"]
        np.testing.assert_allclose(ours["loss"], exact["loss"], rtol=1e-3)
        np.testing.assert_allclose(ours["grad_norm"], exact["grad_norm"], rtol=1e-2)


@pytest.mark.parametrize("dora", [False, True])
def test_a_matrix_read_in_generation_has_its_adapters(dora: bool):
    build = models.lora(decoder, targets="layers/1/self_attn/k_proj", dora=dora, rank=2).model
    linear = randomised(build()).layers[1].self_attn.k_proj
    x = np.random.default_rng(2).normal(size=(3, linear.weight.shape[1])).astype(np.float32)
    np.testing.assert_allclose(linear(x), x @ _matrix_of(linear).T, rtol=1e-4, atol=1e-5)
    assert not np.allclose(linear(x), x @ linear.weight[...].T, rtol=1e-2)
