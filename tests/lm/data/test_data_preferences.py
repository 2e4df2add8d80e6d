"""Pairs of which one is preferred, compared with Transformers and with a DPO loss pair by pair."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chats import conversations, openai, tokenizer, write
from megatrain_jax import data
from messages import refuses
from preference_pairs import FORMS, answer, by_transformers, found, pairs

VOCAB = 400


def load(source: Any, **options: Any) -> data.Dataset:
    options = {"length": 256, "batch_size": 3, "progress": False, **options}
    return data.preferences(source, tokenizer(), **options)


SINGLE = {
    "question": lambda s, q, c, r: {"system": s, "question": q, "chosen": c, "rejected": r},
    "alpaca": lambda s, q, c, r: {"system": s, "instruction": q, "chosen": c, "rejected": r},
    "prompt": lambda s, q, c, r: {"system": s, "prompt": q, "chosen": c, "rejected": r},
}


@pytest.mark.by_default("texts", "messages", "whole")
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
        chosen = batch["segments"] % 2 == 1
        learned, labelled = batch["mask"][chosen].sum(), (batch["labels"] > 0)[chosen].sum()
        assert batch["chosen_learned_per_row"].sum() == pytest.approx(learned)
        assert batch["chosen_tokens_per_row"].sum() == pytest.approx(labelled)
        assert labelled > learned
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
    # What a conversation doesn't learn stays so after its beginning.
    unlearned = {**answer("unlearned"), "weight": 0}
    row = {
        name: [*rest[:1], unlearned, {"role": "user", "content": "go on"}, answer(said)]
        for name, said in (("chosen", "sat"), ("rejected", "x"))
    }
    row["chosen"][1] = unlearned | {"content": "here"}
    for batch in load([row]):
        said: Any = [tokenizer().decode(batch["labels"][r][m]) for r, m in enumerate(batch["mask"])]
        assert "sat" in "".join(said) and "here" not in "".join(said)
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
    "alike": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected` .*alike"),
    "alike as a whole": (
        dict.fromkeys(("chosen", "rejected"), [*BEGIN, answer("b")]),
        "`chosen` and `rejected` .*alike",
    ),
    "one missing": ({"prompt": "a", "chosen": "b"}, "no `rejected` .*prompt"),
    "no question": (
        {"chosen": "a", "rejected": "b"},
        "question.*messages, ",
    ),
    "half whole": (
        {"chosen": [{"role": "user", "content": "a"}, answer("b")], "rejected": "c"},
        "`chosen` and `rejected` .*whole",
    ),
    "empty": ({"prompt": "a", "chosen": " ", "rejected": "b"}, "empty.*chosen"),
    "a number": ({"prompt": "a", "chosen": 3, "rejected": "b"}, "`chosen` .*list"),
    "begins the other": (
        {
            "chosen": [{"role": "user", "content": "a"}, answer("b")],
            "rejected": [{"role": "user", "content": "a"}, answer("b")] * 2,
        },
        "`chosen` and `rejected` .*beginning",
    ),
    "other questions": (
        {
            "chosen": [{"role": "user", "content": "a"}, answer("b")],
            "rejected": [{"role": "user", "content": "c"}, answer("d")],
        },
        "different .*message 1.*'a' .*'c'",
    ),
    "another system message": (
        {
            name: [{"role": "system", "content": said}, *BEGIN, answer(said)]
            for name, said in (("chosen", "a"), ("rejected", "b"))
        },
        "different .*message 1",
    ),
    "another prompt": (
        {"prompt": "c", "chosen": [*BEGIN, answer("b")], "rejected": [*BEGIN, answer("d")]},
        "`chosen` and `rejected` .*`prompt`.*'c'.*'the cat'",
    ),
    "messages of another prompt": (
        {
            "prompt": [{"role": "user", "content": "c"}],
            "chosen": [*BEGIN, answer("b")],
            "rejected": [*BEGIN, answer("d")],
        },
        "`chosen` and `rejected` .*`prompt`",
    ),
    "too long": (
        {"prompt": "a", "chosen": "cat " * 150, "rejected": "sat " * 150},
        "`length`=256",
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
    with refuses(ValueError, "`too_long`", '"error"', '"drop"'):
        load([{"prompt": "a", "chosen": "b", "rejected": "c"}], too_long="cut")
    with refuses(data.DataError, "`data.preferences`"):
        row = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
        data.chat(row, tokenizer(), length=8, batch_size=1, progress=False)


def test_each_pair_has_its_own_margin():
    chosen = {"cat": 1.5, "rain": None, "sat": "-2"}
    rows = [{"prompt": "the", "chosen": c, "rejected": "x", "margin": m} for c, m in chosen.items()]
    dataset, read = load(rows, margins=True), {}
    for batch in dataset:
        for (row, pair), margin in np.ndenumerate(batch["margins"]):
            if batch["pairs"][row, pair]:
                tokens = batch["tokens"][row][batch["segments"][row] == 2 * pair + 1]
                read[tokenizer().decode(tokens)] = float(margin)
    said = {c: read[text] for c in chosen for text in read if c in text}
    assert said == {"cat": 1.5, "rain": 0.0, "sat": -2.0} and len(read) == 3
    for wrong in ("wide", float("nan"), True, []):
        with refuses(data.DataError, "`margin`", repr(wrong)):
            load([{**rows[0], "margin": wrong}], margins=True)
