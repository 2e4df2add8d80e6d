"""Converts rows of all formats to conversations, pairs, labelled answers, texts, or stored ids.

A row's fields identify its format: `messages` (OpenAI), `conversations` (ShareGPT), or a question
and its answer, such as `instruction` and `output` (Alpaca) or `prompt` and `completion`. A row of
preferences has `chosen` and `rejected` as answers, one for KTO a `label`, and one for distillation
token ids with a teacher's top-k log-probabilities.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from megatrain_jax._src.lm.data.report import InvalidRow
from megatrain_jax._src.lm.data.turns import (
    CONVERSATIONS,
    Message,
    TurnRules,
    Turns,
    check_content,
    merged,
    order_turns,
    read_tools,
    read_turns,
    valid_text,
)

# The fields that identify a format, and the further fields that each format reads.
_ANSWERS = {
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
    "prompt": ("completion", "response"),
    "query": ("answer", "response"),
    "problem": ("solution",),
    "input": ("output",),
}
_FORMS = (*CONVERSATIONS, *_ANSWERS)
_ALWAYS_READ = {"system", "tools"}
# Text below an instruction: that of Alpaca, or that of Dolly.
_CONTEXTS = ("input", "context")
# Fields in the order in which they are looked for; the first that a row has counts.
_ORDERS = (
    ("text", *_FORMS),
    ("output", "answer", "completion", "solution", "response"),
    _CONTEXTS,
    ("label", "kto_tag"),
)
# All fields that are read, for the argument `columns`.
FIELDS = tuple(
    dict.fromkeys(
        (
            *(field for order in _ORDERS for field in order),
            *("history", "system", "tools", "chosen", "rejected", "margin", "images", "image"),
            *("input_ids", "topk_token_ids", "topk_logprobs", "completion_mask"),
        )
    )
)
_NO_RULES = TurnRules()

Row = Mapping[str, Any]


class Conversation(NamedTuple):
    """A conversation to train on.

    Attributes:
        messages: Dicts with a role and a content, in an order checked by `order_turns`.
        learned: For each message, whether the loss may count it: false for user messages, for
            assistant messages with weight 0 or `train` false, and for messages of a prompt.
        tools: JSON schemas of the available tools, or None.
        ignored: Fields of the row that nothing reads.
        changed: Changes made to the turns by the user's rules, in words.
    """

    messages: list[Message]
    learned: list[bool]
    tools: list[Any] | None
    ignored: set[str]
    changed: set[str]


class Pair(NamedTuple):
    """Two conversations with a common beginning; the first was preferred.

    Attributes:
        chosen: The conversation with the preferred answer.
        rejected: The conversation with the rejected answer.
    """

    chosen: Conversation
    rejected: Conversation


class Text(NamedTuple):
    """A plain text.

    Attributes:
        text: The text.
        start: Number of characters at its beginning that are a prompt, which is not learned.
        ignored: Fields of the row that nothing reads.
    """

    text: str
    start: int
    ignored: set[str]


def with_columns(row: Row, columns: Mapping[str, str], ignored: Counter[str]) -> Row:
    """Returns a row with the user's columns under the names of fields.

    Args:
        row: The row.
        columns: For each of these fields, the row's own name; an absent one is left out.
        ignored: A counter of fields that nothing reads, for fields in the way of those that the
            user has named: the same, and others that would be looked for before.
    """
    if not columns:
        return row
    hidden = set(columns)
    for order in _ORDERS:
        first = next((i for i, field in enumerate(order) if field in columns), 0)
        hidden.update(order[:first])
    own = set(columns.values())
    ignored.update((hidden - own) & set(row))
    rest = {name: value for name, value in row.items() if name not in hidden | own}
    return rest | {field: row[name] for field, name in columns.items() if name in row}


def to_conversation(row: Row, rules: TurnRules = _NO_RULES) -> Conversation:
    """Converts a row to a conversation.

    Args:
        row: ``{"messages": [{"role", "content"}]}``, ``{"conversations": [{"from", "value"}]}``,
            ``{"instruction", "input", "output"}``, ``{"question", "answer"}``, ``{"prompt",
            "completion"}`` or others of `_ANSWERS`. An instruction and its input, or context,
            become one user message, with an empty line between. A prompt and a completion may be
            lists of messages; then only the
            completion is learned. All may have a "system" and "tools", Alpaca rows a "history" of
            pairs. A field with value None is treated as absent.
        rules: Allowed changes to the order of turns.

    Raises:
        InvalidRow: If it has none of these formats, or is not a valid conversation.
    """
    row = _present(row)
    # In the order of `_FORMS`: a row of messages may also have a `prompt`, as metadata.
    form = _first(_FORMS, row)
    if form is None:
        raise _unknown(row)
    if form in CONVERSATIONS:
        read, turns = {form}, read_turns(form, row[form])
    else:
        answer = _first(_ANSWERS[form], row)
        if answer is None:
            article = "an" if form[0] == "i" else "a"
            raise InvalidRow(
                "unknown form",
                f"{article} {form} without a field `{'` or `'.join(_ANSWERS[form])}` among the "
                f"fields {_names(row)}{_hint(row)}",
            )
        read = {form, answer} | _also_read(form, row)
        turns = _joined(_question(form, row), _answer(answer, row[answer]))
    return _conversation(row, turns, read, rules)


def to_pair(row: Row, rules: TurnRules) -> Pair:
    """Converts a row to two conversations, one of which is preferred.

    Args:
        row: "chosen" and "rejected" are a text, a message or messages. The question before them has
            one of the formats of `to_conversation`. Without a question, both are whole
            conversations; the answers then begin where they first differ.
        rules: See `to_conversation`.

    Raises:
        InvalidRow: If it is not such a pair, both answers are equal, or they answer different
            questions: whole conversations must be the same up to an answer, and a `prompt` beside
            them must be part of their common beginning.
    """
    row = _present(row)
    _check_fields(row, ("chosen", "rejected"))
    answers = {name: _answer(name, row[name]) for name in ("chosen", "rejected")}
    # An answer begins with the assistant, a whole conversation with someone else.
    whole = [turns.messages[0]["role"] != "assistant" for turns in answers.values()]
    if all(whole):
        read = {"chosen", "rejected"} | ({"prompt"} & set(row))
        both = [_conversation(row, turns, read, rules) for turns in answers.values()]
        common = _common_prompt(*both)
        if prompt := row.get("prompt"):
            _check_prompt(prompt, both[0].messages[:common], rules)
        pair = Pair(*_learned_from(common, *both))
    elif any(whole):
        raise InvalidRow(
            "unknown form", "one of `chosen` and `rejected` is a whole conversation, one an answer"
        )
    else:
        form = _first(_FORMS, row)
        if form is None:
            raise InvalidRow(
                "unknown form",
                f"`chosen` and `rejected` are answers, but there is no question: none of "
                f"{', '.join(_FORMS)} is among the fields {_names(row)}",
            )
        read = {"chosen", "rejected", form} | _also_read(form, row)
        question = _unlearned(_question(form, row))
        pair = Pair(
            *(_conversation(row, _joined(question, a), read, rules) for a in answers.values())
        )
    if pair.chosen.messages == pair.rejected.messages:
        raise InvalidRow("`chosen` and `rejected` are alike")
    return pair


def to_margin(row: Row) -> float:
    """Returns the margin of a pair, the minimum difference of its scores; 0 if it has none.

    Raises:
        InvalidRow: If it is not a finite number.
    """
    given = row.get("margin")
    try:
        margin = 0.0 if given is None else float(given)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin) or isinstance(given, bool):
        raise InvalidRow("`margin` that is no number", repr(given))
    return margin


def to_text(row: Row) -> Text:
    """Returns the text of a row: ``{"text"}``, or a prompt and its completion joined.

    Raises:
        InvalidRow: If it has no text, or an empty one.
    """
    row = _present(row)
    if "text" in row:
        fields = ["text"]
    elif "prompt" in row and (answer := _first(_ANSWERS["prompt"], row)):
        fields = ["prompt", answer]
    else:
        raise InvalidRow("unknown form", f"no text among the fields {_names(row)}")
    parts = [valid_text(row[name], name) for name in fields]
    if not parts[-1].strip():
        raise InvalidRow("empty text", "" if len(parts) == 1 else fields[-1])
    return Text("".join(parts), sum(map(len, parts[:-1])), set(row) - set(fields))


def _conversation(row: Row, turns: Turns, read: set[str], rules: TurnRules) -> Conversation:
    turns, changed = order_turns(_with_system(row, turns), rules)
    if not any(turns.learned):
        raise InvalidRow(
            "nothing to learn", "every turn of the assistant has a weight of 0, or `train` false"
        )
    ignored = turns.ignored | set(row) - read - _ALWAYS_READ
    tools = read_tools(row.get("tools"))
    return Conversation(turns.messages, turns.learned, tools, ignored, changed)


def _common_prompt(*both: Conversation) -> int:
    """The number of messages that both conversations share before an answer."""
    pairs = list(zip(*(one.messages for one in both), strict=False))
    common = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    # One is the beginning of the other, or both are equal: they differ where the shorter one ends.
    if common is None:
        return len(pairs)
    if {message["role"] for message in pairs[common]} != {"assistant"}:
        one, other = map(_shown, pairs[common])
        raise InvalidRow(
            "`chosen` and `rejected` answer different questions",
            f"message {common + 1}, before an answer, is {one} in one and {other} in the other",
        )
    return common


def _check_prompt(prompt: Any, begin: list[Message], rules: TurnRules) -> None:
    """Checks a `prompt` beside two conversations; it must repeat part of their common beginning.

    A text may be one of the messages, often the last question, or contain all of them, as a
    template renders them. Messages must be the last ones before the answers.
    """
    if isinstance(prompt, str):
        text, said = prompt.strip(), [message.get("content", "").strip() for message in begin]
        agrees = not text or text in said or all(one in text for one in said)
    else:
        turns = read_turns("prompt", prompt)
        turns = turns if rules.merge is None else merged(turns, rules.merge)
        agrees = turns.messages == begin[-len(turns.messages) :]
    if not agrees:
        raise InvalidRow(
            "`chosen` and `rejected` don't begin with `prompt`",
            f"it is {str(prompt)[:60]!r}, and before their answers both have {_shown(begin[-1])}",
        )


def _shown(message: Message) -> str:
    return f"{message['role']} {message.get('content', '')[:60]!r}"


def _learned_from(common: int, *both: Conversation) -> list[Conversation]:
    """The conversations, with only the messages after the common ones learned."""
    learned = [[i >= common and it for i, it in enumerate(one.learned)] for one in both]
    if not all(map(any, learned)) and both[0].messages != both[1].messages:
        raise InvalidRow(
            "nothing to learn", "one of `chosen` and `rejected` is the beginning of the other"
        )
    return [one._replace(learned=its) for one, its in zip(both, learned, strict=True)]


def _question(form: str, row: Row) -> Turns:
    """The turns before an answer; turns of a prompt that is a conversation are not learned."""
    given = row[form]
    if form in CONVERSATIONS or (form == "prompt" and not isinstance(given, str)):
        return _unlearned(read_turns(form, given))
    question = valid_text(given, form)
    turns = Turns([], [], set())
    if form == "instruction":
        name = _first(_CONTEXTS, row)
        if name is not None and (context := valid_text(row[name], name)):
            question = f"{question}\n\n{context}" if question else context
        history = row.get("history", ())
        for pair in history if isinstance(history, list | tuple) else [history]:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise InvalidRow("unknown form", "`history` is no list of pairs")
            for role, text in zip(("user", "assistant"), pair, strict=True):
                turns = _joined(turns, _turn(role, text, "history"))
    return _joined(turns, _turn("user", question, form))


def _first(names: Iterable[str], row: Row) -> str | None:
    """The first of some fields that a row has."""
    return next((name for name in names if name in row), None)


def _check_fields(row: Row, names: Iterable[str]) -> None:
    for name in names:
        if name not in row:
            raise InvalidRow("unknown form", f"no `{name}` among the fields {_names(row)}")


def _also_read(form: str, row: Row) -> set[str]:
    return {"history", _first(_CONTEXTS, row) or "history"} if form == "instruction" else set()


def _answer(field: str, given: Any) -> Turns:
    if isinstance(given, str):
        return _turn("assistant", given, field)
    return read_turns(field, [given] if isinstance(given, Mapping) else given)


def _turn(role: str, text: Any, field: str) -> Turns:
    message = {"role": role, "content": valid_text(text, field)}
    check_content(message, field)
    return Turns([message], [role == "assistant"], set())


def _with_system(row: Row, turns: Turns) -> Turns:
    text = valid_text(row.get("system", ""), "system")
    return _joined(_turn("system", text, "system"), turns) if text else turns


def _joined(first: Turns, second: Turns) -> Turns:
    return Turns(
        first.messages + second.messages,
        first.learned + second.learned,
        first.ignored | second.ignored,
    )


def _unlearned(turns: Turns) -> Turns:
    return turns._replace(learned=[False] * len(turns.learned))


def _present(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}


def _unknown(row: Row) -> InvalidRow:
    found = f"none of {', '.join(_FORMS)} is among the fields {_names(row)}"
    return InvalidRow("unknown form", f"{found}{_hint(row)}")


def _hint(row: Row) -> str:
    if "chosen" in row:
        return "; preferences are for `data.preferences`"
    if "text" in row:
        return "; plain text is for `data.text`"
    return (
        '; `columns={"prompt": ..., "completion": ...}` names the fields of a row with other ones'
    )


def _names(row: Row) -> str:
    return ", ".join(map(str, row)) or "(none)"


_LABELS = {"true": True, "false": False, "1": True, "0": False}


class LabelledAnswer(NamedTuple):
    """A conversation that ends with a labelled answer.

    Attributes:
        conversation: The conversation; only the answer is learned.
        start: Number of messages before the answer.
        desirable: The label.
    """

    conversation: Conversation
    start: int
    desirable: bool


def to_labelled(row: Row, rules: TurnRules) -> list[LabelledAnswer]:
    """Converts a row to labelled answers.

    Args:
        row: A conversation in one of the formats of `to_conversation`, and "label", true or false.
            The answer is its text after the last user message. Without a label, "chosen" and
            "rejected" as in `to_pair` are a desirable and an undesirable answer. A label may also
            be named "kto_tag", as by LLaMA-Factory.
        rules: See `to_conversation`.

    Raises:
        InvalidRow: If it has none of these formats, or the label is neither true nor false.
    """
    row = _present(row)
    name = _first(("label", "kto_tag"), row)
    if name is None:
        if "chosen" not in row or "rejected" not in row:
            raise InvalidRow(
                "unknown form",
                f"no `label`, and no `chosen` with `rejected`, among the fields {_names(row)}",
            )
        pair = to_pair(row, rules)
        return [_labelled(pair.chosen, True), _labelled(pair.rejected, False)]
    desirable = _label(row[name])
    rest = {field: value for field, value in row.items() if field != name}
    conversation = to_conversation(rest, rules)
    asked = [i for i, message in enumerate(conversation.messages) if message["role"] == "user"]
    start = asked[-1] + 1 if asked else 0
    if any(conversation.learned[:start]) and "completion" in rest:
        raise InvalidRow("unknown form", "`completion` has a turn of the user")
    learned = [i >= start and it for i, it in enumerate(conversation.learned)]
    if not any(learned):
        raise InvalidRow("nothing to learn", "the answer has a weight of 0, or `train` false")
    return [_labelled(conversation._replace(learned=learned), desirable)]


def mismatched(one: LabelledAnswer, before: LabelledAnswer) -> Conversation:
    """Returns the prompt of an answer with the answer of another one."""
    prompt, answer = one.conversation, before.conversation
    return prompt._replace(
        messages=prompt.messages[: one.start] + answer.messages[before.start :],
        learned=prompt.learned[: one.start] + answer.learned[before.start :],
    )


def _labelled(conversation: Conversation, desirable: bool) -> LabelledAnswer:
    return LabelledAnswer(conversation, conversation.learned.index(True), desirable)


def _label(given: Any) -> bool:
    # Text as in .csv files.
    label = _LABELS.get(str(given).lower()) if isinstance(given, str | bool | int) else None
    if label is None:
        raise InvalidRow("`label` that is neither true nor false", repr(given))
    return label


_NAMES = ("input_ids", "topk_token_ids", "topk_logprobs")
_LARGEST_ID = 2**31 - 1
# Log-probabilities that were rounded to bfloat16 may sum to a probability slightly above 1.
_MOST_PROBABILITY = 1.02
# The largest accepted value above 0: a difference of two fp32 numbers may be slightly positive.
_MOST_ABOVE = 1e-4


class DistilledRow(NamedTuple):
    """The tokens of a row with the teacher's predictions.

    Attributes:
        tokens: The token ids.
        learned: Whether each token is learned as a label.
        topk_token_ids: For each token, the candidates for the next one.
        topk_logprobs: Their log-probabilities; minus infinity for entries that don't exist.
        ignored: Fields of the row that nothing reads.
    """

    tokens: Int32[np.ndarray, " n"]
    learned: Bool[np.ndarray, " n"]
    topk_token_ids: Int32[np.ndarray, "n k"]
    topk_logprobs: Float32[np.ndarray, "n k"]
    ignored: set[str]


def to_distilled(row: Row, topk: int, tail: bool) -> DistilledRow:
    """Converts a row.

    Args:
        row: "input_ids", a list of ids; "topk_token_ids" and "topk_logprobs", lists as long as that
            one, of lists of ids and of numbers, in any order; optionally "completion_mask", as long
            too, 1 for the tokens to learn.
        topk: Number of entries per token: the likeliest are kept, missing ones filled.
        tail: Whether the rest of the vocabulary counts; then logits are refused.

    Raises:
        InvalidRow: If it is no such row. The message names the field.
    """
    row = _present(row)
    _check_fields(row, _NAMES)
    tokens = _numbers("input_ids", row["input_ids"], len(row["input_ids"]), np.int32)
    size = len(tokens)
    mask = _numbers("completion_mask", row.get("completion_mask", [1] * size), size, np.float32)
    ids, logs = (_lists(name, row[name], size) for name in _NAMES[1:])
    found_ids = np.zeros((size, topk), np.int32)
    found_logs = np.full((size, topk), -np.inf, np.float32)
    for place, (some, values) in enumerate(zip(ids, logs, strict=True)):
        own = _numbers("topk_token_ids", some, len(some), np.int32)
        if len(set(own.tolist())) < len(own):
            raise InvalidRow("`topk_token_ids` with an id twice at one position")
        # JSON has no infinity: null stands for a token that can't follow.
        scores = [-np.inf if value is None else value for value in values]
        own_logs = _numbers("topk_logprobs", scores, len(own), np.float32)
        if tail:
            _check_probability(own_logs, place)
        order = np.argsort(-own_logs, kind="stable")[:topk]
        found_ids[place, : len(order)] = own[order]
        found_logs[place, : len(order)] = own_logs[order]
    if np.isnan(found_logs).any() or (found_logs == np.inf).any():
        raise InvalidRow("`topk_logprobs` that are no numbers")
    ignored = set(row) - {*_NAMES, "completion_mask"}
    return DistilledRow(tokens, mask != 0, found_ids, found_logs, ignored)


def _check_probability(logs: Float32[np.ndarray, " k"], place: int) -> None:
    """Checks that a position's numbers can be log-probabilities: the tail gets the remainder."""
    total = np.exp(logs.astype(np.float64)).sum()
    above = logs[logs > _MOST_ABOVE]
    if above.size or total > _MOST_PROBABILITY:
        found = (
            f"{above[0]:g} is above 0" if above.size else f"they sum to a probability of {total:g}"
        )
        raise InvalidRow(
            "`topk_logprobs` that are no log-probabilities, which `tail=True` needs",
            f"at position {place + 1}, {found}",
        )


def _lists(name: str, given: Any, size: int) -> Any:
    is_list = isinstance(given, list | tuple | np.ndarray)
    if not is_list or len(given) != size or not all(hasattr(one, "__len__") for one in given):
        raise InvalidRow(f"`{name}` that is no list of lists as long as `input_ids`")
    return given


def _numbers(name: str, given: Any, size: int, dtype: Any) -> np.ndarray:
    try:
        found = np.array(given)
        is_whole = dtype is not np.int32 or found.dtype.kind in "iu" or not found.size
        if found.shape == (size,) and found.dtype.kind in "iufb" and is_whole:
            if dtype is not np.int32 or (found >= 0).all() and (found <= _LARGEST_ID).all():
                return found.astype(dtype)
    except (TypeError, ValueError):
        pass
    kind = "token ids" if dtype is np.int32 else "numbers"
    raise InvalidRow(f"`{name}` that is no list of {kind} of the right length")
