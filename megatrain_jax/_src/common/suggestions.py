"""Suggestions for a misspelt name."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name nearest to a misspelt one.

    Case and underscores don't count, so `rtx4090` is near `RTX_4090`.

    Args:
        name: The misspelt name.
        known: The names to choose from.

    Returns:
        The end of a message, such as "; did you mean `steps`?"; empty if no name is near.
    """
    names = list(known)
    near = get_close_matches(_plain(name), {*map(_plain, names)}, n=1, cutoff=0.7)
    if not near:
        return ""
    # `plan` and `Plan` differ in case alone.
    alike = [one for one in names if _plain(one) == near[0]]
    nearest = max(alike, key=lambda one: SequenceMatcher(None, name, one).ratio())
    return f"; did you mean `{nearest}`?"


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
