"""The calls that make a dataset: of conversations, of preferences, and of plain text."""

from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.data.corpus import TOO_LONG, CorpusBuilder, WhenTooLong
from megatrain_jax._src.data.dataset import Dataset
from megatrain_jax._src.data.documents import conversations, pairs, text_parts
from megatrain_jax._src.data.finish import (
    INVALID,
    Invalid,
    check_choices,
    check_template,
    finish,
    shown,
    to_options,
    to_rules,
)
from megatrain_jax._src.data.report import Report
from megatrain_jax._src.data.sources import Source, resolve
from megatrain_jax._src.data.template import Template
from megatrain_jax._src.data.tokenise import TRAIN_ON, TrainOn, add_conversations, add_texts
from megatrain_jax._src.data.tokens import load_tokens
from megatrain_jax._src.data.turns import LEADING, Leading


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
    workers: int = 0,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of conversations.

    Everything is tokenised here, once, and held in host memory: five bytes a token. A row is a
    conversation in OpenAI's form (``{"messages": [{"role", "content"}]}``), ShareGPT's
    (``{"conversations": [{"from", "value"}]}``) or Alpaca's (``{"instruction", "input",
    "output"}``), or ``{"question", "answer"}`` or ``{"prompt", "completion"}``, whatever the other
    rows have. A prompt and a completion may be lists of messages; only the completion is learned.

    Args:
        source: A file, a folder, a pattern with ``*``, an iterable of rows that ends, such as a
            list of dicts, a `datasets.Dataset` or an `IterableDataset`, or a list of these, which
            are read in order. Files are .json (an array of rows), .jsonl, .ndjson, .csv, .tsv, all
            of them also with .gz, or .parquet.
        tokenizer: The folder of the model's tokenizer, its name on the Hugging Face Hub, from where
            it is downloaded, or a fast tokenizer of Transformers.
        length: Tokens of a row; conversations are packed into rows, each into one.
        batch_size: Rows of a batch.
        seed: Seed of the order of conversations.
        shuffle: Whether that order is drawn, anew every epoch.
        epochs: The number of times that every conversation is seen; None goes on for ever.
        train_on: The tokens that the loss counts: those of the "assistant", which are what it says
            and the token that ends each of its turns, but no message with a `weight` of 0 or
            `train` false; or "all".
        too_long: Treatment of conversations longer than `length`: an "error" that lists them
            once all are read; "cut" loses their end, "split" has them go on in another row
            without what came before, "drop" leaves them out.
        invalid: Treatment of rows that can't be used: an "error" that lists them, or "drop".
        merge: The text to put between consecutive turns of one role, such as two line ends,
            which become one turn; with None they make a row invalid.
        leading: Treatment of turns of the assistant before the first of the user: an "error" makes
            the row invalid, "keep" learns them, "drop" leaves them out.
        chat_template: A Jinja template to use instead of the tokenizer's own, or the name of one
            of its templates.
        template_variables: Further variables of the template, such as
            ``{"enable_thinking": False}``.
        workers: Number of threads that build batches ahead. 0 builds each when asked for, which
            takes well below a millisecond.
        progress: Whether to show a progress bar and print the summary of what was read.

    Raises:
        DataError: If rows are invalid or too long and that is an error, if there is nothing left,
            or if the chat template is missing or no Jinja. Names files and lines. Rows are also
            invalid if the template fails on them, and if they have a token beyond the
            `vocab_size` of the `config.json` that lies beside the tokenizer.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has another type.
        ValueError: If an option is not one of those above, or the tokenizer can't be loaded.
    """
    # Mistakes are found in the order of their cost: options, then files by their names, then the
    # tokenizer, which may be downloaded, and rows last.
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(
        train_on=(train_on, TRAIN_ON),
        too_long=(too_long, TOO_LONG),
        invalid=(invalid, INVALID),
        leading=(leading, LEADING),
    )
    check_template(chat_template, template_variables)
    rules = to_rules(merge, leading)
    parts = resolve(source, texts=False)
    tokens = load_tokens(tokenizer)
    template = Template(tokens.tokenizer, chat_template, template_variables)
    report, errors = Report(), invalid == "error"
    builder = CorpusBuilder(options.length, too_long, errors, report, tokens.vocabulary.fault)
    documents = shown(conversations(parts, rules, report, errors), progress)
    add_conversations(documents, template, tokens, train_on, errors, builder, report)
    return finish(builder, report, options, progress, template.source)


def preferences(
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
    workers: int = 0,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of pairs of conversations, of which one is preferred.

    A row has "chosen" and "rejected", each a text, a message or messages, and before them the
    question in one of the forms of `chat`: ``{"prompt", "chosen", "rejected"}``,
    ``{"conversations", "chosen", "rejected"}`` and so on. Without a question both are whole
    conversations that are the same up to an answer; a `prompt` beside them has to agree. The `mask`
    is True on the answers: on what the assistant says where the two differ. Both conversations of a
    pair are in one row of a batch, one after the other; see `Dataset` for the arrays.

    Args:
        source: See `chat`.
        tokenizer: See `chat`.
        length: Tokens of a row, which has to hold both conversations of a pair.
        batch_size: Rows of a batch.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        too_long: Treatment of pairs longer than `length`: an "error" that lists them, or "drop".
        invalid: See `chat`.
        merge: See `chat`.
        leading: See `chat`.
        chat_template: See `chat`.
        template_variables: See `chat`.
        workers: See `chat`.
        progress: See `chat`.

    Raises:
        DataError: See `chat`; rows are also invalid if both answers are alike, or answer other
            questions.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has another type.
        ValueError: If an option is not one of those above, or the tokenizer can't be loaded.
    """
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(
        too_long=(too_long, ("error", "drop")),
        invalid=(invalid, INVALID),
        leading=(leading, LEADING),
    )
    check_template(chat_template, template_variables)
    rules = to_rules(merge, leading)
    parts = resolve(source, texts=False)
    tokens = load_tokens(tokenizer)
    template = Template(tokens.tokenizer, chat_template, template_variables)
    report, errors = Report(), invalid == "error"
    builder = CorpusBuilder(options.length, too_long, errors, report, tokens.vocabulary.fault, 2)
    documents = shown(pairs(parts, rules, report, errors), progress)
    add_conversations(documents, template, tokens, "assistant", errors, builder, report)
    return finish(builder, report, options, progress, template.source)


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
    workers: int = 0,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of plain text, of which every token is learned.

    A .txt file is one text, and so is a ``{"text": ...}`` row of the other kinds of files. Each
    gets the tokenizer's end of text at its end and, if the tokenizer puts one there, its token for
    the beginning. Special tokens that a text spells out become those tokens. A row of ``{"prompt",
    "completion"}`` is one text, of which only the completion and its end are learned.

    Texts of any length are read and tokenised in parts that end with a line.

    Args:
        source: See `chat`; files may also be .txt.
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
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(too_long=(too_long, TOO_LONG), invalid=(invalid, INVALID))
    parts = resolve(source, texts=True)
    tokens = load_tokens(tokenizer)
    report, errors = Report(), invalid == "error"
    builder = CorpusBuilder(options.length, too_long, errors, report, tokens.vocabulary.fault)
    texts = shown(text_parts(parts, report, errors), progress)
    add_texts(texts, tokens, errors, builder, report)
    return finish(builder, report, options, progress)
