"""The calls that make a dataset: option checks, then the cache, or else a build."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.data import documents
from megatrain_jax._src.lm.data.batches import DatasetOptions
from megatrain_jax._src.lm.data.corpus import CorpusBuilder, WhenTooLong
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.image_processors import image_processor
from megatrain_jax._src.lm.data.image_rows import ImageTemplate, image_conversations, image_prompt
from megatrain_jax._src.lm.data.report import (
    AnswerLost,
    AssistantTextNotFound,
    DataError,
    InvalidRow,
    Report,
    Summary,
    TooLong,
)
from megatrain_jax._src.lm.data.row_formats import to_distilled
from megatrain_jax._src.lm.data.sources import Parts, Source, resolve
from megatrain_jax._src.lm.data.template import Template
from megatrain_jax._src.lm.data.token_cache import Cached, TokenCache, open_cache
from megatrain_jax._src.lm.data.tokenizer import (
    BeyondVocabulary,
    FastTokenizer,
    load_fast_tokenizer,
)
from megatrain_jax._src.lm.data.turns import Leading, TurnRules, read_turns, valid_text

T = TypeVar("T")
Invalid = Literal["error", "drop"]
_ADVICE_INVALID = 'Repair them, or pass `invalid="drop"` to leave them out.'
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


def _checked(given: Mapping[str, Any], too_long: Any = WhenTooLong) -> DatasetOptions:
    """Checks the options of a call; returns those that make batches of its documents.

    Args:
        given: The arguments of the call, by name.
        too_long: The words that its option `too_long` allows.

    Raises:
        TypeError: If one has a wrong type.
        ValueError: If one is out of range, or a word is not allowed.
    """
    checks.boolean("progress", given["progress"])
    options = DatasetOptions(**{field.name: given[field.name] for field in fields(DatasetOptions)})
    words = {
        "train_on": documents.TrainOn,
        "too_long": too_long,
        "invalid": Invalid,
        "leading": Leading,
    }
    for name, known in words.items():
        if name in given:
            checks.word(name, given[name], get_args(known))
    kinds = (
        ("chat_template", str, "a Jinja template or the name of one, as a str"),
        ("template_variables", Mapping, "a mapping of names to values"),
        ("merge", str, "the text between merged turns, as a str, or None"),
    )
    for name, kind, allowed in kinds:
        value = given.get(name)
        is_named = not isinstance(value, Mapping) or all(isinstance(key, str) for key in value)
        if not isinstance(value, kind | None) or not is_named:
            raise TypeError(checks.refused(name, allowed, value))
    return options


def _dataset(
    kind: str,
    given: Mapping[str, Any],
    options: DatasetOptions,
    parts: Parts,
    tokens: FastTokenizer,
    fill: Callable[[CorpusBuilder, Report], None],
    *used: Any,
    chat_template: str | None = None,
    num_parts: int = 1,
) -> Dataset:
    """The dataset from a cache, or else built from rows.

    Args:
        kind: Name of the function that makes the documents.
        given: The arguments of the call, by name.
        options: Options of the dataset.
        parts: The files and rows.
        tokens: The tokenizer.
        fill: Function that reads the rows and adds their documents to a builder, and faults to a
            report.
        *used: Further options that determine tokens, labels or documents.
        chat_template: The Jinja template that renders conversations.
        num_parts: Parts of each document: 2 if documents are pairs.

    Raises:
        DataError: If there was a fault that the user did not allow, or there is no document.
    """
    words = [given[name] for name in ("too_long", "invalid", "train_on") if name in given]
    used = (options.length, *words, *used)
    cache = open_cache(given.get("cache"), kind, parts, tokens, used, chat_template)
    if cache is not None and (found := cache.find()) is not None:
        return _to_dataset(found, options, given["progress"])
    report = Report(is_strict=given["invalid"] == "error")
    with nullcontext() if cache is None else cache.files() as files:
        builder = CorpusBuilder(
            options.length, given["too_long"], report, tokens.fault, num_parts, files
        )
        fill(builder, report)
        made = _finished(builder, report, chat_template, cache)
    return _to_dataset(made, options, given["progress"])


def _with_bar(items: Iterable[T], given: Mapping[str, Any]) -> Iterable[T]:
    """The items, with a progress bar if the call asks for it."""
    return tqdm(items, "tokenising", unit=" rows", disable=not given["progress"])


def _finished(
    builder: CorpusBuilder, report: Report, chat_template: str | None, cache: TokenCache | None
) -> Cached:
    """The corpus of all documents that were read, with its summary; kept in the cache.

    Raises:
        DataError: If there was a fault that the user did not allow, or there is no document.
    """
    if builder.processor is not None:
        too_long = _ADVICE_TOO_LONG_IMAGES
    else:
        too_long = _ADVICE_TOO_LONG if builder.num_parts == 1 else _ADVICE_TOO_LONG_PAIRS
    report.check(
        {
            InvalidRow: _ADVICE_INVALID,
            # Over all documents, even dropped ones, so that the advice names a sufficient `length`.
            TooLong: too_long.format(longest=builder.longest),
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
        **report.counted(),
        num_documents=corpus.num_documents,
        num_pieces=len(corpus.lengths),
        num_tokens=int(corpus.lengths.sum(dtype="int64")),
        num_learned=int(corpus.learned.sum()),
        longest=builder.longest,
        num_bytes=corpus.num_bytes,
        examples=tuple(report.examples()),
        cached=None if cache is None else str(cache.path),
    )
    made = Cached(corpus, summary, chat_template)
    if cache is not None:
        assert builder.files is not None
        cache.keep(builder.files, made)
    return made


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


def _conversations(
    given: Mapping[str, Any],
    read: Callable[..., Iterator[documents.Document]],
    too_long: Any = Invalid,
    num_parts: int = 1,
) -> Dataset:
    """The dataset of documents of conversations, for the calls that render a chat template.

    Args:
        given: The arguments of the call, by name.
        read: Function that reads them.
        too_long: The words that its option `too_long` allows.
        num_parts: Conversations of a document.
    """
    # Errors are found in order of cost: options, file names, the tokenizer (maybe downloaded),
    # rows.
    options = _checked(given, too_long)
    rules = TurnRules(given["merge"], given["leading"])
    parts = resolve(given["source"], texts=False, columns=given["columns"])
    images = image_processor(given["processor"]) if "processor" in given else None
    tokens = load_fast_tokenizer(given["tokenizer"] if images is None else images.tokenizer)
    variables = given["template_variables"]
    if images is None:
        template = Template(tokens.tokenizer, given["chat_template"], variables)
    else:
        template = ImageTemplate(images, given["chat_template"], variables)
    train_on = given.get("train_on", "assistant")
    unlearned = frozenset() if images is None else images.tokens

    def fill(builder: CorpusBuilder, report: Report) -> None:
        builder.processor = images
        more = () if images is None else (images,)
        found = _with_bar(read(parts, rules, report, *more), given)
        documents.add_conversations(found, template, tokens, train_on, builder, report, unlearned)

    return _dataset(
        read.__name__,
        given,
        options,
        parts,
        tokens,
        fill,
        rules,
        variables,
        chat_template=template.source,
        num_parts=num_parts,
    )


def chat(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    train_on: documents.TrainOn = "assistant",
    too_long: WhenTooLong = "error",
    invalid: Invalid = "error",
    merge: str | None = None,
    leading: Leading = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: str | PathLike[str] | None = None,
) -> Dataset:
    """Makes packed batches of conversations.

    All tokens are computed here, once, and kept in host memory, or on disk with `cache`: five bytes
    per token. Each row is a conversation in the format of OpenAI (``{"messages": [{"role",
    "content"}]}``), ShareGPT or LLaMA-Factory (``{"conversations": [{"from", "value"}]}``), Alpaca
    (``{"instruction", "input", "output"}``) or Dolly (``{"instruction", "context", "response"}``),
    or a question and its answer in the columns prompt and completion or response, question and
    answer or response, query and answer or response, problem and solution, or input and output;
    formats may be mixed, and `columns` names others. Messages may be JSON text, as in cells of CSV.
    A prompt and a completion may be lists of messages; only the completion is learned.

    Args:
        source: A file, a folder, a pattern with ``*``, a dataset on the Hugging Face Hub as
            "OWNER/NAME:SPLIT" or "OWNER/NAME:CONFIG:SPLIT", with "@REVISION" after the name if it
            is not the newest, a finite iterable of rows, such as a list of dicts, a
            `datasets.Dataset` or an `IterableDataset`, a `pandas.DataFrame`, a table of Arrow or
            Polars, or a list of these, read in order. Files are .json (an array of rows), .jsonl,
            .ndjson, .csv or .tsv, optionally with .gz, .bz2, .xz or .zst, or .parquet, .arrow or
            .feather. A folder may be one that `datasets` saved, or a dataset of the Hub; files
            about the dataset are not read, and data for training beside data for evaluation is an
            error.
        tokenizer: The folder of the model's tokenizer, its name on the Hugging Face Hub, from which
            it is downloaded, or a fast tokenizer of Transformers.
        length: Tokens of a row; conversations are packed into rows, each within one row.
        batch_size: Rows of a batch.
        seed: Seed of the order of conversations.
        shuffle: Whether that order is random, drawn anew every epoch.
        epochs: How often every conversation is seen; None continues for ever.
        train_on: The tokens that the loss counts: "assistant", the assistant's text and the token
            that ends each of its turns, except messages with `weight` 0 or `train` false; or "all".
        too_long: Treatment of conversations longer than `length`: "error" lists them after all are
            read; "cut" drops their end, "split" continues them in another row without the earlier
            context, "drop" leaves them out.
        invalid: Treatment of unusable rows: "error" lists them, "drop" leaves them out.
        merge: Text between consecutive turns of one role, such as two newlines, that are merged to
            one turn; with None they make a row invalid.
        leading: Treatment of assistant turns before the first user turn: "error" makes the row
            invalid, "keep" learns them, "drop" leaves them out.
        chat_template: A Jinja template to use instead of the tokenizer's own, or the name of one of
            its templates.
        template_variables: Further variables of the template, such as ``{"enable_thinking":
            False}``.
        columns: For names of fields of these formats, the names of the rows' own columns, such as
            ``{"prompt": "task", "completion": "reply"}``. All other columns keep their names.
        workers: Number of threads that build batches ahead. With 0 each is built on request, which
            takes well below a millisecond.
        progress: Whether to show a progress bar and print a summary.
        cache: Folder that keeps tokenised data on disk for later calls with the same files,
            tokenizer and options; tokens are then mapped from there, and host memory holds none
            of them. Rows in memory are not kept. None keeps tokens in host memory.

    Raises:
        DataError: If rows are invalid or too long and that is an error, if nothing is left, or if
            the chat template is missing or not valid Jinja. The message names files and lines. Rows
            are also invalid if the template fails on them, or if they have a token beyond the
            `vocab_size` of the `config.json` beside the tokenizer.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the tokenizer can't be loaded.
    """
    return _conversations(locals(), documents.conversations, WhenTooLong)


def preferences(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    margins: bool = False,
    too_long: WhenTooLong = "error",
    invalid: Invalid = "error",
    merge: str | None = None,
    leading: Leading = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: str | PathLike[str] | None = None,
) -> Dataset:
    """Makes packed batches of pairs of conversations, one of each preferred.

    A row has "chosen" and "rejected", each a text, a message or messages, and before them the
    question in one of the formats of `chat`: ``{"prompt", "chosen", "rejected"}``,
    ``{"conversations", "chosen", "rejected"}`` and so on. Without a question, both are whole
    conversations that are the same up to an answer; a `prompt` beside them must agree. `mask` is
    True on the answers: the assistant's text from where the two differ. Both conversations of a
    pair are in the same row of a batch, one after the other; see `Dataset` for the arrays.

    Args:
        source: See `chat`.
        tokenizer: See `chat`.
        length: Tokens of a row, which must hold both conversations of a pair.
        batch_size: Rows of a batch.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        margins: Whether to read the margins of reward models: a number "margin" of a row, 0 if it
            has none.
        too_long: Treatment of pairs longer than `length`: "error" lists them, "drop" leaves them
            out.
        invalid: See `chat`.
        merge: See `chat`.
        leading: See `chat`.
        chat_template: See `chat`.
        template_variables: See `chat`.
        columns: See `chat`.
        workers: See `chat`.
        progress: See `chat`.
        cache: See `chat`.

    Raises:
        DataError: See `chat`; rows are also invalid if both answers are equal, or answer different
            questions.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the tokenizer can't be loaded.
    """
    given = locals()
    read = documents.pairs_with_margins if checks.boolean("margins", margins) else documents.pairs
    return _conversations(given, read, num_parts=2)


def unpaired(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    too_long: WhenTooLong = "error",
    invalid: Invalid = "error",
    merge: str | None = None,
    leading: Leading = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: str | PathLike[str] | None = None,
) -> Dataset:
    """Makes packed batches of answers that are labelled desirable or undesirable, for KTO.

    A row has a "label" (or "kto_tag"), true or false, and a conversation in one of the formats of
    `chat`, such as ``{"prompt", "completion", "label"}``; its text after the last user message is
    the answer. Rows of `preferences`, with "chosen" and "rejected", are two answers. `mask` is True
    on the answers.

    Each answer shares a row of the batch with its prompt followed by a mismatched answer: that of
    the row before, or for the first row, of the last. See `Dataset` for the arrays.

    Args:
        source: See `chat`. Neighbouring rows should have different prompts, and there must be two.
        tokenizer: See `chat`.
        length: Tokens of a row, which must hold an answer and its mismatched one, each with the
            prompt.
        batch_size: Rows of a batch.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        too_long: Treatment of answers that don't fit: "error" lists them, "drop" leaves them out.
        invalid: See `chat`.
        merge: See `chat`.
        leading: See `chat`.
        chat_template: See `chat`.
        template_variables: See `chat`.
        columns: See `chat`.
        workers: See `chat`.
        progress: See `chat`.
        cache: See `chat`.

    Raises:
        DataError: See `chat`; rows are also invalid without a label, or if it is neither true nor
            false.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the tokenizer can't be loaded.
    """
    return _conversations(locals(), documents.unpaired, num_parts=2)


def text(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    too_long: WhenTooLong = "split",
    invalid: Invalid = "error",
    columns: Mapping[str, str] | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: str | PathLike[str] | None = None,
) -> Dataset:
    """Makes packed batches of plain text in which every token is learned.

    A .txt file is one text, and so is a ``{"text": ...}`` row of the remaining kinds of files. Each
    text gets the tokenizer's end-of-text token and, if the tokenizer adds one, its beginning token.
    Special tokens spelled out in a text become those tokens. A row of ``{"prompt", "completion"}``
    is one text, with only the completion and its end learned.

    Long texts are read and tokenised in parts that end with a line.

    Args:
        source: See `chat`; files may also be .txt.
        tokenizer: See `chat`.
        length: Tokens of a row.
        batch_size: Rows of a batch.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        too_long: See `chat`; the default here splits a text into pieces of `length` tokens, and the
            last token of a piece has the first of the next as its label.
        invalid: See `chat`.
        columns: See `chat`.
        workers: See `chat`.
        progress: See `chat`.
        cache: See `chat`.

    Raises:
        DataError: See `chat`; or if the tokenizer has no end-of-text token.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the tokenizer can't be loaded.
    """
    given = locals()
    options = _checked(given)
    parts = resolve(source, texts=True, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)

    def fill(builder: CorpusBuilder, report: Report) -> None:
        texts = _with_bar(documents.text_parts(parts, report), given)
        documents.add_texts(texts, tokens, builder, report)

    return _dataset("text", given, options, parts, tokens, fill)


def distillation(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch_size: int,
    topk: int,
    tail: bool = True,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    too_long: WhenTooLong = "error",
    invalid: Invalid = "error",
    columns: Mapping[str, str] | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: str | PathLike[str] | None = None,
) -> Dataset:
    """Makes packed batches of token ids with a teacher's stored top-k log-probabilities.

    A row has "input_ids", a list of ids, and "topk_token_ids" and "topk_logprobs", a list of ids
    and one of log-probabilities for each of them: the teacher's prediction of the next token, as a
    model's logits at that place. An optional "completion_mask" is 1 for the tokens to learn. All
    tokens and entries are kept in host memory: 5 + 8 `topk` bytes per token.

    Args:
        source: See `chat`.
        tokenizer: See `chat`; ids beyond the vocabulary of the model in its folder are invalid.
        length: Tokens of a row.
        batch_size: Rows of a batch.
        topk: Number of entries per token: of more, the likeliest are kept; for fewer, entries with
            a log-probability of minus infinity are added.
        tail: Whether the loss counts the rest of the vocabulary (`losses.distillation`). If it
            does, a position's numbers must be log-probabilities: none above 0, and probabilities
            that sum to at most 1, or 1.02 if they were rounded. If not, logits are as good.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        too_long: See `chat`.
        invalid: See `chat`.
        columns: See `chat`.
        workers: See `chat`.
        progress: See `chat`.
        cache: See `chat`.

    Raises:
        DataError: See `chat`; rows are invalid if a list has a wrong length or wrong numbers.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the tokenizer can't be loaded.
    """
    given = locals()
    options = _checked(given)
    topk = checks.integer("topk", topk)
    checks.boolean("tail", tail)
    parts = resolve(source, texts=False, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)

    def fill(builder: CorpusBuilder, report: Report) -> None:
        read = documents.read_rows(parts, lambda row: to_distilled(row, topk, tail), report)
        for origin, row in _with_bar(read, given):
            report.ignored.update(row.ignored)
            entries = {name: getattr(row, name) for name in ("topk_token_ids", "topk_logprobs")}
            builder.extend(row.tokens, row.learned, entries)
            builder.check_ids(row.topk_token_ids)
            builder.end(origin)

    return _dataset("distillation", given, options, parts, tokens, fill, topk, tail)


def image_chat(
    source: Source,
    processor: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    train_on: documents.TrainOn = "assistant",
    too_long: Invalid = "error",
    invalid: Invalid = "error",
    merge: str | None = None,
    leading: Leading = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 2,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of conversations with images or videos, for vision-language models.

    Rows have the formats of `chat`. An image is a part of a user's message, ``{"type": "image",
    "image": IMAGE}``, or the row has a column `images` with a list of them, or `image`: they belong
    to the parts ``{"type": "image"}`` in order, or, if there is none, to the beginning of the first
    question. IMAGE is the path of a file, the bytes of one, or a PIL image. A relative path begins
    at the folder of its data file. Rows without images may be among them.

    A video is a part ``{"type": "video", "video": FRAMES, "fps": 2}``. FRAMES is a list of images
    of one size, or the path of a folder with their files, in the order of their names, where
    numbers count as numbers. All frames are used. `fps` is their number per second, by default 24
    as in Transformers; the tokens or positions of most models depend on it. Models of Gemma 3 and
    Llama 4 have no videos.

    Batches also have `pixel_values`, float32. For Gemma 3 it is (batch_size, images, channels,
    height, width): the images of each row in order, and zeros behind them; for InternVL and
    Llama 4, their tiles. For Qwen2.5-VL, Qwen3-VL and Qwen3.5 it is (batch_size, patches, numbers):
    the patches of these images after each other, as their processor makes them;
    `image_grid_thw`, int32 (batch_size, images, 3), has the number of patches of each image along
    time, height and width, of which only videos have several along time; for Qwen2.5-VL,
    `second_per_grid_ts`, float32 (batch_size, images), has the seconds from one of these to the
    next, 0 for images. For Gemma 4 it is (batch_size, images, patches, numbers), and
    `image_position_ids`, int32 (batch_size, images, patches, 2), has the column and the row of each
    patch, -1 if unused; each frame of a video is an image here, and for InternVL.
    `images` and `patches` are the same in all batches, the largest numbers that a row of this
    packing can have. Tokens of images are never labels.

    Tokens and references to images are kept in host memory; each image is opened, resized and
    normalised for its batch. Images given as bytes or by PIL stay in memory. Pixels are those of
    Transformers for the same image: a file is turned upright and loses its transparency, a PIL
    image is not turned, and its transparent pixels are put on white. Bytes are turned
    upright, as `datasets` does, and then treated like a PIL image.

    Args:
        source: See `chat`.
        processor: The folder of the checkpoint, its name on the Hugging Face Hub, or a
            `Gemma3Processor`, `Gemma4Processor`, `InternVLProcessor`, `Llama4Processor`,
            `Qwen2_5_VLProcessor` or `Qwen3VLProcessor` of Transformers.
        length: See `chat`. A conversation is never cut.
        batch_size: See `chat`.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        train_on: See `chat`.
        too_long: Treatment of conversations longer than `length`: "error" lists them, "drop" leaves
            them out.
        invalid: See `chat`. With "drop", each image is decoded before training, so that damaged
            ones are found; otherwise only its header is read.
        merge: See `chat`.
        leading: See `chat`.
        chat_template: See `chat`.
        template_variables: See `chat`.
        columns: See `chat`.
        workers: Number of threads that open images ahead; with 0 a step waits for its images.
        progress: See `chat`.

    Raises:
        DataError: See `chat`; rows are also invalid if an image can't be read, belongs to an
            answer, or has no place.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the processor can't be loaded or is of
            another kind.
    """
    return _conversations(locals(), image_conversations)


