"""Reward models: decoders with a score head, as Transformers has them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.models.config import FAMILIES
from messages import refuses, tells
from small_decoders import SMALL

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

import transformers  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from families import make_torch, save  # noqa: E402


def test_families_have_the_classes_of_transformers():
    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    found = {name: family.scorer_class for name, family in FAMILIES.items()}
    assert found == {
        name: None if family.multimodal else known.get(name) for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize("name", ["gemma2", "phi", "qwen2"])
def test_a_language_model_becomes_a_scorer_that_transformers_loads(name, tmp_path):
    pretrained = models.load_pretrained(save(make_torch(name), tmp_path / "base"))
    scorer = models.reward_model(pretrained, pad_token_id=3, seed=1)
    model = scorer.model()
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, scorer.params))
    nnx.update(model, state)
    models.save_pretrained(model, tmp_path / "scorer")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scorer", dtype=torch.float32
    )
    assert theirs.num_labels == 1
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 60, (3, 10)).astype(np.int32)
    # Padding, a padding token at the end of a conversation, and nothing but padding tokens.
    tokens[0, 6:], tokens[1, 9:], tokens[2] = 3, 3, 3
    segments = np.ones((3, 10), np.int32)
    segments[0, 6:] = 0
    batch = {"tokens": tokens, "segments": segments, "positions": np.arange(10)[None].repeat(3, 0)}
    ours = models.conversation_scores(model, batch, segments=1)[:, 0]
    with torch.no_grad():
        there = torch.tensor(segments > 0)
        expected = theirs.eval()(torch.tensor(tokens).long(), attention_mask=there).logits[:, 0]
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
    # The model itself gives the score at every token: of the last one, the conversation's.
    np.testing.assert_allclose(model(tokens[1:2, :9])[0, -1, 0], ours[1], rtol=2e-5, atol=2e-6)


def test_mistakes_are_named(tmp_path):
    pretrained = models.load_pretrained(save(make_torch("granite"), tmp_path / "base"))
    with refuses(ValueError, "granite", "Transformers"):
        models.reward_model(pretrained)
    with refuses(TypeError, "`pretrained`", "load_pretrained"):
        models.reward_model(pretrained.model)  # type: ignore[arg-type]
    decoder = models.Decoder(SMALL, rngs=nnx.Rngs(0))
    with refuses(ValueError, "`model`", "score"):
        models.conversation_scores(decoder, {}, segments=1)
    scorer = models.Decoder(dataclasses.replace(SMALL, scores=True), rngs=nnx.Rngs(0))
    with refuses(ValueError, "`source`", "reward"):
        models.generate(scorer, [[1, 2]], max_tokens=2)
    batch = {"tokens": np.ones((1, 3), np.int32), "labels": np.ones((1, 3), np.int32)}
    with refuses(ValueError, "`model`", "reward", "logits"):
        models.next_token_loss(scorer, batch)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_reward_model_learns_scores_only(objective, tmp_path, capsys):
    base = models.load_pretrained(save(make_torch("qwen2"), tmp_path / "base"))
    scorer = models.reward_model(base)
    model = scorer.model()
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, scorer.params))
    nnx.update(model, state)
    models.save_pretrained(model, tmp_path / "scorer")
    (tmp_path / "rows.jsonl").write_text("{}")
    given = {"model": tmp_path / "scorer", "data": tmp_path / "rows.jsonl", "out": tmp_path / "out"}
    given |= {"objective": objective, "length": 16, "batch": 2}
    assert main(["finetune", *(str(x) for k, v in given.items() for x in (f"--{k}", v))]) == 2
    assert tells(capsys.readouterr().err, "reward", "scores", "logits")
