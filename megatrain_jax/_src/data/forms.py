"""Rows of the usual forms become one form: the messages that chat templates take.

Alpaca (instruction, input, output), ShareGPT (conversations of from and value) and OpenAI
(messages of role and content).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megatrain_jax._src.data.report import InvalidRow

Message = dict[str, Any]

_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# The roles that may follow each role; None is the start.
_FOLLOWS = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
# The fields that templates read besides the role and the content.
_PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_KNOWN_OF_MESSAGE = {"role", "content", "from", "value", "weight", *_PASSED_ON}


class Conversation(NamedTuple):
    """A conversation from which an assistant learns what to say.

    Attributes:
        messages: Dicts with a role and a content, in an order that `to_conversation` has checked.
        learned: For each message, whether the loss may count it; false for messages of the user,
            and for those of the assistant that have a weight of 0.
        tools: JSON schemas of the tools that the assistant could use, or None.
        ignored: Fields of the row that nothing reads.
    """

    messages: list[Message]
    learned: list[bool]
    tools: list[Any] | None
    ignored: set[str]


def to_conversation(row: Mapping[str, Any]) -> Conversation:
    """Turns a row into a conversation; its form is told by its fields.

    Args:
        row: ``{"messages": [{"role", "content"}]}``, ``{"conversations": [{"from", "value"}]}`` or
            ``{"instruction", "input", "output"}``. An instruction and its input become one message
            of the user, with an empty line between. The first two may have "tools", the last two a
            "system", Alpaca rows a "history" of pairs. A field that is None is taken for absent.

    Returns:
        The conversation. It has an optional system message, then turns of user and assistant, the
        last of which is the assistant's; tools may answer the assistant.

    Raises:
        InvalidRow: If it has none of the forms, or is not such a conversation.
    """
    row = {name: value for name, value in row.items() if value is not None}
    form = next((name for name in _FORMS if name in row), None)
    if form is None:
        hint = "; plain text is for `data.text`" if "text" in row else ""
        raise InvalidRow(
            "unknown form",
            f"none of {', '.join(_FORMS)} is among the fields {_names(row)}{hint}",
        )
    known, read = _FORMS[form]
    messages, learned, ignored = read(row)
    _check_order(messages)
    if not any(learned):
        raise InvalidRow("nothing to learn", "every turn of the assistant has a weight of 0")
    return Conversation(messages, learned, _tools(row.get("tools")), ignored | set(row) - known)


def to_text(row: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Returns the text of a ``{"text": ...}`` row, and the fields that nothing reads.

    Raises:
        InvalidRow: If it has no text, or an empty one.
    """
    if row.get("text") is None:
        raise InvalidRow("unknown form", f"no text among the fields {_names(row)}")
    text = _valid(row["text"], "text")
    if not text.strip():
        raise InvalidRow("empty text")
    return text, {name for name, value in row.items() if value is not None} - {"text"}


def _alpaca(row: Mapping[str, Any]) -> tuple[list[Message], list[bool], set[str]]:
    if "output" not in row:
        raise InvalidRow("unknown form", f"an instruction without an output among {_names(row)}")
    question = _valid(row["instruction"], "instruction")
    if context := _valid(row.get("input", ""), "input"):
        question = f"{question}\n\n{context}" if question else context
    messages = _system(row)
    for pair in row.get("history", ()):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidRow("unknown form", "`history` is no list of pairs")
        messages += _turn(_valid(pair[0], "history"), _valid(pair[1], "history"))
    messages += _turn(question, _valid(row["output"], "output"))
    for message in messages:
        _check_content(message, message["role"])
    return messages, [message["role"] == "assistant" for message in messages], set()


def _turn(question: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def _system(row: Mapping[str, Any]) -> list[Message]:
    text = _valid(row.get("system", ""), "system")
    return [{"role": "system", "content": text}] if text else []


def _turns(field: str) -> Callable[[Mapping[str, Any]], Any]:
    def read(row: Mapping[str, Any]) -> tuple[list[Message], list[bool], set[str]]:
        turns = row[field]
        if not isinstance(turns, list | tuple) or not turns:
            raise InvalidRow("no turns", f"`{field}` is no list, or an empty one")
        messages, learned, ignored = _system(row), [], set()
        learned = [False] * len(messages)
        for number, turn in enumerate(turns, 1):
            if not isinstance(turn, Mapping):
                raise InvalidRow("unknown form", f"turn {number} is no object")
            given = {name: value for name, value in turn.items() if value is not None}
            messages.append(message := _message(given, number))
            weight = given.get("weight", 1)
            if weight not in (0, 1):
                raise InvalidRow("a weight that is neither 0 nor 1", f"{weight!r} in turn {number}")
            learned.append(message["role"] == "assistant" and bool(weight))
            ignored |= {f"{field}[].{name}" for name in set(given) - _KNOWN_OF_MESSAGE}
        return messages, learned, ignored

    return read


def _message(turn: Mapping[str, Any], number: int) -> Message:
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRow("unknown role", f"{name!r} in turn {number}")
    message = {"role": role}
    content = turn.get("content", turn.get("value"))
    if content is not None:
        message["content"] = _content(content, number)
    message |= {field: turn[field] for field in _PASSED_ON if field in turn}
    for call in message.get("tool_calls") or ():
        _open_arguments(call, number)
    for text in _strings([message.get(field) for field in _PASSED_ON]):
        _valid(text, f"turn {number}")
    _check_content(message, f"turn {number}")
    return message


def _content(content: Any, number: int) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise InvalidRow("content that is no text", f"in turn {number}")
        content = "".join(texts)
    return _valid(content, f"turn {number}")


def _open_arguments(call: Any, number: int) -> None:
    """Replaces the arguments of a call by what their JSON says, as templates want them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, dict):
        raise InvalidRow("unknown form", f"a tool call without a function in turn {number}")
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            raise InvalidRow("arguments that are no valid JSON", f"in turn {number}") from None


def _check_content(message: Message, name: str) -> None:
    if message.get("content", "").strip() or message.get("tool_calls"):
        return
    # A tool may well return nothing.
    if message["role"] != "tool":
        raise InvalidRow("an empty turn", f"{name} ({message['role']}) says nothing")


def _check_order(messages: list[Message]) -> None:
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _FOLLOWS[before]:
            raise InvalidRow(
                "roles out of order",
                f"message {number} is of the role {role}, but "
                f"{f'after {before}' if before else 'at the start'} there can only be "
                f"{' or '.join(_FOLLOWS[before])}",
            )
        before = role
    if before != "assistant":
        raise InvalidRow(
            "the assistant does not have the last turn",
            f"message {len(messages)}, the last, is of the role {before}: there is no answer to "
            "learn",
        )


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise InvalidRow("tools that are no valid JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRow("tools that are no list of JSON schemas")
    for text in _strings(tools):
        _valid(text, "tools")
    return tools


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _valid(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise InvalidRow("content that is no text", f"{name} is of type {type(text).__name__}")
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidRow("invalid Unicode", f"half of a surrogate pair in {name}")
    return text


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "(none)"


_FORMS: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], Any]]] = {
    "messages": ({"messages", "tools", "system"}, _turns("messages")),
    "conversations": ({"conversations", "tools", "system"}, _turns("conversations")),
    "instruction": ({"instruction", "input", "output", "system", "history"}, _alpaca),
}
