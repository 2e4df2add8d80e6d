"""A log to Weights & Biases, online or offline."""

import inspect
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import jax

from megatrain_jax import FitResult
from megatrain_jax._src.callbacks.callback import Log, Rows, missing


class WandB(Log):
    """Logs the records to a Weights & Biases run; samples are tables.

    Needs `pip install "megatrain-jax[wandb]"`. For a run that continues from a checkpoint, pass
    ``id=...`` and ``resume="allow"``, as to `wandb.init`.
    """

    def __init__(self, **init: Any):
        """Starts no run yet.

        Args:
            **init: Arguments of `wandb.init`: `project`, `name`, `config`, `mode="offline"` and so
                on.

        Raises:
            ImportError: If wandb is not installed.
            TypeError: If `wandb.init` has no such argument.
            ValueError: If a value is not valid, or if the log is online and nobody is logged in. At
                a terminal and in a notebook, wandb asks for the key instead; if several processes
                share a run, the first one asks when the run begins.
        """
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "wandb") from error
        _check(wandb, init)
        _log_in(wandb, init.get("mode") or os.environ.get("WANDB_MODE", "online"))
        self._start, self._init = wandb.init, init
        self._table: Any = wandb.Table
        self._run: Any = None

    def _open(self, num_steps: int) -> None:
        self._run = self._start(**self._init)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _write_table(self, step: int, name: str, rows: Rows) -> None:
        data = [list(row.values()) for row in rows]
        self._run.log({name: self._table(columns=list(rows[0]), data=data)}, step=step)

    def _close(self, result: FitResult) -> None:
        self._run.summary["ended"] = f"{result.ended}: {result.reason}"
        self._run.finish(exit_code=int(result.ended == "failed"))


def _log_in(wandb: Any, mode: str) -> None:
    """Asks for credentials now; wandb would ask when the run begins."""
    # Only the first process logs, and JAX reveals the first one only after its devices have
    # started.
    if mode not in ("online", "shared") or jax.distributed.is_initialized():
        return
    try:
        known = wandb.login(verify=False)
    except wandb.errors.UsageError:
        known = False
    if not known:
        raise ValueError(
            "nobody is logged in at Weights & Biases: run `wandb login`, set WANDB_API_KEY, or "
            'pass `mode="offline"`'
        )


def _check(wandb: Any, init: Mapping[str, Any]) -> None:
    """Checks arguments of `wandb.init` early; wandb would check them when the run begins."""
    known = inspect.signature(wandb.init).parameters
    is_open = any(row.kind is inspect.Parameter.VAR_KEYWORD for row in known.values())
    for name, value in init.items():
        if name not in known and not is_open:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"`wandb.init` has no argument `{name}`; {hint}")
        # wandb's Settings validates values, and has different names for some arguments.
        settings = wandb.Settings.model_fields
        field = next((field for field in (name, f"run_{name}") if field in settings), None)
        if field is None:
            continue
        try:
            wandb.Settings(**{field: value})
        except (TypeError, ValueError) as error:
            # A pydantic error lists each fault; its own text is about settings.
            listed: Any = getattr(error, "errors", list)()
            why = listed[0]["msg"] if listed else error
            raise ValueError(f"`wandb.init` can't take `{name}`={value!r}: {why}") from error
