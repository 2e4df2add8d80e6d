"""The folder of a training run: its settings, and whether the run is done.

Of several processes that share a run, only the first one writes. What all of them do next must not
depend on what it has just written, so they ask it (`distributed.in_first`).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain_jax import distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import integer, naming
from megatrain_jax._src.common.settings import changes
from megatrain_jax._src.common.unfinished import replaced_file
from megatrain_jax._src.lm.cli.run_settings import CHANGEABLE_OPTIONS, RunSettings
from megatrain_jax._src.lm.common.hf_folder import read_json, regular_file

# The initial settings; how training ended; notes for later processes; and the report, which comes
# last.
_SETTINGS, _ENDED, _NOTES, _REPORT = "settings.json", "ended.json", "notes.json", "report.json"


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

    def saving(self, settings: RunSettings) -> dict[str, Any]:
        """The options of `fit` that save checkpoints; none if the settings have them off."""
        if not settings.checkpoints:
            return {}
        return {
            "checkpoint_dir": self.checkpoints,
            "checkpoint_every": settings.checkpoint_every,
            "keep": settings.keep,
        }

    @property
    def best(self) -> Path:
        """The folder of the checkpoint with the best evaluation."""
        return self.path / "best"

    @property
    def reference(self) -> Path:
        """The file with the reference's log-probabilities."""
        return self.path / "reference.npz"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a step to continue from."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    @property
    def _has_result(self) -> bool:
        """Whether the folder has results that different settings would contradict."""
        return self.has_checkpoints or self.ended is not None or self.report is not None

    def check(self, settings: RunSettings) -> None:
        """Checks that the folder is new or belongs to a run with these settings.

        A run that ended before its first checkpoint, because it didn't fit the memory for example,
        begins anew with any settings.

        Raises:
            ValueError: If it does not.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"`out` = {self.path} must be a folder, but is a file")
        before = self._read(_SETTINGS)
        if before is None:
            if any(self.path.iterdir()):
                raise ValueError(
                    f"`out` = {self.path} exists and is of no run of this command: choose another"
                )
            return
        now = _as_json(settings)
        if self._has_result and (changed := changes(before, now, CHANGEABLE_OPTIONS)):
            is_longer = self.report is not None and changed.keys() <= {"steps", "epochs"}
            remedy = "Choose another `out`, or go on with the settings of that run"
            advice = self._how_to_continue(now) if is_longer else remedy
            raise ValueError(
                f"`out` = {self.path} belongs to a run with different settings: "
                f"{', '.join(changed.values())}. {advice}"
            )

    def _how_to_continue(self, settings: Mapping[str, Any]) -> str:
        """Instructions to continue training from this run's result, in words."""
        exported = self.path / "model"
        command = "grpo" if "rewards" in settings else "finetune"
        has_format = "rewards" in settings or "format" in settings
        text = "" if has_format else " and `format`=text"
        missing = ""
        if not exported.exists():
            adapted = settings.get("lora_rank") or settings.get("adapter")
            merged = " and `export_as`=model" if adapted else ""
            missing = f", which that run's command writes with `export`=finished{merged}"
        return (
            "That run is done, and its learning rate has come to its end. To train further, choose "
            f"another `out` for `megatrain-jax {command}` with `model`={exported}{text}{missing}"
        )

    def is_done(self, settings: RunSettings) -> bool:
        """Whether the run has finished, and everything is exported; for all processes."""

        def here() -> bool:
            exported = all((self.path / name).exists() for name in settings.exports)
            return self.report is not None and (settings.export == "never" or exported)

        return distributed.in_first(here)

    def check_data(self, fingerprint: str) -> None:
        """Checks that all processes have the same data, and a continued run that it began with.

        Args:
            fingerprint: A hash of the data and of the order of its batches.

        Raises:
            ValueError: If the data has changed, or differs between processes.
        """
        if len(set(distributed.gather(fingerprint))) > 1:
            raise ValueError("`data` differs between processes: each needs the same files")
        before = self.note("data")
        if self.has_checkpoints and before not in (None, fingerprint):
            raise ValueError(
                f"`data` has changed since the run in `out` = {self.path} began: a file, the "
                "tokenizer or its chat template differs. Restore it, or choose another `out`"
            )

    def changed_files(self, stamps: Mapping[str, str]) -> list[str]:
        """The options that name files changed since a process of the run read them.

        Args:
            stamps: For each option, a hash of its files, from `file_stamps`.
        """
        before = {option: self.note(f"files of {option}") for option in stamps}
        return [option for option in stamps if before[option] not in (None, stamps[option])]

    def begin(self, settings: RunSettings) -> None:
        """Creates the folder and saves the settings, once all processes have read what is there."""

        def here() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(_SETTINGS, _as_json(settings))
            if self.best.exists() and not self.has_checkpoints:
                shutil.rmtree(self.best)  # left by a process that ended before its first checkpoint

        distributed.in_first(here)

    def end(self, how: Mapping[str, Any]) -> None:
        """Records that training has ended, and how."""
        self._write(_ENDED, how)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Writes the report, which marks the run as finished; null stands for NaN and infinity."""
        # Python would write NaN, which is not valid JSON.
        self._write(_REPORT, json.loads(json.dumps(report), parse_constant=lambda _: None))

    @property
    def ended(self) -> dict[str, Any] | None:
        """The end of training, and its reason; None if it has not ended."""
        return self._read(_ENDED)

    @property
    def report(self) -> dict[str, Any] | None:
        """The report of a finished run; None before."""
        return self._read(_REPORT)

    def note(self, name: str) -> str | None:
        """The value that an earlier process saved under a name; None for none."""
        value = (self._read(_NOTES) or {}).get(name)
        if not isinstance(value, str | None):
            raise ValueError(f"{self.path / _NOTES}: {checks.refused(name, 'a text', value)}")
        return value

    def take_note(self, name: str, value: str) -> None:
        """Saves a value for later processes."""
        self._write(_NOTES, {**(self._read(_NOTES) or {}), name: value})

    @property
    def began(self) -> list[int]:
        """The first step of each process that has trained."""
        path = self.path / _NOTES
        with naming(path):
            steps = [int(step) for step in (self.note("began") or "").split()]
        return [integer(path, "began", step) for step in steps]

    def begin_at(self, step: int) -> None:
        """Records the first step of a process."""
        self.take_note("began", " ".join(map(str, sorted({*self.began, step}))))

    def _read(self, name: str) -> dict[str, Any] | None:
        path = regular_file(self.path, name)
        return None if path is None else read_json(path)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        if not distributed.is_first():
            return
        # Complete or absent, whenever the process dies.
        with replaced_file(self.path / name) as unfinished:
            unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _as_json(settings: RunSettings) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(settings)))
