"""The decoder in the core: its layers are blocks, equal ones share a template, steps are exact."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax.models import Decoder, DecoderConfig, next_token_loss
from oracle import train_plain
from runs import check_close, make_trainer, train
from small_decoders import EXPERTS, GEMMA, SMALL, batch, packed_loss, plain_loss
from tiny_sizes import tiny_decoder
from zoo_case import Case

MIXED = dataclasses.replace(EXPERTS, layers=(1, 3))
LINEAR = DecoderConfig.from_hf(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 40,
        # Wide beside its heads, as large models are: products of linear attention are in fp32.
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
)
# Name: configuration, kinds of layers.
CONFIGS = {
    "plain": (SMALL, 1),
    "fused": (dataclasses.replace(SMALL, fused=True), 1),
    "gemma": (GEMMA, 2),
    "experts": (dataclasses.replace(SMALL, experts=EXPERTS), 1),
    "linear": (LINEAR, 2),
    "some-experts": (dataclasses.replace(SMALL, experts=MIXED), 2),
}


@pytest.mark.by_default("packed_loss-fused")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("loss_fn", [plain_loss, packed_loss])
def test_equal_layers_share_a_template(name, loss_fn):
    config, kinds = CONFIGS[name]
    plan = mt.plan(lambda: Decoder(config, rngs=nnx.Rngs(0)), loss_fn, optax.adamw(1e-3), batch())
    layers = [row for row in plan.groups if row.name.startswith("layers.")]
    assert sum(row.count for row in layers) == config.num_layers
    # Masks of packed documents come from the batch; layers that differ in theirs only are equal.
    templates = len({row.template for row in layers})
    assert templates == kinds or (loss_fn is packed_loss and templates < kinds)
    assert not plan.warnings


@pytest.mark.exhaustive
def test_training_agrees_with_plain_jax(monkeypatch):
    experts = dataclasses.replace(EXPERTS, layers=(1,))
    config = dataclasses.replace(GEMMA, num_layers=2, windows=(3, None), experts=experts)
    # Attention is a loop over pieces of 16 queries, within each layer.
    monkeypatch.setattr("megatrain_jax._src.lm.models.causal_attention._PIECE_BYTES", 1)
    monkeypatch.setattr("megatrain_jax._src.lm.models.causal_attention._MAX_SPANS", 1)
    case = Case(
        name="decoder",
        build=lambda: lambda: Decoder(config, rngs=nnx.Rngs(0)),
        loss_fn=packed_loss,
        blocks=config.num_layers,
        templates=2,
        batch=lambda seed: batch(seed, 36, 2),
    )

    def optimizer(params):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-3))

    plan = mt.plan(case.build(), packed_loss, optax.sgd(1e-3), case.batch(0))
    assert len({row.template for row in plan.groups if row.name.startswith("layers.")}) == 2
    assert not plan.warnings
    batches = [case.batch(0), case.batch(1)]
    plain = train_plain(case, optimizer, batches)
    run = train(make_trainer(case, optimizer), batches, gradients=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
    check_close(run.params, plain.params, 1e-5, "parameter")
    model = run.trainer.model
    assert isinstance(model, Decoder) and model.config == config
    assert isinstance(model.norm.weight.get_value(), np.ndarray)


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_weigh_as_much_as_they_have_labels_that_count(microbatches):
    rng = np.random.default_rng(0)
    mask = np.arange(12) < rng.permutation([1, 11, 4, 0])[:, None]
    made = {
        "tokens": rng.integers(0, 40, (4, 12), np.int32),
        "labels": rng.integers(0, 40, (4, 12), np.int32),
        "mask": mask,
        "learned_per_row": np.full(4, mask.sum() / 4, np.float32),
    }

    def step(parts):
        trainer = mt.Trainer(
            lambda: Decoder(SMALL, rngs=nnx.Rngs(0)),
            next_token_loss,
            optax.sgd(0.1),
            made,
            microbatches=parts,
            precision=mt.Precision(compute=jnp.float32),
        )
        return trainer.read(trainer.step(made)), trainer.params

    (whole, params), (parts, of_parts) = step(1), step(microbatches)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6)
    check_close(of_parts, params, 1e-6, "parameter")


def test_a_large_model_is_planned_without_making_it():
    config = dataclasses.replace(SMALL, hidden_size=8192, intermediate_size=65536, num_layers=8)
    plan = mt.plan(lambda: Decoder(config, rngs=nnx.Rngs(0)), plain_loss, optax.sgd(1e-3), batch())
    assert plan.num_parameters > 12e9
    assert len({row.template for row in plan.groups if row.name.startswith("layers.")}) == 1


def partly_learned(rows, seed, per_row, length=12):
    """Tokens of which from none to all of a row count."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 30, (rows, length + 1)).astype(np.int32)
    mask = np.arange(length) < rng.integers(0, length + 1, rows)[:, None]
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}
    if per_row:
        batch["learned_per_row"] = np.full(rows, mask.sum() / rows, np.float32)
    return batch


@pytest.mark.exhaustive
@pytest.mark.parametrize("per_row", [False, True])
def test_perplexity_is_that_of_all_labels(per_row):
    config = tiny_decoder(vocab_size=30, init_std=0.5)
    batches = [partly_learned(rows, seed, per_row) for seed, rows in enumerate([4, 4, 3])]
    batches[1]["mask"][1:] = False  # few labels, as at the end of an epoch
    if per_row:
        batches[1]["learned_per_row"][:] = batches[1]["mask"].sum() / 4
    result = mt.fit(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        batches[:1],
        optax.sgd(0.0),
        eval_data=batches,
        microbatches=2,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    logits = jax.jit(lambda tokens: model(tokens))
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(logits(b["tokens"]), b["labels"])[b["mask"]]
        for b in batches
    ]
    every = np.concatenate(losses).astype(np.float64)
    means = [np.mean(part) for part in losses]
    assert abs(np.mean(means) - every.mean()) > 0.01  # what one must not take for it
    record = result.history[-1]
    np.testing.assert_allclose(math.exp(record["eval_loss"]), np.exp(every.mean()), rtol=1e-5)
    np.testing.assert_allclose(record["eval_weight"], every.size, rtol=1e-6)
    np.testing.assert_allclose(record["weight"], batches[0]["mask"].sum(), rtol=1e-6)
