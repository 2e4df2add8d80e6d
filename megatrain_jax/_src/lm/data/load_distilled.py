"""The call that makes a dataset for distillation: `distillation`."""

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.corpus import TOO_LONG, CorpusBuilder, WhenTooLong
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.distilled_rows import DistilledRow
from megatrain_jax._src.lm.data.documents import distilled
from megatrain_jax._src.lm.data.fast_tokenizer import load_fast_tokenizer
from megatrain_jax._src.lm.data.finish import (
    INVALID,
    Invalid,
    check_choices,
    find_or_build,
    to_options,
    with_progress_bar,
)
from megatrain_jax._src.lm.data.report import Report, RowOrigin
from megatrain_jax._src.lm.data.sources import Source, resolve
from megatrain_jax._src.lm.data.token_cache import open_cache


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
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    topk = checks.integer("topk", topk)
    checks.boolean("tail", tail)
    check_choices(too_long=(too_long, TOO_LONG), invalid=(invalid, INVALID))
    parts = resolve(source, texts=False, columns=columns)
    tokens = load_fast_tokenizer(tokenizer)
    used = [options.length, too_long, invalid, topk, tail]
    place = open_cache(cache, "distillation", parts, tokens, used)
    errors = invalid == "error"

    def fill(builder: CorpusBuilder, report: Report) -> None:
        read: Iterator[tuple[RowOrigin, DistilledRow]] = distilled(
            parts, topk, tail, report, errors
        )
        for origin, row in with_progress_bar(read, progress):
            entries = {name: getattr(row, name) for name in ("topk_token_ids", "topk_logprobs")}
            builder.extend(row.tokens, row.learned, entries)
            builder.check_ids(row.topk_token_ids)
            builder.end(origin)

    return find_or_build(
        place, options, progress, fill, too_long=too_long, invalid=invalid, tokens=tokens
    )
