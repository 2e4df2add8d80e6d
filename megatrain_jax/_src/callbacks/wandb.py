"""A log at Weights & Biases, online or offline."""

from typing import Any

from megatrain_jax import FitResult
from megatrain_jax._src.callbacks.callback import Log, Rows, missing


class WandB(Log):
    """Logs the records to a run of Weights & Biases; samples are tables.

    Needs `pip install "megatrain-jax[wandb]"`. For a run that goes on from a checkpoint, pass
    ``id=...`` and ``resume="allow"``, as to `wandb.init`.
    """

    def __init__(self, **init: Any):
        """Starts no run yet.

        Args:
            **init: Arguments of `wandb.init`: `project`, `name`, `config`, `mode="offline"` and so
                on.

        Raises:
            ImportError: If wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "wandb") from error
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
