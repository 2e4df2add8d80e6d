"""What is learned with models' own templates, compared with the training templates of TRL."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import transformers

from chats import tokenizer
from megatrain_jax import data

trl = pytest.importorskip("trl", reason='compared with TRL: pip install -e ".[torch]"')
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# Models' own templates, and what their prompts for an answer end with, which TRL's training
# templates count as a part of the answer.
PROMPTS = {
    "glm4moe": "",
    "nemotron_3_nano": "<think>\n",
    "nemotron_3_super": "<think>\n",
    "nemotron_3_ultra": "<think>\n",
    "nemotron_3_5_lightning": "<think>\n",
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "qwen3_instruct_2507": "",
    "llama3": "",
    "phi3": "",
    "cohere": "",
    "deepseekv3": "<｜Assistant｜>",
}
_SPECIAL = re.compile(r"<\|[^|<>\s']*\|>|<｜[^｜]*｜>|\[gMASK\]|<sop>|<\|turn>|<turn\|>")
CALL = {"type": "function", "id": "a1", "function": {"name": "f", "arguments": {"x": "1"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
Messages = list[dict[str, Any]]


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


RESULT = {"role": "tool", "name": "f", "content": "42", "tool_call_id": "a1"}
CONVERSATIONS: dict[str, Messages] = {
    "one turn": [asks("cat"), says("sat on")],
    "two turns": [asks("cat"), says("sat on"), asks("mat"), says("rain fell")],
    "reasoning": [
        asks("cat"),
        says("sat on", reasoning_content="while"),
        asks("mat"),
        says("rain fell", reasoning_content="then"),
    ],
    "thinking": [
        asks("cat"),
        says("<think>\nwhile\n</think>\n\nsat on"),
        asks("mat"),
        says("<think>\nthen\n</think>\n\nrain fell"),
    ],
    "call": [asks("cat"), says("", tool_calls=[CALL])],
    "result": [asks("cat"), says("", tool_calls=[CALL]), RESULT, says("rain fell")],
    "reasoning and calls": [
        asks("cat"),
        says("on", tool_calls=[CALL], reasoning_content="while"),
        RESULT,
        says("rain fell", reasoning_content="then"),
        asks("mat"),
        says("two", reasoning_content="lines"),
    ],
}
# Conversations that the template itself doesn't render, or not in whole.
LEFT_OUT = {
    "gptoss": ("reasoning and calls",),
    **dict.fromkeys(
        ("llama3", "phi3", "cohere", "deepseekv3"), ("call", "result", "reasoning and calls")
    ),
}


def tokenizer_of(template: str) -> transformers.PreTrainedTokenizerFast:
    made = tokenizer(template)
    names: Any = sorted(set(_SPECIAL.findall(template)))
    made.add_special_tokens({"additional_special_tokens": names})
    return made


@pytest.mark.parametrize("name", PROMPTS)
def test_a_models_own_template_learns_what_trls_training_template_marks(name):
    made = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    training = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    for kind, messages in CONVERSATIONS.items():
        if kind in LEFT_OUT.get(name, ()):
            continue
        row: dict[str, Any] = {"messages": messages}
        if any("tool_calls" in message for message in messages):
            row["tools"] = [TOOL]
        theirs: Any = made.apply_chat_template(
            messages,
            tools=row.get("tools"),
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        pairs = zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
        turns = [
            str(made.decode([token for token, _ in group]))
            for marked, group in groupby(pairs, key=lambda pair: pair[1])
            if marked
        ]
        expected = [turn.removeprefix(PROMPTS[name]).rstrip("\n") for turn in turns]
        (batch,) = data.chat([row], made, length=2048, batch_size=1, progress=False)
        learned = made.decode(batch["labels"][batch["mask"]].tolist())
        assert learned == "".join(expected), kind
        if name == "glm4moe":  # the mark of the next turn is in the text, too
            size = int((batch["segments"] > 0).sum())
            assert batch["tokens"][0, :size].tolist() == theirs["input_ids"], kind


@pytest.mark.parametrize("name", ["phi3", "phi3_5", "diffusion_gemma"])
def test_turns_of_no_weight_are_left_out_of_trls_marks(name):
    own = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    training = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    learned = []
    for unlearned in (1, 3):
        messages = [dict(message) for message in CONVERSATIONS["two turns"]]
        messages[unlearned]["weight"] = 0
        for template in (own, training):
            made = tokenizer_of(template)
            (batch,) = data.chat(
                [{"messages": messages}], made, length=2048, batch_size=1, progress=False
            )
            text = str(made.decode(batch["labels"][batch["mask"]].tolist()))
            learned.append(text.replace("\n", ""))
    assert "sat on" not in learned[1] and "rain fell" not in learned[3]
    assert learned[0::2] == learned[1::2]


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "lfm2"])
def test_trls_marks_of_text_without_the_answer_are_refused(name):
    training = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    row: dict[str, Any] = {"messages": CONVERSATIONS["one turn"]}
    if name == "lfm2":
        row = {"messages": CONVERSATIONS["result"], "tools": [TOOL]}
    with pytest.raises(data.DataError, match="row 1: .* message 2"):
        data.chat([row], tokenizer_of(training), length=2048, batch_size=1, progress=False)
