"""Renders conversations with the model's chat template, and locates the assistant's text.

Templates are programs. Some mark the assistant's text with ``{% generation %}``. For the rest it is
found by rendering the conversation up to each answer, and checked. A template that fails the check
is refused, because training on the wrong tokens would go unnoticed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain_jax._src.common.outside import check_text
from megatrain_jax._src.lm.common.prompts import check_template
from megatrain_jax._src.lm.data.report import AssistantTextNotFound, DataError, InvalidRow
from megatrain_jax._src.lm.data.row_formats import Conversation
from megatrain_jax._src.lm.data.turns import THOUGHT, THOUGHTS, Message

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
    # Nine letters and digits, the format that Mistral's templates require for a tool call's id.
    marks = [f"zq{number:07d}" for number in range(len(parts))]
    marked = render(_replaced(messages, parts, marks), tools)
    if marked is not None:
        parts = [p for p, mark in zip(parts, marks, strict=True) if mark not in marked]
    # A missing mark may still have been read: compared, or converted to capitals.
    if parts and render(_replaced(messages, parts, marks), tools) != text:
        parts = [p for p in parts if render(_replaced(messages, [p], marks), tools) == text]
    return found | {part.name for part in parts}


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


_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A block of reasoning that a prompt opens at its end, like `<think>`, and may close again.
_OPENED = re.compile(
    r"(<[^<>\s]*think[^<>\s]*>|\[THINK\])\s*((<[^<>\s]*think[^<>\s]*>|\[/THINK\])\s*)?$", re.I
)
# They replace messages' contents, to find where a template puts these.
_MARK, _NEXT = "zq0000000", "zq0000001"


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        text: All of it, with the special tokens spelled out.
        spans: Start and end, in characters, of each assistant turn to learn.
        stops: Whether the model has nothing more to write after a turn: others follow it, or none.
    """

    text: str
    spans: list[tuple[int, int]]
    stops: list[bool]


