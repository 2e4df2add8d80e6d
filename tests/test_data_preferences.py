"""Pairs of which one is preferred, compared with Transformers and with a DPO loss pair by pair."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chats import CHATML, WORDS, conversations, openai, tokenizer, write
from megatrain_jax import data

VOCAB = 400


def load(source: Any, **options: Any) -> data.Dataset:
    options = {"length": 256, "batch_size": 3, "progress": False, **options}
    return data.preferences(source, tokenizer(), **options)


def pairs(count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Prompts that end with the user, each with two answers."""
    rng = random.Random(seed)
    prompts = [messages[:-1] for messages in conversations(count, seed=seed, turns=2, words=5)]
    return [
        (prompt, *(f"{n} {' '.join(rng.choices(WORDS, k=rng.randint(1, 5)))}" for n in (1, 2)))
        for prompt in prompts
    ]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS = {
    "texts": lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
    "messages": lambda p, c, r: {"prompt": p, "chosen": [answer(c)], "rejected": [answer(r)]},
    "whole": lambda p, c, r: {"chosen": [*p, answer(c)], "rejected": [*p, answer(r)]},
    "sharegpt": lambda p, c, r: {
        "conversations": [{"from": m["role"], "value": m["content"]} for m in p],
        "chosen": {"from": "gpt", "value": c},
        "rejected": {"from": "gpt", "value": r},
    },
}
SINGLE = {
    "question": lambda s, q, c, r: {"system": s, "question": q, "chosen": c, "rejected": r},
    "alpaca": lambda s, q, c, r: {"system": s, "instruction": q, "chosen": c, "rejected": r},
    "prompt": lambda s, q, c, r: {"system": s, "prompt": q, "chosen": c, "rejected": r},
}


def by_transformers(prompt: list[dict[str, str]], said: str) -> tuple[tuple[int, ...], int, int]:
    """The tokens of a conversation, and where its last answer begins and ends."""
    made = tokenizer(CHATML)

    def tokens(messages: Any, asking: bool) -> list[int]:
        return made.apply_chat_template(  # type: ignore[return-value]
            messages, add_generation_prompt=asking, return_dict=False
        )

    whole = tokens([*prompt, answer(said)], False)
    # The line end after the last token of a turn is the template's.
    return tuple(whole), len(tokens(prompt, True)), len(whole) - 1


def found(batches: Any) -> list[tuple[Any, Any]]:
    """The pairs of batches: of each conversation its tokens, and the span of labels that count."""
    result = []
    for batch in batches:
        for row in range(len(batch["tokens"])):
            segments = batch["segments"][row]
            assert segments.max() == 2 * batch["pairs"][row].sum()
            for pair in np.flatnonzero(batch["pairs"][row]):
                sides = []
                for number in (2 * pair + 1, 2 * pair + 2):
                    here = segments == number
                    assert batch["positions"][row][here].tolist() == list(range(here.sum()))
                    tokens = batch["tokens"][row][here]
                    assert batch["labels"][row][here].tolist() == [*tokens[1:], 0]
                    counts = np.flatnonzero(batch["mask"][row][here])
                    assert counts.tolist() == list(range(counts[0], counts[-1] + 1))
                    sides.append((tuple(tokens.tolist()), int(counts[0]) + 1, int(counts[-1]) + 2))
                result.append(tuple(sides))
    return result


@pytest.mark.parametrize("form", FORMS)
def test_both_answers_are_those_of_transformers(tmp_path: Path, form: str):
    given = pairs(40)
    rows = [FORMS[form](*one) for one in given]
    dataset = load(write(tmp_path / "a.jsonl", rows), epochs=2)
    expected = Counter((by_transformers(p, c), by_transformers(p, r)) for p, c, r in given)
    assert Counter(found(dataset)) == Counter({pair: 2 * n for pair, n in expected.items()})
    assert dataset.num_documents == dataset.summary.num_documents == 40
    sizes = {len(batch["pairs"][0]) for batch in dataset}
    assert len(sizes) == 1 and sizes.pop() > 1
    for batch in dataset:
        assert batch["pairs"].dtype == np.bool_ and batch["pairs_per_row"].dtype == np.float32
        assert batch["pairs_per_row"].sum() == pytest.approx(batch["pairs"].sum())
        assert batch["learned_per_row"].sum() == pytest.approx(batch["mask"].sum())
    train, held_out = dataset.split(0.25)
    assert Counter(found(train)) + Counter(found(held_out) * 2) == Counter(found(dataset))
    assert held_out.num_documents == 10 and train.num_documents == 30


@pytest.mark.parametrize("form", SINGLE)
def test_questions_of_all_forms_are_read(form: str):
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
    row = SINGLE[form]("be brief", "the cat", "sat", "rain")
    expected = (by_transformers(prompt, "sat"), by_transformers(prompt, "rain"))
    assert found(load([row])) == [expected]


def test_whole_conversations_are_learned_from_where_they_differ():
    start = openai(conversations(1)[0])["messages"]
    rest = [{"role": "user", "content": "and then"}, answer("sat")]
    row = {
        "chosen": [*start, answer("cat")][:-1] + rest,
        "rejected": [*start, *rest[:1], answer("x")],
    }
    expected = tuple(by_transformers([*start, *rest[:1]], said) for said in ("sat", "x"))
    before = [*start, *rest[:1]]
    told = "".join(f"<{m['role']}>{m['content']}" for m in before)
    prompts = ["and then", " and then\n", start[0]["content"], "", told, before, before[-1:]]
    for prompt in prompts:
        dataset = load([{**row, "prompt": prompt, "score": 3}])
        assert found(dataset) == [expected] and dataset.summary.ignored == {"score": 1}
    torn = [{"role": "user", "content": text} for text in ("a", "b")]
    row = {"prompt": torn, "chosen": [*torn, answer("x")], "rejected": [*torn, answer("y")]}
    joined = [{"role": "user", "content": "a\nb"}]
    assert found(load([row], merge="\n")) == [
        tuple(by_transformers(joined, said) for said in ("x", "y"))
    ]


