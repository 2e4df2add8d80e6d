"""Reports on reading data: counts of rows read and left out, with file and line.

Every row that is dropped is recorded here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NO_JSON = "no valid JSON"
_EXAMPLES_SHOWN = 5
_REASONS_SHOWN = 20


class DataError(ValueError):
    """Data that can't be used for training as it is; the message names files and lines."""


class InvalidRow(ValueError):
    """One row that can't be used.

    Attributes:
        reason: The fault, in words common to all rows with it.
    """

    def __init__(self, reason: str, detail: str = ""):
        """Makes the error of a row with a fault."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def invalid_utf8(byte: int) -> InvalidRow:
    """The fault of a row with a byte that is not UTF-8."""
    return InvalidRow("invalid UTF-8", f"byte 0x{byte:02x}")


class TooLong(InvalidRow):
    """A row that is longer than `length`."""


class AssistantTextNotFound(InvalidRow):
    """A conversation for which the chat template does not reveal the assistant's text."""


class AnswerLost(InvalidRow):
    """An answer of which nothing is learned, because all of it shares a token with the prompt."""


def to_fault(error: Exception) -> InvalidRow:
    """The fault of a row whose use has failed, whatever the error.

    Raises:
        MemoryError: If that is the error, because the row may be right.
    """
    if isinstance(error, InvalidRow):
        return error
    if isinstance(error, MemoryError):
        raise error
    return InvalidRow("a row that can't be used", f"{type(error).__name__}: {error}")


class RowOrigin(NamedTuple):
    """The origin of a row: its file, and its place there.

    Attributes:
        path: The file, as the user named it, or the argument that contained the row.
        number: Its line or row, counted from 1; 0 for the whole file.
        unit: "line" or "row".
    """

    path: str
    number: int = 0
    unit: str = "line"

    def __str__(self) -> str:
        """Returns text such as ``chats.jsonl, line 7``."""
        return f"{self.path}, {self.unit} {self.number}" if self.number else self.path