class Template:
    """The chat template of a tokenizer.

    Attributes:
        source: The Jinja template.
        name: The template's name in errors.
        marked: Whether it marks the assistant's text.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        """Finds the template.

        Args:
            tokenizer: A tokenizer of Transformers.
            chat_template: A Jinja template, or the name of one of the tokenizer's; None for the
                tokenizer's own.
            variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
            DataError: If there is none, or it is not valid Jinja.
        """
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if chat_template is None and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {name} has no chat template, and tokenizers of base models often "
                "lack one; pass `chat_template=`, a Jinja template such as that of the instruct "
                "model (its tokenizer's `.chat_template`), or use `data.text`"
            )
        self.source: str = tokenizer.get_chat_template(chat_template)
        self.name = f"the chat template of {name}" if chat_template is None else "`chat_template`"
        try:
            check_template(self.name, self.source)
        except ValueError as error:
            raise DataError(str(error)) from error
        self._eos: str = tokenizer.eos_token or ""
        self._variables = {**tokenizer.special_tokens_map, **(variables or {})}
        self.marked = bool(_MARKED.search(self.source))
        self._has_prompt = "add_generation_prompt" in self.source
        self._takes_tools = "tools" in self.source

    def render(self, conversation: Conversation) -> Rendered:
        """Renders a conversation.

        Raises:
            InvalidRow: If the template refuses it, or does not support its tools; an
                `AssistantTextNotFound` if the assistant's text can't be located.
            DataError: If the template is not valid Jinja.
        """
        if conversation.tools and not self._takes_tools:
            raise InvalidRow(f"{self.name} has no place for tools")
        if self.marked:
            return self._by_marks(conversation)
        return self._by_prefixes(conversation)

    def left_out(self, conversation: Conversation, text: str) -> set[str]:
        """Names the fields that the template omits in at least one message.

        Args:
            conversation: The conversation.
            text: The conversation as returned by `render`.
        """
        return left_out(conversation.messages, conversation.tools, text, self._attempt)

    def _attempt(self, messages: list[Message], tools: list[Any] | None) -> str | None:
        try:
            return self._text(messages, tools)[0]
        except Exception:  # a program, given input it was not written for
            return None

    def _by_marks(self, conversation: Conversation) -> Rendered:
        messages, learned = conversation.messages, conversation.learned
        text, spans = self._text(messages, conversation.tools, marks=True)
        spans = [(start, end) for start, end in spans if end > start]
        turns = [index for index, message in enumerate(messages) if _answers(message)]
        if not spans:
            raise self._unclear("it marks nothing as the assistant's", text)
        parts = [[span] for span in spans]
        if len(spans) != len(turns):
            parts = self._by_turns(conversation, text, turns, spans)
        kept: list[tuple[int, int]] = []
        stops: list[bool] = []
        for index, some in zip(turns, parts, strict=True):
            if not learned[index] or not some:
                continue
            said = "".join(text[start:end] for start, end in some)
            if not _says(said, messages[index]):
                raise self._unclear(
                    f"message {index + 1}: the marked part should have the answer, but is "
                    f"{said[:60]!r}",
                    text,
                )
            kept += some
            stops += [False] * (len(some) - 1) + [_stops(messages, index)]
        return Rendered(text, kept, stops)

    def _by_turns(
        self, conversation: Conversation, text: str, turns: list[int], spans: list[tuple[int, int]]
    ) -> list[list[tuple[int, int]]]:
        """The marked parts of each turn, by their places in the text."""
        messages, tools, end = conversation.messages, conversation.tools, 0
        parts: list[list[tuple[int, int]]] = []
        for index in turns:
            start = self._end(messages, tools, index - 1, text, end) if index else 0
            before, end = end, self._end(messages, tools, index, text, start)
            for place, _ in spans:
                if before <= place < start:
                    raise self._unclear(
                        f"it marks {text[place:][:60]!r}, before message {index + 1}", text
                    )
            parts.append([span for span in spans if start <= span[0] < end])
        return parts

    def _by_prefixes(self, conversation: Conversation) -> Rendered:
        messages, learned, tools = conversation[:3]
        text, _ = self._text(messages, tools)
        spans: list[tuple[int, int]] = []
        stops: list[bool] = []
        for index, message in enumerate(messages):
            if not _answers(message) or not learned[index]:
                continue
            start = self._start(messages, tools, index, text)
            end = self._end(messages, tools, index, text, start)
            if not _says(text[start:end], message) or self._has_header(text[start:end], message):
                raise self._unclear(
                    f"message {index + 1}: the text after the prompt should be the answer, but is "
                    f"{text[start:end][:60]!r}",
                    text,
                )
            spans.append((start, end))
            stops.append(_stops(messages, index))
        return Rendered(text, spans, stops)

    def _start(
        self, messages: list[Message], tools: list[Any] | None, index: int, text: str
    ) -> int:
        """The place in `text` where the answer `index` starts: the end of the prompt for it."""
        if not any(message["role"] == "user" for message in messages[:index]):
            return self._start_of_leading(messages, tools, index, text)
        prompt, _ = self._text(messages[:index], tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # For an answer without reasoning, the template may omit the block that its prompt opens:
        # the prompt ends in "assistant\n<think>\n", but the text continues "assistant\nYes.".
        opened = _OPENED.search(prompt)
        if opened and text.startswith(prompt[: opened.start()]):
            return opened.start()
        # Earlier answers may be shown differently once later messages follow, such as without their
        # reasoning. Then the prompt is what the template adds to the messages before.
        before, _ = self._text(messages[:index], tools)
        if prompt.startswith(before):
            begin = self._end(messages, tools, index - 1, text, 0)
            header = prompt[len(before) :]
            shorter = header[: opened.start() - len(before)] if opened else header
            for given in (header, shorter):
                if text.startswith(given, begin):
                    return begin + len(given)
        raise self._unclear(
            f"message {index + 1}: the prompt that it gives for the answer is not how the "
            f"conversation begins; the prompt ends in {prompt[-60:]!r}",
            text,
        )

    def _start_of_leading(
        self, messages: list[Message], tools: list[Any] | None, index: int, text: str
    ) -> int:
        """The start of an answer before any question; few templates have a prompt for it."""
        marked, _ = self._text(_with_mark(messages, index), tools)
        start = marked.find(_MARK)
        if start < 0 or text[:start] != marked[:start]:
            raise self._unclear(f"message {index + 1} is not found in its text", text)
        return start

    def _end(
        self, messages: list[Message], tools: list[Any] | None, index: int, text: str, start: int
    ) -> int:
        """The end in `text` of message `index`, which begins at `start` or later."""
        if index == len(messages) - 1:
            return len(text)
        upto, _ = self._text(messages[: index + 1], tools)
        if not text.startswith(upto) and self._eos and upto.endswith(self._eos):
            # Some templates end every text with this token, but not every turn.
            upto = upto.removesuffix(self._eos)
        if text.startswith(upto) and len(upto) > start:
            return len(upto)
        # The template shows the message differently once others follow, such as without its
        # reasoning. A mark in place of its words shows what follows them: as the last message, the
        # end of its turn; otherwise that end, and the rest of the text.
        alone, _ = self._text(_with_mark(messages, index)[: index + 1], tools)
        marked, _ = self._text(_with_mark(messages, index), tools)
        words, _, rest = marked.rpartition(_MARK)
        tail = alone.rpartition(_MARK)[2]
        end = len(text) - len(rest)
        if words and text.endswith(rest) and _MARK in alone and end > start:
            if rest.startswith(tail):
                return end + len(tail)
            # The last turn ends in another way, as by "<|return|>" in place of "<|end|>".
            if not messages[index].get("tool_calls"):
                return end
        raise self._unclear(
            f"message {index + 1}: its end depends on later messages; without them it ends in "
            f"{upto[start:][-60:]!r}",
            text,
        )

    def next_mark(self, conversation: Conversation) -> str:
        """The text between a conversation's last answer and the words of a message after it.

        After a call of tools that is a tool's message, otherwise the user's. Empty if the template
        refuses such a message, or writes the answer differently before it.
        """
        last = {**_with_mark(conversation.messages, -1)[-1]}
        for name in THOUGHTS:
            last.pop(name, None)
        after: Message = {"role": "user", "content": _NEXT}
        if calls := last.get("tool_calls"):
            call = calls[0]
            after = {"role": "tool", "content": _NEXT, "name": call["function"].get("name", "")}
            after |= {"tool_call_id": call["id"]} if "id" in call else {}
        messages: list[Message] = [{"role": "user", "content": "a"}, last]
        alone = self._attempt(messages, conversation.tools)
        both = self._attempt([*messages, after], conversation.tools)
        if alone is None or both is None or not both.startswith(alone) or _NEXT not in both:
            return ""
        return both[len(alone) : both.index(_NEXT)]

    def _text(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of some messages, and the parts that the template marks."""
        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._variables,
            )
            check_text(rendered[0][0])
        except jinja2.TemplateSyntaxError as caught:
            raise DataError(f"{self.name} is no valid Jinja: {caught}") from caught
        except jinja2.TemplateError as caught:
            raise InvalidRow(f"{self.name} refuses it", str(caught)) from caught
        except Exception as caught:  # a program, given input it was not written for
            why = f"{type(caught).__name__}: {caught}"
            raise InvalidRow(f"{self.name} fails on it", why) from caught
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def _has_header(self, part: str, message: Message) -> bool:
        """Whether a part begins with a header that the model need not learn."""
        if self._has_prompt or message.get("tool_calls"):
            return False
        return bool(part.partition(_visible(message))[0].strip())

    def _unclear(self, why: str, text: str) -> AssistantTextNotFound:
        return AssistantTextNotFound(
            f"{self.name} doesn't mark the assistant's words",
            f"{why}. The conversation is {text[:200]!r}{'...' if len(text) > 200 else ''}",
        )


def _says(part: str, message: Message) -> bool:
    """Whether a part of the text has the words of a message, and the tools that it calls."""
    calls = [call["function"].get("name", "") for call in message.get("tool_calls") or ()]
    return _visible(message) in part and all(name in part for name in calls)


def _visible(message: Message) -> str:
    """The part of a message that must be visible; some templates omit reasoning."""
    return message.get("content", "").rpartition(THOUGHT)[2].strip()


def _answers(message: Message) -> bool:
    return message["role"] == "assistant"


def _stops(messages: list[Message], index: int) -> bool:
    """Whether the model stops after a message: it is the last one, or calls tools."""
    return index == len(messages) - 1 or messages[index + 1]["role"] == "tool"


def _with_mark(messages: list[Message], index: int) -> list[Message]:
    """Messages, of which one has a mark in place of its words, or of the tools that it calls."""
    changed, message = list(messages), messages[index]
    is_call = message.get("tool_calls") and not _visible(message)
    changed[index] = replace_calls(message, _MARK) if is_call else {**message, "content": _MARK}
    return changed
