"""The two calls that make a dataset of files: conversations, and plain text."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from megatrain_jax._src.common import checks
from megatrain_jax._src.data.corpus import TOO_LONG, CorpusBuilder, WhenTooLong
from megatrain_jax._src.data.dataset import Dataset, DatasetOptions
from megatrain_jax._src.data.forms import Conversation, to_conversation, to_text
from megatrain_jax._src.data.reading import Paths, as_paths, blocks, rows
from megatrain_jax._src.data.report import (
    DataError,
    InvalidRow,
    Report,
    RowOrigin,
    Summary,
    TooLong,
)
from megatrain_jax._src.data.template import Template
from megatrain_jax._src.data.tokenise import TRAIN_ON, Tokens, TrainOn, add_conversations, add_texts
from megatrain_jax._src.data.vocabulary import BeyondVocabulary

Invalid = Literal["error", "drop"]
_INVALID = ("error", "drop")
_ADVICE_INVALID = 'Repair them, or pass `invalid="drop"` to leave them out.'
_ADVICE_TOO_LONG = (
    'Pass a larger `length` (the longest has {longest:,} tokens), or say `too_long="cut"` (lose '
    'their end), "split" (go on in other rows, without what came before) or "drop".'
)
_ADVICE_BEYOND = (
    "Use the tokenizer that the model was trained with, or a model with a row for each token that "
    'was added to it; or pass `invalid="drop"` to leave such rows out.'
)


def chat(
    paths: Paths,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    train_on: TrainOn = "assistant",
    too_long: WhenTooLong = "error",
    invalid: Invalid = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    workers: int = 0,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of conversations.

    Everything is tokenised here, once, and held in host memory: five bytes a token. A row of a
    file is a conversation in OpenAI's form (``{"messages": [{"role", "content"}]}``), ShareGPT's
    (``{"conversations": [{"from", "value"}]}``) or Alpaca's (``{"instruction", "input",
    "output"}``), whatever the other rows have.

    Args:
        paths: One or more files: .json (an array of rows), .jsonl, .ndjson or .parquet.
        tokenizer: The folder of the model's tokenizer, or a fast tokenizer of Transformers.
        length: Tokens of a row; conversations are packed into rows, each into one.
        batch_size: Rows of a batch.
        seed: Seed of the order of conversations.
        shuffle: Whether that order is drawn, anew every epoch.
        epochs: The number of times that every conversation is seen; None goes on for ever.
        train_on: The tokens that the loss counts: those of the "assistant", which are what it says
            and the token that ends each of its turns, but no message with a weight of 0; or "all".
        too_long: Treatment of conversations longer than `length`: an "error" that lists them
            once all are read; "cut" loses their end, "split" has them go on in another row
            without what came before, "drop" leaves them out.
        invalid: Treatment of rows that can't be used: an "error" that lists them, or "drop".
        chat_template: A Jinja template to use instead of the tokenizer's own, or the name of one
            of its templates.
        template_variables: Further variables of the template, such as
            ``{"enable_thinking": False}``.
        workers: Number of threads that build batches ahead. 0 builds each when asked for, which
            takes well below a millisecond.
        progress: Whether to show a progress bar and print the summary of what was read.

    Raises:
        DataError: If rows are invalid or too long and that is an error, if there is nothing left,
            or if the chat template is missing or can't be understood. Names files and lines. Rows
            are also invalid if they have a token beyond the `vocab_size` of the `config.json` that
            lies beside the tokenizer.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has another type.
        ValueError: If an option is not one of those above, or the tokenizer can't be loaded.
    """
    options = _options(length, batch_size, seed, shuffle, epochs, workers)
    _check_choices(train_on=train_on, too_long=too_long, invalid=invalid)
    _check_template(chat_template, template_variables)
    checks.boolean("progress", progress)
    names = as_paths(paths)
    tokens = _tokens(tokenizer)
    template = Template(tokens.tokenizer, chat_template, template_variables)
    report, errors = Report(), invalid == "error"
    builder = CorpusBuilder(options.length, too_long, errors, report, tokens.vocabulary.fault)
    read = _progress((item for path in names for item in rows(path, report, errors)), progress)
    conversations = _conversations(read, report, errors)
    add_conversations(conversations, template, tokens, train_on, errors, builder, report)
    return _finish(builder, report, options, progress)


