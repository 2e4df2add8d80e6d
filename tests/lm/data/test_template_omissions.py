"""Fields that a chat template leaves out are counted, compared with templates made to leave out."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import chats
from chats import openai, tokenizer, write
from megatrain_jax import data

THOUGHT = "content before </think> of assistant"
EXTRA = {
    "user": ("name",),
    "assistant": ("reasoning_content", "name"),  # Transformers knows other names of the first
    "tool": ("name", "tool_call_id"),
}


def load(tmp_path: Path, rows: list[Any], template: str) -> data.Dataset:
    path = write(tmp_path / "a.jsonl", rows)
    return data.chat(path, tokenizer(template), length=4096, batch_size=1, progress=False)


def not_shown(tmp_path: Path, rows: list[Any], template: str) -> dict[str, int]:
    return load(tmp_path, rows, template).summary.not_shown


def template_of(shown: set[tuple[str, str]]) -> str:
    """Shows these fields of these roles, and all that the assistant says."""
    fields = "".join(
        f"{{% if m.role == '{role}' and m.{field} %}}[{{{{ m.{field} }}}}]{{% endif %}}"
        for role, field in sorted(shown)
    )
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + fields + "{% if m.role == 'assistant'"
        " %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Of few words, so that what is left out is somewhere else in the text, too."""
    roles = ["user", "assistant"]
    if rng.random() < 0.5:
        roles.insert(0, "system")
    for _ in range(rng.randrange(3)):
        roles += [rng.choice(["user", "tool"]), "assistant"]
    messages = []
    for role in roles:
        said = rng.choice("abc") if role == "assistant" else rng.choice(["a", "b", role])
        message = {"role": role, "content": said}
        for field in EXTRA.get(role, ()):
            if rng.random() < 0.5:
                message[field] = rng.choice(["a", "b", "c", " ", ""])
        messages.append(message)
    return messages


@pytest.mark.parametrize("seed", range(25))
def test_what_a_template_leaves_out_is_counted_by_rows(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    every = [(role, field) for role, fields in EXTRA.items() for field in fields]
    every += [(role, "content") for role in ("system", "user", "tool")]
    shown = {pair for pair in every if rng.random() < 0.6}
    rows = [conversation(rng) for _ in range(8)]
    expected: Counter[str] = Counter()
    for messages in rows:
        pairs = {(m["role"], f) for m in messages for f in m if f != "role" and m[f].strip()}
        expected.update(f"{f} of {r}" for r, f in pairs - shown - {("assistant", "content")})
    found = not_shown(tmp_path, [openai(messages) for messages in rows], template_of(shown))
    assert found == expected


def test_reasoning_that_vanishes_is_said_in_the_summary(tmp_path: Path):
    rows = [
        openai(
            [
                {"role": "user", "content": "sum"},
                {"role": "assistant", "content": "two", "reasoning_content": f"thought {number}"},
            ]
        )
        for number in range(3)
    ]
    dataset = load(tmp_path, rows, chats.CHATML)
    assert dataset.summary.not_shown == {"reasoning_content of assistant": 3}
    assert re.search(r"reasoning_content .*assistant .*\b3\b", str(dataset.summary))
    assert "reasoning_content" not in str(load(tmp_path, rows[:1], SHOWING).summary)


SHOWING = chats.CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")


def test_reasoning_in_the_content_is_counted_where_earlier_answers_lose_it(tmp_path: Path):
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nfirst answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nlast thought\n</think>\n\nlast answer"},
    ]
    last_only = [openai(turns[2:]), openai([*turns[:1], {**turns[1], "content": "x"}, *turns[2:]])]
    assert not_shown(tmp_path, last_only, chats.QWEN3) == {}
    # The thought that is lost is in the answer as well.
    assert not_shown(tmp_path, [openai(turns)], chats.QWEN3) == {THOUGHT: 1}
    assert not_shown(tmp_path, [openai(turns)], chats.CHATML) == {}


READS = {
    "in capitals": "{{ m.name | upper }}",
    "compared": "{% if m.name == 'zoe' %}she{% else %}they{% endif %}",
    "refuses others": "{% if m.name != 'zoe' %}{{ raise_exception('who?') }}{% endif %}",
    "of nine letters": "{% if m.name|length % 6 != 3 %}{{ raise_exception('9') }}{% endif %}"
    "{{ m.name }}",
}


@pytest.mark.parametrize("how", READS)
def test_what_a_template_reads_is_not_counted(tmp_path: Path, how: str):
    user = "{% if m.role == 'user' %}" + READS[how] + "{% endif %}{{ m.content }}"
    messages = [
        {"role": "user", "content": "who am I", "name": "zoe"},
        {"role": "assistant", "content": "zoe", "thinking": "hm"},
    ]
    template = chats.CHATML.replace("{{ m.content }}", user)
    assert not_shown(tmp_path, [openai(messages)], template) == {"thinking of assistant": 1}


def test_tools_and_their_calls_are_counted(tmp_path: Path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "I add", "tool_calls": [call], "weight": 0},
            {"role": "tool", "content": "2", "tool_call_id": "000000001"},
            {"role": "assistant", "content": "two"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    shows_calls = chats.CHATML.replace("{{ m.content }}", "{{ m.content }}" + calls)
    ids = {"tool_call_id of tool": 1}
    shows_all = "{% if tools %}{{ tools | tojson }}{% endif %}" + shows_calls
    assert not_shown(tmp_path, [row], shows_all) == ids
    hides_tools = "{% if false %}{{ tools }}{% endif %}"
    assert not_shown(tmp_path, [row], hides_tools + shows_calls) == {**ids, "tools": 1}
    hidden = {**ids, "tools": 1, "tool_calls of assistant": 1}
    assert not_shown(tmp_path, [row], hides_tools + chats.CHATML) == hidden
    # A template that shows no words beside a call leaves out nothing where there are none.
    words = "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    only_calls = chats.CHATML.replace("{{ m.content }}", words + calls)
    for said, lost in (("", {}), ("\n", {}), ("I add", {"content of assistant": 1})):
        row["messages"][1] |= {"content": said, "weight": 0}
        assert not_shown(tmp_path, [row], hides_tools + only_calls) == {**ids, "tools": 1, **lost}


def test_marked_templates_are_asked_as_well(tmp_path: Path):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "thinking": "hm"},
    ]
    template = chats.CHATML_MARKED.replace("in messages %}", "in messages[1:] %}", 1)
    found = not_shown(tmp_path, [openai(messages)], template)
    assert found == {"content of system": 1, "thinking of assistant": 1}
