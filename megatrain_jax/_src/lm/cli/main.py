"""The entry point `megatrain-jax`: a command's name, then its options."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatrain_jax import __version__
from megatrain_jax._src.lm.cli.errors import (
    CommandError,
    as_command_errors,
    error_text,
    with_cli_options,
)

_USAGE = """usage: megatrain-jax COMMAND [options]

commands:
  plan      show the memory and time to train a model on a machine, or the largest runs that fit it
  finetune  train a checkpoint, or adapters for it, on conversations, preferences or texts
  grpo      train a checkpoint, or adapters for it, by rewards of its own completions
  pretrain  train a model of given sizes on texts, from random weights
  chat      talk to an exported model
  merge     merge adapters into their base model

`megatrain-jax COMMAND --help` lists the options of a command."""
# Exit statuses: training failed; invalid request, as in argparse; and 128 plus the number of
# SIGINT, as in a shell.
_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The command and its arguments; None for the process's own.

    Returns:
        The exit status: 0 on success, 2 if the request was invalid.
    """
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "--version":
        print(__version__)
        return 0
    commands = {
        "plan": _plan,
        "finetune": _finetune,
        "grpo": _grpo,
        "pretrain": _pretrain,
        "chat": _chat,
        "merge": _merge,
    }
    if name not in commands:
        known = "plan, finetune, grpo, pretrain, chat and merge"
        return _told(f"megatrain-jax: error: unknown command {name!r}; commands are {known}")
    try:
        with _short_warnings():
            return commands[name](arguments)
    except CommandError as error:
        return _told(f"megatrain-jax {name}: error: {error}")
    except (FloatingPointError, MemoryError) as error:
        return _failed(name, error)
    except SystemExit as end:  # the parser has printed the reason; or after SIGTERM
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


# Each command imports only its own modules, because imports take seconds or need optional packages.
# Most of them come after its options have been checked.


def _plan(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.catalogue import config_values
        from megatrain_jax._src.lm.cli.parsing import parsed
        from megatrain_jax._src.lm.cli.plan_settings import PlanSettings

        settings = parsed("plan", PlanSettings, arguments, "model")
        # Names before sizes: a corrected name may change the valid sizes.
        if settings.model is not None:
            config_values(settings.model)
        if settings.gpu is not None:
            from megatrain_jax import card

            card(settings.gpu)
        settings.check_batch()

        from megatrain_jax._src.lm.cli import plan_command as plan

        return plan.run(settings)


def _finetune(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
        from megatrain_jax._src.lm.cli.parsing import parsed

        settings = parsed("finetune", FinetuneSettings, arguments, "config")

        from megatrain_jax._src.lm.cli import finetune
    return _trained("finetune", lambda: finetune.run(settings))


def _grpo(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.grpo_settings import GrpoSettings
        from megatrain_jax._src.lm.cli.parsing import parsed

        settings = parsed("grpo", GrpoSettings, arguments, "config")

        from megatrain_jax._src.lm.cli import grpo_command
    return _trained("grpo", lambda: grpo_command.run(settings))


def _pretrain(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.parsing import parsed
        from megatrain_jax._src.lm.cli.pretrain_settings import PretrainSettings

        settings = parsed("pretrain", PretrainSettings, arguments, "config")

        from megatrain_jax._src.lm.cli import pretrain
    return _trained("pretrain", lambda: pretrain.run(settings))


def _chat(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.chat_settings import ChatSettings
        from megatrain_jax._src.lm.cli.parsing import parsed

        settings = parsed("chat", ChatSettings, arguments, "model")

        from megatrain_jax._src.lm.cli import chat
    return chat.run(settings)


def _merge(arguments: Sequence[str]) -> int:
    with as_command_errors():
        from megatrain_jax._src.lm.cli.merge_settings import MergeSettings
        from megatrain_jax._src.lm.cli.parsing import parsed

        settings = parsed("merge", MergeSettings, arguments, "adapter")

        from megatrain_jax._src.lm.cli import merge
    return merge.run(settings)


def _trained(name: str, run: Callable[[], int]) -> int:
    from megatrain_jax import CheckpointError

    try:
        return run()
    except CheckpointError as error:
        return _failed(name, error)


def _failed(name: str, error: Exception) -> int:
    _told(f"megatrain-jax {name}: {with_cli_options(error_text(error))}")
    return _FAILED


def _told(error: str) -> int:
    print(error, file=sys.stderr)
    return _WRONG


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Prints warnings in one line, without their place in this library's code."""

    def tell(message: Warning | str, *_: Any) -> None:
        print(f"warning: {with_cli_options(str(message))}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield
