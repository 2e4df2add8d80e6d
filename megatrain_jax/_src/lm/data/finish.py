"""Code of all calls that make a dataset: option checks, then the cache, or else a build."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.data.batches import DatasetOptions
from megatrain_jax._src.lm.data.corpus import CorpusBuilder, WhenTooLong
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.fast_tokenizer import FastTokenizer
from megatrain_jax._src.lm.data.report import (
    AnswerLost,
    AssistantTextNotFound,
    DataError,
    InvalidRow,
    Report,
    Summary,
    TooLong,
)
from megatrain_jax._src.lm.data.token_cache import Cached, GrowingFiles, TokenCache
from megatrain_jax._src.lm.data.turns import Leading, TurnRules
from megatrain_jax._src.lm.data.vocabulary import BeyondVocabulary

Invalid = Literal["error", "drop"]
INVALID = ("error", "drop")
ADVICE_INVALID = 'Repair them, or pass `invalid="drop"` to leave them out.'
_ADVICE_TOO_LONG = (
    'Pass a larger `length` (the longest has {longest:,} tokens), or pass `too_long="cut"` (drop '
    'their end), "split" (continue in another row, without the earlier context) or "drop".'
)
_ADVICE_TOO_LONG_PAIRS = (
    "Pass a larger `length`, which has to hold both conversations of a pair (the longest has "
    '{longest:,} tokens), or pass `too_long="drop"`.'
)
_ADVICE_TOO_LONG_IMAGES = (
    "Pass a larger `length`, which has to hold a conversation with all its images (the longest has "
    '{longest:,} tokens), or pass `too_long="drop"`.'
)
_ADVICE_BEYOND = (
    "Use the tokenizer that the model was trained with, or a model with a row for each token that "
    'was added to it; or pass `invalid="drop"` to leave such rows out.'
)
_ADVICE_JOINED = (
    "Move the space to the completion: `prompt` then ends before it, and `completion` begins with "
    "it. If a chat template writes it, let the template write it after its prompt"
)
_ADVICE_UNCLEAR = (
    "Pass `chat_template=` with the assistant's turns, the special token at the end of each "
    'included, between {% generation %} and {% endgeneration %}; or pass `train_on="all"`, or '
    '`invalid="drop"` to leave such rows out.'
)

T = TypeVar("T")


def to_options(
    length: int,
    batch_size: int,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    workers: int,
    progress: bool,
) -> DatasetOptions:
    """Checks the options that all calls share.

    Raises:
        TypeError: If one has a wrong type.
        ValueError: If one is out of range.
    """
    checks.boolean("progress", progress)
    return DatasetOptions(
        length=length,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        workers=workers,
    )


def to_rules(merge: Any, leading: Leading) -> TurnRules:
    """Checks the options about turns.

    Raises:
        TypeError: If `merge` is not text.
    """
    if not isinstance(merge, str | None):
        allowed = "the text between merged turns, as a str, or None"
        raise TypeError(checks.refused("merge", allowed, merge))
    return TurnRules(merge, leading)


def check_choices(**given: tuple[Any, Sequence[str]]) -> None:
    """Checks options with a fixed set of words.

    Args:
        **given: For each option, its value and the allowed words.

    Raises:
        ValueError: If a value is not allowed.
    """
    for name, (value, known) in given.items():
        if not isinstance(value, str) or value not in known:
            raise ValueError(checks.refused(name, f"one of {known}", value))


def check_template(chat_template: Any, template_variables: Any) -> None:
    """Checks the options about the chat template.

    Raises:
        TypeError: If one has a wrong type.
    """
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


def find_or_build(
    cache: TokenCache | None,
    options: DatasetOptions,
    progress: bool,
    fill: Callable[[CorpusBuilder, Report], None],
    *,
    too_long: WhenTooLong,
    invalid: Invalid,
    tokens: FastTokenizer,
    chat_template: str | None = None,
    num_parts: int = 1,
) -> Dataset:
    """The dataset from a cache, or else built from rows.

    Args:
        cache: The dataset's place in the cache, if any.
        options: Options of the dataset.
        progress: Whether to print the summary.
        fill: Function that reads the rows and adds their documents to a builder, and faults to a
            report.
        too_long: Treatment of documents longer than a row.
        invalid: Treatment of unusable rows.
        tokens: The tokenizer.
        chat_template: The Jinja template that renders conversations.
        num_parts: Parts of each document: 2 if documents are pairs.

    Raises:
        DataError: If there was a fault that the user did not allow, or there is no document.
    """
    if cache is not None and (found := cache.find()) is not None:
        return _to_dataset(found, options, progress)
    report, fault_of = Report(), tokens.vocabulary.fault
    errors = invalid == "error"
    with _files_of(cache) as files:
        builder = CorpusBuilder(
            options.length, too_long, errors, report, fault_of, num_parts, files
        )
        fill(builder, report)
        return _finish(builder, report, options, progress, chat_template, cache)


def with_progress_bar(items: Iterable[T], progress: bool) -> Iterable[T]:
    """The items, with a progress bar if requested."""
    return tqdm(items, "tokenising", unit=" rows", disable=not progress)


def _finish(
    builder: CorpusBuilder,
    report: Report,
    options: DatasetOptions,
    progress: bool,
    chat_template: str | None,
    cache: TokenCache | None,
) -> Dataset:
    """Makes the dataset from all documents that were read.

    Args:
        builder: The builder of the corpus.
        report: The report about reading.
        options: Options of the dataset.
        progress: Whether to print the summary.
        chat_template: The Jinja template that rendered conversations.
        cache: The place where the builder's files are kept.

    Raises:
        DataError: If there was a fault that the user did not allow, or there is no document.
    """
    # Over all documents, even dropped ones, so that the advice names a sufficient `length`.
    longest = builder.longest
    if builder.processor is not None:
        too_long = _ADVICE_TOO_LONG_IMAGES
    else:
        too_long = _ADVICE_TOO_LONG if builder.num_parts == 1 else _ADVICE_TOO_LONG_PAIRS
    report.check(
        {
            InvalidRow: ADVICE_INVALID,
            TooLong: too_long.format(longest=longest),
            BeyondVocabulary: _ADVICE_BEYOND,
            AssistantTextNotFound: _ADVICE_UNCLEAR,
            AnswerLost: f'{_ADVICE_JOINED}; or pass `invalid="drop"` to leave such rows out.',
        }
    )
    corpus = builder.finish()
    # If allowed drops leave nothing, the reasons are shown.
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
        num_joined=report.num_joined,
        end_tokens=sorted(report.end_tokens),
        ignored=dict(report.ignored),
        not_shown=dict(report.not_shown),
        changed=dict(report.changed),
        file_faults=dict(report.file_faults),
        examples=tuple(report.examples()),
        cached=None if cache is None else str(cache.path),
    )
    made = Cached(corpus, summary, chat_template)
    if cache is not None:
        assert isinstance(builder.files, GrowingFiles)
        cache.keep(builder.files, made)
    return _to_dataset(made, options, progress)


def _to_dataset(made: Cached, options: DatasetOptions, progress: bool) -> Dataset:
    """The dataset of a corpus; prints its summary if `progress` is set."""
    if progress:
        print(made.summary, file=sys.stderr, flush=True)
    if joined := made.summary.num_joined:
        warn_user(
            f"{joined:,} of {made.summary.num_documents:,} rows have an answer whose first token "
            f"also contains the end of the prompt, so that it is not learned. {_ADVICE_JOINED}.",
        )
    for name, labels in made.corpus.unit_values.items():
        if labels.dtype == np.bool_ and (labels == labels[0]).all():
            kind = name if labels[0] else f"not {name}"
            warn_user(
                f"all {len(labels):,} answers of a dataset are labelled {kind}: alone it has no "
                "difference between answers that can be learned",
            )
    return Dataset(made.corpus, made.summary, options, made.chat_template)


@contextmanager
def _files_of(cache: TokenCache | None) -> Iterator[GrowingFiles | None]:
    """New files for the tokens of a dataset, deleted if the body fails; None without a cache."""
    if cache is None:
        yield None
        return
    files = cache.files()
    try:
        yield files
    except BaseException:
        files.discard()
        raise
