"""Reads documents from the rows of all sources: conversations, pairs of them, or parts of texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megatrain_jax._src.data.reading import TEXT_KINDS, blocks, blocks_of, given_rows, kind_of, rows
from megatrain_jax._src.data.report import InvalidRow, Report, RowOrigin
from megatrain_jax._src.data.row_formats import Conversation, to_conversation, to_pair, to_text
from megatrain_jax._src.data.sources import Given
from megatrain_jax._src.data.tokenise import TextPart
from megatrain_jax._src.data.turns import TurnRules

# Texts of rows with more characters are tokenised in blocks of about this size.
_LONG, _BLOCK = 1 << 20, 1 << 18

T = TypeVar("T")


def conversations(
    parts: Iterable[str | Given], rules: TurnRules, report: Report, errors: bool
) -> Iterator[tuple[RowOrigin, Sequence[Conversation]]]:
    """Reads a conversation from each row.

    Args:
        parts: The files and the given rows.
        rules: Allowed changes to the order of turns.
        report: The report that lists unusable rows.
        errors: Whether unusable rows are errors.

    Yields:
        The origin of each row, and its conversation in a tuple.
    """
    for origin, one in _read(parts, lambda row: to_conversation(row, rules), report, errors):
        report.ignored.update(one.ignored)
        report.changed.update(one.changed)
        yield origin, (one,)


def pairs(
    parts: Iterable[str | Given], rules: TurnRules, report: Report, errors: bool
) -> Iterator[tuple[RowOrigin, Sequence[Conversation]]]:
    """Reads two conversations from each row, the preferred one first; see `conversations`."""
    for origin, pair in _read(parts, lambda row: to_pair(row, rules), report, errors):
        report.ignored.update(pair.chosen.ignored | pair.rejected.ignored)
        report.changed.update(pair.chosen.changed | pair.rejected.changed)
        yield origin, pair


def text_parts(parts: Iterable[str | Given], report: Report, errors: bool) -> Iterator[TextPart]:
    """Reads the texts of files and rows, long ones in parts; see `conversations`."""
    for part in parts:
        if isinstance(part, str) and kind_of(part) in TEXT_KINDS:
            yield from _parts(RowOrigin(part, 1), blocks(part, report, errors), 0)
            continue
        for origin, text in _read([part], to_text, report, errors):
            report.ignored.update(text.ignored)
            yield from _parts(origin, _divided(text.text), text.start)


def _read(
    parts: Iterable[str | Given],
    convert: Callable[[Mapping[str, Any]], T],
    report: Report,
    errors: bool,
) -> Iterator[tuple[RowOrigin, T]]:
    for part in parts:
        if isinstance(part, Given):
            read = given_rows(part.name, part.rows, report, errors)
        else:
            read = rows(part, report, errors)
        for origin, row in read:
            try:
                converted = convert(row)
            except InvalidRow as fault:
                report.leave_out(origin, fault, errors)
                continue
            yield origin, converted


def _divided(text: str) -> Iterable[str]:
    if len(text) <= _LONG:
        return [text]
    # A tokenizer takes about 300 bytes per token while it works: a whole library at once would take
    # all memory.
    return blocks_of(text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))


def _parts(origin: RowOrigin, texts: Iterable[str], start: int) -> Iterator[TextPart]:
    # One part behind, because the last part must be marked.
    before: str | None = None
    for text in texts:
        if before is not None:
            yield TextPart(origin, before, min(start, len(before)), False)
            start = max(0, start - len(before))
        before = text
    if before is not None:
        yield TextPart(origin, before, start, True)
