"""What is learned of a conversation, compared with text that is put together by hand."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from chats import conversations, openai, tokenizer, write
from megatrain_jax import data
from messages import refuses, tells, warns

# Parts of the text, and whether the assistant says them.
Parts = list[tuple[str, bool]]
Messages = list[dict[str, str]]


def chatml(messages: Messages, header: bool = True) -> Parts:
    parts: Parts = []
    if header and messages[0]["role"] != "system":
        parts.append(("<|im_start|>system\nBe kind.<|im_end|>\n", False))
    for message in messages:
        answers = message["role"] == "assistant"
        parts.append((f"<|im_start|>{message['role']}\n", False))
        parts.append((f"{message['content']}<|im_end|>", answers))
        parts.append(("\n", False))
    return parts


def llama3(messages: Messages) -> Parts:
    parts: Parts = [("<s>", False)]
    for message in messages:
        parts.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        parts.append((f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"))
    return parts


def gemma(messages: Messages) -> Parts:
    parts: Parts = [("<s>", False)]
    for message in messages:
        answers = message["role"] == "assistant"
        parts.append((f"<start_of_turn>{'model' if answers else 'user'}\n", False))
        parts.append((f"{message['content'].strip()}<end_of_turn>", answers))
        parts.append(("\n", False))
    return parts


def phi(messages: Messages) -> Parts:
    parts: Parts = []
    for index, message in enumerate(messages):
        answers = message["role"] == "assistant"
        parts.append((f"<|{message['role']}|>\n", False))
        parts.append((f"{message['content']}<|end|>", answers))
        last = index == len(messages) - 1
        parts += [("\n<|endoftext|>", True)] if last else [("\n", False)]
    return parts


def mistral(messages: Messages) -> Parts:
    parts: Parts = [("<s>", False)]
    for message in messages:
        if message["role"] == "user":
            parts.append((f"[INST] {message['content']} [/INST]", False))
        else:
            parts.append((f" {message['content']}<|endoftext|>", True))
    return parts


def qwen3(messages: Messages) -> Parts:
    parts: Parts = []
    for index, message in enumerate(messages):
        answers = message["role"] == "assistant"
        parts.append((f"<|im_start|>{message['role']}\n", False))
        content = message["content"]
        if answers:
            thought, _, said = content.rpartition("</think>")
            thought = thought.replace("<think>", "").strip("\n")
            content = said.lstrip("\n")
            if index == len(messages) - 1:
                content = f"<think>\n{thought}\n</think>\n\n{content}"
        parts.append((f"{content}<|im_end|>", answers))
        parts.append(("\n", False))
    return parts


def qwen3_thinking(messages: Messages) -> Parts:
    """As `qwen3`, but the block of reasoning is opened in the prompt for the last answer."""
    parts = qwen3(messages)
    (said, _), end = parts[-2:]
    return [*parts[:-2], ("<think>\n", False), (said.removeprefix("<think>\n"), True), end]


def r1(messages: Messages) -> Parts:
    parts: Parts = [("<s>", False)]
    for message in messages:
        answers = message["role"] == "assistant"
        parts.append(("<|assistant|>" if answers else "<|user|>", False))
        said = message["content"].rpartition("</think>")[2] if answers else message["content"]
        parts.append((said + "<|endoftext|>" * answers, answers))
    return parts


def glm(messages: Messages) -> Parts:
    parts: Parts = [("<s>", False)]
    for index, message in enumerate(messages):
        answers = message["role"] == "assistant"
        # The question's mark is the end of the answer before it.
        parts.append((f"<|{message['role']}|>", not answers and index > 0))
        parts.append(("\n", False))
        thought, _, said = message["content"].rpartition("</think>")
        if answers:
            shown = thought.replace("<think>", "") if index == len(messages) - 1 else ""
            said = f"<think>{shown.strip()}</think>\n{said.strip()}"
        parts.append((said, answers))
    return [*parts, ("<|user|>", True)]


def harmony(messages: Messages) -> Parts:
    parts: Parts = []
    for index, message in enumerate(messages):
        answers = message["role"] == "assistant"
        end = "<|endoftext|>" if index == len(messages) - 1 else "<|im_end|>"
        parts.append((f"<|im_start|>{message['role']}\n", False))
        parts.append((message["content"] + end, answers))
    return parts


STYLES = {
    "chatml": (chats.CHATML, chatml),
    "chatml-marked": (chats.CHATML_MARKED, chatml),
    "chatml-marked-short": (chats.CHATML_MARKED_SHORT, chatml),
    "llama3": (chats.LLAMA3, llama3),
    "gemma": (chats.GEMMA, gemma),
    "phi": (chats.PHI, phi),
    "mistral": (chats.MISTRAL, mistral),
    "qwen3": (chats.QWEN3, qwen3),
    "qwen3-thinking": (chats.QWEN3_THINKING, qwen3_thinking),
    "r1": (chats.R1, r1),
    "glm": (chats.GLM, glm),
    "harmony": (chats.HARMONY, harmony),
}


def by_hand(parts: Parts) -> tuple[list[int], list[int], list[bool]]:
    """Tokens, labels and mask of a document; a token is learned if all its characters are."""
    text = "".join(part for part, _ in parts)
    said = [answers for part, answers in parts for _ in part]
    # No template here cuts a token in two, and offsets of this tokenizer leave nothing out.
    encoding = tokenizer(None)(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens: Any = encoding["input_ids"]
    offsets: Any = encoding["offset_mapping"]
    learned = [all(said[start:end]) for start, end in offsets]
    return tokens, [*tokens[1:], 0], [*learned[1:], False]


def batches_of(path: Path, template: str | None, trim: bool = False, **options: Any) -> Any:
    options = {"length": 1024, "batch_size": 1, "shuffle": False, "progress": False, **options}
    return data.chat(path, tokenizer(template, trim), **options)


def single(tmp_path: Path, messages: Any, template: str, trim: bool = False, **options: Any) -> Any:
    row = messages if isinstance(messages, dict) else openai(messages)
    (batch,) = batches_of(write(tmp_path / "one.jsonl", [row]), template, trim, **options)
    size = int((batch["segments"][0] > 0).sum())
    return {k: v[0][:size].tolist() for k, v in batch.items() if k != "learned_per_row"}


def learned_text(line: dict[str, list[Any]]) -> str:
    tokens = [token for token, counts in zip(line["labels"], line["mask"], strict=True) if counts]
    return str(tokenizer().decode(tokens))


@pytest.mark.parametrize("trim", [False, True], ids=["offsets", "trimmed"])
@pytest.mark.parametrize("style", STYLES)
def test_learns_what_the_assistant_says_and_the_end_of_its_turns(
    tmp_path: Path, style: str, trim: bool
):
    template, parts = STYLES[style]
    for seed in range(6):
        (messages,) = conversations(1, seed=seed, turns=4, system=style.startswith("chatml"))
        line = single(tmp_path, messages, template, trim)
        tokens, labels, mask = by_hand(parts(messages))
        assert line["tokens"] == tokens
        assert line["labels"] == labels
        assert line["mask"] == mask
        assert line["segments"] == [1] * len(tokens)


def test_learns_all_if_asked(tmp_path: Path):
    (messages,) = conversations(1)
    line = single(tmp_path, messages, chats.CHATML, train_on="all")
    assert line["mask"] == [True] * (len(line["tokens"]) - 1) + [False]


@pytest.mark.parametrize("style", ["chatml", "qwen3", "qwen3-thinking", "r1", "glm"])
def test_reasoning_is_learned_where_the_template_shows_it(tmp_path: Path, style: str):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nfirst thought\n</think>\n\nfirst answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nlast thought\n</think>\n\nlast answer"},
    ]
    template, parts = STYLES[style]
    line = single(tmp_path, messages, template)
    assert (line["tokens"], line["labels"], line["mask"]) == by_hand(parts(messages))
    shown = {"chatml": 2, "qwen3": 1, "qwen3-thinking": 1, "r1": 0, "glm": 1}
    assert learned_text(line).count("thought") == shown[style]


def test_a_marked_template_agrees_with_transformers(tmp_path: Path):
    for seed in range(5):
        (messages,) = conversations(1, seed=seed)
        line = single(tmp_path, messages, chats.CHATML_MARKED)
        theirs: Any = tokenizer(chats.CHATML_MARKED).apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert line["tokens"] == theirs["input_ids"]
        assert line["mask"] == [bool(one) for one in theirs["assistant_masks"][1:]] + [False]


def test_template_variables_reach_the_template(tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    thinks = single(tmp_path, messages, chats.QWEN3)
    assert learned_text(thinks) == "<think>\n\n</think>\n\nhello<|im_end|>"
    earlier = [*messages, {"role": "user", "content": "and"}, messages[1]]
    both = single(tmp_path, earlier, chats.QWEN3, template_variables={"enable_thinking": False})
    assert learned_text(both) == "hello<|im_end|>" * 2
    silent = single(tmp_path, messages, chats.QWEN3, template_variables={"enable_thinking": False})
    assert learned_text(silent) == "hello<|im_end|>"
    assert silent["tokens"] == thinks["tokens"]


def test_a_turn_with_a_weight_of_zero_is_not_learned(tmp_path: Path):
    (messages,) = [m for m in conversations(20, turns=2, system=False) if len(m) == 4][:1]
    row = openai([{**m, "weight": int(i != 1)} for i, m in enumerate(messages)])
    for template in (chats.CHATML, chats.CHATML_MARKED):
        line = single(tmp_path, row, template)
        assert learned_text(line) == f"{messages[3]['content']}<|im_end|>"


@pytest.mark.parametrize("mark", ["end", "question", "both", "call"])
def test_marks_around_other_text_than_the_answer_are_refused(tmp_path: Path, mark: str):
    inside, outside = "{% generation %}", "{% endgeneration %}"
    said = "{{ m.content }}"
    whole = inside + said + "<|im_end|>" + outside
    template = {
        "end": chats.CHATML_MARKED.replace(inside + said, said + inside),
        "question": chats.CHATML_MARKED.replace("== 'assistant'", "== 'user'"),
        "both": chats.CHATML_MARKED.replace(
            "{% else %}" + said + "<|im_end|>", "{% else %}" + whole
        ),
        "call": chats.CHATML_MARKED + "{% if tools %}{% endif %}",
    }[mark]
    (messages,) = conversations(1, turns=2, system=False)
    row: dict[str, Any] = openai(messages)
    if mark == "call":
        call = {"type": "function", "function": {"name": "add", "arguments": {}}}
        row["messages"] = [messages[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(data.DataError, match="line 1: .* message 2"):
        single(tmp_path, row, template)


def test_an_answer_may_have_several_marks(tmp_path: Path):
    """Such as one around the end of the text, and one of its thoughts, which are left out later."""
    end = (
        "{% if loop.last %}{% generation %}<|endoftext|>{% endgeneration %}{% endif %}{% endfor %}"
    )
    template = chats.CHATML_MARKED.replace("{% endfor %}", end)
    said = [" while then", "sat on", "<think>so</think>rain"]
    for weights in ((1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        messages = [
            message
            for text, weight in zip(said, weights, strict=True)
            for message in (
                {"role": "user", "content": "the"},
                {"role": "assistant", "content": text, "weight": weight},
            )
        ]
        line = single(tmp_path, openai(messages), template)
        learned = [
            f"{text}<|im_end|>" for text, weight in zip(said, weights, strict=True) if weight
        ]
        assert learned_text(line) == "".join(learned) + "<|endoftext|>" * weights[2]
    template = template.replace("{{ m.content }}<|im", "{{ m.content.split('>')[-1] }}<|im", 1)
    thinking = [messages[0], {"role": "assistant", "content": said[2]}]
    line = single(tmp_path, openai(thinking), template)
    assert learned_text(line) == "rain<|im_end|><|endoftext|>"
    # A turn ends behind its last part alone.
    options: Any = {"length": 64, "batch_size": 1, "progress": False}
    dataset = data.chat([openai(thinking)], tokenizer(template), **options)
    assert tokenizer().decode([*dataset.end_tokens]) == "<|endoftext|>"


def test_tools_are_called_and_answer(tmp_path: Path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + chats.CHATML.replace(
        "{{ m.content }}",
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "sum"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    line = single(tmp_path, row, template)
    assert learned_text(line) == 'add({"x": 1})<|im_end|>two<|im_end|>'
    with refuses(data.DataError, "line 1:", "template", "tools"):
        single(tmp_path, row, chats.CHATML)
    for tools in ("add", [{"name": "add"}, "add"], {"name": "add"}):
        with refuses(data.DataError, "line 1:", "tools", "JSON"):
            single(tmp_path, row | {"tools": tools}, template)


def test_a_token_shared_with_the_prompt_is_counted_and_not_learned(tmp_path: Path):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    made = tokenizer(template)
    made.add_tokens([":while"])
    rows = [
        openai([{"role": "user", "content": "a"}, {"role": "assistant", "content": "while on"}])
    ]
    path = write(tmp_path / "a.jsonl", rows)
    with warns(UserWarning, 1, "space", "completion"):
        dataset = data.chat(path, made, length=64, batch_size=1, progress=False)
    (batch,) = dataset
    assert made.decode(batch["labels"][batch["mask"]].tolist()) == " on<|endoftext|>"
    assert (dataset.summary.num_blurred, dataset.summary.num_joined) == (1, 1)
    assert tells(str(dataset.summary), "share", "token", "prompt")


@pytest.mark.parametrize("style", ["glm", "harmony", "phi"])
def test_only_what_ends_the_writing_is_an_end(tmp_path: Path, style: str):
    """The end of a turn within a conversation may be no end of an answer, as with gpt-oss."""
    (messages,) = [m for m in conversations(20, turns=3, system=False) if len(m) == 6][:1]
    path = write(tmp_path / "one.jsonl", [openai(messages)])
    end = {"glm": "<|user|>"}.get(style, "<|endoftext|>")
    for train_on in ("assistant", "all"):
        made = batches_of(path, STYLES[style][0], train_on=train_on)
        assert made.end_tokens == (tokenizer().convert_tokens_to_ids(end),)


def test_a_call_of_tools_ends_with_the_mark_of_their_answer(tmp_path: Path):
    template = chats.GLM.replace(
        "{{ parts[-1] | trim }}",
        "{{ parts[-1] | trim }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}",
    ).replace("<|{{ m.role }}|>", "{{ '<|end|>' if m.role == 'tool' else '<|' ~ m.role ~ '|>' }}")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    question = {"role": "user", "content": "sum"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    line = single(tmp_path, [question, calling], template)
    assert learned_text(line) == "<think></think>\n[add]<|end|>"
    answered = [question, calling, {"role": "tool", "content": "2"}]
    messages = [*answered, {"role": "assistant", "content": "two"}]
    path = write(tmp_path / "a.jsonl", [openai(messages)])
    made = batches_of(path, template)
    expected = "<think></think>\n[add]<|end|><think></think>\ntwo<|user|>"
    (batch,) = made
    assert tokenizer().decode(batch["labels"][batch["mask"]].tolist()) == expected
    ends = [tokenizer().convert_tokens_to_ids(name) for name in ("<|user|>", "<|end|>")]
    assert sorted(made.end_tokens) == sorted(ends)


@pytest.mark.parametrize("content", ["", "I call"])
def test_an_answer_without_one_of_its_calls_is_refused(content, tmp_path: Path):
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {}}}
        for name in ("add", "find")
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    messages = [{"role": "user", "content": "sum"}, answer]
    for shown in ("", "[:1]", "[1:]"):
        each = "{% for c in (m.tool_calls or [])" + shown + " %}[{{ c.function.name }}]{% endfor %}"
        template = chats.CHATML.replace("{{ m.content }}", "{{ m.content }}" + each)
        with refuses(data.DataError, "assistant's words") if shown else nullcontext():
            line = single(tmp_path, messages, template)
            assert learned_text(line) == f"{content}[add][find]<|im_end|>"


def test_a_template_that_refuses_a_question_behind_an_answer_has_no_end(tmp_path: Path):
    refusing = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    messages = [{"role": name, "content": "sum"} for name in ("user", "assistant")]
    with refuses(data.DataError, "special token", "{% generation %}"):
        single(tmp_path, messages, chats.GLM + refusing)


def test_answers_are_found_in_turns_that_are_shown_otherwise_later(tmp_path: Path):
    """Reasoning before a call of tools, left out once another question follows."""
    template = chats.QWEN3.replace(
        "{{ content }}<|im_end|>",
        "{{ content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
        "<|im_end|>",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for said in ("on ", ""):
        messages = [
            {"role": "user", "content": "sum"},
            {
                "role": "assistant",
                "content": f"<think>while</think>{said}",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "<think>then</think>two"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "<think>last</think>lines"},
        ]
        line = single(tmp_path, messages, template)
        learned = f"{said}[add]<|im_end|>two<|im_end|><think>\nlast\n</think>\n\nlines<|im_end|>"
        assert learned_text(line) == learned


# Answers whose first token joins the prompt's end


SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def joined_rows(kind: str, *answers: str) -> list[dict[str, Any]]:
    """Rows with a space at the end of the prompt, which belongs to the answer's first token."""
    prompt = {"text": "while the ", "chat": "the"}.get(kind, "the")
    if kind == "preferences":
        return [{"prompt": prompt, "chosen": a, "rejected": f"{a} fell"} for a in answers]
    return [{"prompt": prompt, "completion": a, "label": i > 0} for i, a in enumerate(answers)]


