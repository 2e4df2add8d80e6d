"""Options from the command line and from a YAML file, checked by the types of a dataclass."""

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import NoReturn, TypeVar

try:
    import jsonargparse
except ImportError as caught:
    raise ImportError(
        f'the command line needs {caught.name}: pip install "megatrain-jax[cli]"'
    ) from caught

_Settings = TypeVar("_Settings")


class _Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line, and which ends with status 2 after one."""

    def format_help(self) -> str:
        """Returns the help with options as they are usually spelled."""
        return re.sub(r"--\w+", lambda m: m[0].replace("_", "-"), super().format_help())

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Says what is wrong, in the words of the command line."""
        # jsonargparse names an option by its key, as a configuration file has it.
        text = re.sub(r'Parser key "(\w+)":', lambda m: f"{_option(m[1])}:", message)
        print(f"{self.prog}: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)


def parsed(command: str, kind: type[_Settings], arguments: Sequence[str], first: str) -> _Settings:
    """Reads the settings of a command.

    Args:
        command: Name of the command.
        kind: Dataclass of the settings. Its docstring describes the command and each option.
        arguments: The arguments behind the command's name.
        first: Option that an argument without one is for, if it comes first.

    Raises:
        SystemExit: With status 2 if they are wrong, 0 after `--help` and `--print-config`.
    """
    usage = f"megatrain-jax {command} [{first.upper()}] [options]"
    parser = _Parser(prog=f"megatrain-jax {command}", usage=usage)
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the options as keys."
    )
    parser.add_class_arguments(kind)
    known = fields(kind)  # type: ignore[arg-type]
    flags = {field.name for field in known if field.type is bool}
    read = parser.parse_args(_spelled(arguments, first, flags))
    return kind(**{field.name: read[field.name] for field in known})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _spelled(arguments: Sequence[str], first: str, flags: Collection[str]) -> list[str]:
    """The arguments as the parser knows them.

    A leading one gets its name, options have underscores, and a flag without a value is true.
    """
    given = list(arguments)
    if given and not given[0].startswith("-"):
        given.insert(0, f"--{first}")
    words = [_underscored(word) if word.startswith("--") else word for word in given]
    following = [*words[1:], "--"]
    return [
        f"{word}=true" if word[2:] in flags and after.startswith("--") else word
        for word, after in zip(words, following, strict=True)
    ]


def _underscored(word: str) -> str:
    name, equals, value = word[2:].partition("=")
    if name == "print-config" and not equals:
        return "--print_config=comments"
    return f"--{name.replace('-', '_')}{equals}{value}"
