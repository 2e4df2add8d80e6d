"""The metrics of the command line's losses, of batches that are cut into microbatches."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models
from megatrain_jax._src.cli import pair_objectives
from megatrain_jax._src.cli.answers import Comparison

SIZES = models.DecoderConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rope=models.Rope(dim=8, base=1e4),
)


def two_pairs_in_four_rows():
    """A batch whose reference makes one of its two pairs right, and the other one wrong."""
    has_pair = np.array([True, False, True, False])
    answers = np.repeat([1, 2], 3) * has_pair[:, None]
    tokens = np.arange(24).reshape(4, 6) % 16
    right, wrong = [-1e4, 1e4], [1e4, -1e4]
    return {
        "tokens": tokens,
        "labels": (tokens + 1) % 16,
        "positions": np.tile(np.arange(3), (4, 2)),
        "segments": answers,
        "mask": answers > 0,
        "pairs": has_pair[:, None],
        "pairs_per_row": np.full(4, 2 / 4, np.float32),
        "reference": np.array([right, [0, 0], wrong, [0, 0]], np.float32),
    }


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_accuracy_and_tokens_are_those_of_the_whole_batch(microbatches):
    model = models.Decoder(SIZES, rngs=nnx.Rngs(0))
    loss_fn = pair_objectives.dpo(Comparison(microbatches=microbatches, is_stored=True), beta=0.1)
    whole = {name: jnp.asarray(array) for name, array in two_pairs_in_four_rows().items()}
    cut = {name: jnp.split(array, microbatches) for name, array in whole.items()}
    metrics = [
        loss_fn(model, {name: parts[i] for name, parts in cut.items()})[1]
        for i in range(microbatches)
    ]
    found = {name: np.array([part[name] for part in metrics]) for name in metrics[0]}
    assert found["accuracy"].mean() == 0.5  # as steps have it
    assert np.average(found["accuracy"], weights=found["weight"]) == 0.5  # as evaluations have it
    assert found["tokens"].mean() == 12


def test_accuracy_of_a_batch_without_pairs_is_0():
    batch = two_pairs_in_four_rows()
    without = {name: jnp.zeros_like(batch[name]) for name in ("pairs", "pairs_per_row")}
    model = models.Decoder(SIZES, rngs=nnx.Rngs(0))
    _, metrics = pair_objectives.dpo(Comparison(is_stored=True), beta=0.1)(
        model, {name: jnp.asarray(array) for name, array in {**batch, **without}.items()}
    )
    assert metrics["accuracy"] == 0