@pytest.mark.parametrize("kind", ["text", "chat", "preferences", "unpaired"])
def test_answers_that_join_the_prompt_are_warned_of_or_refused(tmp_path: Path, kind: str):
    made = tokenizer(SPACED)
    options: dict[str, Any] = {"length": 64, "batch_size": 1, "shuffle": False, "progress": False}

    def read(rows: list[dict[str, Any]], **more: Any) -> data.Dataset:
        return getattr(data, kind)(rows, made, **options, **more)

    with warns(UserWarning, 2, "space", "completion"):
        some = read(joined_rows(kind, "cat sat", "mat sat"))
    assert some.summary.num_joined == 2
    # All of an answer: nothing but the end would be learned.
    rows = joined_rows(kind, "cat", "mat sat", "mat")
    with refuses(data.DataError, "space", "completion") as caught:
        read(rows)
    assert "row 1" in str(caught.value) and "row 3" in str(caught.value)
    if kind != "unpaired":  # there, each row's answer is another's mismatched one
        assert "row 2" not in str(caught.value)
        with warns(UserWarning, "1 of 1"):
            kept = read(rows, invalid="drop")
        assert sum(kept.summary.left_out.values()) == 2
        # Rows that are left out have no answers.
        assert kept.summary.num_blurred == (2 if kind == "preferences" else 1)


