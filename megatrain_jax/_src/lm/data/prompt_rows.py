"""`prompts`: rows with a prompt each, for training on a model's own completions."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from megatrain_jax._src.lm.data.documents import read_rows
from megatrain_jax._src.lm.data.finish import ADVICE_INVALID, INVALID, check_choices
from megatrain_jax._src.lm.data.report import DataError, InvalidRow, Report
from megatrain_jax._src.lm.data.sources import Source, resolve
from megatrain_jax._src.lm.data.turns import read_turns, valid_text


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
    check_choices(invalid=(invalid, INVALID))
    parts = resolve(source, texts=False, columns=columns)
    report = Report()
    found = [row for _, row in read_rows(parts, _checked, report, invalid == "error")]
    report.check({InvalidRow: ADVICE_INVALID})
    left_out = report.examples()
    if not found:
        raise DataError("\n".join(["there is no prompt:", *left_out]))
    if left_out:
        print("prompts that are left out:", *left_out, sep="\n", file=sys.stderr, flush=True)
    return found


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        kind = type(prompt).__name__
        raise InvalidRow("a row has no `prompt`", f"it must be a text or messages, but is {kind}")
    if isinstance(prompt, str):
        valid_text(prompt, "prompt")
    elif not all(type(token) is int and token >= 0 for token in prompt):
        read_turns("prompt", prompt)
    return dict(row)
