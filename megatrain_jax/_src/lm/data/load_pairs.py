"""Makes a dataset whose documents are two conversations with one prompt."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatrain_jax._src.lm.data.batches import DatasetOptions
from megatrain_jax._src.lm.data.corpus import CorpusBuilder, WhenTooLong
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.fast_tokenizer import load_fast_tokenizer
from megatrain_jax._src.lm.data.finish import (
    INVALID,
    Invalid,
    check_choices,
    check_template,
    find_or_build,
    to_rules,
    with_progress_bar,
)
from megatrain_jax._src.lm.data.report import Report
from megatrain_jax._src.lm.data.sources import Source, resolve
from megatrain_jax._src.lm.data.template import Template
from megatrain_jax._src.lm.data.token_cache import open_cache
from megatrain_jax._src.lm.data.tokenise import Document, add_conversations
from megatrain_jax._src.lm.data.turns import LEADING, Leading


def paired_dataset(
    documents: Callable[..., Iterator[Document]],
    source: Source,
    tokenizer: Any,
    options: DatasetOptions,
    *,
    too_long: WhenTooLong,
    invalid: Invalid,
    merge: str | None,
    leading: Leading,
    chat_template: str | None,
    template_variables: Mapping[str, Any] | None,
    columns: Mapping[str, str] | None,
    progress: bool,
    cache: Any,
) -> Dataset:
    """Reads documents of two conversations, and makes their dataset.

    `documents` is the function of `documents.py` that reads them, and `too_long` is "error" or
    "drop"; see `chat` for the remaining arguments and for errors.
    """
    check_choices(
        too_long=(too_long, ("error", "drop")),
        invalid=(invalid, INVALID),
        leading=(leading, LEADING),
    )
    check_template(chat_template, template_variables)
    rules = to_rules(merge, leading)
    parts = resolve(source, texts=False, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)
    template = Template(tokens.tokenizer, chat_template, template_variables)
    used = [options.length, too_long, invalid, rules, template_variables]
    place = open_cache(cache, documents.__name__, parts, tokens, used, template.source)
    errors = invalid == "error"

    def fill(builder: CorpusBuilder, report: Report) -> None:
        read = with_progress_bar(documents(parts, rules, report, errors), progress)
        add_conversations(read, template, tokens, "assistant", errors, builder, report)

    return find_or_build(
        place,
        options,
        progress,
        fill,
        too_long=too_long,
        invalid=invalid,
        tokens=tokens,
        chat_template=template.source,
        num_parts=2,
    )