def test_answers_after_the_prompts_last_word_are_learned_whole():
    made, rows = tokenizer(), [{"prompt": "while the", "completion": " cat"}]
    (batch,) = data.text(rows, made, length=64, batch_size=1, progress=False)
    assert made.decode(batch["labels"][batch["mask"]].tolist()) == " cat<|endoftext|>"
    rows = [{"prompt": "Sentiment: ", "completion": "positive"}] * 8
    with refuses(data.DataError, "8 of 8"):
        data.text(rows, made_with("positive"), length=64, batch_size=1, progress=False)


def made_with(word: str) -> Any:
    """A tokenizer that has a word with the space before it as a token."""
    made = tokenizer()
    made.add_tokens([f" {word}"])
    return made


def test_a_reused_cache_warns_of_lost_tokens_again(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", joined_rows("text", "cat sat", "mat sat"))
    for _ in range(2):
        with warns(UserWarning, "2 of 2"):
            made = data.text(
                path, tokenizer(), length=64, batch_size=1, cache=tmp_path / "c", progress=False
            )
    assert made.summary.is_reused


# Templates that are refused


def refused(tmp_path: Path, template: str | None, messages: Messages | None = None) -> str:
    path = write(tmp_path / "a.jsonl", [openai(messages or conversations(1, turns=1)[0])])
    with pytest.raises(data.DataError) as caught:
        batches_of(path, template)
    return str(caught.value)


def test_no_template_says_what_to_pass(tmp_path: Path):
    message = refused(tmp_path, None)
    assert tells(message, "template", "`chat_template=`", "`data.text`")
    path = write(tmp_path / "a.jsonl", [openai(m) for m in conversations(3)])
    ours = batches_of(path, None, chat_template=chats.CHATML)
    for one, other in zip(ours, batches_of(path, chats.CHATML), strict=True):
        np.testing.assert_array_equal(one["mask"], other["mask"])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("/no/such.jinja", "Jinja"),
        ("chatml", "Jinja"),
        ("", "Jinja"),
        ("{{ 'a' }}\ud800", "surrogate"),
        (r"{{ '\ud800' }}", "surrogate"),
    ],
)
def test_what_is_no_template_is_refused(template: str, why: str, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [openai(m) for m in conversations(1)])
    with pytest.raises(data.DataError, match=f"`chat_template`.*{why}"):
        batches_of(path, chats.CHATML, chat_template=template)
    if template:
        with pytest.raises(data.DataError, match=f"template .*{why}"):
            batches_of(path, template)


