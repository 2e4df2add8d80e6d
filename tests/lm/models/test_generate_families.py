"""Generated text of every family: the most likely tokens are those of Transformers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawn import in_turn
from megatrain_jax import models

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import FAMILIES, VOCAB, make_torch, save  # noqa: E402
from written_texts import stream  # noqa: E402

# One for each kind of cache: windows with two rotary embeddings, latents, the delta rule beside
# experts, lent keys and values, sinks, wavelengths that change with the length, a state-space layer
# beside attention, chunks with queries that grow, streams that are joined after the layers, the
# delta rule with a decay for each channel beside latents, and keys of indexers.
KINDS = ["gemma3", "deepseek-v3", "qwen3-next", "gemma4-shared", "gpt-oss", "phi3"]
KINDS += ["falcon-h1", "llama4", "gemma3n", "kimi-linear", "glm-moe-dsa"]
# Longer than every window, and of different lengths.
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 11, 1)]
LONGER = [*PROMPTS, np.random.default_rng(30).integers(0, VOCAB, 30).tolist()]


def written(theirs: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The text of Transformers, by a model that hasn't seen longer texts before."""
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None}
    with torch.no_grad():
        model = copy.deepcopy(theirs)
        ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return ids[0, len(prompt) :].tolist()


def most_likely(theirs: Any, text: list[int]) -> tuple[list[int], np.ndarray]:
    """The most likely token after each one of a text, and its log-probability."""
    with torch.no_grad():
        log_probs, ids = theirs(torch.tensor([text])).logits[0].log_softmax(-1).max(-1)
    return ids.tolist(), log_probs.numpy()


def check(name: str, theirs: Any, prompt: list[int], found: models.Completion) -> None:
    """Compares greedy text: each token is the most likely one after the text before it."""
    ids = found.ids.tolist()
    # Token by token for one usual family, and where keys depend on the length of the text when they
    # were computed.
    if name in ("llama", "llama-dynamic", "phi3"):
        assert ids == written(theirs, prompt, len(ids))
    else:
        wanted, log_probs = most_likely(theirs, prompt + ids)
        assert ids == wanted[len(prompt) - 1 : -1]
        # Small models often repeat one token, so ids alone say little.
        np.testing.assert_allclose(found.log_probs, log_probs[len(prompt) - 1 : -1], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "streamed"), [*((name, False) for name in KINDS), ("gemma3n", True)]
)
def test_tokens_are_the_most_likely_ones(
    name: str, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if streamed:
        stream(monkeypatch)
    theirs = make_torch(name)
    pretrained = models.load_pretrained(save(theirs, tmp_path / "checkpoint"))
    found = models.generate(pretrained, PROMPTS, max_tokens=28, stop=(), max_batch=2)
    for prompt, one in zip(PROMPTS, found, strict=True):
        check(name, theirs, prompt, one)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "streamed"),
    in_turn([name for name in KINDS if name != "phi3"], {"resident": False, "streamed": True}),
)
def test_beams_move_every_kind_of_cache(
    name: str, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if streamed:
        stream(monkeypatch)
    theirs = make_torch(name)
    pretrained = models.load_pretrained(save(theirs, tmp_path / "checkpoint"))
    options: Any = {"max_tokens": 12, "num_beams": 3, "num_samples": 3, "stop": [5]}
    for one in models.generate(pretrained, PROMPTS, **options):
        ids = torch.tensor([[*PROMPTS[one.prompt], *one.ids.tolist()]])
        with torch.no_grad():
            each = theirs(ids).logits[0].log_softmax(-1)[-len(one.ids) - 1 : -1]
        expected = each.gather(1, ids[0, -len(one.ids) :, None])[:, 0]
        np.testing.assert_allclose(one.log_probs, expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "streamed"), [*((name, False) for name in FAMILIES), *((name, True) for name in KINDS)]
)
def test_long_texts_are_those_of_transformers(
    name: str, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if streamed:
        stream(monkeypatch)
    theirs = make_torch(name)
    pretrained = models.load_pretrained(save(theirs, tmp_path / "checkpoint"))
    found = models.generate(pretrained, LONGER, max_tokens=200, stop=(), max_batch=3)
    for prompt, one in zip(LONGER, found, strict=True):
        check(name, theirs, prompt, one)