def image_prompts(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    processor: Any,
    *,
    folder: str | PathLike[str] = ".",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Renders questions with images or videos, for `models.generate`.

    Args:
        conversations: For each prompt, a list of messages up to the question, with images and
            videos as in `image_chat`.
        processor: See `image_chat`.
        folder: Where relative paths of images begin.
        chat_template: See `chat`.
        template_variables: See `chat`.

    Returns:
        For each prompt, its ids in `tokens`, int32 (length,), and the arrays of its images as in
        a row of `image_chat`.

    Raises:
        DataError: If there is no chat template, or it is not valid Jinja.
        FileNotFoundError: If there is no such checkpoint.
        TypeError: If an argument has a wrong type.
        ValueError: If a prompt can't be rendered, an image can't be read, or the processor can't be
            loaded or is of another kind.
    """
    if isinstance(conversations, str | Mapping) or not isinstance(conversations, Sequence):
        raise TypeError(
            checks.refused("conversations", "a list of lists of messages", conversations)
        )
    images = image_processor(processor)
    template = ImageTemplate(images, chat_template, template_variables)
    found = []
    for number, messages in enumerate(conversations):
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            hint = "messages are one prompt: pass a list of such lists"
            raise TypeError(checks.refused("conversations", "lists of messages", messages, hint))
        origin = f"conversations[{number}]"
        try:
            found.append(image_prompt(messages, images, template, Path(folder), origin))
        except InvalidRow as error:
            raise ValueError(f"`{origin}`: {error}") from error
    return found


def prompts(
    source: Source,
    *,
    invalid: Literal["error", "drop"] = "error",
    columns: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Reads rows with a prompt each, and all their columns.

    Args:
        source: See `chat`. The column `prompt` is a text or a list of messages; a reward function
            gets all further columns.
        invalid: Whether a row without a prompt is an error, or left out, with a note in the
            terminal.
        columns: See `chat`, such as ``{"prompt": "question"}``.

    Returns:
        The rows, for `models.train_grpo`.

    Raises:
        DataError: If a row has no prompt and that is an error, no row is left, or a file can't be
            read.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If `invalid` is unknown, or `source` is empty.

    Examples:
        >>> prompts([{"prompt": "2 + 2 =", "answer": "4"}])
        [{'prompt': '2 + 2 =', 'answer': '4'}]
    """
    checks.word("invalid", invalid, get_args(Invalid))
    parts = resolve(source, texts=False, columns=columns)
    report = Report(is_strict=invalid == "error")
    found = [row for _, row in documents.read_rows(parts, _with_prompt, report)]
    report.check({InvalidRow: _ADVICE_INVALID})
    left_out = report.examples()
    if not found:
        raise DataError("\n".join(["there is no prompt:", *left_out]))
    if left_out:
        print("prompts that are left out:", *left_out, sep="\n", file=sys.stderr, flush=True)
    return found


def _with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        kind = type(prompt).__name__
        raise InvalidRow("a row has no `prompt`", f"it must be a text or messages, but is {kind}")
    if isinstance(prompt, str):
        valid_text(prompt, "prompt")
    elif not all(type(token) is int and token >= 0 for token in prompt):
        read_turns("prompt", prompt)
    return dict(row)
