"""Converts rows of answers that are labelled desirable or undesirable, for KTO."""

from typing import Any, NamedTuple

from megatrain_jax._src.lm.data.report import InvalidRow
from megatrain_jax._src.lm.data.row_formats import Conversation, Row, to_conversation, to_pair
from megatrain_jax._src.lm.data.turns import TurnRules

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
    row = {name: value for name, value in row.items() if value is not None}
    name = next((name for name in ("label", "kto_tag") if name in row), None)
    if name is None:
        if "chosen" not in row or "rejected" not in row:
            raise InvalidRow(
                "unknown form",
                f"no `label`, and no `chosen` with `rejected`, among the fields "
                f"{', '.join(map(str, row)) or '(none)'}",
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
