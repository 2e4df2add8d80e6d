"""Noise on embeddings in training: drawn as by hand, placed and sized as in Transformers."""

import dataclasses
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from small_decoders import GEMMA, SMALL, batch, packed_loss

ALPHA, SEED, STEPS, LENGTH, ROWS = 7.0, 3, 4, 12, 4
CONFIGS = {
    "plain": dataclasses.replace(SMALL, num_layers=2),
    # Its embeddings are scaled before the noise is added.
    "gemma": dataclasses.replace(GEMMA, num_layers=2, windows=(3, None)),
}
BATCHES = [batch(seed, LENGTH, ROWS) for seed in range(STEPS)]


def build(config: models.DecoderConfig) -> models.Decoder:
    return models.Decoder(config, rngs=nnx.Rngs(0))


def by_hand(config: models.DecoderConfig, microbatches: int) -> tuple[list[float], Any]:
    """The losses and the parameters of steps in plain JAX, whose noise is written out."""
    graph, params = nnx.split(build(config), nnx.Param)
    unscaled = dataclasses.replace(config, scale_embedding=False)
    optimizer = optax.adamw(1e-2)

    def loss(params: Any, part: Any, noise: Any) -> Any:
        model = nnx.merge(graph, params)
        table, factor = model.embed_tokens.weight[...], 1.0
        if config.scale_embedding:
            factor = config.hidden_size**0.5
        x = table[part["inputs"]] * factor + noise
        model.config, model.embed = unscaled, lambda tokens: x
        return packed_loss(model, part)

    @jax.jit
    def step(params: Any, state: Any, parts: Any, keys: Any) -> Any:
        total, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
        for part, key in zip(parts, keys, strict=True):
            shape = (*part["inputs"].shape, config.hidden_size)
            most = ALPHA / np.sqrt(LENGTH * config.hidden_size)
            noise = jax.random.uniform(key, shape, minval=-most, maxval=most)
            value, grad = jax.value_and_grad(loss)(params, part, noise)
            total += value / microbatches
            grads = jax.tree.map(lambda a, b: a + b / microbatches, grads, grad)
        updates, state = optimizer.update(grads, state, params)
        return total, optax.apply_updates(params, updates), state

    key = jax.random.fold_in(jax.random.key(SEED), zlib.crc32(b"neftune"))
    state, losses, count = optimizer.init(params), [], 0
    for one in BATCHES:
        parts = [
            jax.tree.map(lambda x, m=m: np.split(x, microbatches)[m], one)
            for m in range(microbatches)
        ]
        keys = [jax.random.fold_in(key, count + m) for m in range(microbatches)]
        total, params, state = step(params, state, parts, keys)
        losses.append(float(total))
        count += microbatches
    return losses, nnx.to_pure_dict(params)


def make(config: models.DecoderConfig, microbatches: int = 1, **options: Any) -> mt.Trainer:
    return mt.Trainer(
        models.neftune(lambda: build(config), alpha=ALPHA, seed=SEED),
        packed_loss,
        optax.adamw(1e-2),
        BATCHES[0],
        microbatches=microbatches,
        precision=mt.Precision(compute=jnp.float32),
        **options,
    )


@pytest.mark.by_default("plain-1")
@pytest.mark.parametrize(("name", "microbatches"), [("plain", 1), ("gemma", 2)])
def test_steps_are_those_of_noise_by_hand(name: str, microbatches: int, tmp_path: Any):
    config = CONFIGS[name]
    trainer, losses = make(config, microbatches), []
    for i, one in enumerate(BATCHES):
        losses.append(trainer.read(trainer.step(one))["loss"])
        if i == 1:
            trainer.save(tmp_path / "saved")
    expected, params = by_hand(config, microbatches)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    found = nnx.to_pure_dict(nnx.state(trainer.model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, params)
    # A resumed run goes on with the same noise, to the bit.
    again = make(config, microbatches)
    again.restore(tmp_path / "saved")
    assert [again.read(again.step(one))["loss"] for one in BATCHES[2:]] == losses[2:]
    # Evaluations have no noise, nor has generation.
    plain = build(config)
    nnx.update(plain, jax.tree.map(jnp.asarray, nnx.state(trainer.model, nnx.Param)))
    evaluated = trainer.evaluate([BATCHES[0]])["loss"]
    np.testing.assert_allclose(evaluated, packed_loss(plain, BATCHES[0]), rtol=1e-6)
    texts = [models.generate(m, [[1, 2, 3]], max_tokens=4) for m in (trainer, plain)]
    assert texts[0][0].ids.tolist() == texts[1][0].ids.tolist()


def test_adapters_have_the_noise_beside_them():
    config = CONFIGS["plain"]
    adapted = models.lora(lambda: build(config), targets="_proj", rank=2)
    model = models.neftune(adapted.model, alpha=ALPHA)()
    first, second = (float(packed_loss(model, BATCHES[0])) for _ in range(2))
    model.eval()
    calm = float(packed_loss(model, BATCHES[0]))
    assert calm == float(packed_loss(build(config), BATCHES[0]))
    assert len({first, second, calm}) == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": 0}, ValueError, "`alpha` .*0"),
        ({"seed": -1}, ValueError, "`seed` .*0.*-1"),
        ({"model": 3}, TypeError, "`model` .*models.Decoder .*function"),
        ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, TypeError, "models.Decoder,"),
        ({"model": models.neftune(build(CONFIGS["plain"]))}, ValueError, "noise .*already"),
    ],
)
def test_misuses_are_named(change: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        models.neftune(**{"model": build(CONFIGS["plain"]), **change})


torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')


@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3"])
def test_the_noise_is_where_transformers_adds_it(family: str, tmp_path: Any):
    from families import make_torch, random_tokens, save
    from filled_models import filled

    reference = make_torch(family)
    model = filled(models.load_pretrained(save(reference, tmp_path / "m")))
    tokens = random_tokens()
    shape = (*tokens.shape, model.config.hidden_size)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, shape).astype(np.float32)
    model.noise = lambda x: x + noise
    reference.get_input_embeddings().register_forward_hook(
        lambda m, i, out: out + torch.tensor(noise)
    )
    with torch.no_grad():
        logits = reference(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, atol=1e-4)


def test_the_noise_is_as_large_as_that_of_transformers():
    from transformers.integrations.neftune import neftune_post_forward_hook

    module = SimpleNamespace(training=True, neftune_noise_alpha=ALPHA)
    theirs = neftune_post_forward_hook(module, None, torch.zeros(64, LENGTH, 16)).numpy()
    model = models.neftune(build(CONFIGS["plain"]), alpha=ALPHA)
    assert model.noise is not None
    ours = np.asarray(model.noise(jnp.zeros((64, LENGTH, 16))))
    most = ALPHA / np.sqrt(LENGTH * 16)
    for noise in (theirs, ours):
        assert 0.999 * most < noise.max() <= most and -most <= noise.min() < -0.999 * most
        np.testing.assert_allclose(noise.std(), most / np.sqrt(3), rtol=0.02)
