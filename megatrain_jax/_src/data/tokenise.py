"""Conversations and texts become tokens, and for each token whether it is learned.

The tokenizer's Rust threads work on many texts at once; what they give is copied into flat arrays,
and no text is kept.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int32, Int64
from tokenizers import Encoding

from megatrain_jax._src.data.corpus import CorpusBuilder
from megatrain_jax._src.data.forms import Conversation
from megatrain_jax._src.data.report import DataError, InvalidRow, Report, RowOrigin
from megatrain_jax._src.data.template import Rendered, Template
from megatrain_jax._src.data.tokenizer import load_tokenizer
from megatrain_jax._src.data.vocabulary import Vocabulary

TrainOn = Literal["assistant", "all"]
TRAIN_ON = ("assistant", "all")
_TEXTS_AT_ONCE = 512
_CHARACTERS_AT_ONCE = 1 << 22

T = TypeVar("T")


class Tokens:
    """A fast tokenizer of Transformers, and what has to be known of its special tokens.

    Attributes:
        tokenizer: The tokenizer.
        name: The tokenizer's name in errors.
        vocabulary: The vocabulary of the model in its folder.
    """

    def __init__(self, tokenizer: Any):
        """Takes a tokenizer, or loads one from a folder.

        Raises:
            TypeError: If it is no fast tokenizer.
            FileNotFoundError: See `load_tokenizer`.
            ValueError: See `load_tokenizer`.
        """
        if isinstance(tokenizer, str | PathLike):
            tokenizer = load_tokenizer(tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(
                "`tokenizer` must be the folder of one, or a fast tokenizer of Transformers (one "
                f"that has a tokenizer.json), but is of type {type(tokenizer).__name__}"
            )
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        self.vocabulary = Vocabulary.beside(tokenizer)
        added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
        special = {t for t, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        special.update(tokenizer.all_special_ids)
        names = [added.get(token, "") for token in special] + list(tokenizer.all_special_tokens)
        names = sorted({name for name in names if name}, key=len, reverse=True)
        self._special = special
        self._written = re.compile("|".join(map(re.escape, names))) if names else None
        self._is_space: dict[int, bool] = {}

    def encode(self, texts: list[str]) -> list[Encoding]:
        """Tokenises texts, in which special tokens may be written out; adds none."""
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        ).encodings

    def check_written(self, conversation: Conversation) -> None:
        """Checks that no message spells out a special token, such as the end of a turn.

        Raises:
            InvalidRow: If one does: it would become that token.
        """
        if self._written is None:
            return
        for number, message in enumerate(conversation.messages, 1):
            for field in ("content", "reasoning_content", "reasoning", "thinking"):
                found = self._written.search(message.get(field) or "")
                if found:
                    raise InvalidRow(
                        "a special token of the tokenizer is spelled out",
                        f"{found[0]!r} in message {number}",
                    )

    def end_of_turn(self, ids: Int32[np.ndarray, " n"], start: int, stop: int) -> int | None:
        """The end of the turn in ``ids[start:stop]``, its end-of-turn token included.

        Space alone after that token is left to the template; such a token that follows the turn
        belongs to it.

        Returns:
            The end, or None if the turn has no such token.
        """
        end = stop
        while end > start and self._space(int(ids[end - 1])):
            end -= 1
        if end > start and int(ids[end - 1]) in self._special:
            return end
        if stop < len(ids) and int(ids[stop]) in self._special:
            return stop + 1
        return None

    def ends_of_text(self) -> tuple[Int32[np.ndarray, " first"], Int32[np.ndarray, " last"]]:
        """The tokens before and after a plain text, one of each at the most.

        Raises:
            DataError: If the tokenizer has no end of text.
        """
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer {self.name} has no `eos_token`, which has to stand between texts; "
                "set `tokenizer.eos_token`"
            )
        first = tokenizer("a").input_ids[:1]
        starts = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
        begin = np.array(first if starts else [], np.int32)
        return begin, np.array([tokenizer.eos_token_id], np.int32)

    def _space(self, token: int) -> bool:
        if token not in self._is_space:
            text = "" if token in self._special else self.tokenizer.decode([token])
            self._is_space[token] = bool(text) and text.isspace()
        return self._is_space[token]


def add_conversations(
    conversations: Iterable[tuple[RowOrigin, Conversation]],
    template: Template,
    tokens: Tokens,
    train_on: TrainOn,
    errors: bool,
    builder: CorpusBuilder,
    report: Report,
) -> None:
    """Adds conversations to a builder; once there is an error, only looks for further ones.

    Args:
        conversations: The conversations, each with its origin.
        template: Renders them.
        tokens: Tokenises them.
        train_on: Tokens that the loss counts.
        errors: Whether a conversation that can't be used is an error.
        builder: The builder of the corpus that they go into.
        report: The report that lists conversations that can't be used.

    Raises:
        DataError: If the template does not tell what the assistant says, or ends a turn without a
            token that says so.
    """
    rendered = _render(conversations, template, tokens, errors, report)
    for some in _batches(rendered, lambda item: len(item[1].text)):
        if errors and report.errors[InvalidRow]:
            continue
        encodings = tokens.encode([text for _, (text, _) in some])
        for (origin, (_, spans)), encoding in zip(some, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            learned = np.ones(len(ids), np.bool_)
            if train_on == "assistant":
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                try:
                    learned = _assistant_tokens(ids, offsets, spans, tokens, report)
                except DataError as error:
                    raise DataError(f"{origin}: {template.name} {error}") from error
            builder.extend(ids, learned)
            builder.end(origin)


def _render(
    conversations: Iterable[tuple[RowOrigin, Conversation]],
    template: Template,
    tokens: Tokens,
    errors: bool,
    report: Report,
) -> Iterator[tuple[RowOrigin, Rendered]]:
    for origin, conversation in conversations:
        try:
            tokens.check_written(conversation)
            rendered = template.render(conversation)
        except InvalidRow as fault:
            report.leave_out(origin, fault, errors)
            continue
        except DataError as error:
            raise DataError(f"{origin}: {error}") from error
        report.not_shown.update(template.left_out(conversation, rendered.text))
        yield origin, rendered


def _assistant_tokens(
    ids: Int32[np.ndarray, " n"],
    offsets: Int64[np.ndarray, "n 2"],
    spans: list[tuple[int, int]],
    tokens: Tokens,
    report: Report,
) -> Bool[np.ndarray, " n"]:
    """Tells which tokens are the assistant's: those within its turns, and those that end them.

    Args:
        ids: The tokens of a conversation.
        offsets: The characters, from and to, that each token was made of.
        spans: The characters of each turn.
        tokens: The tokenizer, which knows the special tokens.
        report: Report in which turns that share a token with the prompt are counted.

    Returns:
        Whether each token is. One that also holds characters of the prompt is not among them: a
        model that answers the prompt never has to say it.

    Raises:
        DataError: If the last turn has no token at its end.
    """
    learned = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        # The first token that reaches beyond the start, and that after the last before the stop.
        # Tokens of whitespace may be empty here, as some tokenizers trim their offsets.
        first = int(np.searchsorted(offsets[:, 1], start, "right"))
        last = int(np.searchsorted(offsets[:, 0], stop, "left"))
        blurred = first < last and offsets[first, 0] < start
        first += blurred
        if last > first and offsets[last - 1, 1] > stop:
            last, blurred = last - 1, True
        report.num_blurred += bool(blurred)
        end = tokens.end_of_turn(ids, first, last)
        if end is None and (start, stop) == spans[-1]:
            raise DataError(
                "ends the assistant's last turn without a special token, so that the model would "
                f"not learn to stop; the turn's last tokens are "
                f"{tokens.tokenizer.convert_ids_to_tokens(ids[first:last][-4:].tolist())}. Pass "
                "`chat_template=` with `eos_token` at the end of each turn"
            )
        learned[first : last if end is None else end] = True
    return learned


def add_texts(
    parts: Iterable[tuple[RowOrigin, str, bool]],
    tokens: Tokens,
    errors: bool,
    builder: CorpusBuilder,
    report: Report,
) -> None:
    """Adds plain texts to a builder; once there is an error, only looks for further ones.

    Args:
        parts: Parts of texts, in order: the text's origin, the part, and whether it is the last.
        tokens: Tokenises them; each text gets the tokens that begin and end one.
        errors: Whether errors are looked for.
        builder: The builder of the corpus that they go into.
        report: The report that lists errors.

    Raises:
        DataError: If the tokenizer has no token to end a text with.
    """
    first, last = tokens.ends_of_text()
    begins = True
    for some in _batches(parts, lambda part: len(part[1])):
        if errors and report.errors[InvalidRow]:
            continue
        for (origin, _, ends), encoding in zip(
            some, tokens.encode([text for _, text, _ in some]), strict=True
        ):
            ids = [first] * begins + [np.array(encoding.ids, np.int32)] + [last] * ends
            joined = np.concatenate(ids)
            builder.extend(joined, np.ones(len(joined), np.bool_))
            if ends:
                builder.end(origin)
            begins = ends


def _batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups items into lists of so many, or of so many characters, as threads share well."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == _TEXTS_AT_ONCE or total >= _CHARACTERS_AT_ONCE:
            yield group
            group, total = [], 0
    if group:
        yield group
