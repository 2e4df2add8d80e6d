"""The entry point `megatrain-jax`: a command's name, then its options."""

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatrain_jax import __version__
from megatrain_jax._src.lm.cli import errors

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
# For each command: its settings, the option that takes an argument without a name, and the function
# that runs it. Only these modules are imported, because imports take seconds or need optional
# packages; most of them come after the options have been checked.
_COMMANDS = {
    "plan": ("plan_settings.PlanSettings", "model", "plan_command.run"),
    "finetune": ("finetune_settings.FinetuneSettings", "config", "finetune.run"),
    "grpo": ("grpo_settings.GrpoSettings", "config", "grpo_command.run"),
    "pretrain": ("run_settings.PretrainSettings", "config", "pretrain.run"),
    "chat": ("plan_settings.ChatSettings", "model", "chat.run"),
    "merge": ("plan_settings.MergeSettings", "adapter", "chat.merge"),
}
# Several processes share these; all other commands run in the first one alone.
_SHARED = ("finetune", "grpo", "pretrain")


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
    if name not in _COMMANDS:
        *first, last = _COMMANDS
        known = f"{', '.join(first)} and {last}"
        return _told(f"megatrain-jax: error: unknown command {name!r}; commands are {known}")
    ends = argv is None and name == "plan"  # the process ends then
    if ends:
        # Imports and traces leave hardly any garbage, and collecting it takes a tenth of the time.
        gc.disable()
    try:
        with _short_warnings():
            return _run(name, arguments)
    except errors.CommandError as error:
        return _told(f"megatrain-jax {name}: error: {error}")
    except (FloatingPointError, MemoryError) as error:
        return _failed(name, error)
    except SystemExit as end:  # the parser has printed the reason; or after SIGTERM
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        if ends:
            gc.freeze()  # else Python would look for garbage once more


def _run(name: str, arguments: Sequence[str]) -> int:
    settings_class, first, command = _COMMANDS[name]
    with errors.as_command_errors():
        settings = _named("parsing.parsed")(name, _named(settings_class), arguments, first)
        if name == "plan":
            settings.check_names()
        run = _named(command)
        if not _takes_part(name):
            return 0
    from megatrain_jax import CheckpointError, distributed

    try:
        with _output_of_first():
            return run(settings)
    except errors.CommandError as error:
        distributed.leave(str(error))  # it may be one of this process alone
        raise
    except (CheckpointError, distributed.PeerEndedError) as error:
        return _failed(name, error)


def _takes_part(name: str) -> bool:
    """Connects the processes of a run; returns whether this one has something to do."""
    from megatrain_jax import distributed

    if name not in _SHARED:
        return distributed.is_first()
    if distributed.initialize(progress=False) and distributed.is_first():
        print(distributed.summary(), flush=True)
    return True


def _number() -> int:
    """This process's number among those of a run; 0 for a single one, and before."""
    jax = sys.modules.get("jax")
    return jax.process_index() if jax and jax.distributed.is_initialized() else 0


@contextmanager
def _output_of_first() -> Iterator[None]:
    """Drops the output of all processes but the first; their errors are still told."""
    if not _number():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _named(name: str) -> Any:
    """A function or class of this package, whose module is imported now."""
    module, _, member = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), member)


def _failed(name: str, error: Exception) -> int:
    _told(f"megatrain-jax {name}: {errors.with_cli_options(errors.error_text(error))}")
    return _FAILED


def _told(error: str) -> int:
    print(f"process {number}: {error}" if (number := _number()) else error, file=sys.stderr)
    return _WRONG


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Prints warnings in one line, without their place in this library's code."""

    def tell(message: Warning | str, *_: Any) -> None:
        if not _number():
            print(f"warning: {errors.with_cli_options(str(message))}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        # The command also shuffles by it.
        warnings.filterwarnings("ignore", "`seed`=")
        yield