def text(
    paths: Paths,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    too_long: WhenTooLong = "split",
    invalid: Invalid = "error",
    workers: int = 0,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of plain text, of which every token is learned.

    A .txt file is one text, and so is a ``{"text": ...}`` row of the other kinds of files. Each
    gets the tokenizer's end of text at its end and, if the tokenizer puts one there, its token for
    the beginning. Special tokens that a text spells out become those tokens.

    Args:
        paths: One or more files: .txt, .json, .jsonl, .ndjson or .parquet.
        tokenizer: See `chat`.
        length: Tokens of a row.
        batch_size: Rows of a batch.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        too_long: See `chat`; the default here splits a text into pieces of `length` tokens, and
            the last token of a piece has the first of the next as its label.
        invalid: See `chat`.
        workers: See `chat`.
        progress: See `chat`.

    Raises:
        DataError: See `chat`; or if the tokenizer has no end of text.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has another type.
        ValueError: If an option is not one of those above, or the tokenizer can't be loaded.
    """
    options = _options(length, batch_size, seed, shuffle, epochs, workers)
    _check_choices(too_long=too_long, invalid=invalid)
    checks.boolean("progress", progress)
    names = as_paths(paths)
    tokens = _tokens(tokenizer)
    report, errors = Report(), invalid == "error"
    builder = CorpusBuilder(options.length, too_long, errors, report, tokens.vocabulary.fault)
    parts = (part for path in names for part in _parts(path, report, errors))
    add_texts(_progress(parts, progress), tokens, errors, builder, report)
    return _finish(builder, report, options, progress)


def _tokens(tokenizer: Any) -> Tokens:
    tokens = Tokens(tokenizer)
    tokens.vocabulary.warn(stacklevel=3)
    return tokens


def _conversations(
    read: Iterable[tuple[RowOrigin, Mapping[str, Any]]], report: Report, errors: bool
) -> Iterator[tuple[RowOrigin, Conversation]]:
    for origin, row in read:
        try:
            conversation = to_conversation(row)
        except InvalidRow as fault:
            report.leave_out(origin, fault, errors)
            continue
        report.ignored.update(conversation.ignored)
        yield origin, conversation


def _parts(path: str, report: Report, errors: bool) -> Iterator[tuple[RowOrigin, str, bool]]:
    if Path(path).suffix.lower() != ".txt":
        for origin, row in rows(path, report, errors):
            try:
                content, ignored = to_text(row)
            except InvalidRow as fault:
                report.leave_out(origin, fault, errors)
                continue
            report.ignored.update(ignored)
            yield origin, content, True
        return
    origin, before = RowOrigin(path, 1, "line"), None
    for part in blocks(path, report, errors):
        if before is not None:
            yield origin, before, False
        before = part
    if before is not None:
        yield origin, before, True


def _finish(
    builder: CorpusBuilder, report: Report, options: DatasetOptions, progress: bool
) -> Dataset:
    longest = builder.longest
    report.check(
        {
            InvalidRow: _ADVICE_INVALID,
            TooLong: _ADVICE_TOO_LONG.format(longest=longest),
            BeyondVocabulary: _ADVICE_BEYOND,
        }
    )
    corpus = builder.finish()
    if not corpus.num_documents:
        raise DataError("\n".join(["there is nothing to train on:", *report.examples()]))
    summary = Summary(
        num_rows=report.num_rows,
        num_documents=corpus.num_documents,
        num_pieces=len(corpus.lengths),
        num_tokens=int(corpus.lengths.sum(dtype="int64")),
        num_learned=int(corpus.learned.sum()),
        longest=longest,
        num_bytes=corpus.num_bytes,
        left_out=dict(report.left_out),
        num_cut=report.num_cut,
        num_split=report.num_split,
        num_pieces_left_out=report.num_pieces_left_out,
        num_blurred=report.num_blurred,
        ignored=dict(report.ignored),
        not_shown=dict(report.not_shown),
        file_faults=dict(report.file_faults),
        examples=tuple(report.examples()),
    )
    if progress:
        print(summary, file=sys.stderr, flush=True)
    return Dataset(corpus, summary, options)


def _options(
    length: int, batch_size: int, seed: int, shuffle: bool, epochs: int | None, workers: int
) -> DatasetOptions:
    return DatasetOptions(
        length=length,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        workers=workers,
    )


def _check_choices(**given: str) -> None:
    known = {"train_on": TRAIN_ON, "too_long": TOO_LONG, "invalid": _INVALID}
    for name, value in given.items():
        if not isinstance(value, str) or value not in known[name]:
            raise ValueError(checks.refused(name, f"one of {known[name]}", value))


def _check_template(chat_template: Any, template_variables: Any) -> None:
    if not isinstance(chat_template, str | None):
        allowed = "a Jinja template or the name of one, as a str"
        raise TypeError(checks.refused("chat_template", allowed, chat_template))
    if template_variables is None:
        return
    named = isinstance(template_variables, Mapping) and all(
        isinstance(name, str) for name in template_variables
    )
    if not named:
        allowed = "a mapping of names to values"
        raise TypeError(checks.refused("template_variables", allowed, template_variables))


def _progress(items: Iterable[Any], progress: bool) -> Iterable[Any]:
    return tqdm(items, "tokenising", unit=" rows", disable=not progress)
