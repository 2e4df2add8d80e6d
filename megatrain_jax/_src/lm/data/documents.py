"""Documents from the rows of all sources: read, tokenised, and the learned tokens marked.

A document is a conversation, a pair of them, or a text in parts. The tokenizer's Rust threads work
on many texts at once; the results are copied into flat arrays, and no text is kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int32, Int64
from tokenizers import Encoding

from megatrain_jax._src.lm.data import reading, row_formats
from megatrain_jax._src.lm.data.corpus import CorpusBuilder
from megatrain_jax._src.lm.data.image_files import Media
from megatrain_jax._src.lm.data.report import (
    AnswerLost,
    AssistantTextNotFound,
    DataError,
    InvalidRow,
    Report,
    RowOrigin,
    to_fault,
)
from megatrain_jax._src.lm.data.sources import GivenRows, Parts
from megatrain_jax._src.lm.data.template import Rendered, Template
from megatrain_jax._src.lm.data.tokenizer import FastTokenizer
from megatrain_jax._src.lm.data.turns import TurnRules

TrainOn = Literal["assistant", "all"]
_TEXTS_AT_ONCE = 512
# While the tokenizer works, a token takes about 300 bytes.
_CHARACTERS_AT_ONCE = 1 << 21

T = TypeVar("T")


class Document(NamedTuple):
    """A document of one or two conversations.

    Attributes:
        origin: Origin of its row.
        conversations: Its conversations.
        values: Numbers of the document by name, such as a label; the same names in all documents.
        images: Its images, in the order of their placeholders.
    """

    origin: RowOrigin
    conversations: Sequence[row_formats.Conversation]
    values: Mapping[str, float] = MappingProxyType({})
    images: Sequence[Media] = ()


class TextPart(NamedTuple):
    """A part of a plain text.

    Attributes:
        origin: Origin of the text's row.
        text: The part.
        start: Number of characters at its beginning that are not learned.
        is_last: Whether the text ends here.
    """

    origin: RowOrigin
    text: str
    start: int
    is_last: bool


def add_conversations(
    documents: Iterable[Document],
    template: Template,
    tokens: FastTokenizer,
    train_on: TrainOn,
    builder: CorpusBuilder,
    report: Report,
    unlearned: frozenset[int],
) -> None:
    """Adds conversations to a builder; after an error, only looks for further errors.

    Args:
        documents: The documents, each of one conversation or of two.
        template: Renders them.
        tokens: Tokenises them.
        train_on: Tokens that the loss counts.
        builder: The builder of the corpus.
        report: The report that lists unusable conversations.
        unlearned: Tokens that the loss never counts, such as placeholders of images.

    Raises:
        DataError: If the template is not valid Jinja.
    """
    rendered = _render(documents, template, tokens, report)
    for some in _batches(rendered, lambda item: sum(len(one.text) for one in item[1])):
        # The call will fail, so the remaining rows are only searched for further faults.
        if report.is_strict and (report.errors[InvalidRow] or report.errors[AssistantTextNotFound]):
            continue
        encodings = iter(_encoded([one.text for _, parts in some for one in parts], tokens))
        for document, parts in some:
            given = [next(encodings) for _ in parts]
            try:
                pairs = [(part, _usable(one)) for part, one in zip(parts, given, strict=True)]
                learned = [_learned(*pair, tokens, train_on, template, report) for pair in pairs]
            except Exception as error:
                report.leave_out(document.origin, to_fault(error))
                continue
            for number, (ids, mask, *_) in enumerate(learned, 1):
                builder.extend(ids, mask & ~np.isin(ids, list(unlearned)) if unlearned else mask)
                if number < len(learned):
                    builder.end_part()
            is_kept = builder.end(document.origin, document.values, document.images)
            report.num_blurred += is_kept and sum(blurred for _, _, blurred, _ in learned)
            report.num_joined += is_kept and any(joined for *_, joined in learned)


def _render(
    documents: Iterable[Document], template: Template, tokens: FastTokenizer, report: Report
) -> Iterator[tuple[Document, list[Rendered]]]:
    for document in documents:
        origin, conversations = document[:2]
        try:
            for conversation in conversations:
                tokens.check_written(conversation)
            rendered = [_ended(conversation, template, tokens) for conversation in conversations]
            hidden = [
                template.left_out(conversation, one.text)
                for conversation, one in zip(conversations, rendered, strict=True)
            ]
        except DataError as error:
            raise DataError(f"{origin}: {error}") from error
        except Exception as error:
            report.leave_out(origin, to_fault(error))
            continue
        report.not_shown.update(set().union(*hidden))
        yield document, rendered


def _ended(
    conversation: row_formats.Conversation, template: Template, tokens: FastTokenizer
) -> Rendered:
    """A conversation as text, whose last answer has an end if the template knows one.

    Some templates write nothing after an answer: it ends where the next turn's mark begins, such as
    "<|user|>" of GLM. Only by learning this mark does a model learn to stop.
    """
    rendered = template.render(conversation)
    if not rendered.stops or not rendered.stops[-1]:
        return rendered
    text, (start, stop) = rendered.text, rendered.spans[-1]
    if text[stop:].strip() or tokens.ends_turn(text, start, stop):
        return rendered
    mark = tokens.up_to_special(template.next_mark(conversation))
    if not mark:
        return rendered
    text = text[:stop] + mark
    return Rendered(text, [*rendered.spans[:-1], (start, len(text))], rendered.stops)


def _learned(
    rendered: Rendered,
    encoding: Encoding,
    tokens: FastTokenizer,
    train_on: TrainOn,
    template: Template,
    report: Report,
) -> tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"], int, bool]:
    """Finds the assistant's tokens: the tokens within its turns, and the ones that end them.

    Returns:
        The tokens, a mask of those that are learned, the number of turns whose first or last token
        also contains text outside of them, and whether a turn's first token is not among them
        because it also contains characters of the prompt: a model that answers the prompt never
        generates it.

    Raises:
        AssistantTextNotFound: If the last turn has no token at its end.
        AnswerLost: If no turn has another word than such a first token.
    """
    ids = np.array(encoding.ids, np.int32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    learned = np.full(len(ids), train_on == "all", np.bool_)
    num_blurred, any_joined, has_words = 0, False, not rendered.spans
    for (start, stop), stops in zip(rendered.spans, rendered.stops, strict=True):
        # `first` is the first token of the turn, and `last` the one after its last token.
        # Whitespace tokens may be empty here, because some tokenizers trim their offsets.
        first, joined = _first_after(offsets, start)
        last = int(np.searchsorted(offsets[:, 0], stop, "left"))
        crosses = last > first and bool(offsets[last - 1, 1] > stop)
        last -= crosses
        end = tokens.end_of_turn(ids, first, last)
        if end is not None and stops:
            report.end_tokens.add(int(ids[end - 1]))
        if train_on == "all":
            continue
        num_blurred += joined or crosses
        if end is None and (start, stop) == rendered.spans[-1]:
            shown = tokens.tokenizer.convert_ids_to_tokens(ids[first:last][-4:].tolist())
            raise AssistantTextNotFound(
                f"{template.name} ends the assistant's last turn without a special token, so that "
                "the model would not learn to stop",
                f"the turn's last tokens are {shown}",
            )
        # An earlier turn may lack an end token; the text after it then belongs to the template.
        learned[first : last if end is None else end] = True
        any_joined |= joined
        has_words = has_words or not joined or tokens.has_words(ids[first:last])
    if any_joined and not has_words:
        raise _lost(rendered.text[slice(*rendered.spans[-1])])
    return ids, learned, num_blurred, any_joined


def _lost(answer: str) -> AnswerLost:
    return AnswerLost(
        "the whole answer shares a token with the end of the prompt, so that nothing of it is "
        "learned",
        repr(answer[:60]),
    )


def _first_after(offsets: Int64[np.ndarray, "n 2"], start: int) -> tuple[int, bool]:
    """The first token that begins at or after a character, and whether a token crosses it."""
    first = int(np.searchsorted(offsets[:, 1], start, "right"))
    across = first < len(offsets) and bool(offsets[first, 0] < start)
    return first + across, across


def add_texts(
    parts: Iterable[TextPart], tokens: FastTokenizer, builder: CorpusBuilder, report: Report
) -> None:
    """Adds plain texts to a builder; after an error, only looks for further errors.

    Args:
        parts: Parts of texts, in order.
        tokens: Tokenises them, and adds the beginning and end tokens of each text.
        builder: The builder of the corpus.
        report: The report that lists errors.

    Raises:
        DataError: If the tokenizer has no end-of-text token.
    """
    first, last = tokens.ends_of_text()
    report.end_tokens.update(last.tolist())
    begins, joined, has_words = True, False, False
    for some in _batches(parts, lambda part: len(part.text)):
        if report.is_strict and report.errors[InvalidRow]:
            continue
        encodings = _encoded([part.text for part in some], tokens)
        for part, encoding in zip(some, encodings, strict=True):
            if isinstance(encoding, InvalidRow):
                builder.refuse(encoding)
                encoding = Encoding()
            ids = np.array(encoding.ids, np.int32)
            learned = np.ones(len(ids), np.bool_)
            if part.start:
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                at, blurred = _first_after(offsets, part.start)
                learned[:at] = False
                joined |= blurred
            # Words matter only if a token is lost.
            has_words = has_words or (joined and tokens.has_words(ids[learned]))
            if begins:
                builder.extend(first, np.ones(len(first), np.bool_))
            builder.extend(ids, learned)
            begins = part.is_last
            if not part.is_last:
                continue
            builder.extend(last, np.ones(len(last), np.bool_))
            lost = _lost(part.text[part.start :]) if joined and not has_words else None
            is_kept = builder.end(part.origin, fault=lost)
            report.num_blurred += is_kept and joined
            report.num_joined += is_kept and joined
            joined = has_words = False


def _encoded(texts: list[str], tokens: FastTokenizer) -> list[Encoding | InvalidRow]:
    """The tokens of texts, or in their place the fault of a text that has none."""
    try:
        return [*tokens.encode(texts)]
    except Exception as error:  # of only one text, but the tokenizer doesn't say which
        if len(texts) > 1:
            return [one for text in texts for one in _encoded([text], tokens)]
        return [to_fault(error)]


def _usable(encoding: Encoding | InvalidRow) -> Encoding:
    if isinstance(encoding, InvalidRow):
        raise encoding
    return encoding


def _batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups items into lists of limited number and total size for the tokenizer's threads."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == _TEXTS_AT_ONCE or total >= _CHARACTERS_AT_ONCE:
            yield group
            group, total = [], 0
    if group:
        yield group


# Texts of rows with more characters are tokenised in blocks of about this size.
_LONG, _BLOCK = 1 << 20, 1 << 18


def conversations(parts: Parts, rules: TurnRules, report: Report) -> Iterator[Document]:
    """Reads a conversation from each row.

    Args:
        parts: The files and the given rows, with names of their columns.
        rules: Allowed changes to the order of turns.
        report: The report that lists unusable rows.

    Yields:
        The document of each row.
    """
    for origin, one in read_rows(
        parts, lambda row: row_formats.to_conversation(row, rules), report
    ):
        yield noted(Document(origin, (one,)), report)


def pairs(parts: Parts, rules: TurnRules, report: Report) -> Iterator[Document]:
    """Reads two conversations from each row, the preferred one first; see `conversations`."""
    for origin, pair in read_rows(parts, lambda row: row_formats.to_pair(row, rules), report):
        yield noted(Document(origin, pair), report)


def pairs_with_margins(parts: Parts, rules: TurnRules, report: Report) -> Iterator[Document]:
    """Reads two conversations from each row, and their margin; see `pairs`."""

    def convert(row: Mapping[str, Any]) -> tuple[row_formats.Pair, float]:
        rest = {name: value for name, value in row.items() if name != "margin"}
        return row_formats.to_pair(rest, rules), row_formats.to_margin(row)

    for origin, (pair, margin) in read_rows(parts, convert, report):
        yield noted(Document(origin, pair, {"margins": margin}), report)


def noted(document: Document, report: Report) -> Document:
    """The document; the report counts its ignored fields and changed turns."""
    report.ignored.update(set().union(*(one.ignored for one in document.conversations)))
    report.changed.update(set().union(*(one.changed for one in document.conversations)))
    return document


def unpaired(parts: Parts, rules: TurnRules, report: Report) -> Iterator[Document]:
    """Reads labelled answers, and a mismatched answer to each prompt; see `conversations`.

    The mismatched answer is taken from the previous row, or for the first row from the last row, so
    the first row's documents come at the end. A row with a chosen and a rejected answer makes two
    documents, and counts as two rows.
    """
    first, before = None, None
    for origin, labelled in read_rows(
        parts, lambda row: row_formats.to_labelled(row, rules), report
    ):
        report.num_rows += len(labelled) - 1  # as many as documents
        report.ignored.update(set().union(*(one.conversation.ignored for one in labelled)))
        report.changed.update(set().union(*(one.conversation.changed for one in labelled)))
        if before is None:
            first = origin, labelled
        else:
            yield from _mismatching(origin, labelled, before)
        before = labelled
    if first is None or before is None:
        return
    origin, labelled = first
    if before is labelled:
        fault = "the only row, but a mismatched answer comes from another row: give two or more"
        report.leave_out(origin, InvalidRow(fault))
        return
    yield from _mismatching(origin, labelled, before)


def _mismatching(
    origin: RowOrigin,
    labelled: Sequence[row_formats.LabelledAnswer],
    before: Sequence[row_formats.LabelledAnswer],
) -> Iterator[Document]:
    for number, one in enumerate(labelled):
        other = before[min(number, len(before) - 1)]
        both = one.conversation, row_formats.mismatched(one, other)
        yield Document(origin, both, {"desirable": one.desirable})


def text_parts(parts: Parts, report: Report) -> Iterator[TextPart]:
    """Reads the texts of files and rows, long ones in parts; see `conversations`."""

    def convert(row: Mapping[str, Any]) -> tuple[Iterable[str], int]:
        text = row_formats.to_text(row)
        report.ignored.update(text.ignored)
        return _divided(text.text), text.start

    def of_file(path: str) -> tuple[Iterable[str], int]:
        return reading.blocks(path, report), 0

    for origin, (texts, start) in read_rows(parts, convert, report, of_file=of_file):
        yield from _parts(origin, texts, start)


def read_rows(
    parts: Parts,
    convert: Callable[[Mapping[str, Any]], T],
    report: Report,
    *,
    most: int | None = None,
    of_file: Callable[[str], T] | None = None,
) -> Iterator[tuple[RowOrigin, T]]:
    """Reads and converts rows; `convert` raises `InvalidRow` to refuse one. See `conversations`.

    With `most`, only so many rows of each part are read, which may lack columns of later ones. With
    `of_file`, a file of plain text counts as a row that this function converts.
    """
    unseen = set(parts.columns.values())
    origin = None
    for part in parts:
        if of_file and isinstance(part, str) and reading.kind_of(part) in reading.TEXT_KINDS:
            yield RowOrigin(part, 1), of_file(part)
            continue
        if isinstance(part, GivenRows):
            read = reading.given_rows(part.name, part.rows, report)
        else:
            read = reading.rows(part, report)
        for origin, row in islice(read, most):
            unseen.difference_update(row)
            try:
                converted = convert(row_formats.with_columns(row, parts.columns, report.ignored))
            except Exception as error:  # a row may have anything in any place
                report.leave_out(origin, to_fault(error))
                continue
            yield origin, converted
    if origin is not None and unseen and most is None:
        raise DataError(f"`columns` names {', '.join(sorted(unseen))}, which no row has")


def _divided(text: str) -> Iterable[str]:
    if len(text) <= _LONG:
        return [text]
    # While it works, a tokenizer takes about 300 bytes per token: too much for a very long text at
    # once.
    return reading.blocks_of(text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))


def _parts(origin: RowOrigin, texts: Iterable[str], start: int) -> Iterator[TextPart]:
    # Each part is yielded one step late, because the last one must be marked.
    before: str | None = None
    for text in texts:
        if before is not None:
            yield TextPart(origin, before, min(start, len(before)), False)
            start = max(0, start - len(before))
        before = text
    if before is not None:
        yield TextPart(origin, before, start, True)