@dataclass(kw_only=True)
class Report:
    """Counts of rows read and left out while files are read.

    Attributes:
        is_strict: Whether unusable rows are errors.
        num_rows: Rows read, including rows left out.
        left_out: The number of rows left out, by reason.
        file_faults: The number of files that were faulty as a whole (for example empty), by reason.
        ignored: The number of rows with a field that nothing reads, by field.
        not_shown: The number of rows with a field that the chat template omits, by field.
        changed: The number of rows with turns that were merged or dropped, by change.
        num_cut: Documents that lost their end.
        num_split: Documents that were split.
        num_pieces_left_out: Pieces of split documents without a token to learn.
        num_blurred: Answers whose first or last token also contains text outside of them.
        num_joined: Rows with an answer whose first token also contains the prompt's end.
        end_tokens: Ids of the tokens that end what a model writes.
        errors: The number of faults that the user did not allow, by their class.
    """

    is_strict: bool = True
    num_rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    file_faults: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    not_shown: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    num_cut: int = 0
    num_split: int = 0
    num_pieces_left_out: int = 0
    num_blurred: int = 0
    num_joined: int = 0
    end_tokens: set[int] = field(default_factory=set)
    errors: Counter[type[InvalidRow]] = field(default_factory=Counter)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, origin: RowOrigin, fault: InvalidRow, error: bool | None = None) -> None:
        """Records a row (or a file, if `origin` has no number) that is not used.

        Args:
            origin: Origin of the row.
            fault: Fault of the row.
            error: Whether `check` will raise for it; None for what `is_strict` says.
        """
        # Number 0 stands for the whole file, which is not a row.
        counts = self.left_out if origin.number else self.file_faults
        counts[fault.reason] += 1
        if self.is_strict if error is None else error:
            self.errors[type(fault)] += 1
        examples = self._examples.setdefault(fault.reason, [])
        # Only counted from then on: a file with a million faulty rows takes no memory.
        if len(examples) < _EXAMPLES_SHOWN:
            examples.append(f"{origin}: {fault}")

    def check(self, advice: Mapping[type[InvalidRow], str]) -> None:
        """Raises if there was a fault that the user did not allow.

        Args:
            advice: Advice on faults, by their class.

        Raises:
            DataError: With the origins of the first faults of each kind.
        """
        if self.errors:
            hints = [advice[kind] for kind in self.errors]
            raise DataError("\n".join([f"{self._total()}:", *self.examples(), *hints]))

    def counted(self) -> dict[str, Any]:
        """The counts that a `Summary` has too, as plain values."""
        kept = {
            name: getattr(self, name) for name in Summary.__dataclass_fields__.keys() & vars(self)
        }
        named = {k: dict(v) for k, v in kept.items() if isinstance(v, Counter)}
        return kept | named | {"end_tokens": sorted(self.end_tokens)}

    def examples(self) -> list[str]:
        """Returns the first origins by reason, most frequent first, and the rest as a count."""
        lines = []
        counts = self.left_out + self.file_faults
        for reason, count in counts.most_common(_REASONS_SHOWN):
            shown = self._examples[reason]
            lines += [f"  {text}" for text in shown]
            if count > len(shown):
                lines.append(f"  ... and {count - len(shown):,} more: {reason}")
        if len(counts) > _REASONS_SHOWN:
            lines.append(f"  ... and {len(counts) - _REASONS_SHOWN:,} other reasons")
        return lines

    def _total(self) -> str:
        rows, files = self.left_out.total(), self.file_faults.total()
        parts = [f"{rows:,} of {self.num_rows:,} rows"] if rows else []
        parts += [f"{files:,} whole file{'s' * (files > 1)}"] if files else []
        return f"{' and '.join(parts)} can't be used"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of the rows that a dataset was made from; its string is printed.

    Attributes:
        num_rows: Rows read.
        num_documents: Rows used for training: `num_rows` less those in `left_out`.
        num_pieces: Pieces of these documents; long documents may be split.
        num_tokens: Tokens of all documents.
        num_learned: Tokens that the loss counts.
        longest: Tokens of the longest document read, also if it was cut or dropped.
        num_bytes: Host memory used.
        left_out: The number of rows left out, by reason.
        num_cut: Documents that lost their end.
        num_split: Documents that were split.
        num_pieces_left_out: Pieces of split documents without a token to learn.
        num_blurred: Answers whose first or last token also contains text outside of them, and is
            not learned.
        num_joined: Rows with an answer whose first token also contains the prompt's end.
        end_tokens: Ids of the learned tokens that end what a model writes, ascending.
        ignored: The number of rows with a field that nothing reads, by field.
        not_shown: The number of rows with a message that has a field omitted by the chat template,
            such as ``reasoning_content of assistant``, by field.
        changed: The number of rows with turns that were merged or dropped, by change.
        file_faults: The number of files with nothing to read, by reason.
        examples: The first origins of left-out rows, with the reasons.
        cached: Folder of the tokens on disk; None if they are in host memory.
        is_reused: Whether an earlier start has written this folder.
    """

    num_rows: int
    num_documents: int
    num_pieces: int
    num_tokens: int
    num_learned: int
    longest: int
    num_bytes: int
    left_out: dict[str, int]
    num_cut: int
    num_split: int
    num_pieces_left_out: int
    num_blurred: int
    num_joined: int
    end_tokens: list[int]
    ignored: dict[str, int]
    not_shown: dict[str, int]
    changed: dict[str, int]
    file_faults: dict[str, int]
    examples: tuple[str, ...]
    cached: str | None = None
    is_reused: bool = False

    def __str__(self) -> str:
        """A few lines: rows, tokens, memory, and everything that is not used for training."""
        lines = [
            f"{self.num_documents:,} of {self.num_rows:,} rows: {self.num_tokens:,} tokens, "
            f"{self.num_learned:,} of them learned ({self.num_learned / self.num_tokens:.0%}), "
            f"the longest of {self.longest:,}; {self.num_bytes / 2**20:,.1f} MiB "
            f"{'on disk' if self.cached else 'in host memory'} "
            f"({self.num_bytes / self.num_tokens:.1f} bytes a token)"
        ]
        if self.cached is not None:
            how = "read from" if self.is_reused else "kept for the next start in"
            lines.append(f"tokenised data is {how} {self.cached}")
        lines += [f"left out: {count:,} × {reason}" for reason, count in self.left_out.items()]
        lines += [f"files: {count:,} × {reason}" for reason, count in self.file_faults.items()]
        lines += self.examples
        if self.num_cut:
            lines.append(f"cut at the end: {self.num_cut:,} documents")
        if self.num_split:
            lines.append(f"split: {self.num_split:,} documents; {self.num_pieces:,} pieces in all")
        if self.num_pieces_left_out:
            lines.append(f"pieces with nothing to learn, left out: {self.num_pieces_left_out:,}")
        if self.num_blurred:
            lines.append(
                "answers that share a token with the prompt or the text behind them, which is not "
                f"learned: {self.num_blurred:,}"
            )
        of_rows = {
            "as the options say": self.changed,
            "fields that nothing reads": self.ignored,
            "fields that the chat template leaves out, of one message at least": self.not_shown,
        }
        for what, counts in of_rows.items():
            if counts:
                rows = (f"{name} ({count:,} rows)" for name, count in counts.items())
                lines.append(f"{what}: {', '.join(rows)}")
        return "\n".join(lines)
