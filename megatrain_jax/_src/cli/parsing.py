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
# The values that a flag may have.
_TRUTHS = ("true", "false", "yes", "no")


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
        first: Option that an argument without one is for.

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
    try:
        spelled = _spelled(arguments, first, flags)
    except ValueError as error:
        parser.error(str(error))
    read = parser.parse_args(spelled)
    return kind(**{field.name: read[field.name] for field in known})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _spelled(arguments: Sequence[str], first: str, flags: Collection[str]) -> list[str]:
    """The arguments as the parser knows them.

    The one without an option gets its own, wherever it is; options have underscores; and a flag
    without a value is true.

    Raises:
        ValueError: If there are two arguments without an option.

    Examples:
        >>> _spelled(["--gpu-name", "H100", "--quiet", "Qwen3-8B"], "model", {"quiet"})
        ['--model', 'Qwen3-8B', '--gpu_name', 'H100', '--quiet=true']
    """
    bare: list[str] = []
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            bare.append(word)
            continue
        words.append(_underscored(word) if word.startswith("--") else word)
        name, has_value = words[-1].removeprefix("--"), rest and not rest[0].startswith("--")
        if name in flags:
            words[-1] += f"={rest.pop(0) if has_value and rest[0].lower() in _TRUTHS else 'true'}"
        elif has_value and "=" not in name and name not in ("help", "-h"):
            words.append(rest.pop(0))
    if len(bare) > 1:
        raise ValueError(
            f"{bare[0]} and {bare[1]} are given without an option, of which one can be "
            f"{_option(first)}: say what the other is"
        )
    return [*(word for one in bare for word in (_option(first), one)), *words]


def _underscored(word: str) -> str:
    name, equals, value = word[2:].partition("=")
    if name == "print-config" and not equals:
        return "--print_config=comments"
    return f"--{name.replace('-', '_')}{equals}{value}"
