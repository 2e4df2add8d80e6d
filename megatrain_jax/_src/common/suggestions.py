"""Suggestions for a misspelt name, and the refusal of misspelt keywords."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


def refuse_keywords(
    function: Callable[..., object],
    unknown: Iterable[str],
    hint: Callable[[str, list[str]], str] = did_you_mean,
) -> None:
    """Refuses keywords that a function doesn't have, and suggests one that it has.

    Args:
        function: The function that was called.
        unknown: The keywords that are none of its parameters.
        hint: Function from a keyword and the function's parameters to the end of the message.

    Raises:
        TypeError: If there is one. The message is Python's own, followed by the hint.
    """
    for name in unknown:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        said = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
        raise TypeError(f"{said}{hint(name, known)}")


def near_or_meant(meant: Mapping[str, str]) -> Callable[[str, list[str]], str]:
    """A hint for `refuse_keywords`: the parameter that a name means elsewhere, or the nearest one.

    Args:
        meant: This library's parameter for each name in other libraries.
    """
    return lambda name, known: did_you_mean(meant.get(name, name), known)


def hinting(
    hint: Callable[[str, list[str]], str] = did_you_mean,
    refused: Collection[str] | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator of a function: an unknown keyword gets a suggestion.

    Args:
        hint: See `refuse_keywords`.
        refused: The keywords to refuse, for a function that passes unknown ones on; None for all
            that it doesn't have.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def called(*args: _P.args, **given: _P.kwargs) -> _T:
            unknown = (name for name in given if name not in known)
            wrong = (name for name in unknown if refused is None or name in refused)
            refuse_keywords(function, wrong, hint)
            return function(*args, **given)

        return called

    return decorate


def suggesting(
    hint: Callable[[str, list[str]], str] = did_you_mean,
) -> Callable[[type[_T]], type[_T]]:
    """A decorator of a dataclass with keywords only: a misspelt keyword gets a suggestion.

    Args:
        hint: See `refuse_keywords`.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        record: Any = kind
        make = record.__init__
        known = inspect.signature(make).parameters

        # The signature stays that of the dataclass.
        @functools.wraps(make)
        def __init__(self: Any, **given: Any) -> None:
            refuse_keywords(make, (name for name in given if name not in known), hint)
            make(self, **given)

        record.__init__ = __init__
        return kind

    return decorate


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
