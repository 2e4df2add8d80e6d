"""Beam search: the texts and scores of Transformers, and the best of all texts if they are few."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax import models
from megatrain_jax._src.lm.models.generation import generate as generate_module
from megatrain_jax._src.lm.models.generation.beams import continued, empty_beams, search_params
from megatrain_jax._src.lm.models.generation.decoding import (
    SamplingKind,
    program,
    shapes_of,
    write_tokens,
)
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory
from megatrain_jax._src.lm.models.generation.weight_source import open_source
from messages import refuses
from word_tokenizer import word_tokenizer
from written_texts import PROMPTS, decoder, ids_of, plain_log_probs, stream


def test_as_many_beams_as_tokens_find_the_best_texts_of_all():
    """Two of ten tokens end a text, and the other eight are a beam each."""
    model, ends = decoder(vocab_size=10), [2, 3]
    options: Any = {"num_beams": 8, "num_samples": 8, "length_penalty": 0.0}
    found = models.generate(model, [[5, 7, 1]], max_tokens=2, stop=ends, **options)
    texts = [[5, 7, 1, *pair] for pair in itertools.product(range(10), repeat=2)]
    log_probs = np.asarray(jax.nn.log_softmax(model(jnp.asarray(texts))))
    first = log_probs[0, 2]
    each = {(i, j): first[i] + log_probs[10 * i + j, 3, j] for i in range(10) for j in range(10)}
    each = {pair: total for pair, total in each.items() if pair[0] not in ends}
    each |= {(end,): first[end] for end in ends if end in first.argsort()[-8:]}
    best = sorted(each, key=lambda text: -each[text])[:8]
    assert [tuple(one.ids) for one in found] == best
    assert [one.score for one in found] == pytest.approx([each[x] for x in best], abs=1e-5)
    assert min(map(len, best)) == 1


def test_ends_leave_tokens_to_continue_every_beam_with():
    log_probs = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1], [0.4, 0.4, 0.15, 0.05]]))
    beams = jax.tree.map(jnp.asarray, empty_beams(np.arange(2, dtype=np.int32), 2, 4))
    beams = beams._replace(scores=jnp.array([0.0, -0.1]))
    stops, count = jnp.array([0, 1]), jnp.ones(2, jnp.int32)
    given: Any = log_probs, log_probs, stops, count, 3 * count, search_params(2)
    found, tokens, going = continued(beams, 2, *given)
    assert (tokens.tolist(), found.parents.tolist()) == ([2, 2], [0, 1])
    np.testing.assert_allclose(found.scores, np.log([0.2, 0.15]) - [0, 0.1], rtol=1e-5)
    # Of both beams' ends, the best ones.
    assert found.found.ids[:, 1].tolist() == [0, 0]
    assert not going.any()  # no beam is as good as these
    np.testing.assert_allclose(found.found.scores, (np.log([0.4, 0.4]) - [0, 0.1]) / 2, rtol=1e-5)


@pytest.mark.parametrize("penalty", [-8.0, -40.0, -1e9])
def test_a_strong_penalty_finds_as_many_texts_as_beams(penalty):
    options: Any = {"num_beams": 3, "num_samples": 3, "length_penalty": penalty}
    found = models.generate(decoder(), PROMPTS[:1], max_tokens=24, **options)
    assert all(len(one.ids) and one.score is not None and one.score <= 0 for one in found)
    assert len(found) == 3


RULES = list(itertools.product((0.0, 1.0, 2.0, -1.0), (False, True, "never"), (1.0, 1.3)))
FIRST = [(1.0, False, 1.3), (1.0, True, 1.0), (2.0, "never", 1.0)]


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory: Any) -> tuple[Any, models.Generator]:
    """A small model of Transformers whose texts end often, and its generator here."""
    torch = pytest.importorskip("torch", reason='pip install -e ".[torch]"')
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
        tie_word_embeddings=False,
        eos_token_id=[4, 26, 12, 18],
        pad_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, models.Generator(models.load_pretrained(folder))


def cases(first: list[Any], more: list[Any]) -> list[Any]:
    rest = [case for case in more if case not in first]
    return [*first, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in rest)]


@pytest.mark.parametrize(("length_penalty", "early_stopping", "penalty"), cases(FIRST, RULES))
def test_texts_and_scores_are_those_of_transformers(
    transformers_model: Any, length_penalty: float, early_stopping: Any, penalty: float
):
    import torch

    model, generator = transformers_model
    options: Any = {
        "num_beams": 3,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "repetition_penalty": penalty,
    }
    # Prompts of different lengths at once, two at a time.
    found = generator.generate(PROMPTS, max_tokens=9, num_samples=2, max_batch=7, **options)
    assert [(one.prompt, one.sample) for one in found] == [(i, k) for i in range(4) for k in (0, 1)]
    lengths = set()
    for number, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([prompt])
        theirs = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=9,
            num_return_sequences=2,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        ours = found[2 * number : 2 * number + 2]
        for one, text, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
            written, count = text[len(prompt) :].tolist(), len(one.ids)
            assert written[:count] == one.ids.tolist() and set(written[count:]) <= {1}
            assert one.score == pytest.approx(score.item(), abs=1e-5, rel=1e-5)
            assert one.finish == ("stop" if one.ids[-1] in (4, 26, 12, 18) else "length")
            lengths.add(count)
    assert len(lengths) > 1 or length_penalty == 2


def test_streamed_beams_are_those_on_the_device(monkeypatch: pytest.MonkeyPatch):
    model = decoder()
    options: Any = {"max_tokens": 6, "num_beams": 3, "num_samples": 2, "max_batch": 6}
    resident = models.generate(model, PROMPTS[:2], stop=[7, 9], **options)
    texts = []
    stream(monkeypatch)
    streamed = models.generate(
        model, PROMPTS[:2], stop=[7, 9], on_text=lambda *text: texts.append(text), **options
    )
    assert ids_of(streamed) == ids_of(resident)
    for one, other in zip(streamed, resident, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)
        np.testing.assert_allclose(one.log_probs, plain_log_probs(model, one), atol=1e-5)
        assert one.score == pytest.approx(one.log_probs.sum() / len(one.ids), abs=1e-5)
    # Whole texts, once each.
    assert sorted(texts) == [(one.prompt, one.sample, one.text) for one in streamed]


def test_caches_of_beams_are_moved_without_a_second_copy():
    model = decoder(num_layers=4, num_kv_heads=4)
    source, size = open_source(model), 1024
    memory = GenerationMemory(source, None)
    caches = shapes_of(source.form, *memory.shapes)(8, size)
    kind = SamplingKind(greedy=True, top_k=None, has_top_p=False)
    temporaries = []
    for num_beams in (1, 4):
        number = np.arange(8, dtype=np.int32)
        beams = None
        _, params = generate_module._sampling(0.0, 1.0, None, 0, 0.0, 1.0)
        if num_beams > 1:
            beams = empty_beams(number, num_beams, 16)
            search = search_params(num_beams)
            params = params._replace(search=search)
        rows = generate_module.empty_rows(8, 0, beams)
        params = params._replace(stops=np.full(4, -1, np.int32))  # type: ignore[arg-type]
        kind = SamplingKind(greedy=True, top_k=None, has_top_p=False, num_beams=num_beams)
        write = program(write_tokens, source.form, kind, donate=(2, 3))
        compiled = write.lower(*memory.shapes, caches, rows, params, np.int32(1)).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches[0]))
    assert temporaries[1] < temporaries[0] + layer


def test_searches_fit_in_memory_with_all_their_beams():
    model = decoder(num_layers=4)
    room = GenerationMemory(open_source(model), None)
    for resident, fitting, rows in ((True, 14, 12), (False, 6, 4)):
        budget = room.needs(16, fitting, resident=resident)
        memory = GenerationMemory(open_source(model), budget).with_beams(4)
        assert memory.choose(16, 20)[:2] == (resident, rows)
    few = room.needs(16, 3, resident=False, num_pages=4)
    with refuses(MemoryError, 4, 16):
        models.generate(model, [[1, 2]], max_tokens=12, num_beams=4, device_budget=few)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "`num_beams` .*1.*0"),
        ({"num_beams": 40, "stop": [1]}, ValueError, "`num_beams` .*39.*40"),
        (
            {"num_beams": 2, "temperature": 0.5},
            ValueError,
            "`temperature` .*0 .*`num_beams`=2.*0.5",
        ),
        ({"num_beams": 2, "num_samples": 3}, ValueError, "`num_samples` .*2.*3"),
        ({"num_beams": 2, "max_batch": 1}, ValueError, "`max_batch` .*2.*1"),
        ({"num_beams": 2, "length_penalty": "a"}, TypeError, "`length_penalty` .*number.*a"),
        (
            {"num_beams": 2, "early_stopping": "often"},
            ValueError,
            "`early_stopping` .*never.*often",
        ),
        ({"num_beams": 2, "early_stopping": 1}, TypeError, "`early_stopping` .*True.*1"),
        ({"length_penalty": 2.0}, ValueError, "`length_penalty`=2.0 .*`num_beams`"),
        ({"early_stopping": "never"}, ValueError, "`early_stopping`='never' .*`num_beams`"),
        ({"num_beams": 2, "stop": ["a"]}, ValueError, "`stop` .*ids .*`num_beams`=2.*a"),
    ],
)
def test_misuses_are_named(changes: Any, error: Any, message: str):
    given = {"max_tokens": 2, "tokenizer": word_tokenizer(40)} | changes
    with pytest.raises(error, match=message):
        models.generate(decoder(num_layers=1), [[1]], **given)


def test_texts_that_outgrow_their_embeddings_are_refused():
    factors = (1.0, 2.0, 3.0, 4.0)
    rope = models.Rope(
        dim=8,
        base=100.0,
        kind="longrope",
        short_factors=factors,
        long_factors=factors,
        original_length=8,
    )
    model = decoder(num_layers=1, rope=rope)
    options: Any = {"num_beams": 2, "max_tokens": 4}
    with refuses(ValueError, "`num_beams`=2", 8):
        models.generate(model, [[1, 2], [1] * 6], **options)
    with pytest.raises(MemoryError):  # which is found later
        models.generate(model, [[1] * 5, [1] * 9], device_budget=1, **options)
