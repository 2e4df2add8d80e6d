"""Reads options from the command line and from a YAML file, checked by a dataclass's types."""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

try:
    import jsonargparse
except ImportError as caught:
    raise ImportError(
        f'the command line needs {caught.name}: pip install "megatrain-jax[cli]"'
    ) from caught

from megatrain_jax._src.lm.cli.errors import choices, cli_error_message, option

_Settings = TypeVar("_Settings")
# The values that each flag may have.
_TRUTHS = ("true", "false", "yes", "no")


class _Parser(jsonargparse.ArgumentParser):
    """A parser that reports errors in one line and then exits with status 2.

    Attributes:
        kinds: The type of each setting.
    """

    kinds: dict[str, Any]

    def format_help(self) -> str:
        """Returns the help with hyphens in option names."""
        return re.sub(r"--\w+", lambda m: m[0].replace("_", "-"), super().format_help())

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Reports an error in the terms of the command line."""
        text = " ".join(cli_error_message(message, self.kinds).split())
        print(f"{self.prog}: error: {text}", file=sys.stderr)
        sys.exit(2)


def parsed(command: str, kind: type[_Settings], arguments: Sequence[str], first: str) -> _Settings:
    """Reads the settings of a command.

    Args:
        command: Name of the command.
        kind: Dataclass of the settings. Its docstring describes the command and each option.
        arguments: The arguments after the command's name.
        first: Option that takes an argument without a name.

    Raises:
        SystemExit: With status 2 if they are invalid, 0 after `--help` and `--print-config`.
    """
    usage = f"megatrain-jax {command} [{first.upper()}] [options]"
    # An abbreviation would become ambiguous, or another option, with the next new option.
    parser = _Parser(prog=f"megatrain-jax {command}", usage=usage, allow_abbrev=False)
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the options as keys."
    )
    parser.add_class_arguments(kind)
    known = fields(kind)  # type: ignore[arg-type]
    parser.kinds = {field.name: field.type for field in known}
    flags = {
        field.name: (*_TRUTHS, *choices(field.type))
        for field in known
        if field.type is bool or bool in get_args(field.type)
    }
    lists = {
        field.name for field in known if any(get_origin(t) is list for t in get_args(field.type))
    }
    try:
        spelled = _joined(_normalized_arguments(arguments, first, flags), lists)
    except ValueError as error:
        parser.error(str(error))
    read = parser.parse_args(spelled)
    return kind(**{field.name: read[field.name] for field in known})


def _normalized_arguments(
    arguments: Sequence[str], first: str, flags: Mapping[str, Collection[str]]
) -> list[str]:
    """The arguments in the parser's form.

    An argument without a name gets its option's name, options get underscores, and a flag without a
    value is true.

    Raises:
        ValueError: If there are two arguments without a name, or one follows a flag and is no file.

    Examples:
        >>> words = ["--gpu-name", "H100", "--quiet", "Qwen3-8B"]
        >>> _normalized_arguments(words, "model", {"quiet": ["true", "false"]})
        ['--model', 'Qwen3-8B', '--gpu_name', 'H100', '--quiet=true']
    """
    bare: list[str] = []
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            flag = words[-1] if words and words[-1].endswith("=true") else None
            bare.append(word)
            if flag and (len(bare) > 1 or (first == "config" and not Path(word).exists())):
                raise ValueError(f"{option(flag[2:-5])} takes true or false, but is {word}")
            continue
        words.append(_underscored(word) if word.startswith("--") else word)
        name, has_value = words[-1].removeprefix("--"), rest and not rest[0].startswith("--")
        if name in flags:
            is_value = has_value and rest[0].lower() in flags[name]
            words[-1] += f"={rest.pop(0) if is_value else 'true'}"
        elif has_value and "=" not in name and name not in ("help", "-h"):
            words.append(rest.pop(0))
    if len(bare) > 1:
        raise ValueError(
            f"{bare[0]} and {bare[1]} are given without an option, but only one can be "
            f"{option(first)}: name the option of the second"
        )
    return [*(word for one in bare for word in (option(first), one)), *words]


def _joined(words: Sequence[str], lists: Collection[str]) -> list[str]:
    """The arguments with each option that is given several times as one list, if it takes lists.

    Args:
        words: The arguments in the parser's form.
        lists: Names of the options that take lists.

    Examples:
        >>> _joined(["--trainable", "q_proj", "--steps", "5", "--trainable=norm"], {"trainable"})
        ['--steps', '5', '--trainable=["q_proj", "norm"]']
    """
    found: dict[str, list[str]] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if name not in lists or not (equals or rest):
            others.append(word)
        else:
            found.setdefault(name, []).append(value if equals else rest.pop(0))
    several = [f"--{k}={v[0] if len(v) == 1 else json.dumps(v)}" for k, v in found.items()]
    # After `--config`, so that they override the file's values.
    return [*others, *several]


def _underscored(word: str) -> str:
    name, equals, value = word[2:].partition("=")
    if name == "print-config" and not equals:
        return "--print_config=comments"
    return f"--{name.replace('-', '_')}{equals}{value}"