def dpo(policy: Any, reference: Any, batch: dict[str, jax.Array], beta: float = 0.1) -> jax.Array:
    """The loss of DPO over a packed batch, as the documentation has it."""

    def logps(table: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(table[batch["tokens"]])
        said = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
        rows, most = batch["pairs"].shape
        sums = jnp.zeros((rows, 2 * most + 1))
        at = jnp.arange(rows)[:, None], batch["segments"]
        return sums.at[at].add(said * batch["mask"])[:, 1:].reshape(rows, most, 2)

    ratios = logps(policy) - logps(reference)
    losses = -jax.nn.log_sigmoid(beta * (ratios[..., 0] - ratios[..., 1]))
    return jnp.sum(losses * batch["pairs"]) / batch["pairs_per_row"].sum()


def test_a_dpo_loss_over_batches_is_that_over_pairs():
    rng = np.random.default_rng(0)
    tables = rng.normal(size=(2, VOCAB, VOCAB)).astype(np.float32)
    logps = tables - np.log(np.exp(tables).sum(axis=-1, keepdims=True))
    compiled = jax.jit(dpo)
    given = pairs(30, seed=1)
    total, count = 0.0, 0
    for batch in load([FORMS["texts"](*one) for one in given], batch_size=4):
        size = int(batch["pairs"].sum())
        total += size * float(compiled(*tables, batch))
        count += size
    expected = []
    for prompt, chosen, rejected in given:
        ratios = []
        for said in (chosen, rejected):
            tokens, start, end = by_transformers(prompt, said)
            steps = range(start - 1, end - 1)
            ours, theirs = (sum(of[tokens[i], tokens[i + 1]] for i in steps) for of in logps)
            ratios.append(ours - theirs)
        expected.append(np.log1p(np.exp(0.1 * (ratios[1] - ratios[0]))))
    assert count == 30
    np.testing.assert_allclose(total / count, np.mean(expected), rtol=1e-5)


def test_batches_of_pairs_resume():
    rows = [FORMS["texts"](*one) for one in pairs(30)]
    dataset = load(rows, epochs=2)
    whole = list(dataset)
    iterator = iter(dataset)
    for count in range(len(whole) + 1):
        resumed = iter(load(rows, epochs=2) if count < 2 else dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        for one, other in zip(resumed, whole[count:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)
        next(iterator, None)
    mixed = data.mix([dataset, load(rows[:9], epochs=4)])
    assert Counter(found(mixed)) == Counter(found(dataset)) + Counter(found(mixed.datasets[1]))


BEGIN = [{"role": "user", "content": "the cat"}]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "alike": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected` are alike"),
    "one missing": ({"prompt": "a", "chosen": "b"}, "no `rejected` among the fields prompt"),
    "no question": (
        {"chosen": "a", "rejected": "b"},
        "there is no question: none of messages, .* is among",
    ),
    "half whole": (
        {"chosen": [{"role": "user", "content": "a"}, answer("b")], "rejected": "c"},
        "one of `chosen` and `rejected` is a whole conversation",
    ),
    "empty": ({"prompt": "a", "chosen": " ", "rejected": "b"}, "an empty turn: chosen"),
    "a number": ({"prompt": "a", "chosen": 3, "rejected": "b"}, "`chosen` is no list"),
    "begins the other": (
        {
            "chosen": [{"role": "user", "content": "a"}, answer("b")],
            "rejected": [{"role": "user", "content": "a"}, answer("b")] * 2,
        },
        "one of `chosen` and `rejected` is the beginning of the other",
    ),
    "other questions": (
        {
            "chosen": [{"role": "user", "content": "a"}, answer("b")],
            "rejected": [{"role": "user", "content": "c"}, answer("d")],
        },
        "answer different questions: message 1, before an answer, is user 'a' in one and user 'c'",
    ),
    "another system message": (
        {
            name: [{"role": "system", "content": said}, *BEGIN, answer(said)]
            for name, said in (("chosen", "a"), ("rejected", "b"))
        },
        "answer different questions: message 1",
    ),
    "another prompt": (
        {"prompt": "c", "chosen": [*BEGIN, answer("b")], "rejected": [*BEGIN, answer("d")]},
        "`chosen` and `rejected` don't begin with `prompt`: it is 'c', and .* user 'the cat'",
    ),
    "messages of another prompt": (
        {
            "prompt": [{"role": "user", "content": "c"}],
            "chosen": [*BEGIN, answer("b")],
            "rejected": [*BEGIN, answer("d")],
        },
        "`chosen` and `rejected` don't begin with `prompt`",
    ),
    "too long": (
        {"prompt": "a", "chosen": "cat " * 150, "rejected": "sat " * 150},
        "longer than `length`=256",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_pair_is_named_with_its_row(fault: str):
    row, message = FAULTS[fault]
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(data.DataError, match=f"`source`, row 2: .*{message}"):
        load([good, row, good])
    dropped = load([good, row, good], invalid="drop", too_long="drop")
    assert dropped.num_documents == 2 and sum(dropped.summary.left_out.values()) == 1


def test_options_that_pairs_dont_have_are_named():
    with pytest.raises(ValueError, match="`too_long` must be one of .'error', 'drop'."):
        load([{"prompt": "a", "chosen": "b", "rejected": "c"}], too_long="cut")
    with pytest.raises(data.DataError, match="preferences are for `data.preferences`"):
        row = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
        data.chat(row, tokenizer(), length=8, batch_size=1, progress=False)
