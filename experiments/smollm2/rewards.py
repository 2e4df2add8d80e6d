"""Reward functions for short and right answers; `grpo.yaml` names them."""

from collections.abc import Sequence
from typing import Any

MOST_TOKENS = 16


def right(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 for a completion that has the answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(wanted in message[0]["content"]) for message, wanted in pairs]


def brief(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Almost 1 for a completion of one token, 0 for the longest."""
    return [1 - len(ids) / MOST_TOKENS for ids in completion_ids]
