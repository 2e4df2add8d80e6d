"""Forms of rows, and turns that are merged, kept or dropped before a template has them."""

import csv
import json
import random
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from chats import CHATML, alpaca, assert_same_batches, conversations, openai, sharegpt, tokenizer
from megatrain_jax import data
from megatrain_jax._src.lm.data.report import InvalidRow
from megatrain_jax._src.lm.data.row_formats import to_conversation
from megatrain_jax._src.lm.data.turns import TurnRules
from messages import refuses, tells, warns

Messages = list[dict[str, Any]]


def load(rows: Any, template: str = CHATML, **options: Any) -> data.Dataset:
    options = {"length": 512, "batch_size": 1, "shuffle": False, "progress": False, **options}
    return data.chat(rows, tokenizer(template), **options)


def learned(batch: dict[str, np.ndarray]) -> str:
    return str(tokenizer().decode(batch["labels"][batch["mask"]].tolist()))


def by_transformers(messages: Messages, template: str = CHATML) -> list[int]:
    made = tokenizer(template).apply_chat_template(messages, return_dict=False)
    return made  # type: ignore[return-value]


def tokens_of(rows: Any, template: str = CHATML, **options: Any) -> list[int]:
    (batch,) = load(rows, template, **options)
    return batch["tokens"][batch["segments"] > 0].tolist()


