"""Reward models: decoders with a score head, as Transformers has them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models, objectives
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
    known = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    for name, family in FAMILIES.items():
        assert family.tagger_class == (None if family.multimodal else known.get(name)), name


def with_parameters(scorer: models.Pretrained) -> models.Decoder:
    model = scorer.model()
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, scorer.params))
    nnx.update(model, state)
    return model


@pytest.mark.parametrize(("name", "num_labels"), [("gemma2", 1), ("phi", 3), ("qwen2", 2)])
def test_a_language_model_becomes_a_scorer_that_transformers_loads(name, num_labels, tmp_path):
    pretrained = models.load_pretrained(save(make_torch(name), tmp_path / "base"))
    if num_labels == 1:
        scorer = models.reward_model(pretrained, pad_token_id=3, seed=1)
    else:
        labels = ["negative", "positive", "neutral"][:num_labels]
        scorer = models.classifier(pretrained, labels, pad_token_id=3, seed=1)
    model = with_parameters(scorer)
    models.save_pretrained(model, tmp_path / "scorer")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scorer", dtype=torch.float32
    )
    assert theirs.num_labels == num_labels
    assert num_labels == 1 or theirs.config.label2id["positive"] == 1
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 60, (3, 10)).astype(np.int32)
    # Padding, a padding token at the end of a conversation, and nothing but padding tokens.
    tokens[0, 6:], tokens[1, 9:], tokens[2] = 3, 3, 3
    segments = np.ones((3, 10), np.int32)
    segments[0, 6:] = 0
    batch = {"tokens": tokens, "segments": segments, "positions": np.arange(10)[None].repeat(3, 0)}
    ours = models.conversation_scores(model, batch, segments=1)[:, 0].reshape(3, num_labels)
    with torch.no_grad():
        there = torch.tensor(segments > 0)
        expected = theirs.eval()(torch.tensor(tokens).long(), attention_mask=there).logits
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
    # In one row, the conversation of padding tokens comes after another one.
    if num_labels == 3:
        tokens, numbers = tokens[:1], np.repeat([[1, 2]], [6, 4], axis=1)
        at = np.append(np.arange(6), np.arange(4))[None]
        packed = {"tokens": tokens, "segments": numbers, "positions": at}
        found = models.conversation_scores(model, packed, segments=2)[0].reshape(2, num_labels)
        np.testing.assert_allclose(found, ours[jnp.array([0, 2])], rtol=2e-5, atol=2e-6)
    # The model itself gives the score at every token: of the last one, the conversation's.
    np.testing.assert_allclose(
        model(batch["tokens"][1:2, :9])[0, -1], ours[1], rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("num_labels", [2, 3])  # config.json leaves two labels out
def test_a_classifier_of_transformers_is_read_and_keeps_its_head(num_labels, tmp_path):
    config = make_torch("qwen2", num_labels=num_labels, pad_token_id=0).config
    theirs = transformers.Qwen2ForSequenceClassification(config)
    read = models.load_pretrained(save(theirs, tmp_path / "theirs"))
    kept = models.classifier(read, [f"kind {number}" for number in range(num_labels)])
    for found in (read, kept):
        np.testing.assert_array_equal(found.params["score"]["weight"], theirs.score.weight.detach())
    with refuses(ValueError, "`pretrained`", str(num_labels)):
        models.reward_model(read)
    pairs = np.ones((1, 1), np.int32)
    batch = {name: np.ones((1, 4), np.int32) for name in ("tokens", "segments", "positions")}
    batch |= dict.fromkeys(("labels", "mask"), batch["tokens"])
    batch |= {"pairs": pairs, "pairs_per_row": pairs[0]}
    with refuses(ValueError, "`model`", "reward_model"):
        objectives.reward()(with_parameters(read), batch)


@pytest.mark.parametrize("name", ["gemma2", "phi", "qwen2"])  # capped, with a biased head, tied
def test_a_classifier_of_tokens_is_transformers_own_in_both_directions(name, tmp_path):
    read = models.load_pretrained(save(make_torch(name), tmp_path / "base"))
    fresh = models.classifier(read, ["place", "person", "other"], of_tokens=True, seed=1)
    models.save_pretrained(with_parameters(fresh), tmp_path / "tagger")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "tagger", dtype=torch.float32
    ).eval()
    assert theirs.config.label2id["person"] == 1 and not theirs.score.bias.any()
    with torch.no_grad():
        theirs.score.bias += torch.arange(3)
    again = models.load_pretrained(save(theirs, tmp_path / "theirs"))
    kept = models.classifier(again, ["place", "person", "other"], of_tokens=True)
    own = models.load_pretrained(tmp_path / "tagger")
    tokens = np.random.default_rng(0).integers(4, 60, (2, 10)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[0, 6:] = 0
    with torch.no_grad():
        there = torch.tensor(segments)
        expected = theirs(torch.tensor(tokens).long(), attention_mask=there).logits.numpy()
    seen = segments > 0
    for found, change in ((again, 0), (kept, 0), (fresh, np.arange(3)), (own, np.arange(3))):
        ours = with_parameters(found)(tokens, None, segments) + change
        np.testing.assert_allclose(ours[seen], expected[seen], rtol=2e-5, atol=5e-6)
    with refuses(ValueError, "`of_tokens`", True, False):
        models.classifier(again, ["place", "person", "other"])


def test_the_head_s_inputs_are_the_hidden_states_of_transformers(tmp_path):
    theirs = make_torch("qwen2")
    model = with_parameters(models.load_pretrained(save(theirs, tmp_path)))
    tokens = np.random.default_rng(0).integers(0, 60, (2, 9)).astype(np.int32)
    there = np.ones_like(tokens)
    there[0, 5:] = 0
    hidden, _ = model.hidden(tokens, None, there)
    with torch.no_grad():
        mask = torch.tensor(there)
        expected = theirs.model(torch.tensor(tokens).long(), attention_mask=mask).last_hidden_state
    seen = there.astype(bool)
    np.testing.assert_allclose(hidden[seen], expected.numpy()[seen], rtol=2e-5, atol=2e-6)


def test_mistakes_are_named(tmp_path):
    pretrained = models.load_pretrained(save(make_torch("granite"), tmp_path / "base"))
    with refuses(ValueError, "granite", "Transformers"):
        models.reward_model(pretrained)
    with refuses(ValueError, "granite", "token"):
        models.classifier(pretrained, ["a", "b"], of_tokens=True)
    with refuses(TypeError, "`pretrained`", "load_pretrained"):
        models.reward_model(pretrained.model)  # type: ignore[arg-type]
    read = models.load_pretrained(save(make_torch("qwen2"), tmp_path / "qwen2"))
    wrong: Any = ([], ["yes", "yes"], [0, 1])
    for labels in wrong:
        with refuses(ValueError, "`labels`"):
            models.classifier(read, labels)
    decoder = models.Decoder(SMALL, rngs=nnx.Rngs(0))
    with refuses(ValueError, "`model`", "score"):
        models.conversation_scores(decoder, {}, segments=1)
    scorer = models.Decoder(dataclasses.replace(SMALL, scores=1), rngs=nnx.Rngs(0))
    with refuses(ValueError, "`source`", "reward"):
        models.generate(scorer, [[1, 2]], max_tokens=2)
    batch = {"tokens": np.ones((1, 3), np.int32), "labels": np.ones((1, 3), np.int32)}
    with refuses(ValueError, "`model`", "score", "logits"):
        models.next_token_loss(scorer, batch)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_reward_model_learns_scores_only(objective, tmp_path, capsys):
    base = models.load_pretrained(save(make_torch("qwen2"), tmp_path / "base"))
    models.save_pretrained(with_parameters(models.reward_model(base)), tmp_path / "scorer")
    (tmp_path / "rows.jsonl").write_text("{}")
    given = {"model": tmp_path / "scorer", "data": tmp_path / "rows.jsonl", "out": tmp_path / "out"}
    given |= {"objective": objective, "length": 16, "batch": 2}
    assert main(["finetune", *(str(x) for k, v in given.items() for x in (f"--{k}", v))]) == 2
    assert tells(capsys.readouterr().err, "reward", "scores", "logits")
