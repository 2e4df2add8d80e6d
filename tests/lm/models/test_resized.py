"""Vocabularies that grow, against Transformers' `resize_token_embeddings`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.models.pretrained import resized_array
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import VOCAB, make_torch, random_tokens, save  # noqa: E402

ADDED = 5


def test_new_rows_have_the_mean_and_the_covariance_of_the_old_ones():
    rng = np.random.default_rng(0)
    old = rng.normal(0.5, 1, (6000, 4)).astype(np.float32) @ rng.normal(size=(4, 4))
    old = old.astype(np.float32)
    grown = resized_array(old, 10_000, np.random.SeedSequence([3, 0]))
    whole = np.asarray(grown)
    assert whole.shape == grown.shape == (10_000, 4) and whole.dtype == np.float32
    np.testing.assert_array_equal(whole[:6000], old)
    np.testing.assert_array_equal(whole, grown)  # the same again
    apart = (whole[6000:].astype(np.float64) - old.mean(0, dtype=np.float64)) / 1e-9**0.5
    np.testing.assert_allclose(apart.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(
        np.cov(apart.T), np.cov(old.T), atol=0.06 * np.abs(np.cov(old.T)).max()
    )
    other = np.asarray(resized_array(old, 10_000, np.random.SeedSequence([4, 0])))
    assert (other[6000:] != whole[6000:]).any()


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.long)])
def test_a_vocabulary_grows_as_in_transformers_and_is_exported(name, tmp_path):
    base = make_torch(name)
    pretrained = models.load_pretrained(save(base, tmp_path / "base"))
    resized = models.resize_vocabulary(pretrained, VOCAB + ADDED)
    base.resize_token_embeddings(VOCAB + ADDED)
    expected = {"embed_tokens": base.get_input_embeddings(), "lm_head": base.lm_head}
    tied = resized.config.tie_embeddings
    assert tied == base.config.tie_word_embeddings
    params: Any = resized.params
    for module in ("embed_tokens", *(() if tied else ("lm_head",))):
        ours, theirs = (
            np.asarray(params[module]["weight"]),
            expected[module].weight.detach().numpy(),
        )
        np.testing.assert_array_equal(ours[:VOCAB], theirs[:VOCAB])
        # Both draw with a billionth of the variance.
        np.testing.assert_allclose(ours[VOCAB:], theirs[VOCAB:], atol=5e-4 * theirs.std())
    tokens = random_tokens(2, 13)
    tokens[:, 3:8] = np.arange(VOCAB, VOCAB + ADDED)
    trainer = mt.Trainer(
        resized.model,
        models.next_token_loss,
        optax.sgd(0.1),
        {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]},
        params=resized.params,
        precision=mt.Precision(compute=jnp.float32),
    )
    trainer.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    folder = models.save_pretrained(trainer, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert again.config.vocab_size == again.lm_head.weight.shape[0] == VOCAB + ADDED
    with torch.no_grad():
        theirs = again(torch.tensor(tokens).long()).logits.numpy()
    ours = jax.tree.map(jnp.asarray, trainer.model)(tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert models.load_pretrained(folder).config.vocab_size == VOCAB + ADDED


def test_a_tokenizer_needs_rows_for_all_of_its_ids(tmp_path):
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": VOCAB + ADDED - 1}

    pretrained = models.load_pretrained(save(make_torch("llama"), tmp_path / "base"))
    rows = []
    for seed in (0, 1):
        grown = models.resize_vocabulary(pretrained, Tokenizer(), seed=seed)
        assert grown.config.vocab_size == VOCAB + ADDED
        params: Any = grown.params
        rows += [np.asarray(params[n]["weight"])[VOCAB:] for n in ("embed_tokens", "lm_head")]
    assert len({row.tobytes() for row in rows}) == 4


def test_wrong_vocabularies_are_refused(tmp_path):
    pretrained = models.load_pretrained(save(make_torch("llama"), tmp_path / "base"))
    assert models.resize_vocabulary(pretrained, VOCAB) is pretrained
    with refuses(ValueError, "`vocabulary`", VOCAB):
        models.resize_vocabulary(pretrained, VOCAB - 1)
    with refuses(TypeError, "`vocabulary`", "tokenizer"):
        models.resize_vocabulary(pretrained, "tokenizer")
    with refuses(TypeError, "`pretrained`"):
        models.resize_vocabulary(pretrained.model, VOCAB)  # type: ignore[arg-type]
