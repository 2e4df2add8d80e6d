"""A log for TensorBoard, with its own event writer, which needs neither TensorFlow nor PyTorch.

tensorboardX, the alternative, imports PyTorch wherever it is installed.
"""

import time
from os import PathLike
from typing import Any

from megatrain_jax import FitResult
from megatrain_jax._src.callbacks.callback import Log, Rows, missing
from megatrain_jax._src.callbacks.texts import as_markdown
from megatrain_jax._src.common import checks


class TensorBoard(Log):
    """Writes the records for TensorBoard: a scalar for each metric, a text for samples.

    A run that continues from a checkpoint continues in the same folder; events of later steps there
    are no longer shown. Needs `pip install "megatrain-jax[tensorboard]"`; then ``tensorboard
    --logdir FOLDER`` shows it.
    """

    def __init__(self, folder: str | PathLike[str]):
        """Writes nothing yet.

        Args:
            folder: The run's folder.

        Raises:
            ImportError: If TensorBoard is not installed.
            TypeError: If `folder` is not a path.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing("tensorboard", "tensorboard") from error
        self._make: Any = EventFileWriter
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._folder = checks.path("folder", folder)
        self._writer: Any = None

    def _open(self, num_steps: int) -> None:
        self._writer = self._make(self._folder)
        if num_steps:
            # Marks a restart: TensorBoard then ignores later events in earlier files.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(num_steps + 1, session_log=start)

    def _write(self, step: int, values: dict[str, float]) -> None:
        rows = [self._summary.Summary.Value(tag=n, simple_value=x) for n, x in values.items()]
        self._add(step, summary=self._summary.Summary(value=rows))

    def _write_table(self, step: int, name: str, rows: Rows) -> None:
        self._add_text(step, name, as_markdown(rows))

    def _close(self, result: FitResult) -> None:
        self._add_text(result.trainer.num_steps, "ended", f"{result.ended}: {result.reason}")
        self._writer.close()

    def _add_text(self, step: int, name: str, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        row = self._summary.Summary.Value(
            tag=name,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
        )
        self._add(step, summary=self._summary.Summary(value=[row]))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))
