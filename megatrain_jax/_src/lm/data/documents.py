"""Reads documents from the rows of all sources: conversations, pairs of them, or parts of texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from megatrain_jax._src.lm.data.distilled_rows import DistilledRow, to_distilled
from megatrain_jax._src.lm.data.reading import (
    TEXT_KINDS,
    blocks,
    blocks_of,
    given_rows,
    kind_of,
    rows,
)
from megatrain_jax._src.lm.data.report import (
    DataError,
    InvalidRow,
    Report,
    RowOrigin,
    to_fault,
)
from megatrain_jax._src.lm.data.row_formats import (
    Pair,
    to_conversation,
    to_margin,
    to_pair,
    to_text,
    with_columns,
)
from megatrain_jax._src.lm.data.sources import GivenRows, Parts
from megatrain_jax._src.lm.data.tokenise import Document, TextPart
from megatrain_jax._src.lm.data.turns import TurnRules
from megatrain_jax._src.lm.data.unpaired_rows import LabelledAnswer, mismatched, to_labelled

# Texts of rows with more characters are tokenised in blocks of about this size.
_LONG, _BLOCK = 1 << 20, 1 << 18

T = TypeVar("T")


def conversations(
    parts: Parts, rules: TurnRules, report: Report, errors: bool
) -> Iterator[Document]:
    """Reads a conversation from each row.

    Args:
        parts: The files and the given rows, with names of their columns.
        rules: Allowed changes to the order of turns.
        report: The report that lists unusable rows.
        errors: Whether unusable rows are errors.

    Yields:
        The document of each row.
    """
    for origin, one in read_rows(parts, lambda row: to_conversation(row, rules), report, errors):
        report.ignored.update(one.ignored)
        report.changed.update(one.changed)
        yield Document(origin, (one,))


def pairs(parts: Parts, rules: TurnRules, report: Report, errors: bool) -> Iterator[Document]:
    """Reads two conversations from each row, the preferred one first; see `conversations`."""
    for origin, pair in read_rows(parts, lambda row: to_pair(row, rules), report, errors):
        report.ignored.update(pair.chosen.ignored | pair.rejected.ignored)
        report.changed.update(pair.chosen.changed | pair.rejected.changed)
        yield Document(origin, pair)


def pairs_with_margins(
    parts: Parts, rules: TurnRules, report: Report, errors: bool
) -> Iterator[Document]:
    """Reads two conversations from each row, and their margin; see `pairs`."""

    def convert(row: Mapping[str, Any]) -> tuple[Pair, float]:
        rest = {name: value for name, value in row.items() if name != "margin"}
        return to_pair(rest, rules), to_margin(row)

    for origin, (pair, margin) in read_rows(parts, convert, report, errors):
        report.ignored.update(pair.chosen.ignored | pair.rejected.ignored)
        report.changed.update(pair.chosen.changed | pair.rejected.changed)
        yield Document(origin, pair, {"margins": margin})


def unpaired(parts: Parts, rules: TurnRules, report: Report, errors: bool) -> Iterator[Document]:
    """Reads labelled answers, and a mismatched answer to each prompt; see `conversations`.

    The mismatched answer is taken from the previous row, or for the first row from the last row, so
    the first row's documents come at the end. A row with a chosen and a rejected answer makes two
    documents, and counts as two rows.
    """
    first, before = None, None
    for origin, labelled in read_rows(parts, lambda row: to_labelled(row, rules), report, errors):
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
        report.leave_out(origin, InvalidRow(fault), errors)
        return
    yield from _mismatching(origin, labelled, before)


def _mismatching(
    origin: RowOrigin, labelled: Sequence[LabelledAnswer], before: Sequence[LabelledAnswer]
) -> Iterator[Document]:
    for number, one in enumerate(labelled):
        other = before[min(number, len(before) - 1)]
        both = one.conversation, mismatched(one, other)
        yield Document(origin, both, {"desirable": one.desirable})


def distilled(
    parts: Parts, topk: int, tail: bool, report: Report, errors: bool
) -> Iterator[tuple[RowOrigin, DistilledRow]]:
    """Reads tokens with a teacher's top-k log-probabilities; see `conversations`."""
    for origin, row in read_rows(parts, lambda row: to_distilled(row, topk, tail), report, errors):
        report.ignored.update(row.ignored)
        yield origin, row


def text_parts(parts: Parts, report: Report, errors: bool) -> Iterator[TextPart]:
    """Reads the texts of files and rows, long ones in parts; see `conversations`."""
    for part in parts:
        if isinstance(part, str) and kind_of(part) in TEXT_KINDS:
            yield from _parts(RowOrigin(part, 1), blocks(part, report, errors), 0)
            continue
        for origin, text in read_rows(replace(parts, items=[part]), to_text, report, errors):
            report.ignored.update(text.ignored)
            yield from _parts(origin, _divided(text.text), text.start)


def read_rows(
    parts: Parts,
    convert: Callable[[Mapping[str, Any]], T],
    report: Report,
    errors: bool,
) -> Iterator[tuple[RowOrigin, T]]:
    """Reads and converts rows; `convert` raises `InvalidRow` to refuse one. See `conversations`."""
    unseen = set(parts.columns.values())
    origin = None
    for part in parts:
        if isinstance(part, GivenRows):
            read = given_rows(part.name, part.rows, report, errors)
        else:
            read = rows(part, report, errors)
        for origin, row in read:
            unseen.difference_update(row)
            try:
                converted = convert(with_columns(row, parts.columns, report.ignored))
            except Exception as error:  # a row may have anything in any place
                report.leave_out(origin, to_fault(error), errors)
                continue
            yield origin, converted
    if origin is not None and unseen:
        raise DataError(f"`columns` names {', '.join(sorted(unseen))}, which no row has")


def _divided(text: str) -> Iterable[str]:
    if len(text) <= _LONG:
        return [text]
    # While it works, a tokenizer takes about 300 bytes per token: too much for a very long text at
    # once.
    return blocks_of(text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))


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
