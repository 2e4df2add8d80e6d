"""Tokenises conversations and texts, and marks the tokens that are learned.

The tokenizer's Rust threads work on many texts at once; the results are copied into flat arrays,
and no text is kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int32, Int64
from tokenizers import Encoding

from megatrain_jax._src.data.corpus import CorpusBuilder
from megatrain_jax._src.data.fast_tokenizer import FastTokenizer
from megatrain_jax._src.data.image_files import ImageReference
from megatrain_jax._src.data.report import (
    AssistantTextNotFound,
    DataError,
    InvalidRow,
    Report,
    RowOrigin,
    to_fault,
)
from megatrain_jax._src.data.row_formats import Conversation
from megatrain_jax._src.data.template import Rendered, Template

TrainOn = Literal["assistant", "all"]
TRAIN_ON = ("assistant", "all")
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
    conversations: Sequence[Conversation]
    values: Mapping[str, float] = MappingProxyType({})
    images: Sequence[ImageReference] = ()


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
    errors: bool,
    builder: CorpusBuilder,
    report: Report,
    unlearned: frozenset[int] = frozenset(),
) -> None:
    """Adds conversations to a builder; after an error, only looks for further errors.

    Args:
        documents: The documents, each of one conversation or of two.
        template: Renders them.
        tokens: Tokenises them.
        train_on: Tokens that the loss counts.
        errors: Whether an unusable conversation is an error.
        builder: The builder of the corpus.
        report: The report that lists unusable conversations.
        unlearned: Tokens that the loss never counts, such as placeholders of images.

    Raises:
        DataError: If the template is not valid Jinja.
    """
    rendered = _render(documents, template, tokens, errors, report)
    for some in _batches(rendered, lambda item: sum(len(one.text) for one in item[1])):
        # The call will fail, so the remaining rows are only searched for further faults.
        if errors and (report.errors[InvalidRow] or report.errors[AssistantTextNotFound]):
            continue
        encodings = iter(_encoded([one.text for _, parts in some for one in parts], tokens))
        for document, parts in some:
            given = [next(encodings) for _ in parts]
            try:
                mine = [(part, _usable(one)) for part, one in zip(parts, given, strict=True)]
                learned = [_learned(*pair, tokens, train_on, template, report) for pair in mine]
            except Exception as error:
                report.leave_out(document.origin, to_fault(error), errors)
                continue
            for number, ((_, encoding), mask) in enumerate(zip(mine, learned, strict=True), 1):
                ids = np.array(encoding.ids, np.int32)
                builder.extend(ids, mask & ~np.isin(ids, list(unlearned)) if unlearned else mask)
                if number < len(mine):
                    builder.end_part()
            builder.end(document.origin, document.values, document.images)


def _render(
    documents: Iterable[Document],
    template: Template,
    tokens: FastTokenizer,
    errors: bool,
    report: Report,
) -> Iterator[tuple[Document, list[Rendered]]]:
    for document in documents:
        origin, conversations = document[:2]
        try:
            for conversation in conversations:
                tokens.check_written(conversation)
            rendered = [template.render(conversation) for conversation in conversations]
            hidden = [
                template.left_out(conversation, one.text)
                for conversation, one in zip(conversations, rendered, strict=True)
            ]
        except DataError as error:
            raise DataError(f"{origin}: {error}") from error
        except Exception as error:
            report.leave_out(origin, to_fault(error), errors)
            continue
        report.not_shown.update(set().union(*hidden))
        yield document, rendered


def _learned(
    rendered: Rendered,
    encoding: Encoding,
    tokens: FastTokenizer,
    train_on: TrainOn,
    template: Template,
    report: Report,
) -> Bool[np.ndarray, " n"]:
    ids = np.array(encoding.ids, np.int32)
    if train_on == "all":
        return np.ones(len(ids), np.bool_)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return _assistant_tokens(ids, offsets, rendered.spans, tokens, template.name, report)


def _assistant_tokens(
    ids: Int32[np.ndarray, " n"],
    offsets: Int64[np.ndarray, "n 2"],
    spans: list[tuple[int, int]],
    tokens: FastTokenizer,
    name: str,
    report: Report,
) -> Bool[np.ndarray, " n"]:
    """Finds the assistant's tokens: the tokens within its turns, and the ones that end them.

    Args:
        ids: The tokens of a conversation.
        offsets: The start and end character of each token.
        spans: The characters of each turn.
        tokens: The tokenizer, with its special tokens.
        name: The template's name in errors.
        report: Report that counts turns sharing a token with the prompt.

    Returns:
        A mask of the tokens. A token that also contains characters of the prompt is not included: a
        model that answers the prompt never generates it.

    Raises:
        AssistantTextNotFound: If the last turn has no token at its end.
    """
    learned = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        # `first` is the first token of the turn, and `last` the one after its last token.
        # Whitespace tokens may be empty here, because some tokenizers trim their offsets.
        first, blurred = _first_after(offsets, start)
        last = int(np.searchsorted(offsets[:, 0], stop, "left"))
        if last > first and offsets[last - 1, 1] > stop:
            last, blurred = last - 1, True
        report.num_blurred += bool(blurred)
        end = tokens.end_of_turn(ids, first, last)
        if end is None and (start, stop) == spans[-1]:
            shown = tokens.tokenizer.convert_ids_to_tokens(ids[first:last][-4:].tolist())
            raise AssistantTextNotFound(
                f"{name} ends the assistant's last turn without a special token, so that the model "
                "would not learn to stop",
                f"the turn's last tokens are {shown}",
            )
        # An earlier turn may lack an end token; the text after it then belongs to the template.
        learned[first : last if end is None else end] = True
    return learned


def _first_after(offsets: Int64[np.ndarray, "n 2"], start: int) -> tuple[int, bool]:
    """The first token that begins at or after a character, and whether a token crosses it."""
    first = int(np.searchsorted(offsets[:, 1], start, "right"))
    across = first < len(offsets) and bool(offsets[first, 0] < start)
    return first + across, across


def add_texts(
    parts: Iterable[TextPart],
    tokens: FastTokenizer,
    errors: bool,
    builder: CorpusBuilder,
    report: Report,
) -> None:
    """Adds plain texts to a builder; after an error, only looks for further errors.

    Args:
        parts: Parts of texts, in order.
        tokens: Tokenises them, and adds the beginning and end tokens of each text.
        errors: Whether errors are looked for.
        builder: The builder of the corpus.
        report: The report that lists errors.

    Raises:
        DataError: If the tokenizer has no end-of-text token.
    """
    first, last = tokens.ends_of_text()
    begins = True
    for some in _batches(parts, lambda part: len(part.text)):
        if errors and report.errors[InvalidRow]:
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
                report.num_blurred += blurred
            if begins:
                builder.extend(first, np.ones(len(first), np.bool_))
            builder.extend(ids, learned)
            if part.is_last:
                builder.extend(last, np.ones(len(last), np.bool_))
                builder.end(part.origin)
            begins = part.is_last


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
