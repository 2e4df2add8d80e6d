"""Generated text: that of Transformers, token by token, in every family; and its probabilities."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.models.generation import caches, decoding
from megatrain_jax._src.lm.models.generation import generate as generate_module
from megatrain_jax._src.lm.models.generation.decoding import (
    SamplingKind,
    SamplingParams,
    choose,
    warp,
)
from megatrain_jax._src.lm.models.generation.generate import StopStrings
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory
from megatrain_jax._src.lm.models.generation.sharing import Sharing
from megatrain_jax._src.lm.models.generation.weight_source import open_source
from messages import refuses, tells
from word_tokenizer import word_tokenizer
from written_texts import PROMPTS, SIZES, decoder, ids_of, plain_log_probs


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return decoder(windows=(None, 5))


# Greedy text, and its probabilities


def test_sizes_of_caches_grow_by_a_third_and_a_half():
    sizes = sorted({generate_module.bucket(number) for number in range(1, 400)})
    assert sizes == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(generate_module.bucket(size) == size for size in sizes)


@pytest.mark.parametrize("largest", [-200.0, 0.0, 200.0])
def test_sinks_of_any_size_take_their_part(largest):
    rng = np.random.default_rng(0)
    scores, sinks = rng.normal(size=(2, 3, 5)), largest + rng.normal(size=(2, 3))
    seen = rng.random((2, 3, 5)) < 0.7
    given = [jnp.asarray(x, jnp.float32) for x in (scores, sinks)]
    found = caches._softmax(given[0], jnp.asarray(seen), given[1])
    highest = np.maximum(np.where(seen, scores, -np.inf).max(-1), sinks)[..., None]
    weights = np.where(seen, np.exp(scores - highest), 0)
    expected = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks[..., None] - highest))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.exhaustive
def test_text_and_probabilities_are_those_of_whole_forwards(model: models.Decoder):
    found = models.generate(model, PROMPTS, max_tokens=40, max_batch=3)
    assert [(c.prompt, c.sample, c.finish) for c in found] == [(i, 0, "length") for i in range(4)]
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.prompt_ids.tolist() == prompt and one.ids.dtype == np.int32
        text = np.concatenate([one.prompt_ids, one.ids])[None]
        logits = np.asarray(model(jnp.asarray(text)))[0]
        assert one.ids.tolist() == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        np.testing.assert_allclose(one.log_probs, plain_log_probs(model, one), atol=1e-5)
        np.testing.assert_array_equal(one.log_probs, one.drawn_log_probs)


@pytest.mark.exhaustive
def test_a_streamed_model_writes_the_same():
    model = decoder(num_layers=4)
    resident = models.generate(model, PROMPTS, max_tokens=12)
    room = GenerationMemory(open_source(model), None)
    budget = room.needs(24, 2, resident=False)
    assert GenerationMemory(open_source(model), budget).choose(24, 4) == (False, 2, frozenset())
    streamed = models.generate(model, PROMPTS, max_tokens=12, device_budget=budget)
    assert ids_of(streamed) == ids_of(resident)
    for one, other in zip(streamed, resident, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    with refuses(MemoryError, 24):
        models.generate(model, PROMPTS, max_tokens=12, device_budget=budget // 2)


def test_caches_that_travel_with_their_layers_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    model = decoder(num_layers=4, intermediate_size=96)
    room = GenerationMemory(open_source(model), None)
    budgets = [room.needs(16, 3, resident=False, num_pages=number) for number in (0, 4)]
    forms = [GenerationMemory(open_source(model), budget).choose(16, 3) for budget in budgets]
    assert forms[0] == (False, 3, frozenset())
    assert forms[1].num_rows == 3 and len(forms[1].pages) > 2
    left, asked, goes_on = [], [], Sharing.goes_on

    def asking(sharing: Sharing, has_texts: bool) -> bool:
        asked.append(has_texts)
        return goes_on(sharing, has_texts)

    def as_page(cache: Any) -> Any:
        left.append(caches.as_page(cache))
        return left[-1]

    monkeypatch.setattr(decoding, "as_page", as_page)
    monkeypatch.setattr(Sharing, "goes_on", asking)
    monkeypatch.setattr(generate_module, "_FIRST_SIZE", 8)  # so that pages grow
    options: Any = {"max_tokens": 8, "max_batch": 3, "temperature": 0.8}
    there, paged = (
        models.generate(model, PROMPTS, device_budget=budget, **options) for budget in budgets
    )
    assert len(left) >= 8 * len(forms[1].pages) and all(caches.is_page(page) for page in left)
    for one, other in zip(there, paged, strict=True):
        for name in ("ids", "log_probs", "tempered_log_probs", "drawn_log_probs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    # Other processes hear of each pass before it, and once of the end.
    assert asked == 2 * ([True] * (len(asked) // 2 - 1) + [False]) and len(asked) >= 2 * 8
    card = mt.Hardware(name="card", flops_per_s=1e12, link_bytes_per_s=1e6)
    plan = models.Generator(model, device_budget=budgets[1]).plan(16, 3, card)
    pages = left[-len(forms[1].pages) :]
    assert plan.paged_bytes == sum(x.nbytes for page in pages for x in jax.tree.leaves(page))
    assert plan.tokens_per_s == pytest.approx(3e6 / (plan.weight_bytes + plan.paged_bytes))


@pytest.mark.parametrize("seed", range(3))
def test_memory_has_room_for_the_largest_pages_that_are_there_together(seed, monkeypatch):
    """A page leaves, one is used and one arrives, in layers with caches of different sizes."""
    rng = np.random.default_rng(seed)
    room = GenerationMemory(open_source(decoder(num_layers=4)), None)
    sizes = rng.integers(1, 10**6, 4).tolist()
    monkeypatch.setattr(room, "_layer_bytes", lambda size: sizes)

    needs = [room.needs(16, 2, resident=False, num_pages=n) for n in range(len(room.pageable) + 1)]
    assert len(needs) == 5
    for number, needed in enumerate(needs):
        paged = [sizes[i] for i in room.pages_of(number)]
        together = max(map(sum, itertools.combinations(paged, min(number, 3))))
        assert needs[0] - needed == 2 * (sum(paged) - together)


# The weights of a run


def trainer(model: Any, **options: Any) -> mt.Trainer:
    batch = {name: np.zeros((2, 8), np.int32) for name in ("tokens", "labels")}
    options = {"precision": "float32"} | options
    return mt.Trainer(
        model, models.next_token_loss, optax.sgd(0.5), batch, progress=False, **options
    )


def batch_of(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 40, (2, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


@pytest.mark.exhaustive
def test_a_trainer_writes_with_its_newest_parameters(model: models.Decoder):
    run = trainer(model)
    before = ids_of(models.generate(run, PROMPTS, max_tokens=8))
    assert before == ids_of(models.generate(model, PROMPTS, max_tokens=8))
    for seed in range(3):
        run.step(batch_of(seed))
    after = ids_of(models.generate(run, PROMPTS, max_tokens=8))
    trained = jax.tree.map(jnp.asarray, nnx.state(run.model))
    plain = nnx.merge(nnx.graphdef(run.model), trained)
    assert after == ids_of(models.generate(plain, PROMPTS, max_tokens=8)) != before
    run.step(batch_of(3))  # and training goes on


CODED = mt.Precision(compute="float32", master="int8", state="int4")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "num_devices"), [(CODED, 2), ("bfloat16", 1)], ids=["coded", "bfloat16"]
)
def test_a_run_computes_its_text_as_it_trains(precision: Any, num_devices: int):
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    run = trainer(decoder(num_layers=3), precision=precision, mesh=mesh)
    run.step(batch_of(0))
    source = open_source(run)
    # The masters as they are read, in the dtype of the computation.
    arrays = jax.tree.map(lambda x: jnp.asarray(x, source.dtype), nnx.state(run.model))
    plain = nnx.merge(nnx.graphdef(run.model), arrays)
    tolerance = 1e-5 if source.dtype == jnp.float32 else 0.05
    for resident in (True, False):
        budget = GenerationMemory(source, None).needs(24, 2, resident=resident)
        assert GenerationMemory(source, budget).choose(24, 2) == (resident, 2, frozenset())
        found = models.generate(run, PROMPTS[:2], max_tokens=12, device_budget=budget)
        for one in found:
            np.testing.assert_allclose(one.log_probs, plain_log_probs(plain, one), atol=tolerance)


@pytest.mark.exhaustive
def test_adapters_write_with_their_model():
    adapted = models.lora(decoder(), targets="proj", rank=2, dropout=0.5)
    # Fresh adapters change nothing.
    fresh = models.generate(adapted, PROMPTS, max_tokens=6)
    assert ids_of(fresh) == ids_of(models.generate(decoder(), PROMPTS, max_tokens=6))
    given = models.lora(decoder, targets="proj", rank=2, params=nnx.state(decoder(), nnx.Param))
    assert ids_of(models.generate(given, PROMPTS, max_tokens=6)) == ids_of(fresh)
    run = trainer(adapted.model, trainable=adapted.trainable)
    run.step(batch_of(0))
    found = models.generate(run, PROMPTS, max_tokens=12)
    merged = jax.tree.map(jnp.asarray, nnx.state(models.merge_lora(run)))
    plain = nnx.merge(nnx.graphdef(models.merge_lora(run)), merged)
    for one in found:
        np.testing.assert_allclose(one.log_probs, plain_log_probs(plain, one), atol=1e-5)
    assert ids_of(found) != ids_of(models.generate(decoder(), PROMPTS, max_tokens=12))


def test_parameters_may_be_given_beside_the_model(model: models.Decoder):
    def build() -> models.Decoder:
        return decoder(windows=(None, 5))

    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected = ids_of(models.generate(model, PROMPTS[:2], max_tokens=6))
    for source in [(build, params), (model, mt_like(params)), (build, nnx.state(model))]:
        assert ids_of(models.generate(source, PROMPTS[:2], max_tokens=6)) == expected
    wrong = {**params, "embed_tokens": {"weight": np.ones((40, 8), np.float32)}}
    with pytest.raises(ValueError, match=r"embed_tokens/weight .* shape \(40, 8\).* \(40, 16\)"):
        open_source((build, wrong))
    # Adapters in fp32 beside a model in bfloat16 are computed with in fp32.
    params["norm"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["norm"])
    assert open_source((build, params)).dtype == jnp.float32
    del params["layers"][1]["mlp"]["up_proj"]
    with refuses(ValueError, "layers/1/mlp/up_proj/weight"):
        models.generate((build, params), PROMPTS)


def mt_like(tree: Any) -> Any:
    """A tree with text in place of numbers as keys, like those of `lora`."""
    if not isinstance(tree, dict):
        return np.asarray(tree)
    return {str(key): mt_like(value) for key, value in tree.items()}


# Sampling


@pytest.mark.exhaustive
def test_samples_depend_on_their_numbers_alone(model: models.Decoder):
    options: Any = {"max_tokens": 10, "temperature": 0.9, "num_samples": 3, "seed": 4}
    found = models.generate(model, PROMPTS, **options)
    assert [(c.prompt, c.sample) for c in found] == [(i, k) for i in range(4) for k in range(3)]
    # In other batches, with other texts beside them, and with one sample each.
    assert ids_of(models.generate(model, PROMPTS, **options, max_batch=2)) == ids_of(found)
    fewer = models.generate(model, PROMPTS, **(options | {"num_samples": 1}))
    assert ids_of(fewer) == ids_of(found[::3])
    assert ids_of(models.generate(model, PROMPTS[:1], **options)) == ids_of(found[:3])
    assert ids_of(models.generate(model, PROMPTS, **(options | {"seed": 5}))) != ids_of(found)
    assert len({tuple(ids) for ids in ids_of(found)}) == 12
    for one in found:
        np.testing.assert_allclose(one.log_probs, plain_log_probs(model, one), atol=1e-5)
        expected = plain_log_probs(model, one, temperature=0.9)
        np.testing.assert_allclose(one.drawn_log_probs, expected, atol=1e-5)
    # A restriction changes the probabilities of the draw, and not the ones of the temperature.
    for one in models.generate(model, PROMPTS, **options, top_p=0.7, top_k=20):
        expected = plain_log_probs(model, one, temperature=0.9)
        np.testing.assert_allclose(one.tempered_log_probs, expected, atol=1e-5)
        np.testing.assert_allclose(one.log_probs, plain_log_probs(model, one), atol=1e-5)
        assert (one.drawn_log_probs > expected + 0.1).all()


def test_samples_depend_on_no_row(model: models.Decoder):
    options: Any = {"max_tokens": 6, "temperature": 0.9, "max_batch": 2}
    found = models.generate(model, [[5], [3]], num_samples=2, **options)
    assert len({tuple(ids) for ids in ids_of(found)}) == 4
    # The second prompt's first sample is in the first row above, and in the second one here.
    assert ids_of(models.generate(model, [[5], [3]], **options)) == ids_of(found[::2])


def sampling_params(temperature: float, top_p: float, seed: int = 0) -> SamplingParams:
    numbers = jnp.float32(temperature), jnp.float32(top_p)
    return SamplingParams(*numbers, jax.random.key(seed))


def test_draws_are_as_often_as_they_are_probable():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)
    number = 4000
    rows = jnp.broadcast_to(logits, (number, 12))
    draws = (jnp.zeros(number, jnp.int32), jnp.arange(number), jnp.zeros(number, jnp.int32))
    sampling_kind = SamplingKind(greedy=False, top_k=9, has_top_p=True)
    chosen = choose(rows, sampling_params(0.7, 0.9), draws, sampling_kind)
    odds = np.exp(
        np.asarray(jax.nn.log_softmax(warp(rows[:1], sampling_params(0.7, 0.9), sampling_kind))[0])
    )
    counts = np.bincount(np.asarray(chosen.tokens), minlength=12)
    possible = odds > 0
    assert 3 < possible.sum() < 9 and not counts[~possible].any()
    expected = number * odds[possible]
    # The chi-squared statistic is above this in one of 10,000 cases, for up to eight degrees.
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 31.8
    np.testing.assert_allclose(np.exp(chosen.drawn_log_probs), odds[chosen.tokens], rtol=1e-5)
    for found, factor in ((chosen.log_probs, 1.0), (chosen.tempered_log_probs, 1 / 0.7)):
        all_tokens = jax.nn.log_softmax(factor * logits)
        np.testing.assert_allclose(found, all_tokens[chosen.tokens], rtol=1e-5)


@pytest.mark.parametrize("top_k", [None, 1, 5, 40, 90])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_distributions_are_those_of_transformers(top_k: int | None, top_p: float, min_p: float):
    torch = pytest.importorskip("torch", reason='pip install -e ".[torch]"')
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = np.random.default_rng(1).normal(size=(6, 40)).astype(np.float32)
    warpers: list[Any] = [TemperatureLogitsWarper(1.7)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)]
    theirs = torch.tensor(logits)
    for warper in warpers:
        theirs = warper(None, theirs)
    kinds = {"top_k": top_k, "has_top_p": top_p < 1, "has_min_p": min_p > 0}
    sampling_kind = SamplingKind(greedy=False, **kinds)  # type: ignore[arg-type]
    numbers = sampling_params(1.7, top_p)._replace(min_p=jnp.float32(min_p))
    ours = warp(jnp.asarray(logits), numbers, sampling_kind)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_repeated_tokens_are_penalised_as_by_transformers():
    torch = pytest.importorskip("torch", reason='pip install -e ".[torch]"')
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(1)
    logits, texts = rng.normal(size=(6, 40)).astype(np.float32), rng.integers(0, 40, (6, 30))
    seen = np.zeros((6, 40), bool)
    seen[np.arange(6)[:, None], texts] = True
    draws = (jnp.zeros(6, jnp.int32),) * 3
    for penalty in (0.7, 2.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor(texts), torch.tensor(logits)
        ).numpy()
        numbers = sampling_params(1.7, 1.0)._replace(repetition_penalty=jnp.float32(penalty))
        for greedy in (False, True):
            sampling_kind = SamplingKind(greedy=greedy, top_k=None, has_top_p=False, penalises=True)
            found = choose(jnp.asarray(logits), numbers, draws, sampling_kind, jnp.asarray(seen))
            if greedy:
                np.testing.assert_array_equal(found.tokens, theirs.argmax(-1))
                continue
            for factor, odds, own in ((1.7, theirs, "drawn"), (1.7, logits, "tempered")):
                expected = np.take_along_axis(
                    np.asarray(jax.nn.log_softmax(odds / factor)),
                    np.asarray(found.tokens)[:, None],
                    axis=-1,
                )
                ours = getattr(found, f"{own}_log_probs")
                np.testing.assert_allclose(ours, expected[:, 0], rtol=1e-5)
    assert (logits.argmax(-1) != theirs.argmax(-1)).any()


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_penalties_know_the_prompt_and_all_that_was_written(streamed: bool):
    """In one row, so that the second text comes after the first."""
    model = decoder(num_layers=4 if streamed else 2)
    budget = GenerationMemory(open_source(model), None).needs(16, 1, resident=False)
    assert not streamed or not GenerationMemory(open_source(model), budget).choose(16, 1).resident
    found = models.generate(
        model,
        [[5, 7, 1], [3, 9, 8]],
        max_tokens=12,
        repetition_penalty=3.0,
        max_batch=1,
        device_budget=budget if streamed else None,
    )
    texts = np.stack([np.concatenate([one.prompt_ids, one.ids]) for one in found])
    each = np.asarray(model(jnp.asarray(texts)))
    for text, one, logits in zip(texts, found, each, strict=True):
        changed = logits.copy()
        for place in range(len(text)):
            there = np.unique(text[: place + 1])
            own = logits[place, there]
            changed[place, there] = np.where(own < 0, own * 3, own / 3)
        np.testing.assert_array_equal(one.ids, changed.argmax(-1)[2:-1])
        assert (one.ids != logits.argmax(-1)[2:-1]).any()
        plain = np.asarray(jax.nn.log_softmax(logits))[np.arange(2, 14), one.ids]
        np.testing.assert_allclose(one.log_probs, plain, atol=1e-5)


# Ends


class Letters:
    """A tokenizer of letters, of which the fourth ends a text."""

    eos_token_id = 3

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_texts_end_at_tokens_and_texts(model: models.Decoder):
    tokenizer = Letters()
    (free,) = models.generate(model, ["fhb"], max_tokens=12, stop=(), tokenizer=tokenizer)
    ids, text = free.ids.tolist(), free.text
    assert (free.finish, len(text)) == ("length", 12)
    # A token that ends the text is the last id, and no part of the text.
    at = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    options: Any = {"max_tokens": 12, "tokenizer": tokenizer}
    (ended,) = models.generate(model, ["fhb"], stop=[ids[at], 39], **options)
    assert (ended.ids.tolist(), ended.text, ended.finish) == (ids[: at + 1], text[:at], "stop")
    assert len(ended.log_probs) == len(ended.tempered_log_probs) == at + 1
    # As a text of two tokens: up to the second one in ids, and up to the first one in text.
    at = text.index(text[4:6])
    (ended,) = models.generate(model, ["fhb"], stop=[text[4:6]], **options)
    assert (ended.ids.tolist(), ended.text, ended.finish) == (ids[: at + 2], text[:at], "stop")
    assert ended.log_probs.tolist() == free.log_probs[: at + 2].tolist()
    # Of several texts, the one that comes first.
    for later in ([text[4:6], text[6:8]], [text[6:8], text[4:6]]):
        (first,) = models.generate(model, ["fhb"], stop=later, **options)
        assert (first.ids.tolist(), first.text) == (ended.ids.tolist(), ended.text)
    # Of the tokenizer's end and those of the checkpoint, the first one counts.
    for own, of_checkpoint in ((39, ids[3]), (ids[3], 39), (None, ids[3])):
        tokenizer.eos_token_id = own  # type: ignore
        named = decoder(windows=(None, 5), end_tokens=(of_checkpoint,))
        (ended,) = models.generate(named, ["fhb"], **options)
        assert ended.ids.tolist() == ids[: ids.index(ids[3]) + 1]
    tokenizer.eos_token_id = ids[3]
    seen: list[tuple[int, int, str]] = []
    (ended,) = models.generate(model, ["fhb"], on_text=lambda *x: seen.append(x), **options)
    assert seen[-1] == (0, 0, ended.text)
    assert ended.ids.tolist() == ids[: ids.index(ids[3]) + 1]


def test_texts_have_no_special_tokens_and_ids_have_all(model: models.Decoder):
    tokenizer = word_tokenizer(SIZES["vocab_size"])
    shown: list[str] = []
    options: Any = {"max_tokens": 40, "temperature": 2.0, "tokenizer": tokenizer}
    (free,) = models.generate(
        model, ["count from"], stop=(), on_text=lambda *x: shown.append(x[2]), **options
    )
    assert free.text == shown[-1] == tokenizer.decode(free.ids, skip_special_tokens=True)
    assert free.text != tokenizer.decode(free.ids)
    # A text that ends a completion may have special tokens; they are not shown before it, either.
    ids = free.ids.tolist()
    at = max(i for i in range(1, 40) if ids[i] < 4 <= ids[i - 1])
    assert min(ids[: at - 1]) < 4
    (ended,) = models.generate(
        model, ["count from"], stop=[str(tokenizer.decode(ids[at - 1 : at + 1]))], **options
    )
    assert ended.ids.tolist() == ids[: at + 1]
    assert f"{ended.text}|" == f"{tokenizer.decode(ids[: at - 1], skip_special_tokens=True)} |"


def test_the_end_of_a_long_text_is_found_in_few_decodings():
    class Letters:
        calls = 0

        def decode(self, ids: list[int]) -> str:
            self.calls += 1
            return "".join("abc"[i] for i in ids)

    for ids in ([0] * 7 + [1, 2] + [0] * n for n in (0, 1, 300)):
        tokenizer = Letters()
        text = generate_module.OpenText(prompt=0, sample=0, ids=[2, 1, *ids], start=2)
        assert StopStrings(tokenizer, ["bc", "ca"]).num_kept(text) == 9
        assert tokenizer.calls <= 2 + len(ids).bit_length()
    assert StopStrings(Letters(), ["cc"]).num_kept(text) is None


def test_a_plan_counts_the_bytes_that_are_read():
    model = decoder(windows=(None, 5))
    rates: Any = {"flops_per_s": 1e12, "link_bytes_per_s": 1e6, "memory_bytes_per_s": 1e8}
    card = mt.Hardware(name="card", **rates)
    plan = models.Generator(model).plan(32, 10, card)
    weights = sum(4 * x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    caches = 10 * 4 * 2 * 16 * (32 + 5)  # keys and values in fp32, by two heads of eight
    assert (plan.resident, plan.weight_bytes, plan.cache_bytes) == (True, weights, caches)
    assert plan.tokens_per_s == pytest.approx(10 / ((weights + caches) / 1e8 + 2e-4))
    run = trainer(model)
    # The dtype of the bytes is the one that the run computes in.
    assert open_source(run, "float32").dtype == open_source(run).dtype == jnp.float32
    with pytest.raises(ValueError, match="`dtype`=bfloat16 differs from float32"):
        open_source(run, "bfloat16")
    budget = GenerationMemory(open_source(run), None).needs(32, 3, resident=False)
    plan = models.Generator(run, device_budget=budget).plan(32, 10, card)
    masters = weights - 2 * 4 * 40 * 16 - 4 * 16  # without embeddings, head and norm
    assert (plan.resident, plan.num_texts) == (False, 3)
    assert masters <= plan.weight_bytes <= 1.1 * masters  # slabs have padding
    seconds = plan.weight_bytes / 1e6 + 0.3 * caches / 1e8
    assert plan.tokens_per_s == pytest.approx(3 / seconds)
    assert tells(str(plan), "streamed", 3, 32)
    generator = models.Generator(model)
    # Cards have the names that `plan` knows.
    assert generator.plan(32, 10, "rtx 4090") == generator.plan(32, 10, mt.card("RTX 4090"))
    with refuses(ValueError, "'H1000'", "mean H100"):
        generator.plan(32, 10, "H1000")
    nothing: Any = None
    with refuses(TypeError, "card", '"H100"'):
        generator.plan(32, 10, nothing)
    # Without a budget the form is the one that fits the card, whatever fits here.
    small = mt.Hardware(
        name="small", device_bytes=math.ceil(budget / 0.9), device_share=1.0, **rates
    )
    assert models.Generator(run).plan(32, 10, small) == plan
    # A budget holds for a larger card, too.
    large = dataclasses.replace(small, device_bytes=2**40)
    assert models.Generator(run, device_budget=budget).plan(32, 10, large) == plan
    # All weights stay if eight texts, or all, fit beside them.
    for number, wanted, stays in ((8, 20, True), (7, 20, False), (7, 7, True)):
        budget = GenerationMemory(open_source(run), None).needs(32, number, resident=True)
        plan_then = models.Generator(run, device_budget=budget).plan(32, wanted, card)
        assert plan_then.resident == stays and plan_then.num_texts >= number
    # A tenth of it is left free.
    smaller = dataclasses.replace(small, device_bytes=small.device_bytes - 2)  # type: ignore
    assert models.Generator(run).plan(32, 10, smaller) != plan


def test_programs_are_compiled_for_sizes_not_for_tokens(model: models.Decoder):
    def programs_of(model: models.Decoder) -> list[int]:
        form, sampling_kind = (
            open_source(model).form,
            SamplingKind(greedy=True, top_k=None, has_top_p=False),
        )
        read = decoding.program(decoding.read_prompts, form)
        write = decoding.program(decoding.write_tokens, form, sampling_kind, donate=(2, 3))
        return [read._cache_size(), write._cache_size()]

    # The last prompt is read alone: programs for two prompts and for one, whatever ran before.
    models.generate(model, [*PROMPTS, [6]], max_tokens=30, max_batch=2)
    before = programs_of(model)
    # Other texts, lengths, stops and a later call: the same programs.
    models.generate(model, [[1] * 5, [4], [2, 2]], max_tokens=29, stop=[7], max_batch=2)
    models.generate(model, PROMPTS[::-1], max_tokens=27, max_batch=2)
    assert programs_of(model) == before
    assert before[1] <= 8


def test_temperatures_below_the_least_number_of_fp32_are_greedy(model: models.Decoder):
    greedy = models.generate(model, PROMPTS, max_tokens=4)
    for temperature in (1e-46, 1e-38):
        found = models.generate(model, PROMPTS, max_tokens=4, temperature=temperature)
        assert ids_of(found) == ids_of(greedy)
        for one in found:
            assert not one.tempered_log_probs.any() and not one.drawn_log_probs.any()


class Mixing(nnx.Module):
    """A layer that mixes tokens in a way of its own."""

    def __init__(self, config: Any, layer: int, make: Any):
        """Makes the parameter."""
        self.weight = make.weight(config.hidden_size)

    def __call__(self, x: Any, rotation: Any, segments: Any) -> Any:
        """Adds the tokens before, of the same document."""
        same = jnp.ones(x.shape[:2]) if segments is None else segments[:, 1:] == segments[:, :-1]
        return x + jnp.cumsum(x * same[..., None], axis=1) * self.weight[...], None


class Bare(nnx.Module):
    """A layer that reads no other token."""

    def __init__(self, config: Any, layer: int, make: Any):
        """Makes the parameter."""
        self.weight = make.weight(config.hidden_size)

    def __call__(self, x: Any, rotation: Any, segments: Any) -> Any:
        """Scales each token."""
        return x * self.weight[...], None


@pytest.mark.parametrize("layer", [Mixing, Bare])
def test_layers_without_a_cache_are_refused_by_name(layer: Any):
    with refuses(ValueError, "cache", layer.__name__):
        models.generate(decoder(layer=layer), PROMPTS)


# Misuse


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": 3}, TypeError, "`source` .*Trainer.*3"),
        ({"source": (3, {})}, TypeError, "`source` .*Trainer"),
        ({"prompts": "abc"}, TypeError, "`prompts` .*sequence"),
        ({"prompts": ["abc"]}, ValueError, "texts.*`tokenizer`"),
        ({"prompts": [[]]}, ValueError, "`prompts` .*token"),
        ({"prompts": [[40]]}, ValueError, "ids .*40"),
        ({"max_tokens": 0}, ValueError, "`max_tokens` .*1.*0"),
        ({"temperature": -1}, ValueError, "`temperature` .*-1"),
        ({"top_p": 0}, ValueError, "`top_p` .*0"),
        ({"top_p": 1.5}, ValueError, "`top_p` .*1.*1.5"),
        ({"min_p": 1.5}, ValueError, "`min_p` .*1.*1.5"),
        ({"repetition_penalty": 0}, ValueError, "`repetition_penalty` .*0"),
        ({"top_k": -1}, ValueError, "`top_k` .*0.*-1"),
        ({"on_text": 3}, TypeError, "`on_text` .*function.*3"),
        ({"prompts": [{"role": "user"}]}, TypeError, "messages .*list"),
        ({"stop": 3}, TypeError, "`stop` .*3"),
        ({"stop": [40]}, ValueError, "`stop` .*0 to 39"),
        ({"stop": ["a"]}, ValueError, "stop .*texts.*`tokenizer`"),
        ({"seed": -1}, ValueError, "`seed` .*-1"),
        ({"num_samples": 0}, ValueError, "`num_samples` .*1.*0"),
        ({"num_samples": 10**9}, MemoryError, "`num_samples`=1,000,000,000"),
        ({"num_samples": 10**30}, MemoryError, "`num_samples`=1,000,000,000"),
        ({"max_batch": 0}, ValueError, "`max_batch` .*1.*0"),
        ({"tokenizer": "gpt2"}, TypeError, "`tokenizer` .*`encode`"),
        ({"dtype": "int8"}, TypeError, "`dtype` .*floating.*int8"),
        ({"device_budget": "much"}, ValueError, "`device_budget` .*bytes.*much"),
    ],
)
def test_misuses_are_named(model: models.Decoder, changes: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        models.generate(**({"source": model, "prompts": [[1]], "max_tokens": 2} | changes))


def test_more_completions_than_memory_holds_are_refused(model: models.Decoder, monkeypatch):
    monkeypatch.setattr(generate_module, "available_bytes", lambda: 1200)
    options: Any = {"max_tokens": 1, "num_samples": 2}
    with refuses(MemoryError, "`num_samples`=2", 2, 4):
        models.generate(model, [[1], [2]], **options)
    assert len(models.generate(model, [[1]], **options)) == 2
