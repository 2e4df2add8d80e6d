"""Averages of a decoder's parameters: in generation and exports."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from filled_models import tensors_of
from megatrain_jax import callbacks, models
from messages import refuses
from tiny_sizes import TINY

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}


def adapted() -> models.Decoder:
    config = models.DecoderConfig.from_hf(TINY | {"vocab_size": 40, "hidden_size": 32})
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    return models.lora(model, targets="layers/", rank=2).model


@pytest.fixture(scope="module")
def trainer() -> mt.Trainer:
    """A trainer whose adapters have averages; all else is frozen."""
    made = mt.Trainer(
        adapted,
        models.next_token_loss,
        optax.sgd(5.0),
        BATCH,
        precision="float32",
        trainable=".*lora_",
        ema_decay=0.75,
        progress=False,
    )
    for _ in range(3):
        made.step(BATCH)
    return made


def log_probs(source: Any, **options: Any) -> np.ndarray:
    found = models.generate(source, [[1, 2, 3]], max_tokens=4, **options)
    return np.concatenate([one.log_probs for one in found])


def test_generation_reads_the_averages(trainer: mt.Trainer):
    expected = log_probs(trainer.ema_model)
    np.testing.assert_allclose(log_probs(trainer, params="ema"), expected, rtol=1e-5)
    assert np.abs(log_probs(trainer) - expected).max() > 1e-3
    wrong: Any = "average"
    with refuses(ValueError, "`params`", "'average'"):
        callbacks.Samples([[1, 2, 3]], params=wrong)


@pytest.mark.parametrize("save", [models.save_pretrained, models.save_lora])
def test_exports_hold_what_they_are_asked_for(trainer: mt.Trainer, save: Any, tmp_path: Path):
    found, expected, trained = (
        tensors_of(save(*what, **options))
        for what, options in (
            ((trainer, tmp_path / "averages"), {"params": "ema"}),
            ((trainer.ema_model, tmp_path / "model"), {}),
            ((trainer, tmp_path / "trained"), {}),
        )
    )
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])
    assert any((array != trained[name]).any() for name, array in found.items())


def test_a_decoder_alone_has_no_averages(trainer: mt.Trainer, tmp_path: Path):
    for call in (
        lambda: models.generate(trainer.model, [[1]], params="ema"),
        lambda: models.save_pretrained(trainer.model, tmp_path / "model", params="ema"),
    ):
        with refuses(ValueError, "`params`", "trainer"):
            call()
