"""The folder of a fine-tuning run: which settings it belongs to, and whether the run is done."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain_jax._src.cli.finetune_settings import FREE, FinetuneSettings

_SETTINGS, _REPORT = "settings.json", "report.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: The folder; it may not exist yet.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The folder of the exported model."""
        return self.path / "model"

    def check(self, settings: FinetuneSettings) -> None:
        """Checks that the folder is new or of a run with these settings.

        Raises:
            ValueError: If it is neither.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"`out` = {self.path} must be a folder, but is a file")
        if not (self.path / _SETTINGS).exists():
            if any(self.path.iterdir()):
                raise ValueError(
                    f"`out` = {self.path} exists and is of no run of this command: choose another"
                )
            return
        before = self._read(_SETTINGS)
        now = _as_json(settings)
        changed = [
            f"{name} was {before.get(name)!r} and is {value!r}"
            for name, value in now.items()
            if name not in FREE and before.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"`out` = {self.path} exists, of a run with other settings: {', '.join(changed)}. "
                "Choose another `out`, or go on with the settings of that run"
            )

    def is_done(self, settings: FinetuneSettings) -> bool:
        """Whether the run has finished, and the model is exported if it should be."""
        if not (self.path / _REPORT).exists():
            return False
        return settings.export == "never" or self.model.exists()

    def begin(self, settings: FinetuneSettings) -> None:
        """Makes the folder and writes down whose it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(_SETTINGS, _as_json(settings))

    def finish(self, report: Mapping[str, Any]) -> None:
        """Writes the report, which says that the run has finished."""
        self._write(_REPORT, report)

    @property
    def report(self) -> dict[str, Any]:
        """The report of a run that has finished."""
        return self._read(_REPORT)

    def _read(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path / name)


def _as_json(settings: FinetuneSettings) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(settings)))
