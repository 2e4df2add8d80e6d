"""Batches that a decoder refuses: ids beyond its vocabulary, on the host and on the device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax._src.lm.models.decoder_options import ParameterMaker
from megatrain_jax._src.lm.models.layers import Embedding
from megatrain_jax.models import Decoder, next_token_loss
from messages import refuses
from tiny_sizes import tiny_decoder

VOCAB = 40
CONFIG = tiny_decoder(vocab_size=VOCAB, num_layers=2)


def build():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def make_batch(seed=0, rows=2, length=6):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


def make_trainer(**options):
    return mt.Trainer(build, next_token_loss, optax.sgd(0.1), make_batch(), **options)


@pytest.mark.parametrize("seed", range(30))
def test_ids_out_of_range_are_counted_and_the_first_is_named(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 9, 2))
    dtype = [np.int16, np.int32, np.int64, np.uint32][seed % 4]
    lowest = 0 if dtype == np.uint32 else -3
    arrays = {n: rng.integers(0, VOCAB, shape).astype(dtype) for n in ("tokens", "labels")}
    name = ("tokens", "labels")[seed % 2]
    spoiled = rng.random(shape) < 0.3
    arrays[name] = np.where(spoiled, rng.integers(lowest, VOCAB + 5, shape), arrays[name])
    arrays[name] = arrays[name].astype(dtype)
    if seed % 3 == 0:
        arrays["mask"] = rng.random(shape) < 0.5
    wrong = [
        (row, position, int(value))
        for (row, position), value in np.ndenumerate(arrays[name])
        if value >= VOCAB or (name == "tokens" and value < 0)
        if name == "tokens" or "mask" not in arrays or arrays["mask"][row, position]
    ]
    if not wrong:
        build().check_batch(arrays)
        return
    values = [value for *_, value in wrong]
    counts = len(wrong), arrays[name].size, min(values), max(values), *wrong[0][:2], 40, 39
    with refuses(ValueError, f"batch['{name}']", "ids", *counts):
        build().check_batch(arrays)


@pytest.mark.parametrize("name", ["learned_per_row", "pairs_per_row"])
def test_counts_of_a_whole_batch_are_no_counts_of_single_rows(name):
    """Filled with the rows' own numbers, microbatches would be divided by different counts."""
    with refuses(ValueError, f"batch['{name}']", 2, 5):
        build().check_batch(make_batch() | {name: np.array([5, 2], np.float32)})
    build().check_batch(make_batch() | {name: np.full(2, 3.5, np.float32)})


def test_labels_that_do_not_count_may_be_anything_and_other_arrays_are_not_looked_at():
    good = make_batch()
    ignored = np.where(np.arange(6) < 3, -100, good["labels"])
    beyond = np.where(np.arange(6) < 3, 10**6, good["labels"])
    mask = np.tile(np.arange(6) >= 3, (2, 1))
    for batch in (
        {**good, "labels": ignored},
        {**good, "labels": beyond, "mask": mask},
        {**good, "labels": np.array([50, 60])},  # of rows, not of tokens
        {"inputs": good["tokens"] + VOCAB},
        [good["tokens"] + VOCAB],
        {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in good.items()},
    ):
        build().check_batch(batch)
    with pytest.raises(ValueError, match="labels"):
        build().check_batch({**good, "labels": beyond, "mask": np.roll(mask, 1, axis=1)})


@pytest.mark.exhaustive
def test_on_the_device_ids_out_of_range_make_the_loss_nan():
    trainer = make_trainer()
    for name, value in [("tokens", -1), ("tokens", VOCAB), ("labels", VOCAB), ("labels", 99)]:
        spoiled = make_batch(1)
        spoiled[name][1, 2] = value
        metrics = trainer.step(jax.device_put(spoiled))
        with refuses(FloatingPointError, "loss", "step", trainer.num_steps, "nan"):
            trainer.read(metrics)


@pytest.mark.by_default("labels")
@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_a_run_refuses_a_batch_of_another_vocabulary(name):
    trainer, spoiled = make_trainer(), make_batch(1)
    spoiled[name][1, 2] = VOCAB
    with refuses(ValueError, f"'{name}'", 1, 12, 2):
        trainer.step(spoiled)
    assert np.isfinite(trainer.read(trainer.step(make_batch(2)))["loss"])


def test_logits_at_a_place_are_those_of_the_row():
    model = build()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 6)).astype(np.int32)
    places = np.array([5, 0, 2], np.int32)
    expected = model(tokens)[np.arange(3), places]
    np.testing.assert_allclose(model.logits_at(tokens, places), expected, rtol=1e-5, atol=1e-6)
    with refuses(ValueError, "`places`", (2,), (3,)):
        model.logits_at(tokens, places[:2])


def test_ids_out_of_range_have_no_embedding():
    embedding = Embedding(5, 3, ParameterMaker(nnx.Rngs(0), np.float32, 0.02))
    found = np.asarray(embedding(np.array([[-1, 0], [4, 5]])))
    np.testing.assert_array_equal(np.isnan(found).all(-1), [[True, False], [False, True]])
    np.testing.assert_array_equal(found[1, 0], embedding.weight[...][4])
