"""Errors of users in one line, in the terms of the command: wrong values, unknown options."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from megatrain_jax._src.common.other_libraries import COMMAND, DTYPES
from megatrain_jax._src.common.suggestions import did_you_mean, meant_option
from megatrain_jax._src.lm.cli.run_settings import PrecisionName

# A note that JAX adds to errors passing through its functions; it is about tracebacks.
_OF_TRACEBACKS = "JAX_TRACEBACK_FILTERING"


# Advice for Python, as regular expressions, and the same advice for the command.
_ADVICE = (
    (r'Precision\(products=\{"\*": "float8"\}\)', "--products float8-all"),
    (r"Map these paths to float32 in Precision\(state=\{\.\.\.\}\)", "Use --state float32"),
    (r"Precision\.compact\(\)", "--precision compact"),
    (r"Precision\((\w+)=(?:\.\.\.|\"(\w+)\")\)", r"--\1 \2"),
    (r"`precision` asks for float8", "--products asks for float8"),
    (r"state that `precision` holds", "state that --state holds"),
    (r'`?\b([a-z]\w*)="(\w+)"`?', r"--\1 \2"),
    (r"`(compute|device_budget|disk_budget|disk_dir|host_budget|microbatches)`", r"--\1"),
)


class CommandError(Exception):
    """An invalid request; the command prints the message in one line."""


@contextmanager
def as_command_errors() -> Iterator[None]:
    """Turns errors in a body that only checks, reads and plans into `CommandError`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise CommandError(error_text(error)) from error


def error_text(error: BaseException) -> str:
    """The text of an error, with the notes that were added to it."""
    notes = (note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note)
    return " ".join([str(error), *notes])


def with_cli_options(text: str) -> str:
    """A message of the library, with command-line options in place of arguments in Python.

    Examples:
        >>> with_cli_options('pass Precision(frozen="int8") and a larger `device_budget`')
        'pass --frozen int8 and a larger --device-budget'
    """
    for pattern, option in _ADVICE:
        text = re.sub(pattern, lambda m, o=option: _as_word(m.expand(o)), text)
    return text


def _as_word(option: str) -> str:
    name, space, value = option.partition(" ")
    name = name.replace("_", "-") if name.startswith("--") else name
    return f"{name}{space}{value}".rstrip()


# Names of values elsewhere.
_VALUES = {**DTYPES, "none": "null"}
_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "fields such as {name: value}",
    type(None): "null",
}
_LISTS = {float: "a list of numbers such as [1, 2]", str: "a list of texts such as [a, b]"}


def option(name: str) -> str:
    """A setting's name as an option."""
    return f"--{name.replace('_', '-')}"


def wrong_value(name: str, kind: Any, given: str) -> str:
    """The message for a value that an option doesn't take.

    Args:
        name: The setting.
        kind: Its type.
        given: The value.

    Examples:
        >>> wrong_value("compute", Literal["bfloat16", "float16"] | None, "fp16")
        '--compute takes bfloat16, float16 or null, but is fp16; did you mean `float16`?'
    """
    hint = did_you_mean(_VALUES.get(given.lower(), given), choices(kind))
    if name in ("state", "master") and given in get_args(PrecisionName):
        hint = f"; did you mean `--precision {given}`?"
    return f"{option(name)} takes {_alternatives(kind)}, but is {given or 'empty'}{hint}"


def unknown_option(name: str, known: Iterable[str]) -> str:
    """The message for an option that doesn't exist.

    Args:
        name: The option, with underscores.
        known: The settings.

    Examples:
        >>> unknown_option("lr", ["learning_rate", "length"])
        '--lr is no option; did you mean `--learning-rate`?'
        >>> unknown_option("le", ["learning_rate", "length"])
        '--le is no option; did you mean `--learning-rate` or `--length`?'
    """
    known = list(known)
    longer = sorted(one for one in known if one.startswith(name))
    if meant := meant_option(name, known):
        hint = f"; did you mean `{meant}`?"
    elif name in COMMAND:
        return f"{option(name)} is no option: {COMMAND[name]}"
    elif longer:
        hint = f"; did you mean {' or '.join(f'`{one}`' for one in longer[:3])}?"
    else:
        hint = did_you_mean(name, known)
    return f"{option(name)} is no option{re.sub('`(.*?)`', lambda m: f'`{option(m[1])}`', hint)}"


def cli_error_message(message: str, kinds: Mapping[str, Any]) -> str:
    """A message of jsonargparse in the terms of the command line.

    Args:
        message: The message.
        kinds: The type of each setting.
    """
    if wrong := re.match(r'Parser key "(\w+)":.*value: ?(.*)', message, re.DOTALL):
        return wrong_value(wrong[1], kinds[wrong[1]], wrong[2])
    if unknown := re.match(r"(?:unrecognized arguments: --|Option ')(\w+)", message):
        return unknown_option(unknown[1], kinds)
    named = re.sub(r'^Parser key "(\w+)"', lambda m: option(m[1]), message)
    return re.sub(r"^argument --(\w+)[^:]*", lambda m: option(m[1]), named)


def _alternatives(kind: Any) -> str:
    """The values of a type in words."""
    *first, last = dict.fromkeys(_each(kind))
    return f"{', '.join(first)} or {last}" if first else last


def _each(kind: Any) -> list[str]:
    """The values of a type in words, each by itself."""
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return [_LISTS.get(get_args(kind)[0], "a list of them such as [a, b]")]
    if (plain := get_origin(kind) or kind) in _WORDS:
        return [_WORDS[plain]]
    # "A list of them" refers to the values before it.
    order = {list: 1, type(None): 2}
    members = sorted(get_args(kind), key=lambda member: order.get(get_origin(member) or member, 0))
    return [words for member in members for words in _each(member)]


def choices(kind: Any) -> list[str]:
    """The values of a type that can be listed."""
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    if kind is type(None):
        return ["null"]
    return [choice for member in get_args(kind) for choice in choices(member)]