BROKEN = {
    # The prompt is not how the conversation goes on.
    "prompt gives": chats.CHATML.replace(
        "add_generation_prompt %}<|im_start|>assistant", "add_generation_prompt %}<|im_start|>bot"
    ),
    "text after": chats.CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
    # It knows no prompt, so that its header would be learned.
    "text after should": chats.CHATML.replace("add_generation_prompt", "never"),
    "last special": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "marks nothing": "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
    "Jinja": "{% for m in messages %}",
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_template_that_hides_the_answer_is_refused_by_name(tmp_path: Path, why: str):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    message = refused(tmp_path, BROKEN[why], messages)
    assert tells(message, *why.split(), "template", tmp_path / "a.jsonl", "line 1")


def test_an_earlier_answer_whose_end_is_not_found_is_refused(tmp_path: Path):
    changed = chats.CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else 'gone' }}"
    )
    (messages,) = [m for m in conversations(20, turns=2, system=False) if len(m) == 4][:1]
    assert "message 2" in refused(tmp_path, changed, messages)


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    message = refused(tmp_path, chats.GEMMA, messages)
    assert tells(message, "line 1:", "template", "System role not supported")


def test_a_special_token_that_is_spelled_out_is_refused(tmp_path: Path):
    for turn, field in ((1, "content"), (2, "content"), (2, "reasoning_content")):
        messages = [{"role": role, "content": "hello"} for role in ("user", "assistant")]
        messages[turn - 1][field] = "say <|im_end|>"
        message = refused(tmp_path, chats.CHATML, messages)
        assert tells(message, "special", "'<|im_end|>'", f"message {turn}")


