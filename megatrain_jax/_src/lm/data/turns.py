"""The turns of a conversation: read, merged, ordered and checked.

Rows of every format become these turns, as messages for chat templates.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megatrain_jax._src.lm.data.report import InvalidRow

Message = dict[str, Any]
Leading = Literal["error", "keep", "drop"]

# The fields of a row that are whole conversations.
CONVERSATIONS = ("messages", "conversations", "conversation")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
# The roles of turns whose text is a call of tools, or several, in JSON: those of LLaMA-Factory, and
# of ms-swift.
_CALLING = ("function_call", "tool_call")
# The roles that may follow each role; None is the start.
_FOLLOWS = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_BEFORE_QUESTIONS = (None, "system", "developer")
# Where an answer's thoughts end, if they stand in its text.
THOUGHT = "</think>"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# The fields that templates read in addition to role and content.
_TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id", *THOUGHTS)
_KNOWN_OF_MESSAGE = {"role", "content", "from", "value", "weight", "train", *_TEMPLATE_FIELDS}


class TurnRules(NamedTuple):
    """The user's options about the order of turns.

    Attributes:
        merge: Text put between consecutive turns of one role to merge them; None to treat them as a
            fault.
        leading: Treatment of an assistant's turn before the first user turn.
    """

    merge: str | None = None
    leading: Leading = "error"


class Turns(NamedTuple):
    """Messages, with notes taken while reading them.

    Attributes:
        messages: Dicts with a role and a content.
        learned: For each message, whether the loss may count it: false for user messages, and for
            assistant messages with weight 0 or `train` false.
        ignored: Fields of the row that nothing reads.
    """

    messages: list[Message]
    learned: list[bool]
    ignored: set[str]


def read_turns(field: str, turns: Any) -> Turns:
    """Reads the turns of a field such as `messages` or `conversations`.

    Raises:
        InvalidRow: If they are not turns.
    """
    turns = opened_turns(field, turns)
    if not isinstance(turns, list | tuple) or not turns:
        raise InvalidRow("no turns", f"`{field}` is no list, or an empty one")
    read = Turns([], [], set())
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise InvalidRow("unknown form", f"turn {number} is no object, in `{field}`")
        given = {name: value for name, value in turn.items() if value is not None}
        read.messages.append(message := _message(given, number))
        read.learned.append(_counts(given, number) and message["role"] == "assistant")
        # Only assistant turns are learned, so `train` of a different role has no effect.
        if given.get("train") and message["role"] != "assistant":
            read.ignored.add(f"{field}[].train of {message['role']}")
        read.ignored.update(f"{field}[].{name}" for name in set(given) - _KNOWN_OF_MESSAGE)
    return read


def opened_turns(field: str, turns: Any) -> Any:
    """Returns the turns of a whole conversation, decoded if they are JSON text, as cells of CSV.

    Raises:
        InvalidRow: If they are a text, but no JSON.
    """
    if not isinstance(turns, str) or field not in CONVERSATIONS:
        return turns
    return _decoded(turns, "no turns", f"`{field}` is a text that is no valid JSON")


def _counts(given: Mapping[str, Any], number: int) -> bool:
    """Whether a turn is learned, by its `weight` (OpenAI's field) and its `train`."""
    weight, train = given.get("weight", 1), given.get("train", True)
    if weight not in (0, 1):
        raise InvalidRow("a weight that is neither 0 nor 1", f"{weight!r} in turn {number}")
    if not isinstance(train, bool):
        raise InvalidRow("`train` that is neither true nor false", f"{train!r} in turn {number}")
    if {"weight", "train"} <= set(given) and bool(weight) != train:
        raise InvalidRow(
            "a weight that contradicts `train`", f"{weight!r} and {train!r} in turn {number}"
        )
    return bool(weight) and train


def order_turns(turns: Turns, rules: TurnRules) -> tuple[Turns, set[str]]:
    r"""Merges and drops turns by the rules, and checks the order of the rest.

    For example, with ``TurnRules("\n", "drop")`` the turns assistant "hi", user "a", user "b",
    assistant "c" become user "a\nb", assistant "c".

    Returns:
        The turns: an optional system message, then turns of user and assistant, ending with the
            assistant; tools may answer the assistant. And the changes, in words.

    Raises:
        InvalidRow: If they can't be brought into such an order.
    """
    changed = set()
    if rules.merge is not None and (joined := merged(turns, rules.merge)) is not turns:
        turns = joined
        changed.add("consecutive turns of one role merged")
    if rules.leading == "drop" and (cut := _without_leading(turns)) is not turns:
        turns = cut
        changed.add("turns before the first of the user dropped")
    _check_order(turns.messages, rules.leading == "keep")
    return turns, changed


def valid_text(text: Any, name: str) -> str:
    """Returns a text.

    Raises:
        InvalidRow: If it is not a text, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise InvalidRow("content that is no text", f"{name} is of type {type(text).__name__}")
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidRow("invalid Unicode", f"half of a surrogate pair in {name}")
    return text


def check_content(message: Message, name: str) -> None:
    """Checks that a message is not empty.

    Raises:
        InvalidRow: If it is; but a tool may return nothing.
    """
    if message.get("content", "").strip() or message.get("tool_calls"):
        return
    if message["role"] != "tool":
        raise InvalidRow("an empty turn", f"{name} ({message['role']}) says nothing")


def read_tools(tools: Any) -> list[Any] | None:
    """Returns the JSON schemas of tools, which may be given as text.

    Raises:
        InvalidRow: If they are not.
    """
    if isinstance(tools, str):
        tools = _decoded(tools, "tools that are no valid JSON") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRow("tools that are no list of JSON schemas")
    for text in _strings(tools):
        valid_text(text, "tools")
    return tools


def _message(turn: Mapping[str, Any], number: int) -> Message:
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRow("unknown role", f"{name!r} in turn {number}")
    message: Message = {"role": role}
    content = turn.get("content", turn.get("value"))
    if content is not None and name not in _CALLING:
        message["content"] = _content(content, number)
    if name in _CALLING:
        message = _calling(content, number)
    # Templates read no further fields; all remaining ones are counted as ignored.
    message |= {field: turn[field] for field in _TEMPLATE_FIELDS if field in turn}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = _calls(calls, number)
    for field in THOUGHTS:
        valid_text(message.get(field, ""), f"{field} of turn {number}")
    for text in _strings([message.get(field) for field in _TEMPLATE_FIELDS]):
        valid_text(text, f"turn {number}")
    check_content(message, f"turn {number}")
    return message


def _content(content: Any, number: int) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            kinds = {part.get("type") for part in content if isinstance(part, Mapping)}
            media = kinds & {"image", "video"}
            hint = "; `data.image_chat` reads images and videos" if media else ""
            raise InvalidRow("content that is no text", f"in turn {number}{hint}")
        content = "".join(texts)
    return valid_text(content, f"turn {number}")


def _calling(given: Any, number: int) -> Message:
    """The message of a turn that is a call of tools in JSON, after the thoughts before it."""
    message: Message = {"role": "assistant"}
    if isinstance(given, str):
        thought, end, given = given.rpartition(THOUGHT)
        if end:
            message["content"] = valid_text(thought + end, f"turn {number}")
        given = _decoded(given, "tool calls that are no valid JSON", f"in turn {number}")
    calls = [given] if isinstance(given, Mapping) else given
    if not isinstance(calls, list | tuple) or not calls:
        raise InvalidRow("unknown form", f"turn {number} is no call of tools")
    message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _decoded(calls, "tool calls that are no valid JSON", f"in turn {number}")
    if not isinstance(calls, list | tuple):
        raise InvalidRow("unknown form", f"`tool_calls` is no list in turn {number}")
    return [_opened(call, number) for call in calls]


def _opened(call: Any, number: int) -> dict[str, Any]:
    """A call with its JSON arguments parsed, as templates require."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, dict):
        raise InvalidRow("unknown form", f"a tool call without a function in turn {number}")
    if not isinstance(name := function.get("name"), str) or not name:
        raise InvalidRow("a tool call without a name", f"it is {name!r} in turn {number}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        why = "arguments that are no valid JSON"
        function = {**function, "arguments": _decoded(arguments, why, f"in turn {number}")}
    return {**call, "function": function}


def _decoded(text: str, reason: str, place: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # of numbers with too many digits, and of deep lists
        raise InvalidRow(reason, place) from None


def merged(turns: Turns, between: str) -> Turns:
    """Returns the turns with consecutive turns of one role merged; tools answer one by one.

    Args:
        turns: The turns.
        between: The text to put between merged turns.

    Raises:
        InvalidRow: If two can't be merged because their names or weights differ.
    """
    messages: list[Message] = []
    learned: list[bool] = []
    for number, (message, counts) in enumerate(zip(turns.messages, turns.learned, strict=True), 1):
        same = messages and messages[-1]["role"] == message["role"] != "tool"
        if not same:
            messages.append(message)
            learned.append(counts)
            continue
        # A turn can't be learned in part: a weight applies to all of it.
        if learned[-1] != counts:
            raise InvalidRow(
                "turns that can't be merged",
                f"message {number} and the one before it have different weights",
            )
        messages[-1] = _joined(messages[-1], message, between, number)
    return (
        turns
        if len(messages) == len(turns.messages)
        else turns._replace(messages=messages, learned=learned)
    )


def _joined(first: Message, second: Message, between: str, number: int) -> Message:
    # If both have a field, the second's is taken, except for texts and calls, which are joined.
    result = {**first, **second}
    for field in ("content", *THOUGHTS):
        texts = [message[field] for message in (first, second) if message.get(field)]
        if texts:
            result[field] = between.join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        result["tool_calls"] = calls
    if first.get("name") != second.get("name"):
        raise InvalidRow(
            "turns that can't be merged",
            f"message {number} and the one before it have different names",
        )
    return result


def _without_leading(turns: Turns) -> Turns:
    roles = [message["role"] for message in turns.messages]
    # System messages stay; turns between them and the first question are dropped.
    start = next((i for i, role in enumerate(roles) if role not in _BEFORE_QUESTIONS), 0)
    if roles[start] != "assistant":
        return turns
    if "user" not in roles:
        raise InvalidRow(
            "nothing to learn", "no turn is the user's, and turns before the first are dropped"
        )
    first = roles.index("user")
    return turns._replace(
        messages=turns.messages[:start] + turns.messages[first:],
        learned=turns.learned[:start] + turns.learned[first:],
    )


def _check_order(messages: Sequence[Message], may_lead: bool) -> None:
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        leads = role == "assistant" and before in _BEFORE_QUESTIONS
        if role not in _FOLLOWS[before] and not (may_lead and leads):
            hint = ""
            if role == before:
                hint = "; `merge=` makes one turn of them"
            elif leads:
                hint = '; `leading="keep"` or "drop" takes the row'
            raise InvalidRow(
                "roles out of order",
                f"message {number} is of the role {role}, but "
                f"{f'after {before}' if before else 'at the start'} there can only be "
                f"{' or '.join(_FOLLOWS[before])}{hint}",
            )
        before = role
    if before != "assistant":
        raise InvalidRow(
            "the assistant does not have the last turn",
            f"message {len(messages)}, the last, is of the role {before}: there is no answer to "
            "learn",
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(name)
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
