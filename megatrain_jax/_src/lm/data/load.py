"""The calls that make a dataset: `chat`, `preferences`, `unpaired` and `text`."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.corpus import TOO_LONG, CorpusBuilder, WhenTooLong
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.documents import (
    conversations,
    pairs,
    pairs_with_margins,
    text_parts,
)
from megatrain_jax._src.lm.data.documents import unpaired as labelled
from megatrain_jax._src.lm.data.fast_tokenizer import load_fast_tokenizer
from megatrain_jax._src.lm.data.finish import (
    INVALID,
    Invalid,
    check_choices,
    check_template,
    find_or_build,
    to_options,
    to_rules,
    with_progress_bar,
)
from megatrain_jax._src.lm.data.load_pairs import paired_dataset
from megatrain_jax._src.lm.data.report import Report
from megatrain_jax._src.lm.data.sources import Source, resolve
from megatrain_jax._src.lm.data.template import Template
from megatrain_jax._src.lm.data.token_cache import open_cache
from megatrain_jax._src.lm.data.tokenise import TRAIN_ON, TrainOn, add_conversations, add_texts
from megatrain_jax._src.lm.data.turns import LEADING, Leading


def chat(
    source: Source,
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
    # Errors are found in order of cost: options, file names, the tokenizer (maybe downloaded),
    # rows.
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(
        train_on=(train_on, TRAIN_ON),
        too_long=(too_long, TOO_LONG),
        invalid=(invalid, INVALID),
        leading=(leading, LEADING),
    )
    check_template(chat_template, template_variables)
    rules = to_rules(merge, leading)
    parts = resolve(source, texts=False, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)
    template = Template(tokens.tokenizer, chat_template, template_variables)
    used = [options.length, too_long, invalid, train_on, rules, template_variables]
    place = open_cache(cache, "chat", parts, tokens, used, template.source)
    errors = invalid == "error"

    def fill(builder: CorpusBuilder, report: Report) -> None:
        documents = with_progress_bar(conversations(parts, rules, report, errors), progress)
        add_conversations(documents, template, tokens, train_on, errors, builder, report)

    return find_or_build(
        place,
        options,
        progress,
        fill,
        too_long=too_long,
        invalid=invalid,
        tokens=tokens,
        chat_template=template.source,
    )


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
    return paired_dataset(
        pairs_with_margins if checks.boolean("margins", margins) else pairs,
        source,
        tokenizer,
        to_options(length, batch_size, seed, shuffle, epochs, workers, progress),
        too_long=too_long,
        invalid=invalid,
        merge=merge,
        leading=leading,
        chat_template=chat_template,
        template_variables=template_variables,
        columns=columns,
        progress=progress,
        cache=cache,
    )


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
    return paired_dataset(
        labelled,
        source,
        tokenizer,
        to_options(length, batch_size, seed, shuffle, epochs, workers, progress),
        too_long=too_long,
        invalid=invalid,
        merge=merge,
        leading=leading,
        chat_template=chat_template,
        template_variables=template_variables,
        columns=columns,
        progress=progress,
        cache=cache,
    )


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
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(too_long=(too_long, TOO_LONG), invalid=(invalid, INVALID))
    parts = resolve(source, texts=True, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)
    place = open_cache(cache, "text", parts, tokens, [options.length, too_long, invalid])
    errors = invalid == "error"

    def fill(builder: CorpusBuilder, report: Report) -> None:
        texts = with_progress_bar(text_parts(parts, report, errors), progress)
        add_texts(texts, tokens, errors, builder, report)

    return find_or_build(
        place, options, progress, fill, too_long=too_long, invalid=invalid, tokens=tokens
    )
