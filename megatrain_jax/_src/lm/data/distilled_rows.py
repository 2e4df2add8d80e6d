"""Converts rows of token ids with a teacher's top-k log-probabilities, for distillation."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from megatrain_jax._src.lm.data.report import InvalidRow
from megatrain_jax._src.lm.data.row_formats import Row

_NAMES = ("input_ids", "topk_token_ids", "topk_logprobs")
_LARGEST_ID = 2**31 - 1
# Log-probabilities that were rounded to bfloat16 may sum to a probability slightly above 1.
_MOST_PROBABILITY = 1.02
# The largest accepted value above 0: a difference of two fp32 numbers may be slightly positive.
_MOST_ABOVE = 1e-4


class DistilledRow(NamedTuple):
    """The tokens of a row with the teacher's predictions.

    Attributes:
        tokens: The token ids.
        learned: Whether each token is learned as a label.
        topk_token_ids: For each token, the candidates for the next one.
        topk_logprobs: Their log-probabilities; minus infinity for entries that don't exist.
        ignored: Fields of the row that nothing reads.
    """

    tokens: Int32[np.ndarray, " n"]
    learned: Bool[np.ndarray, " n"]
    topk_token_ids: Int32[np.ndarray, "n k"]
    topk_logprobs: Float32[np.ndarray, "n k"]
    ignored: set[str]


def to_distilled(row: Row, topk: int, tail: bool) -> DistilledRow:
    """Converts a row.

    Args:
        row: "input_ids", a list of ids; "topk_token_ids" and "topk_logprobs", lists as long as that
            one, of lists of ids and of numbers, in any order; optionally "completion_mask", as long
            too, 1 for the tokens to learn.
        topk: Number of entries per token: the likeliest are kept, missing ones filled.
        tail: Whether the rest of the vocabulary counts; then logits are refused.

    Raises:
        InvalidRow: If it is no such row. The message names the field.
    """
    row = {name: value for name, value in row.items() if value is not None}
    missing = [name for name in _NAMES if name not in row]
    if missing:
        names = ", ".join(map(str, row)) or "(none)"
        raise InvalidRow("unknown form", f"no `{missing[0]}` among the fields {names}")
    tokens = _numbers("input_ids", row["input_ids"], len(row["input_ids"]), np.int32)
    size = len(tokens)
    mask = _numbers("completion_mask", row.get("completion_mask", [1] * size), size, np.float32)
    ids, logs = (_lists(name, row[name], size) for name in _NAMES[1:])
    found_ids = np.zeros((size, topk), np.int32)
    found_logs = np.full((size, topk), -np.inf, np.float32)
    for place, (some, values) in enumerate(zip(ids, logs, strict=True)):
        own = _numbers("topk_token_ids", some, len(some), np.int32)
        if len(set(own.tolist())) < len(own):
            raise InvalidRow("`topk_token_ids` with an id twice at one position")
        # JSON has no infinity: null stands for a token that can't follow.
        scores = [-np.inf if value is None else value for value in values]
        own_logs = _numbers("topk_logprobs", scores, len(own), np.float32)
        if tail:
            _check_probability(own_logs, place)
        order = np.argsort(-own_logs, kind="stable")[:topk]
        found_ids[place, : len(order)] = own[order]
        found_logs[place, : len(order)] = own_logs[order]
    if np.isnan(found_logs).any() or (found_logs == np.inf).any():
        raise InvalidRow("`topk_logprobs` that are no numbers")
    ignored = set(row) - {*_NAMES, "completion_mask"}
    return DistilledRow(tokens, mask != 0, found_ids, found_logs, ignored)


def _check_probability(logs: Float32[np.ndarray, " k"], place: int) -> None:
    """Checks that a position's numbers can be log-probabilities: the tail gets the remainder."""
    total = np.exp(logs.astype(np.float64)).sum()
    above = logs[logs > _MOST_ABOVE]
    if above.size or total > _MOST_PROBABILITY:
        found = (
            f"{above[0]:g} is above 0" if above.size else f"they sum to a probability of {total:g}"
        )
        raise InvalidRow(
            "`topk_logprobs` that are no log-probabilities, which `tail=True` needs",
            f"at position {place + 1}, {found}",
        )


def _lists(name: str, given: Any, size: int) -> Any:
    is_list = isinstance(given, list | tuple | np.ndarray)
    if not is_list or len(given) != size or not all(hasattr(one, "__len__") for one in given):
        raise InvalidRow(f"`{name}` that is no list of lists as long as `input_ids`")
    return given


def _numbers(name: str, given: Any, size: int, dtype: Any) -> np.ndarray:
    try:
        found = np.array(given)
        is_whole = dtype is not np.int32 or found.dtype.kind in "iu" or not found.size
        if found.shape == (size,) and found.dtype.kind in "iufb" and is_whole:
            if dtype is not np.int32 or (found >= 0).all() and (found <= _LARGEST_ID).all():
                return found.astype(dtype)
    except (TypeError, ValueError):
        pass
    kind = "token ids" if dtype is np.int32 else "numbers"
    raise InvalidRow(f"`{name}` that is no list of {kind} of the right length")