def say(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


# Forms


def system_of(messages: Messages) -> dict[str, Any]:
    return {"system": messages[0]["content"]} if messages[0]["role"] == "system" else {}


# The last two messages are a question and its answer; a prompt may have more before them.
FORMS = {
    "question": lambda m: {
        **system_of(m), "question": m[-2]["content"], "answer": m[-1]["content"],
    },
    "instruction": lambda m: {
        **system_of(m), "instruction": m[-2]["content"], "output": m[-1]["content"],
    },
    "prompt": lambda m: {
        **system_of(m), "prompt": m[-2]["content"], "completion": m[-1]["content"],
    },
    "messages": lambda m: {"prompt": m[:-1], "completion": m[-1:]},
    "message": lambda m: {"prompt": m[:-1], "completion": m[-1]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_questions_and_answers_give_the_same_batches_as_messages(form: str):
    given = conversations(20, turns=1)
    expected = load([openai(messages) for messages in given])
    assert_same_batches(load([FORMS[form](m) for m in given]), expected)


@pytest.mark.parametrize(
    "columns",
    [
        ("prompt", "response"),
        ("input", "output"),
        ("question", "response"),
        ("query", "response"),
        ("query", "answer"),
        ("problem", "solution"),
        ("instruction", "response"),
    ],
)
def test_columns_of_known_names_are_a_question_and_its_answer(columns: tuple[str, str]):
    given = conversations(8, turns=1)
    expected = load([openai(messages) for messages in given])
    names = dict(zip(columns, ("prompt", "completion"), strict=True))
    rows = [
        {**system_of(m), columns[0]: m[-2]["content"], columns[1]: m[-1]["content"]} for m in given
    ]
    dataset = load(rows)
    assert_same_batches(dataset, expected)
    assert dataset.summary.ignored == {}
    # Others of the same meaning are looked for before, but not if the user names these.
    more = [{**row, "text": "no", "messages": "no", "completion": "no"} for row in rows]
    named = load(more, columns={field: own for own, field in names.items()})
    assert_same_batches(named, expected)
    assert named.summary.ignored == dict.fromkeys(("text", "messages", "completion"), len(rows))
    with refuses(data.DataError, columns[0], "field"):
        load([{columns[0]: "a"}])


def test_rows_of_dolly_have_their_context_below_the_instruction():
    row = {"instruction": "Sum up.", "context": "A b.", "response": "C.", "category": "qa"}
    found = to_conversation(row)
    assert [m["content"] for m in found.messages] == ["Sum up.\n\nA b.", "C."]
    assert found.ignored == {"category"}
    assert to_conversation({**row, "context": ""}).messages[0]["content"] == "Sum up."
    both = to_conversation({**row, "input": "x"})
    assert both.messages[0]["content"] == "Sum up.\n\nx"
    assert both.ignored == {"category", "context"}
    dataset = load([{**row, "input": "x"}], columns={"context": "category"})
    assert dataset.summary.ignored == {"input": 1, "context": 1}
    assert learned(next(iter(dataset))) == "C.<|im_end|>"


def test_the_users_names_of_columns_are_read():
    (messages,) = conversations(1)
    expected = load([openai(messages)])
    options: dict[str, Any] = {"length": 128, "batch_size": 1, "progress": False}
    dialog = [{"dialog": messages, "tag": 5}] * 2
    dataset = load(dialog[:1], columns={"messages": "dialog"})
    assert_same_batches(dataset, expected)
    assert dataset.summary.ignored == {"tag": 1}
    texts = data.text([{"body": "a cat"}], tokenizer(), columns={"text": "body"}, **options)
    assert_same_batches(texts, data.text([{"text": "a cat"}], tokenizer(), **options))
    # A source need not have the columns that another one has.
    bodies = [[{"body": "a cat"}], [{"head": "a cat"}]]
    some = data.text(bodies, tokenizer(), columns={"text": "body"}, invalid="drop", **options)
    assert_same_batches(some, texts)
    pairs = [{"q": "a", "good": "b", "bad": "c"}]
    preferred = data.preferences(
        pairs, tokenizer(), columns={"prompt": "q", "chosen": "good", "rejected": "bad"}, **options
    )
    plain = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert_same_batches(preferred, data.preferences(plain, tokenizer(), **options))
    names = {"prompt": "question"}
    assert data.prompts([{"question": "a", "answer": "b"}], columns=names) == [
        {"answer": "b", "prompt": "a"}
    ]
    with refuses(data.DataError, "`columns`", "dialogue"):
        load([openai(messages)], columns={"system": "dialogue"})
    with refuses(ValueError, "`columns`", "'reply'"):
        load(dialog, columns={"reply": "dialog"})
    with refuses(ValueError, "`columns`", "two"):
        load(dialog, columns={"prompt": "dialog", "completion": "dialog"})
    for wrong in ("dialog", ["dialog"], {"messages": 3}):
        with refuses(TypeError, "`columns`", "mapping"):
            load(dialog, columns=wrong)


@pytest.mark.parametrize("field", ["messages", "conversations", "conversation"])
def test_turns_may_be_json_text(field: str, tmp_path: Path):
    given = conversations(8)
    expected = load([openai(messages) for messages in given])
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([field])
        writer.writerows([json.dumps(messages)] for messages in given)
    assert_same_batches(load(path), expected)
    for text in ("[", "5" * 5000, "[" * 100_000, "{}", "[]", "plain"):
        with refuses(data.DataError, "`source`, row 1:", "turns"):
            load([{field: text}])
    with refuses(data.DataError, "`source`, row 1:", "turns"):
        pair = {field: "plain", "chosen": "a", "rejected": "b"}
        data.preferences([pair], tokenizer(), length=64, batch_size=1, progress=False)


THOUGHT = "<think>\nwhich?\n</think>\n"


@pytest.mark.parametrize(
    "roles", [("function_call", "observation"), ("tool_call", "tool_response")]
)
@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_as_turns_of_their_own_are_calls_of_the_assistant(
    roles: tuple[str, str], thought: str, count: int
):
    calls = [{"name": "add", "arguments": {"a": i, "b": [None]}} for i in range(count)]
    text = thought + json.dumps(calls if count > 1 else calls[0])
    turns = [("human", "sum"), (roles[0], text), (roles[1], "3"), ("gpt", "it is 3")]
    row = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    messages, learned, *_ = to_conversation(row)
    called = {"tool_calls": [{"type": "function", "function": call} for call in calls]}
    said = {"content": thought.rstrip()} if thought else {}
    assert messages == [
        say("user", "sum"),
        {"role": "assistant", **said, **called},
        say("tool", "3"),
        say("assistant", "it is 3"),
    ]
    assert learned == [False, True, False, True]
    for wrong in ("add(1)", "[]", "5", '{"arguments": {}}', '[{"name": "a"}, 5]', ""):
        turns[1] = (roles[0], wrong)
        row = {"conversations": [{"from": name, "value": value} for name, value in turns]}
        with pytest.raises(InvalidRow, match="turn 2"):
            to_conversation(row)


def test_of_a_prompt_and_a_completion_only_the_completion_is_learned():
    (messages,) = [m for m in conversations(20, turns=2, system=False) if len(m) == 4][:1]
    row = {"prompt": messages[:2] + messages[2:3], "completion": messages[3:]}
    (batch,) = load([row])
    assert learned(batch) == f"{messages[3]['content']}<|im_end|>"
    assert batch["tokens"][batch["segments"] > 0].tolist() == by_transformers(messages)


def test_a_text_of_prompt_and_completion_learns_the_completion_and_its_end():
    options: dict[str, Any] = {"length": 64, "batch_size": 1, "shuffle": False, "progress": False}
    whole = tokenizer(None).encode("the cat sat on a mat<|endoftext|>")
    # A token that also has the end of the prompt is not learned.
    for prompt, completion, expected in (
        ("the cat sat", " on a mat", " on a mat<|endoftext|>"),
        ("the cat sat ", "on a mat", " a mat<|endoftext|>"),
    ):
        rows = [{"prompt": prompt, "completion": completion, "source": "x"}]
        joins = prompt[-1] == " "
        warned = warns(UserWarning, "1 of 1") if joins else nullcontext()
        with warned:
            dataset = data.text(rows, tokenizer(), **options)
        (batch,) = dataset
        assert batch["tokens"][batch["segments"] > 0].tolist() == whole
        assert learned(batch) == expected
        assert dataset.summary.num_blurred == dataset.summary.num_joined == joins
        assert dataset.summary.ignored == {"source": 1}
    for row, fault in (({"prompt": "a"}, "text"), ({"prompt": "a", "completion": ""}, "empty")):
        with pytest.raises(data.DataError, match=f"`source`, row 1: .*{fault}"):
            data.text([row], tokenizer(), **options)


# Merging


@pytest.mark.parametrize("seed", range(10))
def test_merged_turns_are_those_that_are_joined_by_hand(seed: int):
    rng = random.Random(seed)
    (start,) = conversations(1, seed=seed, turns=3)
    torn: Messages = []
    for message in start:
        for _ in range(rng.randint(1, 3)):
            torn.append(say(message["role"], f"{rng.randint(0, 99)} {message['content']}"))
    joined = [
        say(role, " | ".join(m["content"] for m in group))
        for role, group in groupby(torn, lambda m: m["role"])
    ]
    assert tokens_of([openai(torn)], merge=" | ") == by_transformers(joined)
    assert tokens_of([sharegpt(torn)], merge=" | ") == by_transformers(joined)
    dataset = load([openai(torn), openai(start)], merge=" | ")
    changed = dataset.summary.changed
    assert [*changed.values()] == [1] * (len(torn) > len(start))
    assert all(tells(name, "merged") and name in str(dataset.summary) for name in changed)


def test_what_belongs_to_a_turn_is_merged_with_it():
    def call(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": {}}}

    row = openai(
        [
            say("user", "a"),
            say("assistant", "b", reasoning_content="first", tool_calls=[call("one")]),
            {"role": "assistant", "tool_calls": [call("two")], "reasoning_content": "then"},
            say("tool", "1"),
            say("tool", "2"),
            say("assistant", "c"),
        ]
    )
    messages = to_conversation(row, TurnRules("\n")).messages
    assert [message["role"] for message in messages] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert messages[1] == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "first\nthen",
        "tool_calls": [call("one"), call("two")],
    }
    for field, value in (("weight", 0), ("name", "bob")):
        row = openai(
            [say("user", "a"), say("assistant", "b"), say("assistant", "c", **{field: value})]
        )
        with refuses(InvalidRow, "merged", "message 3", "different"):
            to_conversation(row, TurnRules("\n"))


# Turns that are not learned


def test_turns_that_say_so_are_not_learned():
    (messages,) = [m for m in conversations(20, turns=3, system=False) if len(m) == 6][:1]
    for number in (1, 3, 5):
        rows = [
            openai([{**m, **mark} if i == number else m for i, m in enumerate(messages)])
            for mark in ({"train": False}, {"weight": 0}, {"train": False, "weight": 0.0})
        ]
        for row in rows:
            dataset = load([row])
            (batch,) = dataset
            answers = [m["content"] for i, m in enumerate(messages) if i % 2 and i != number]
            assert learned(batch) == "".join(f"{said}<|im_end|>" for said in answers)
            assert batch["tokens"][batch["segments"] > 0].tolist() == by_transformers(messages)
            assert dataset.summary.ignored == {}
    row = sharegpt(messages)
    for turn in row["conversations"]:
        turn["train"] = True
    assert load([row]).summary.ignored == {"conversations[].train of user": 1}
    for mark, fault in (
        ({"train": "no"}, "`train` .*'no'.*turn 2"),
        ({"train": True, "weight": 0}, "weight .*`train`"),
        ({"train": False}, "learn"),
    ):
        row = openai([say("user", "a"), say("assistant", "b", **mark)])
        with pytest.raises(data.DataError, match=f"`source`, row 1: .*{fault}"):
            load([row])


# Leading turns of the assistant


@pytest.mark.parametrize("template", ["CHATML", "CHATML_MARKED", "LLAMA3", "QWEN3", "MISTRAL"])
@pytest.mark.parametrize("system", [False, True])
def test_leading_turns_are_kept_or_dropped(template: str, system: bool):
    source = getattr(chats, template)
    if system and template == "MISTRAL":
        pytest.skip("it shows no system message")
    head = [say("system", "be kind")] if system else []
    tail = [say("user", "a mat"), say("assistant", "the cat")]
    row = openai([*head, say("assistant", "hello there"), *tail])
    with refuses(data.DataError, "`source`, row 1:", 'leading="keep"', '"drop"'):
        load([row], source)
    (kept,) = load([row], source, leading="keep")
    assert kept["tokens"][kept["segments"] > 0].tolist() == by_transformers(row["messages"], source)
    said = learned(kept)
    for token in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<think>\n\n</think>\n\n"):
        said = said.replace(token, "|")
    assert said.replace("||", "|").strip("|").lstrip() in (
        "hello there|the cat", "hello there| the cat",
    )  # fmt: skip
    assert tokens_of([row], source, leading="drop") == by_transformers([*head, *tail], source)
    summary = load([row], source, leading="drop").summary
    ((said, number),) = summary.changed.items()
    assert tells(said, "dropped", "user") and number == 1


def test_orders_that_no_rule_allows_stay_errors():
    row = openai([say("assistant", "a")])
    for leading, message in (("drop", "user"), ("error", "start")):
        with pytest.raises(data.DataError, match=f"`source`, row 1: .*{message}"):
            load([row], leading=leading)
    twice = openai([say("user", "a"), say("user", "b"), say("assistant", "c")])
    with refuses(data.DataError, "message 2", "`merge="):
        load([twice], leading="keep")
    with refuses(ValueError, "`leading`", "'some'"):
        load([twice], leading="some")
    with refuses(TypeError, "`merge`", True):
        load([twice], merge=True)
    history = alpaca([say("user", "a"), say("assistant", "b")])
    assert tokens_of([history]) == by_transformers([say("user", "a"), say("assistant", "b")])
