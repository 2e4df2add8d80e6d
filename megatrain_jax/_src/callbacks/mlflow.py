"""A log to MLflow, on a server or in a folder."""

import math
import time
from typing import Any

from megatrain_jax import FitResult
from megatrain_jax._src.callbacks.callback import Log, Rows, missing
from megatrain_jax._src.callbacks.texts import as_text
from megatrain_jax._src.common import checks

_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Log):
    """Logs the records to an MLflow run, and the run's end as status and tag.

    Samples are artifacts, one text per evaluation. Needs `pip install "megatrain-jax[mlflow]"`.
    Values that are not finite are left out, because not every store accepts them.

    Attributes:
        run_id: The run's identifier; None before it has begun. Pass it to continue the run.
    """

    def __init__(
        self,
        experiment: str = "megatrain_jax",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ):
        """Starts no run yet.

        Args:
            experiment: Name of the experiment; created if it does not exist.
            tracking_uri: The server or the database, such as ``sqlite:///runs.db``; None for
                MLflow's own configuration.
            run_name: Name of the run; None lets MLflow choose one.
            run_id: Identifier of a run to continue; None starts a new one.

        Raises:
            ImportError: If MLflow is not installed.
            TypeError: If an argument is not a string.
            ValueError: If MLflow can't use `tracking_uri`, or has no run `run_id` there.
        """
        given = {"tracking_uri": tracking_uri, "run_name": run_name, "run_id": run_id}
        for name, value in {"experiment": experiment, **given}.items():
            if not isinstance(value, str) and (value is not None or name == "experiment"):
                raise TypeError(checks.refused(name, "a str", value))
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise missing("mlflow", "mlflow") from error
        try:
            self._metric, self._client = Metric, MlflowClient(tracking_uri)
        except MlflowException as error:
            raise ValueError(f"MLflow can't use `tracking_uri`={tracking_uri}: {error}") from error
        if run_id is not None:
            try:
                self._client.get_run(run_id)
            except MlflowException as error:
                raise ValueError(f"MLflow can't go on with `run_id`={run_id}: {error}") from error
        self._experiment, self._run_name, self.run_id = experiment, run_name, run_id

    def _open(self, num_steps: int) -> None:
        if self.run_id is not None:
            # The previous process ended it.
            self._client.update_run(self.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        number: Any = found and found.experiment_id
        if number is None:
            number = self._client.create_experiment(self._experiment)
        self.run_id = self._client.create_run(number, run_name=self._run_name).info.run_id

    def _write(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics = [self._metric(name, value, now, step) for name, value in finite.items()]
        self._client.log_batch(self._known, metrics=metrics)

    def _write_table(self, step: int, name: str, rows: Rows) -> None:
        self._client.log_text(self._known, as_text(step, name, rows), f"{name}/step-{step}.txt")

    def _close(self, result: FitResult) -> None:
        self._client.set_tag(self._known, "ended", f"{result.ended}: {result.reason}")
        self._client.set_terminated(self._known, status=_STATUS[result.ended])

    @property
    def _known(self) -> str:
        assert self.run_id is not None
        return self.run_id
