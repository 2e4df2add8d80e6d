"""The page of what fits where: its models are the published ones, its tables what plans say now."""

import random

import jax
import pytest
from flax import nnx
from what_fits import GPUS, MODELS, PAGE, row, tables_in

from megatrain_jax import models

# Billions of parameters, as the makers state them.
PARAMETERS = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Llama-3.1-70B": 70.6,
    "Mistral-Large-2407 (123B)": 123,
    "Qwen3-30B-A3B (experts)": 30.5,
}
ROWS = [(gpu, model) for gpu in GPUS for model in MODELS]
# Plans of few layers, which are traced soonest; another two rows whenever the page has others.
SAMPLE = random.Random(PAGE.stat().st_size).sample(
    [(gpu, model) for gpu, model in ROWS if PARAMETERS[model] < 2], 2
)


def published(gpu: str) -> dict[str, str]:
    """The rows of a GPU's table, by model."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = tables_in(text)[gpu]
    return {line.split("|")[1].strip(): line for line in text[begin:end].splitlines()[2:]}


@pytest.mark.parametrize("gpu", GPUS)
def test_every_model_has_its_row(gpu: str):
    assert list(published(gpu)) == list(MODELS)


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.long if PARAMETERS[m] > 10 else ()) for m in MODELS],
)
def test_models_are_as_large_as_published(model: str):
    config = models.DecoderConfig.from_hf(MODELS[model])
    decoder = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param)))
    assert count / 1e9 == pytest.approx(PARAMETERS[model], rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "model"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.long) for each in ROWS],
)
def test_a_row_is_what_plans_say(gpu: str, model: str):
    assert published(gpu)[model] == row(gpu, model)