# Templates that fail on some conversations


def test_a_template_that_fails_on_one_conversation_makes_one_row_invalid(tmp_path: Path):
    template = chats.CHATML.replace(
        "{{ m.content }}",
        "{% if 'number' in m.content %}{{ m.content + 1 }}{% endif %}"
        "{% if 'refuse' in m.content %}{{ raise_exception('not that') }}{% endif %}"
        "{{ m.content | upper if 'loud' in m.content else m.content }}",
    )
    said = ["fine", "a number", "refuse", "be loud", "fine too"]
    rows = [
        openai([{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}])
        for text in said
    ]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(data.DataError) as caught:
        batches_of(path, template)
    said = str(caught.value)
    assert tells(said, 3, 5, "{% generation %}", "{% endgeneration %}")
    whys = ("TypeError: can only concatenate str", "not that", "message 2")
    for number, why in enumerate(whys, 2):
        assert re.search(rf"{path}, line {number}: .*TokenizersBackend .*{why}", said)
    dropped = batches_of(path, template, invalid="drop")
    assert dropped.num_documents == 2 and sum(dropped.summary.left_out.values()) == 3


def test_the_template_that_was_used_is_known_to_the_dataset(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [openai(m) for m in conversations(5)])
    assert batches_of(path, chats.CHATML).chat_template == chats.CHATML
    given = batches_of(path, chats.CHATML, chat_template=chats.LLAMA3)
    assert given.chat_template == chats.LLAMA3
    assert all(side.chat_template == chats.LLAMA3 for side in given.split(0.4))
