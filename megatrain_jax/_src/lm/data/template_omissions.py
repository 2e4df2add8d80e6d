"""Finds the parts of a conversation that a chat template omits.

A template is a program that reads whatever it likes. So each conversation is rendered once more
with a mark in place of every part; if a mark leaves no trace in the text, its part was omitted.
Looking for the part itself is not enough, because its text may appear elsewhere too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatrain_jax._src.lm.data.turns import THOUGHT, Message

# Renders messages and tools to text; None if the template refuses them.
_Render = Callable[[list[Message], list[Any] | None], str | None]


class _Part(NamedTuple):
    """A part of a message that a template may omit, such as its reasoning.

    Attributes:
        index: The number of the message.
        name: The part's name in reports.
        replace: Returns the message with a mark in place of the part.
    """

    index: int
    name: str
    replace: Callable[[Message, str], Message]


def left_out(
    messages: list[Message], tools: list[Any] | None, text: str, render: _Render
) -> set[str]:
    """Names the parts of a conversation that a template omits.

    For example, an assistant's message has a `reasoning_content` that the template ignores: with a
    mark in its place, the text does not contain the mark and does not change. So "reasoning_content
    of assistant" is omitted.

    Args:
        messages: The conversation.
        tools: The available tools.
        text: The conversation as rendered by the template.
        render: Function that renders messages with the template.

    Returns:
        Names such as ``reasoning_content of assistant``; each is omitted in at least one message.
    """
    # Templates reformat tools, so this compares with the text rendered without them.
    found = {"tools"} if tools and render(messages, None) == text else set()
    parts = list(_parts(messages))
    marks = [_mark(number) for number in range(len(parts))]
    marked = render(_replaced(messages, parts, marks), tools)
    if marked is not None:
        parts = [p for p, mark in zip(parts, marks, strict=True) if mark not in marked]
    # A missing mark may still have been read: compared, or converted to capitals.
    if parts and render(_replaced(messages, parts, marks), tools) != text:
        parts = [p for p in parts if render(_replaced(messages, [p], marks), tools) == text]
    return found | {part.name for part in parts}


def _mark(number: int) -> str:
    # Nine letters and digits, the format that Mistral's templates require for a tool call's id.
    return f"zq{number:07d}"


def _replaced(
    messages: list[Message], parts: Sequence[_Part], marks: Sequence[str]
) -> list[Message]:
    changed = list(messages)
    for part, mark in zip(parts, marks, strict=False):
        changed[part.index] = part.replace(changed[part.index], mark)
    return changed


def _parts(messages: list[Message]) -> Iterator[_Part]:
    for index, message in enumerate(messages):
        for field, value in message.items():
            if field in ("role", "content") or not value or str(value).isspace():
                continue
            replace = replace_calls if field == "tool_calls" else _replace_field(field)
            yield _Part(index, f"{field} of {message['role']}", replace)
        thought, _, said = message.get("content", "").rpartition(THOUGHT)
        if said.strip():
            yield _Part(index, f"content of {message['role']}", _replace_said)
        if thought.rpartition("<think>")[2].strip():
            name = f"content before {THOUGHT} of {message['role']}"
            yield _Part(index, name, _replace_thought)


def _replace_field(field: str) -> Callable[[Message, str], Message]:
    return lambda message, mark: {**message, field: mark}


def replace_calls(message: Message, mark: str) -> Message:
    """A message whose calls of tools have a mark as their name."""
    calls = [
        {**call, "function": {**call["function"], "name": mark}} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _replace_said(message: Message, mark: str) -> Message:
    thought, end, _ = message["content"].rpartition(THOUGHT)
    return {**message, "content": thought + end + mark}


def _replace_thought(message: Message, mark: str) -> Message:
    thought, end, said = message["content"].rpartition(THOUGHT)
    begin = "".join(thought.rpartition("<think>")[:2])
    return {**message, "content": begin + mark + end + said}
